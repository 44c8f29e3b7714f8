"""The exercises of lab 07: a block whose dropout masks can be read from its result, and your own dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import numpy as np

from tplab.exercises.check import Verdict, not_started, raised, untouched
from tplab.exercises.exercise import Framework
from tplab.exercises.trials import run_of
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.widgets.matrices import Panel

TOKENS, WIDTH = 96, 16
BLOCK_MESHES = (Mesh(tp=4), Mesh(tp=3), Mesh(tp=1))
_Fault = tuple[str, list[Panel]]


# --- the bug: a block with two masks ---------------------------------------------------------------------------------


def check_block(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn` applies dropout with p = 1/2 between its two layers, and with p = 1/2 to what it adds to x.

    x [T, D], replicated   a [D, F/tp]   b [F/tp, D]   ->   x + dropped(dropped(relu(x @ a)) @ b) [T, D], replicated
    In JAX, `fn` also takes a key.

    The weights are chosen so that the result shows the masks: every hidden feature is 1, and feature f adds 2**f.
    """
    if not_started(fn):
        return untouched("block")
    panels: list[Panel] = []
    for mesh in BLOCK_MESHES:
        num_features = 9 if mesh.axis_size("tp") == 3 else 8
        x, a = np.ones((TOKENS, WIDTH)), np.full((WIDTH, num_features), 1 / WIDTH)
        b = np.tile(2.0 ** np.arange(num_features)[:, None], (1, WIDTH))
        args = [array.astype(np.float32) for array in (x, a, b)]
        try:
            results = run_of(framework)(
                _with_key(fn, framework), mesh, *args, in_specs=(P(), P(None, "tp"), P("tp", None))
            ).per_rank
            found = [np.asarray(result, float) for result in results]
        except Exception as error:
            return Verdict(False, raised(error, fn, "block", mesh))
        if found[0].shape != x.shape:
            return Verdict(False, f"block: the result has shape {list(found[0].shape)}, but x has {list(x.shape)}.")
        added = [result - x for result in found]
        if fault := _fault_outside(added, mesh, num_features) or _fault_inside(added[0], mesh, num_features):
            return Verdict(False, *fault)
        panels = panels or _kept(added[0], mesh, num_features)[1]
    listed = ", ".join(map(str, BLOCK_MESHES))
    text = f"block is right on {listed}.\nInside, each rank draws its own mask. Outside, all ranks draw the same one."
    return Verdict(True, text, panels)


def _with_key(fn: Callable[..., Any], framework: Framework) -> Callable[..., Any]:
    if framework == "torch":
        return fn

    def program(*args: Any) -> Any:
        import jax

        return fn(*args, jax.random.key(0))

    return program


def _fault_outside(added: list[np.ndarray], mesh: Mesh, num_features: int) -> _Fault | None:
    """What is wrong with what the block adds to x: it differs between ranks, or the wrong fraction of it is zero."""
    for rank, array in enumerate(added):
        differs = array != added[0]
        if differs.any():
            sums_agree = (array == added[0])[(array != 0) & (added[0] != 0)].all()
            hint = (
                "Outside, every rank has a copy of the same tensor, but each rank has dropped different entries, so "
                "the copies\ndrift apart. Which ranks must draw the same mask here?"
                if sums_agree
                else "The ranks also differ in entries that both of them keep. Is the sum over the ranks missing?"
            )
            panels = [_corner(f"rank {r}, what it adds", added[r], differs) for r in (0, rank)]
            return f"block: ranks 0 and {rank} of {mesh} return different tensors.\n{hint}", panels
    known = [_corner("rank 0, what it adds", added[0])]
    tokens = added[0][added[0].any(-1)]  # a token without any entry may have lost all of its hidden features
    share = float((tokens == 0).mean()) if tokens.size else 1.0
    if _is_off(share, added[0].size):
        hint = f"{share:.0%} of what the block adds to x is dropped, but it should be half. Drop once, after the sum."
        return f"block: outside, p is not 1/2 on {mesh}.\n{hint}", known
    codes = added[0] / 4
    if not ((codes == codes.round()) & (codes >= 0) & (codes < 2**num_features)).all():
        hint = (
            "Each dropout doubles what it keeps, so two of them make it 4 times as large. Is one of them missing, or "
            "before the sum?"
        )
        return f"block: what it adds to x is not what two dropouts leave, on {mesh}.\n{hint}", known
    return None


