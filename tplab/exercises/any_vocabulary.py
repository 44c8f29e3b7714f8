"""Check a program of lab 06 with a real vocabulary: it must be right, and send no more than for a few entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tplab.exercises.check import Answer, Verdict, but
from tplab.exercises.verdict import refuse
from tplab.mesh import Mesh

MESH, MANY = Mesh(tp=4), 400_000
"""More entries than any model has, so a constant that a program uses as infinity is never large enough by luck."""

ROUGH = 1e-4


def for_any_vocabulary(answer: Answer, num_numbers: int) -> Verdict:
    """The verdict on a program that is right for few entries: it must also be right for many, and send no more. Ids
    must be integers, and right for logits in bfloat16, which cannot represent large ids."""
    sent, exercise, panels = dict[int, int](), answer.exercise, answer.verdict.panels
    are_ids = "ids" in exercise.results
    runs = [(num_entries, "float32", _logits(num_entries)) for num_entries in (24, MANY)]
    for num_entries, dtype, logits in [*runs, (MANY, "bfloat16", _logits(MANY, whole=True))][: 3 if are_ids else 2]:
        tensors = {"logits": logits} | ({"ids": logits.argmax(-1)} if "ids" in exercise.specs else {})
        narrowed = replace(answer, fn=_narrowed(answer)) if dtype == "bfloat16" else answer
        out = narrowed.run(MESH, tensors)
        want = exercise.plain(*tensors.values())
        found = out.per_rank[0].detach() if answer.framework == "torch" else out.per_rank[0]
        kind = str(found.dtype).removeprefix("torch.")
        got = np.asarray(found.double() if answer.framework == "torch" else found, float)
        if not np.allclose(got, want, rtol=ROUGH, atol=ROUGH):
            token = int(np.flatnonzero(~np.isclose(got, want, rtol=ROUGH, atol=ROUGH))[0])
            why = "Is some number in your program large enough, or exact enough, only for a few entries?"
            if are_ids and num_entries == 24 and got[token] == 1:
                why = "The logits of these two entries are as close as two numbers can be. Compare them exactly."
            refuse(
                f" is right on the check's small examples. With {num_entries:,} entries, in {dtype}, token {token} "
                f"gets {got[token]:,.7g} instead of {want[token]:,.7g}.\n{why}",
                panels,
            )
        if are_ids and "int" not in kind:
            but(f"they are {kind}.\nAn id looks up a row: return integers.", panels)
        sent.setdefault(num_entries, out.trace.bytes_sent())
    if sent[MANY] > sent[24]:
        but(
            f"on {MESH} it sends {sent[24]:,} bytes for 24 entries and {sent[MANY]:,} for {MANY:,}.\n{num_numbers} "
            "numbers per token tell the other ranks all that they need.",
            panels,
        )
    return answer.says("It sends the same however many entries there are.")


def _narrowed(answer: Answer) -> Callable[..., Any]:
    """The learner's function for logits in bfloat16, which NumPy does not have."""

    def program(logits: Any) -> Any:
        return answer.fn(logits.bfloat16() if answer.framework == "torch" else logits.astype("bfloat16"))

    return program


def _logits(num_entries: int, whole: bool = False) -> np.ndarray:
    """Logits of two tokens, in float32, or integers that bfloat16 can represent. The largest is the second to last; in
    float32, token 0 has the next smaller number at id 1."""
    rng, shape = np.random.default_rng(int(whole)), (2, num_entries)
    logits = (rng.integers(-9, 10, shape) if whole else rng.uniform(-9, 9, shape)).astype(np.float32)
    logits[:, -2] = 10
    if not whole:
        logits[0, 1] = np.nextafter(np.float32(10), np.float32(0))
    return logits
