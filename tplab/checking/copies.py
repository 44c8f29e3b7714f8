"""Checks without a reference: what must be equal on ranks that hold copies of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tplab.checking.causes import thread
from tplab.checking.gaps import gap, largest, shown
from tplab.checking.recording import Piece, Seen, Step, idle, unequal_steps
from tplab.checking.reference import FLOOR
from tplab.checking.same_model import Finding, Row, SameModel, What, cannot_tell, named, of_idle
from tplab.checking.samples import seeds_by_rank
from tplab.units import ranks_text

Copies = Mapping[str, Sequence[Sequence[int]]]
"""For each parameter, the groups of ranks that hold the same values."""


WORDS = "copies stay the same", "copies do NOT stay the same"
"""The verdicts. Even if the copies stay the same, the model may not be the one that a single rank would train."""


def check_copies(seen: Sequence[Seen], about: str = "") -> SameModel:
    """Check that ranks that begin with the same parameters step with the same gradients and norms, and have the same
    parameters after each step. Buffers that differ are named but not judged: those of batch norm may differ."""
    if counts := unequal_steps(seen):
        return cannot_tell(f"ranks make different numbers of steps ({counts})", about=about)
    weights = {(rank, name): (name, *_values(x)) for rank, one in enumerate(seen) for name, x in one.weights.items()}
    out = dict.fromkeys(idle(seen, weights))
    held = [{name: x for name, x in one.weights.items() if (rank, name) not in out} for rank, one in enumerate(seen)]
    (copies, unknown), notes = _copies(held), of_idle(out)
    num_steps = seen[0].num_steps
    if not num_steps or not copies:
        return cannot_tell(_no_copies(seen, unknown) if num_steps else "no step of an optimizer was seen", about=about)
    every = {name for one in seen for name, piece in one.weights.items() if piece.values.size}
    words = f"{len(copies)} of {len(every)} parameters begin as the same on several ranks: only these are compared"
    rows = [Row("weights", 0, True, words)]
    rows += [Row("weights", 0, None, f"not compared: {_constant(unknown)}")] * bool(unknown)
    buffers, _ = _copies([one.buffers for one in seen])
    for step in range(num_steps):
        if finding := _of_step(seen, copies, step):
            rows.append(Row(finding.what, step, False, finding.text_of_factor, finding.name))
            return SameModel(rows, [finding], notes=notes, about=about, words=WORDS)
        rows.append(Row("gradient", step, True, "copies step with the same gradients"))
        rows.append(Row("parameters", step, True, "and are the same after the step"))
        if apart := _apart([one.steps[step].buffers for one in seen], buffers):
            ranks = ranks_text(next(iter(apart.values()))[0])
            rows.append(Row("buffers", step, None, f"not judged: {named(list(apart))} differ on {ranks}"))
    return SameModel(rows, notes=notes, about=about, words=WORDS)


def _constant(unknown: Sequence[str]) -> str:
    return f"{named(unknown)}, of which all elements begin as one number: it does not tell copies from parts"


def _copies(held: Sequence[Mapping[str, Piece]]) -> tuple[dict[str, list[list[int]]], list[str]]:
    """Return the tensors that several ranks hold with equal values at the start, and those whose constant values are no
    evidence. A constant tensor counts as a copy if it has the whole's shape, as a DTensor tells, or if all other
    tensors of its module are copies."""
    found: dict[str, list[list[int]]] = {}
    constant = []
    for name in dict.fromkeys(name for one in held for name in one):
        pieces = {rank: one[name] for rank, one in enumerate(held) if name in one and one[name].values.size}
        if all(_tells(piece) for piece in pieces.values()):
            groups: dict[tuple, list[int]] = {}
            for rank, piece in pieces.items():
                groups.setdefault(_values(piece), []).append(rank)
            found[name] = [group for group in groups.values() if len(group) > 1]
        elif len(pieces) > 1:
            constant.append(name)
    near = {name.rpartition(".")[0]: groups for name, groups in reversed(found.items())}
    found |= {name: near.get(name.rpartition(".")[0], []) for name in constant}
    return {name: groups for name, groups in found.items() if groups}, [name for name in constant if not found[name]]


def _values(piece: Piece) -> tuple:
    """Return a key that is equal for pieces with equal values: equal arrays are stored once."""
    return id(piece.values), piece.start


def _tells(piece: Piece) -> bool:
    """Return whether equal values on several ranks show that the ranks hold copies."""
    return piece.shape is not None or (piece.values.size > 1 and np.ptp(piece.values) > 0)


def _no_copies(seen: Sequence[Seen], unknown: Sequence[str]) -> str:
    reason = "no parameter begins as the same on two ranks; if they are replicas, they must begin with the same weights"
    if unknown:
        reason = reason.replace("no parameter", "no other parameter") + f". Not compared: {_constant(unknown)}"
    if seeds := seeds_by_rank(seen):
        reason += f" (ranks set the seeds {', '.join(map(str, seeds[0]))} at {seeds[1]})"
    return reason


def _of_step(seen: Sequence[Seen], copies: Copies, number: int) -> Finding | None:
    steps = [one.steps[number] for one in seen]
    lines = steps[0].lines
    norms = {rank: step.norms[-1] for rank, step in enumerate(steps) if step.norms}
    values = [value for value, _, _ in norms.values()]
    apart = _apart([step.parameters for step in steps], copies)
    gradients = _apart([step.gradients for step in steps], copies)
    if not apart:
        return None
    what: What = "parameters"
    cause = "gradients and norms are the same, and ranks step differently: look at their optimizers' states"
    where, link = lines.get("step", ""), ""
    if gradients:
        what, apart, where = "gradient", gradients, lines.get("backward", "")
        cause, link = _of_gradients(seen, steps, next(iter(gradients.values()))[0])
    elif values and np.ptp(values) > 1e-4 * max(values):
        cause = "each rank clips by a norm of its own: add up the squares over ranks before the root"
        where = next(iter(norms.values()))[1]
        return Finding(
            "norm", "", number, "not the same on all ranks", where=where, cause=cause, thread=thread("norm"),
            got=", ".join(f"{value:.6g}" for value in values), want="one norm",
        )  # fmt: skip
    name, *others = apart
    group, got, want = apart[name]
    words = f"not the same on ranks {', '.join(map(str, group))}, which hold copies"
    also = tuple(dict.fromkeys(filter(None, (where, lines.get("backward"), lines.get("step")))))
    return Finding(what, name, number, words, None, where, cause, link, got, want, (), tuple(others), also)


def _of_gradients(seen: Sequence[Seen], steps: Sequence[Step], ranks: Sequence[int]) -> tuple[str, str]:
    """Return the cause of gradients of copies that differ on these ranks, and a thread."""
    samples = [[[id(x) for x in data.values()] for data in steps[rank].samples] for rank in ranks]
    if not all(samples) or any(one != samples[0] for one in samples):
        return "gradients of copies are not averaged over ranks before the optimizer's step, or not all of them", ""
    cause = "these ranks read the same samples, and their gradients are not added up in the backward pass, or not all"
    if any("Dropout" in one.kinds for one in seen):
        return cause + "; or each rank draws dropout masks of its own", ""
    return cause, thread("backward")


def _apart(pieces: Sequence[Mapping[str, Piece]], copies: Copies) -> dict[str, tuple[Sequence[int], str, str]]:
    """Return the tensors that differ among ranks that hold copies: these ranks, and two of their values."""
    found = {}
    for name, groups in copies.items():
        for group in groups:
            held = {rank: pieces[rank][name] for rank in group if name in pieces[rank]}
            if len(held) < 2:
                continue
            (_, first), *others = held.items()
            size = largest(first.values)
            slack = FLOOR.get(first.dtype, FLOOR["float32"]) * size
            for rank, other in others:
                if other.values is not first.values and gap(other.values, first.values) > slack:
                    found[name] = group, *shown(other.values, first.values, rank)
    return found
