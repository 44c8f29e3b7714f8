"""A step on a mesh beside the step on one device: what is first wrong, and the change with which a new run is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tplab.checking.gaps import largest
from tplab.checking.same_model import Finding
from tplab.jax.checking.repairs import Repairs
from tplab.jax.checking.tape import Repair, Tape

MOST_TRIED = 12
MOST_CHANGES = 6


def explained(
    finding: Finding, wrong: set[int], step: Callable[..., Any], reference: Callable[..., Any], args: Sequence[Any],
    nudged: Sequence[Any], axes: Mapping[str, int], tolerance: float,
) -> Finding:  # fmt: skip
    """Return the finding with its line and its cause, from the step on a mesh beside the step on one device, equation
    by equation.

    wrong       places among the results of the step
    nudged      the arguments, off by one rounding: their effect on the reference is noise
    tolerance   what always counts as rounding, relative to the largest element
    """
    tape, alone = Tape(step, args, axes), Tape(reference, args, dict.fromkeys(axes, 1))
    want, again = alone.values(args, nudged)
    right: dict[Any, list[tuple[list[np.ndarray], list[float]]]] = {}
    for node, values, others in zip(alone.nodes, want, again, strict=True):
        whole = [x.reshape(x.shape[len(axes) :]) if node.is_inside else x for x in values]
        noise = [max(tolerance, 8 * _noise(x, y)) for x, y in zip(values, others, strict=True)]
        right.setdefault(node.key, []).append((whole, noise))
    done: list[Repair] = []
    tried: list[str] = []
    before, first = set[int](), ""
    for _ in range(MOST_CHANGES):
        values = next(tape.values(done=done))
        seen = Repairs(axes, tape.nodes, values, right)
        if not done:
            before, (where, first) = seen.wrong(), seen.located(wrong)
            finding = replace(finding, where=where, lines=(where,) if where else ())
        repairs = list({(*dict.fromkeys(one.sites), one.words): one for one in seen.repairs(wrong)}.values())
        repairs = repairs[:MOST_TRIED]
        best, firsts = None, seen.firsts(wrong)
        runs = tape.values(done=done, tried=repairs, watched=firsts[:1]) if repairs else ()
        for one, kept in zip(repairs, runs):
            outcome = Repairs(axes, tape.nodes, kept, right)
            left = outcome.wrong()
            if not left & wrong and not left - before:
                if best is None or best[1] & wrong or not left:
                    best = one, left
                if not left:
                    break
            else:
                tried.append(one.words)
                if best is None and one.is_step and firsts and outcome.is_right((firsts[0], 0)):
                    best = one, left
        if best is None:
            break
        done.append(best[0])
        if not best[1] & wrong:
            words = "; ".join(dict.fromkeys(one.words for one in done))
            others = f"; {len(best[1])} other results of the step are not right yet" * bool(best[1])
            lines = [line for one in done for line in (one.where, one.other)]
            return finding.proven(done[0].cause, words + others, done[0].where, lines)
    text = f"; first wrong here: what {first} is given is right, and what it returns is not" * bool(first)
    return replace(finding, tried=tuple(dict.fromkeys(tried)), text_of_factor=finding.text_of_factor + text)


def _noise(x: np.ndarray, y: np.ndarray) -> float:
    size = largest(x) if x.dtype.kind == "f" else 0.0
    return largest(x - y) / size if size and np.isfinite(size) else 0.0
