"""The checks of lab 06: solutions pass in both frameworks, and each known mistake is told by name."""

import base64
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tplab.jax as tj
import tplab.torch as tt
from labs.source import build
from tplab import Mesh, P
from tplab.errors import ReplicationError
from tplab.exercises import vocabulary_and_dropout as lab
from tplab.exercises.check import Exercise, Seen, Verdict, weight
from tplab.exercises.dropout_masks import check_block
from tplab.exercises.split_a_layer import finite_differences
from tplab.exercises.vocabulary_and_dropout import check_most_likely, check_token_loss
from tplab.sharding import split


def expect(verdict: Verdict, passed: bool | None, *parts: str) -> None:
    """The verdict is so, and its text has each of these parts."""
    assert verdict.passed is passed, verdict
    for part in parts:
        assert part in verdict.text, verdict


def code_of(name: str) -> str:
    """The lab's cell that defines this function, up to the first empty line."""
    cells = [cell.source for cell in build.read_source("06_vocabulary_and_dropout").cells if cell.cell_type == "code"]
    return next(source for source in cells if f"def {name}(" in source).split("\n\n")[0]


# ------------------------------------------------------------------------------------------------------- the loss


def token_loss(
    largest: str = "all", total: bool = True, label: bool = True, masks: bool = True, in_label: bool = True
) -> Callable[..., Any]:
    """The lab's loss: whose largest logit is subtracted, what is added up, and what other ranks say of the label."""

    def solution(logits, ids):
        n = logits.shape[-1]
        begin = tt.axis_index("tp") * n
        m = logits.detach().amax(-1)
        m = tt.all_reduce(m, "tp", "max") if largest == "all" else m if largest == "own" else torch.zeros_like(m)
        z = logits - m[:, None]
        sums = z.exp().sum(-1)
        sums = tt.all_reduce(sums, "tp") if total else sums
        here = (ids >= begin) & (ids < begin + n)
        of_id = (z if in_label else logits).gather(-1, torch.where(here, ids - begin, 0)[:, None])[:, 0]
        of_id = torch.where(here, of_id, 0) if masks else of_id
        of_id = tt.all_reduce(of_id, "tp") if label else of_id
        return sums.log() - of_id

    return solution


def rescaled(logits, ids):
    """Each rank's own maximum, as in the bug; its sum is brought to one scale before it is added up."""
    n = logits.shape[-1]
    begin = tt.axis_index("tp") * n
    own = logits.detach().amax(-1)
    m = tt.all_reduce(own, "tp", "max")
    total = tt.all_reduce((logits - own[:, None]).exp().sum(-1) * (own - m).exp(), "tp")
    here = (ids >= begin) & (ids < begin + n)
    of_id = (logits - m[:, None]).gather(-1, torch.where(here, ids - begin, 0)[:, None])[:, 0]
    return total.log() - tt.all_reduce(torch.where(here, of_id, 0), "tp")


def in_jax(logits, ids):
    n = logits.shape[-1]
    begin = tj.axis_index("tp") * n
    z = logits - tj.all_reduce(jax.lax.stop_gradient(logits).max(-1), "tp", "max")[:, None]
    total = tj.all_reduce(jnp.exp(z).sum(-1), "tp")
    here = (ids >= begin) & (ids < begin + n)
    of_id = jnp.take_along_axis(z, jnp.where(here, ids - begin, 0)[:, None], -1)[:, 0]
    return jnp.log(total) - tj.all_reduce(jnp.where(here, of_id, 0), "tp")


@pytest.mark.parametrize("solution", [token_loss(), rescaled])
def test_token_loss(solution: Callable[..., Any]):
    verdict = check_token_loss(solution)
    expect(verdict, True, "loss, dlogits equal the plain answer")
    assert "do without" not in verdict.text


def test_token_loss_in_jax():
    expect(check_token_loss(in_jax, framework="jax"), True, "loss, dlogits equal the plain answer")


def test_the_librarys_loss_is_right():
    whole = 12
    ours = lambda logits, ids: tt.vocab_parallel_cross_entropy(logits, ids, "tp", whole, "none")  # noqa: E731
    verdict = check_token_loss(ours)
    expect(verdict, True)
    assert "do without" not in verdict.text


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (token_loss(largest="own"), "numbers in different units"),
        (token_loss(total=False), "The sum of exponentials is this rank's own"),
        (token_loss(label=False), "Only the rank that has the right word"),
        (token_loss(masks=False), "They should add 0"),
        (token_loss(largest="none"), "exp of a large logit is infinite"),
        (token_loss(in_label=False), "not from that of the right word"),
        (lambda z, t: F.cross_entropy(tt.all_gather(z, "tp", dim=1), t, reduction="none"), "all_gather's"),
        (lambda z, t: tt.vocab_parallel_cross_entropy(z, t, "tp", 12), "loss has shape []"),
        (lambda z, t: F.cross_entropy(z, t, reduction="none"), "IndexError"),
    ],
)
def test_token_loss_gone_wrong(fn: Callable[..., Any], hint: str):
    expect(check_token_loss(fn), False, hint, "Mesh(tp=2)")