def _fault_inside(added: np.ndarray, mesh: Mesh, num_features: int) -> _Fault | None:
    """What is wrong with the masks of the hidden features, which can be read from each token's sum."""
    kept, panels = _kept(added, mesh, num_features)
    own = np.split(kept, mesh.axis_size("tp"), axis=1)
    if len(own) > 1 and all((piece == own[0]).all() for piece in own):
        hint = (
            "A row is a token, a column is a hidden feature of the rank, and 1 means kept. The ranks drop their\n"
            "features together, although these have nothing to do with each other. Along which axis must masks differ?"
        )
        return f"block: inside, every rank of {mesh} draws the same mask.\n{hint}", panels
    if _is_off(1 - kept.mean(), kept.size):
        hint = f"{1 - kept.mean():.0%} of the hidden features are dropped, but it should be half."
        return f"block: inside, p is not 1/2 on {mesh}.\n{hint}", panels
    return None


def _kept(added: np.ndarray, mesh: Mesh, num_features: int) -> tuple[np.ndarray, list[Panel]]:
    """1 where a token keeps a hidden feature, for all tokens that keep any; and the first of these by rank."""
    codes = (added.max(-1) / 4).astype(int)
    codes = codes[codes > 0]  # if a token's whole sum is dropped, its hidden features are unknown
    kept = codes[:, None] >> np.arange(num_features) & 1
    own = np.split(kept, mesh.axis_size("tp"), axis=1)
    return kept, [Panel(f"rank {rank}, kept", piece[:6]) for rank, piece in enumerate(own)]


def _is_off(share: float, count: int, p: float = 0.5) -> bool:
    """Whether this share of `count` coin flips is more than five standard deviations away from p."""
    return abs(share - p) > 5 * (p * (1 - p) / count) ** 0.5


def _corner(title: str, array: np.ndarray, wrong: np.ndarray | None = None) -> Panel:
    return Panel(title, array[:6, :8], None if wrong is None else wrong[:6, :8])


# --- the exercise: your own dropout ----------------------------------------------------------------------------------

_DROP_MESHES = (Mesh(tp=4), Mesh(tp=3), Mesh(dp=2, tp=2), Mesh(tp=1))
_AXES = {1: (None, "tp"), 2: (None, "tp", "dp", ("dp", "tp"))}  # by the number of axes of the mesh
_KEYS, _P, _ONES = (0, 1, 2, 3), 0.25, 3.0
_Masks = dict[tuple[Any, int], list[np.ndarray]]  # by axis and key: what each rank returned


def check_drop(fn: Callable[..., Any]) -> Verdict:
    """Whether `fn(x, p, key, axis)`, in torch, is a dropout whose mask depends on the key and, along `axis`, the rank.

    x any shape   p the fraction that is dropped   key an integer, the same on every rank   axis as in tplab's dropout
    """
    name = "drop"
    if not_started(fn):
        return untouched(name)
    panels: list[Panel] = []
    for mesh in _DROP_MESHES:
        try:
            masks = _drawn(fn, mesh)
        except Exception as error:
            return Verdict(False, raised(error, fn, name, mesh))
        for fault in _faults(masks, mesh):
            return Verdict(False, f"{name}, on {mesh}: {fault[0]}", fault[1])
        panels = panels or _by_rank(masks["tp", 0])
    listed = ", ".join(map(str, _DROP_MESHES))
    return Verdict(True, f"{name} is right on {listed}.\nHere are its masks inside, on {_DROP_MESHES[0]}.", panels)


