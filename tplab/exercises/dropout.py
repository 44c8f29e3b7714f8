"""An exercise of lab 07: a block whose dropout masks can be read from its result. The other is in `own_dropout`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np

from tplab.exercises.calls import library_call
from tplab.exercises.check import MOST_WORK
from tplab.exercises.damage import Untouched
from tplab.exercises.exercise import Framework, bytes_of_a_sum
from tplab.exercises.trials import run_of, share_of_work, weight
from tplab.exercises.verdict import Verdict, check, differs, hint, on, refuse, right
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.widgets.matrices import Panel

TOKENS, WIDTH = 96, 16
BLOCK_MESHES = (Mesh(tp=4), Mesh(tp=3), Mesh(tp=1))
NUM_SUMS = 5  # of four forward passes and one backward pass


# --- the bug: a block with two masks ---------------------------------------------------------------------------------


@check("block")
def check_block(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` applies dropout with p = 1/2 between its two layers, and with p = 1/2 to what it adds to x.

    x [T, D], replicated   a [D, F/tp]   b [F/tp, D]   ->   x + dropped(dropped(relu(x @ a)) @ b) [T, D], replicated
    In JAX, `fn` also takes a key.

    The weights are chosen so that the result shows the masks: every hidden feature is 1, and feature f adds 2**f.
    """
    panels, more = list[Panel](), 0
    for mesh in BLOCK_MESHES:
        num_features = 9 if mesh.axis_size("tp") == 3 else 8
        x, a, b = _tensors(num_features)
        dy, args = weight(x), [array.astype(np.float32) for array in (x, a, b)]
        program = (_in_torch if framework == "torch" else _in_jax)(fn)
        specs = (P(), P(), P(None, "tp"), P("tp", None))
        with on(mesh):
            out = run_of(framework)(program, mesh, dy.astype(np.float32), *args, in_specs=specs)
        results = out.per_rank
        found, dx, again, below = ([np.asarray(result[place], float) for result in results] for place in range(4))
        if found[0].shape != x.shape:
            refuse(f": the result has shape {list(found[0].shape)}, but x has {list(x.shape)}.")
        if (found[0] == 0).any():  # x is 1 here, and the block adds nothing below 0
            lost = found[0] == 0
            hint = f"x is 1 everywhere, but {lost.mean():.0%} of the result is 0. Drop only what the block adds to x."
            panel = corner("rank 0, the result", found[0], lost)
            refuse(f": x does not pass through, on {mesh}.\n{hint}", [panel])
        added = [result - x for result in found]
        _look_outside(added, mesh, num_features)
        _look_inside(added[0], mesh, num_features)
        _look_at_draws(added[0], again[0] - x, mesh)
        if harm := next((result[4] for result in results if framework == "torch" and result[4]), ""):
            refuse(f": the masks are right, but {harm}")
        if (below[0] != -x).any():
            panel = corner("rank 0, the result", below[0], below[0] != -x)
            refuse(f": the masks are right, but a relu is missing, on {mesh}.\n{BELOW}", [panel])
        _look_backward(dx, dy, added[0], a, b, mesh)
        panels = panels or _kept(added[0], mesh, num_features)[1]
        more = more or out.trace.bytes_sent() - NUM_SUMS * bytes_of_a_sum(args[0], mesh) if framework == "torch" else 0
    _look_at_work(fn, framework)
    if more > 0:
        refuse(
            f": the masks are right, but on {BLOCK_MESHES[0]} the ranks send {more:,} bytes more than the sums of y "
            "and of the gradient of x need.\nRanks that share a seed can agree on a mask without any message."
        )
    listed = ", ".join(map(str, BLOCK_MESHES))
    text = f" is right on {listed}.\nInside, each rank draws its own mask. Outside, all ranks draw the same one."
    if library_call(fn, ("dropout", "Dropout"), ("torch",)):
        text += "\ntorch's own dropout draws from each rank's generator. On a cluster, seed these differently."
    return right(text, panels)


BELOW = "Where x is -1, every hidden feature is below 0, and relu makes it 0: then nothing is added to x."


