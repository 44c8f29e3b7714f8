"""The second bug of lab 06: a block whose dropout masks are read off its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import Framework, Verdict, not_started, raised, untouched
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.widgets.matrices import Panel

TOKENS, WIDTH = 96, 16
BLOCK_MESHES = (Mesh(tp=4), Mesh(tp=3), Mesh(tp=1))


def check_block(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn` drops with p = 1/2 what is between its two layers, and with p = 1/2 what it adds to x.

    x [T, D], the same on every rank   a [D, F/tp]   b [F/tp, D]   ->   x + dropped(dropped(relu(x @ a)) @ b) [T, D],
    the same on every rank. In JAX `fn` takes a key as well.

    The weights are such that the result tells the masks: every hidden feature is 1, and feature f adds 2**f.
    """
    if not_started(fn):
        return untouched("block")
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
            return Verdict(False, f"block: the result has shape {list(found[0].shape)}, and x has {list(x.shape)}.")
        added = [result - x for result in found]
        if fault := _fault_outside(added, mesh, num_features) or _fault_inside(added[0], mesh, num_features):
            return Verdict(False, *fault)
    listed = ", ".join(map(str, BLOCK_MESHES))
    return Verdict(
        True, f"block is right on {listed}: inside each rank drops for itself, outside all drop the same entries."
    )


_Fault = tuple[str, list[Panel]]


def _with_key(fn: Callable[..., Any], framework: Framework) -> Callable[..., Any]:
    if framework == "torch":
        return fn

    def program(*args: Any) -> Any:
        import jax

        return fn(*args, jax.random.key(0))

    return program


def _fault_outside(added: list[np.ndarray], mesh: Mesh, num_features: int) -> _Fault | None:
    """What is wrong with what the block adds to x: on some rank, or where it is zero."""
    for rank, array in enumerate(added):
        differs = array != added[0]
        if differs.any():
            sums_agree = (array == added[0])[(array != 0) & (added[0] != 0)].all()
            hint = (
                "Outside, every rank holds the same tensor, and each has dropped other entries of it: copies drift "
                "apart.\nWhich ranks must draw the same mask here?"
                if sums_agree
                else "Not only the masks differ, but what is masked: is the sum over the ranks missing?"
            )
            panels = [_corner(f"rank {r}, what it adds", added[r], differs) for r in (0, rank)]
            return f"block: ranks 0 and {rank} of {mesh} do not go on with the same tensor.\n{hint}", panels
    known = [_corner("rank 0, what it adds", added[0])]
    tokens = added[0][added[0].any(-1)]  # of the others all hidden features may be dropped
    share = float((tokens == 0).mean()) if tokens.size else 1.0
    if _is_off(share, added[0].size):
        hint = f"Of what the block adds to x, {share:.0%} is dropped, and half should be: dropout after the sum, once."
        return f"block: outside, p is not 1/2 on {mesh}.\n{hint}", known
    codes = added[0] / 4
    if not ((codes == codes.round()) & (codes >= 0) & (codes < 2**num_features)).all():
        hint = "What is kept is twice as large, once for each dropout. Is one of them missing, or before the sum?"
        return f"block: what it adds is not what two dropouts leave, on {mesh}.\n{hint}", known
    return None


def _fault_inside(added: np.ndarray, mesh: Mesh, num_features: int) -> _Fault | None:
    """What is wrong with the masks of the hidden features, which each token's sum tells."""
    codes = (added.max(-1) / 4).astype(int)
    codes = codes[codes > 0]  # where all is dropped, nobody can tell by whom
    kept = codes[:, None] >> np.arange(num_features) & 1
    own = np.split(kept, mesh.axis_size("tp"), axis=1)
    first = [Panel(f"rank {rank}, kept", piece[:6]) for rank, piece in enumerate(own)]
    if len(own) > 1 and all((piece == own[0]).all() for piece in own):
        hint = (
            "Row: a token; column: a hidden feature of this rank, 1 where it is kept. All ranks toss one coin: "
            "features that\nhave nothing to do with each other are lost together. Along which axis must masks differ?"
        )
        return f"block: inside, every rank of {mesh} draws the same mask.\n{hint}", first
    if _is_off(1 - kept.mean(), kept.size):
        hint = f"Of the hidden features {1 - kept.mean():.0%} are dropped, and half should be."
        return f"block: inside, p is not 1/2 on {mesh}.\n{hint}", first
    return None


def _is_off(share: float, count: int) -> bool:
    """Whether a share of so many coins is further than five deviations from a half."""
    return abs(share - 0.5) > 5 * 0.5 / count**0.5


def _corner(title: str, array: np.ndarray, wrong: np.ndarray | None = None) -> Panel:
    return Panel(title, array[:6, :8], None if wrong is None else wrong[:6, :8])


def run_of(framework: Framework) -> Callable[..., Any]:
    """The framework's `run`."""
    if framework == "torch":
        from tplab.torch import run
    else:
        from tplab.jax import run
    return run