def test_gathering_the_logits_is_right_and_remarked_upon():
    gathers = lambda z, t: F.cross_entropy(tt.gather_from(z, "tp"), t, reduction="none")  # noqa: E731
    expect(check_token_loss(gathers), True, "is there a collective that you can do without?")


def test_the_plain_gradient_of_the_loss_is_its_slope():
    tensors = dict(lab.TOKEN_LOSS.tensors(np.random.default_rng(0), Mesh(tp=2)))
    right = lab.TOKEN_LOSS.plain(tensors)

    def loss(logits: np.ndarray) -> float:
        found = lab.TOKEN_LOSS.plain({**tensors, "logits": logits})["loss"]
        return float((found * weight(found)).sum())

    assert np.allclose(right["dlogits"], finite_differences(loss, tensors["logits"]), rtol=1e-6, atol=1e-6)


def test_the_lab_shows_the_first_bug():
    """The check refuses it, with the hint about units; ranks agree on it, so that `run` has no complaint."""
    names: dict[str, Any] = {"torch": torch, **{name: getattr(tt, name) for name in ("all_reduce", "axis_index")}}
    bug = code_of("token_loss")
    exec(bug, names)
    expect(check_token_loss(names["token_loss"]), False, "numbers in different units")
    logits, ids = lab.TOKEN_LOSS.tensors(np.random.default_rng(0), Mesh(tp=4)).values()
    loss = tt.run(names["token_loss"], Mesh(tp=4), logits, ids, in_specs=(P(None, "tp"), P()), out_specs=P()).value
    assert (loss >= 0).all()
    own = "largest = logits.detach().amax(-1)"
    mended = bug.replace(own, 'largest = all_reduce(logits.detach().amax(-1), "tp", "max")')
    assert mended != bug
    exec(mended, names)
    expect(check_token_loss(names["token_loss"]), True)


# -------------------------------------------------------------------------------------------- the most likely word


def most_likely(ops: Any, np_like: Any, where: str = "lowest") -> Callable[..., Any]:
    def solution(logits):
        n = logits.shape[-1]
        own = logits.max(-1) if np_like is jnp else logits.amax(-1)
        ids = logits.argmax(-1) + (0 if where == "place" else ops.axis_index("tp") * n)
        if where == "own":
            return ids
        is_best = own == ops.all_reduce(own, "tp", "max")
        if where == "sum":
            return ops.all_reduce(np_like.where(is_best, ids, 0), "tp")
        if where == "highest":
            return ops.all_reduce(np_like.where(is_best, ids, -1), "tp", "max")
        return ops.all_reduce(np_like.where(is_best, ids, n * ops.axis_size("tp")), "tp", "min")

    return solution


def by_pairs(logits):
    """One gather of two numbers a token and rank, in place of two all_reduces."""
    n = logits.shape[-1]
    best, place = logits.max(-1)
    pairs = tt.all_gather(torch.stack([best, (place + tt.axis_index("tp") * n).double()])[None], "tp")
    winner = pairs[:, 0].argmax(0)
    return pairs[winner, 1, torch.arange(len(winner))].long()


def test_most_likely():
    verdict = check_most_likely(most_likely(tt, torch))
    expect(verdict, True, "ids equal the plain answer", "However many words there are, it sends the same.")
    assert "do without" not in verdict.text
    expect(check_most_likely(most_likely(tj, jnp), framework="jax"), True, "it sends the same")
    expect(check_most_likely(by_pairs), True, "it sends the same")


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (most_likely(tt, torch, "own"), "the best of this rank's own words"),
        (most_likely(tt, torch, "place"), "place among the words of the rank that has it"),
        (most_likely(tt, torch, "sum"), "their ids were added up"),
        (most_likely(tt, torch, "highest"), "this is the higher"),
        (lambda z: z.amax(-1), "entries are off"),
        (lambda z: tt.all_gather(z, "tp", dim=1).argmax(-1), "sends 1,152 bytes for 24 words and 2,304 for 48"),
    ],
)
def test_most_likely_gone_wrong(fn: Callable[..., Any], hint: str):
    expect(check_most_likely(fn), False, hint)


@pytest.mark.parametrize("exercise", [lab.TOKEN_LOSS, lab.MOST_LIKELY])
def test_known_mistakes_differ_from_what_is_right_and_from_each_other(exercise: Exercise):
    """On the mesh that a wrong program meets first; otherwise a hint would be a guess."""
    mesh = exercise.meshes[0]
    tensors = exercise.tensors(np.random.default_rng(0), mesh)
    pieces = {name: split(array, exercise.specs[name], mesh) for name, array in tensors.items()}
    specs = {**exercise.results, **{f"d{name}": exercise.specs[name] for name in exercise.gradients}}
    outcomes: dict[str, list[np.ndarray]] = {}
    for mistake in exercise.mistakes:
        wants = split(exercise.plain(tensors)[mistake.result], specs[mistake.result], mesh)
        owns = [{name: pieces[name][rank] for name in pieces} for rank in mesh.ranks]
        seen = [Seen(tensors, owns[rank], wants[rank], mesh, rank) for rank in mesh.ranks]
        known = outcomes.setdefault(mistake.result, [np.stack(wants)])
        outcome = np.stack([mistake.wrong(one) for one in seen])
        assert not any(outcome.shape == other.shape and np.allclose(outcome, other) for other in known), mistake.hint
        known.append(outcome)