def _tensors(num_features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, a and b, which make every hidden feature 1, and let feature f add 2**f."""
    x, a = np.ones((TOKENS, WIDTH)), np.full((WIDTH, num_features), 1 / WIDTH)
    return x, a, np.tile(2.0 ** np.arange(num_features)[:, None], (1, WIDTH))


def _in_torch(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A program that returns the block's result, the gradient of x, a second result, that of -x, and the damage."""

    def program(dy: Any, x: Any, *weights: Any) -> Any:
        import torch

        x.requires_grad_()
        before = Untouched({"x": x, "a": weights[0], "b": weights[1]}, generators=False)  # dropout advances torch's
        y = fn(x, *weights)
        if not isinstance(y, torch.Tensor):
            found = "None; is a `return` missing?" if y is None else f"an object of type {type(y).__name__}"
            raise TypeError(f"it must return a tensor, and it returned {found}")
        if not y.requires_grad:
            raise TypeError("what it returns has no gradient; is something detached?")
        harm = before.damage()
        if y.shape == dy.shape and not harm:
            y.backward(dy)
        states, again = [], y
        for seed in (1, 2):  # from two states of torch's generator: a block that seeds it ends in one state
            torch.manual_seed(seed)
            again = fn(x, *weights)
            states.append(torch.get_rng_state())
        if not harm and torch.equal(*states):
            harm = (
                "it seeds torch's global generator.\nAll random numbers that the program draws later are then the "
                "same in every step."
            )
        below = fn(-x.detach(), *weights).detach()
        return y.detach(), dy if x.grad is None else x.grad, again.detach(), below, harm

    return program


def _in_jax(fn: Callable[..., Any]) -> Callable[..., Any]:
    def program(dy: Any, x: Any, *weights: Any) -> Any:
        import jax

        key = jax.random.key(1)
        y, backward = jax.vjp(lambda x: fn(x, *weights, jax.random.key(0)), x)
        return y, backward(dy)[0], fn(x, *weights, key), fn(-x, *weights, key)

    return program


def _look_outside(added: list[np.ndarray], mesh: Mesh, num_features: int) -> None:
    """Refuse what the block adds to x if it differs between ranks, or if the wrong fraction of it is zero."""
    for rank, array in enumerate(added):
        differs = array != added[0]
        if differs.any():
            whole = [r for r in (0, rank) if (added[r][added[r].any(-1)] != 0).all()]  # drops nothing
            if (array == added[0])[(array != 0) & (added[0] != 0)].all():
                hint = (
                    "Outside, every rank has a copy of the same tensor, but each rank has dropped different entries, "
                    "so the copies\ndrift apart. Which ranks must draw the same mask here?"
                )
            elif len(whole) == 1:
                hint = f"Outside, rank {whole[0]} drops nothing. All ranks must apply the same mask there."
            else:
                hint = "The ranks also differ in entries that both of them keep. Is the sum over the ranks missing?"
            panels = [corner(f"rank {r}, what it adds", added[r], differs) for r in (0, rank)]
            refuse(f": ranks 0 and {rank} of {mesh} return different tensors.\n{hint}", panels)
    known = [corner("rank 0, what it adds", added[0])]
    if mistake := _of_the_sum(added[0], mesh, num_features):
        refuse(f": outside, {mistake}", known)
    tokens = added[0][added[0].any(-1)]  # a token without any entry may have lost all of its hidden features
    share = float((tokens == 0).mean()) if tokens.size else 1.0
    if is_off(share, added[0].size):
        hint = f"{share:.0%} of what the block adds to x is dropped, but it should be half."
        refuse(f": outside, p is not 1/2 on {mesh}.\n{hint}", known)
    if not _are_sums(added[0], num_features):
        hint = (
            "Each dropout doubles what it keeps, so two of them make it 4 times as large. Is one missing, there twice, "
            "or before the sum?"
        )
        refuse(f": what it adds to x is not what two dropouts leave, on {mesh}.\n{hint}", known)


def _of_the_sum(added: np.ndarray, mesh: Mesh, num_features: int) -> str:
    """The fault in an outer mask that is not drawn per entry, or not after the sum, in words; "" if there is none."""
    num_ranks, zero = mesh.axis_size("tp"), added == 0
    without = added - (num_ranks - 1)
    if num_ranks > 1 and _are_sums(without, num_features) and (without == 0).any() and not zero.any():
        return f"x is added once per rank, on {mesh}.\nEvery rank has all of x: add it once, after the sum."
    if (zero.all(-1) | ~zero.any(-1)).all() and not is_off(zero.all(-1).mean(), len(zero)):
        return f"whole tokens are dropped, on {mesh}.\n{EACH}"
    seen = zero[~zero.all(-1)]
    if len(seen) and seen.any() and (seen == seen[0]).all():
        return f"the same entries of every token are dropped, on {mesh}.\n{EACH}"
    if any(np.ptp(token[token != 0]) > 1e-3 for token in added if token.any()):
        return (
            f"a token keeps different numbers, on {mesh}.\nHere each hidden feature adds the same number to all "
            "entries of a token, so those that are kept are equal.\nDrop once, after the sum: not each rank's terms."
        )
    return ""


EACH = "Each number is dropped with probability p, whatever the others do."


def _are_sums(added: np.ndarray, num_features: int) -> bool:
    """Whether these are sums of 2**f over some of the features, four times as large."""
    codes = added / 4
    return bool(((codes == codes.round()) & (codes >= 0) & (codes < 2**num_features)).all())


def _look_inside(added: np.ndarray, mesh: Mesh, num_features: int) -> None:
    """Refuse wrong masks of the hidden features, which can be read from each token's sum."""
    kept, panels = _kept(added, mesh, num_features)
    own = np.split(kept, mesh.axis_size("tp"), axis=1)
    if (kept == kept[0]).all():
        refuse(f": inside, the same hidden features are dropped for every token, on {mesh}.", panels)
    if own[0].shape[1] > 1 and all((piece == piece[:, :1]).all() for piece in own):
        refuse(f": inside, a rank drops all of a token's hidden features or none, on {mesh}.\n{EACH}", panels)
    alike = [(i, j) for i, j in combinations(range(len(own)), 2) if (own[i] == own[j]).all()]
    if alike:
        hint = (
            "A row is a token, a column is a hidden feature of the rank, and 1 means kept. These ranks drop their\n"
            "features together, although these have nothing to do with each other. Along which axis must masks differ?"
        )
        all_are = len(alike) == len(own) * (len(own) - 1) // 2
        ranks, draw = ("every rank", "draws") if all_are else (f"ranks {alike[0][0]} and {alike[0][1]}", "draw")
        refuse(f": inside, {ranks} of {mesh} {draw} the same mask.\n{hint}", panels)
    if is_off(1 - kept.mean(), kept.size):
        hint = f"{1 - kept.mean():.0%} of the hidden features are dropped, but it should be half."
        refuse(f": inside, p is not 1/2 on {mesh}.\n{hint}", panels)


def _look_at_draws(added: np.ndarray, again: np.ndarray, mesh: Mesh) -> None:
    """Refuse a block that draws the same masks when it runs again."""
    both = added.any(-1) & again.any(-1)  # the tokens whose masks show in both results
    masks = {
        "outside": (added != 0, again != 0),
        "inside": (added.max(-1), again.max(-1)),  # encodes which hidden features a token keeps
    }
    for place, (first, second) in masks.items():
        if (first[both] == second[both]).all():
            hint = "Training would drop the same numbers in every step. Each draw needs a mask of its own."
            panels = [corner("first run", added), corner("second run", again)]
            refuse(f": {place}, the mask is the same whenever the block runs, on {mesh}.\n{hint}", panels)


def _look_at_work(fn: Callable[..., Any], framework: Framework) -> None:
    """Refuse a block in which every rank does all of the work."""
    mesh, specs = BLOCK_MESHES[0], {"x": P(), "a": P(None, "tp"), "b": P("tp", None)}

    def with_key(x: Any, a: Any, b: Any) -> Any:
        import jax

        return fn(x, a, b, jax.random.key(0))

    tensors = {name: array.astype(np.float32) for name, array in zip(specs, _tensors(8))}
    program = fn if framework == "torch" else with_key
    if (share := share_of_work(framework, program, specs, tensors, "tp", mesh.axis_size("tp"))) >= MOST_WORK:
        refuse(
            f": the masks are right, but on {mesh} the busiest rank does {share:.0%} of what one rank alone would do.\n"
            "Let each rank compute with its own columns of a and its own rows of b."
        )


def _look_backward(
    dx: list[np.ndarray], dy: np.ndarray, added: np.ndarray, a: np.ndarray, b: np.ndarray, mesh: Mesh
) -> None:
    """Refuse a gradient of x that is wrong, given the masks that the result shows."""
    codes = (added.max(-1) / 4).astype(int)  # a token whose sum is dropped passes no gradient on
    inside = 2 * (codes[:, None] >> np.arange(len(b)) & 1)
    dh = ((2 * dy * (added != 0)) @ b.T) * inside
    want = dy + dh @ a.T
    num_ranks = mesh.axis_size("tp")
    own = [dy + part @ rows.T for part, rows in zip(np.split(dh, num_ranks, 1), np.split(a, num_ranks, 1))]
    slack = 1e-4 * np.abs(want).max()
    for rank in mesh.ranks:
        off = differs(dx[rank], want, slack)
        if off.any():
            known = {
                "No gradient comes back through the two layers. Is something detached?": [dy] * num_ranks,
                "It is only the part that comes through this rank's own hidden features. What adds up the gradients of "
                "the ranks?": own,
                "What comes back through the two layers is R times too large: all_gather adds up the gradients of all "
                "R copies.": [dy + num_ranks * (want - dy)] * num_ranks,
            }
            said = hint(
                dx, known, "Each dropout passes a gradient on where it has kept a number, twice as large.", slack
            )
            panels = [corner(f"dx, rank {rank}", dx[rank], off), corner("right", want)]
            refuse(f": the masks are right, but the gradient of x is not, on rank {rank} of {mesh}.\n{said}", panels)


def _kept(added: np.ndarray, mesh: Mesh, num_features: int) -> tuple[np.ndarray, list[Panel]]:
    """1 where a token keeps a hidden feature, for all tokens that keep any; and the first of these by rank."""
    codes = (added.max(-1) / 4).astype(int)
    codes = codes[codes > 0]  # if a token's whole sum is dropped, its hidden features are unknown
    kept = codes[:, None] >> np.arange(num_features) & 1
    own = np.split(kept, mesh.axis_size("tp"), axis=1)
    return kept, [Panel(f"rank {rank}, kept", piece[:6]) for rank, piece in enumerate(own)]


def is_off(share: float, count: int, p: float = 0.5) -> bool:
    """Whether this share of `count` coin flips is more than five standard deviations away from p."""
    return abs(share - p) > 5 * (p * (1 - p) / count) ** 0.5


def corner(title: str, array: np.ndarray, wrong: np.ndarray | None = None) -> Panel:
    return Panel(title, array[:6, :8], None if wrong is None else wrong[:6, :8])