def _drawn(fn: Callable[..., Any], mesh: Mesh) -> _Masks:
    """What each rank gets for every axis and key. Before each draw, the ranks' own generators are out of step."""
    import torch

    from tplab.torch import axis_index, run

    calls = [(axis, key) for axis in _AXES[len(mesh.shape)] for key in _KEYS]

    def program() -> list[Any]:
        results = []
        for axis, key in calls:
            torch.manual_seed(0)
            torch.rand(axis_index(mesh.axis_names))
            results.append(fn(torch.full((32, 16), _ONES), _P, key, axis))
        return results

    per_rank = run(program, mesh).per_rank
    return {call: [np.asarray(results[place]) for results in per_rank] for place, call in enumerate(calls)}


def _by_rank(masks: list[np.ndarray]) -> list[Panel]:
    return [_corner(f"rank {rank}", mask) for rank, mask in enumerate(masks)]


def _faults(masks: _Masks, mesh: Mesh) -> Iterator[_Fault]:
    """What is wrong with the masks, the most basic first."""
    first = masks[None, 0][0]
    if first.shape != (32, 16):
        yield f"the result has shape {list(first.shape)}, but x has [32, 16].", []
        return
    kept = _ONES / (1 - _P)
    if not all((np.isclose(mask, kept) | (mask == 0)).all() for drawn in masks.values() for mask in drawn):
        text = f"with x = {_ONES:g} and p = {_P}, every number must become 0 or {_ONES:g} / {1 - _P} = {kept:g}."
        yield text, [_corner("rank 0", first)]
        return
    share = float(np.mean([mask == 0 for drawn in masks.values() for mask in drawn[:1]]))
    if _is_off(share, first.size * len(masks), _P):
        yield f"with p = {_P}, {share:.0%} of the numbers are dropped.", [_corner("rank 0", first)]
    for (axis, key), drawn in masks.items():
        yield from _fault_of_ranks(axis, key, drawn, mesh)
    yield from _fault_of_keys(masks, mesh)


def _fault_of_ranks(axis: Any, key: int, drawn: list[np.ndarray], mesh: Mesh) -> Iterator[_Fault]:
    """Ranks at the same position along the axis must draw the same mask, and at different positions different masks."""
    for one, other in combinations(mesh.ranks, 2):
        is_equal = bool((drawn[one] == drawn[other]).all())
        if is_equal == (axis is None or mesh.index(one, axis) == mesh.index(other, axis)):
            continue
        panels = [_corner(f"rank {rank}", drawn[rank]) for rank in (one, other)]
        if is_equal:
            hint = f"ranks {one} and {other} draw the same mask with axis={axis!r}, but they hold different data."
        else:
            hint = (
                f"ranks {one} and {other} draw different masks with axis={axis!r}, but they hold the same data.\n"
                "A generator made from the key alone is the same on every rank. torch's own generator is not: "
                "here the ranks\nhave drawn from it a different number of times."
            )
        yield hint, panels
        return


def _fault_of_keys(masks: _Masks, mesh: Mesh) -> Iterator[_Fault]:
    """Draws with different keys must have different masks, even on different ranks."""
    for axis in _AXES[len(mesh.shape)]:
        known: dict[bytes, tuple[int, int]] = {}
        for key in _KEYS:
            for rank, mask in enumerate(masks[axis, key]):
                other_key, other = known.setdefault(mask.tobytes(), (key, rank))
                if other_key == key:
                    continue
                panels = [_corner(f"key {other_key}, rank {other}", masks[axis, other_key][other])]
                panels.append(_corner(f"key {key}, rank {rank}", mask))
                hint = (
                    f"with axis={axis!r}, rank {rank} draws the same mask with key {key} as rank {other} with key "
                    f"{other_key}.\nIf you add the rank's index to the key, other pairs have the same sum."
                    if rank != other
                    else f"keys {other_key} and {key} give the same mask."
                )
                yield hint, panels
                return