# ------------------------------------------------------------------------------------------------ the masks of a block


def block(
    inside: Any = "tp", outside: Any = None, p_inside: float = 0.5, p_outside: float = 0.5, sums: bool = True,
    early: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """The lab's block: the axis along which masks differ, and the share that is dropped, in both places."""

    def solution(x, a, b):
        h = tt.dropout(torch.relu(tt.copy_to(x, "tp") @ a), p_inside, axis=inside)
        y = h @ b
        if early:
            return x + tt.reduce_from(tt.dropout(y, p_outside, axis="tp"), "tp")
        y = tt.reduce_from(y, "tp") if sums else y
        return x + tt.dropout(y, p_outside, axis=outside)

    return solution


def jax_block(x, a, b, key):
    inner, outer = jax.random.split(key)
    h = tj.dropout(jax.nn.relu(x @ a), 0.5, key=inner, axis="tp")
    return x + tj.dropout(tj.reduce_from(h @ b, "tp"), 0.5, key=outer)


def test_block():
    expect(check_block(block()), True, "block is right on Mesh(tp=4), Mesh(tp=3), Mesh(tp=1)")
    expect(check_block(jax_block, framework="jax"), True)


@pytest.mark.parametrize(
    ("fn", "hint", "is_shown"),
    [
        (block(inside=None, outside="tp"), "each has dropped other entries of it", True),
        (block(outside="tp"), "each has dropped other entries of it", True),
        (block(inside=None), "features that\nhave nothing to do with each other are lost together", True),
        (block(sums=False), "is the sum over the ranks missing?", True),
        (block(early=True), "outside, p is not 1/2", True),
        (block(p_outside=0), "outside, p is not 1/2 on Mesh(tp=4).\nOf what the block adds to x, 0% is dropped", True),
        (block(p_inside=0), "Is one of them missing", True),
        (block(p_inside=0.1), "Is one of them missing", True),
        (lambda x, a, b: x[:1], "the result has shape [1, 16]", False),
        (lambda x, a, b: x @ b, "RuntimeError on rank", False),
    ],
)
def test_block_gone_wrong(fn: Callable[..., Any], hint: str, is_shown: bool):
    verdict = check_block(fn)
    expect(verdict, False, hint)
    assert bool(verdict.panels) == is_shown


def test_a_block_that_drops_too_rarely_inside_is_told():
    def solution(x, a, b):
        h = torch.relu(tt.copy_to(x, "tp") @ a)
        h = torch.where(tt.dropout(h, 0.1, axis="tp") > 0, 2 * h, 0)
        return x + tt.dropout(tt.reduce_from(h @ b, "tp"), 0.5)

    expect(check_block(solution), False, "inside, p is not 1/2 on Mesh(tp=4)")


def test_a_wrong_mask_is_shown():
    """By rank: of the first tokens, which hidden features were kept."""
    verdict = check_block(block(inside=None))
    assert [panel.title for panel in verdict.panels] == [f"rank {rank}, kept" for rank in range(4)]
    assert all(panel.array.shape == (6, 2) for panel in verdict.panels)
    assert all((panel.array == verdict.panels[0].array).all() for panel in verdict.panels)
    data, _ = verdict._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")


def test_the_lab_shows_the_second_bug():
    """The check refuses it for what is outside; with that mended, for what is inside; then it passes."""
    named = ("copy_to", "dropout", "reduce_from")
    names: dict[str, Any] = {"torch": torch, **{name: getattr(tt, name) for name in named}}
    bug = code_of("block")
    exec(bug, names)
    expect(check_block(names["block"]), False, "each has dropped other entries of it")
    args = [np.ones(shape, np.float32) for shape in ((4, 6), (6, 8), (8, 6))]
    with pytest.raises(ReplicationError):
        tt.run(names["block"], Mesh(tp=4), *args, in_specs=(P(), P(None, "tp"), P("tp")), out_specs=P())
    half = bug.replace('dropout(y, 0.5, axis="tp")', "dropout(y, 0.5)")
    assert half != bug
    exec(half, names)
    expect(check_block(names["block"]), False, "draws the same mask")
    mended = half.replace("dropout(h, 0.5)", 'dropout(h, 0.5, axis="tp")')
    assert mended != half
    exec(mended, names)
    expect(check_block(names["block"]), True)


# ------------------------------------------------------------------------------------------------------------ stubs


def test_untouched_stubs_are_not_started():
    for check, name in ((check_token_loss, "token_loss"), (check_most_likely, "most_likely"), (check_block, "block")):

        def stub(*args): ...

        expect(check(stub), None, f"{name}: not started")
