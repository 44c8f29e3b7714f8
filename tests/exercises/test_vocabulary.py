"""The checks of lab 06: solutions pass in both frameworks, and each known mistake gets its hint."""

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
from tplab.exercises import vocabulary as lab
from tplab.exercises.check import Verdict
from tplab.exercises.slopes import weight
from tplab.exercises.split_a_layer import finite_differences
from tplab.exercises.vocabulary import check_most_likely, check_token_loss


def expect(verdict: Verdict, passed: bool | None, *parts: str) -> None:
    """The verdict is so, and its text has each of these parts."""
    assert verdict.passed is passed, verdict
    for part in parts:
        assert part in verdict.text, verdict


def code_of(name: str) -> str:
    """The lab's cell that defines this function, up to the first empty line."""
    cells = [cell.source for cell in build.read_source("06_vocabulary").cells if cell.cell_type == "code"]
    return next(source for source in cells if f"def {name}(" in source).split("\n\n")[0]


# ------------------------------------------------------------------------------------------------------- the loss


def token_loss(
    largest: str = "max", total: bool = True, label: bool = True, masks: bool = True, in_label: bool = True
) -> Callable[..., Any]:
    """The lab's loss: whose largest logit is subtracted, what is added up, and what other ranks say of the label."""

    def solution(logits, ids):
        n = logits.shape[-1]
        begin = tt.axis_index("tp") * n
        m = logits.amax(-1) if largest == "attached" else logits.detach().amax(-1)
        if largest == "attached":
            m = tt.all_reduce(m, "tp", "max")
        elif largest == "first":
            m = tt.broadcast(m, "tp")
        elif largest == "sum":
            m = tt.all_reduce(m, "tp")
        elif largest == "of all":
            m = tt.all_reduce(m.max(), "tp", "max").expand_as(m)
        elif largest in ("max", "mean", "min"):
            m = tt.all_reduce(m, "tp", largest)
        elif largest == "none":
            m = torch.zeros_like(m)
        z = logits - m[:, None]
        sums = z.exp().sum(-1)
        sums = tt.all_reduce(sums, "tp") if total else sums
        here = (ids >= begin) & (ids < begin + n)
        of_id = (z if in_label else logits).gather(-1, torch.where(here, ids - begin, 0)[:, None])[:, 0]
        of_id = torch.where(here, of_id, 0) if masks else of_id
        of_id = tt.all_reduce(of_id, "tp") if label else of_id
        return sums.log() - of_id

    return solution


def log_of_softmax(logits, ids):
    n = logits.shape[-1]
    begin = tt.axis_index("tp") * n
    z = (logits - tt.all_reduce(logits.detach().amax(-1), "tp", "max")[:, None]).exp()
    here = (ids >= begin) & (ids < begin + n)
    shares = (z / tt.all_reduce(z.sum(-1), "tp")[:, None]).log()
    of_id = shares.gather(-1, torch.where(here, ids - begin, 0)[:, None])[:, 0]
    return -tt.all_reduce(torch.where(here, of_id, 0), "tp")


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


def rescaled_in_part(logits, ids):
    """The same, but the logit of the right entry is left on its rank's own scale."""
    n = logits.shape[-1]
    begin = tt.axis_index("tp") * n
    own = logits.detach().amax(-1)
    m = tt.all_reduce(own, "tp", "max")
    z = logits - own[:, None]
    total = tt.all_reduce(z.exp().sum(-1) * (own - m).exp(), "tp")
    here = (ids >= begin) & (ids < begin + n)
    of_id = z.gather(-1, torch.where(here, ids - begin, 0)[:, None])[:, 0]
    return total.log() - tt.all_reduce(torch.where(here, of_id, 0), "tp")


def every_rank_adds(place, detached=False):
    """Each rank adds its logit at place(ids - begin, n)."""

    def solution(logits, ids):
        n = logits.shape[-1]
        z = logits - tt.all_reduce(logits.detach().amax(-1), "tp", "max")[:, None]
        total = tt.all_reduce((z.detach() if detached else z).exp().sum(-1), "tp")
        at = ids - tt.axis_index("tp") * n
        of_id = z.gather(-1, place(at, n)[:, None])[:, 0]
        of_id = torch.where((at >= 0) & (at < n), of_id, 0) if detached else of_id
        return total.log() - tt.all_reduce(of_id, "tp")

    return solution


def gathers_sums(logits, ids):
    """Each rank's sum of exponentials, as a logarithm, is gathered; the loss is right, its gradient is not."""
    begin, n = tt.axis_index("tp") * logits.shape[-1], logits.shape[-1]
    here = (ids >= begin) & (ids < begin + n)
    of_id = torch.where(here, logits.gather(-1, torch.where(here, ids - begin, 0)[:, None])[:, 0], 0)
    sums = tt.all_gather(logits.logsumexp(-1)[None], "tp")
    return sums.logsumexp(0) - tt.all_reduce(of_id, "tp")


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
    expect(verdict, True, "loss, dlogits equal the unsharded result")
    assert "do without" not in verdict.text


def test_token_loss_in_jax():
    expect(check_token_loss(in_jax, framework="jax"), True, "loss, dlogits equal the unsharded result")


def test_the_librarys_loss_is_not_an_answer():
    ours = lambda logits, ids: tt.vocab_parallel_cross_entropy(logits, ids, "tp", 12, "none")  # noqa: E731
    expect(check_token_loss(ours), False, "`vocab_parallel_cross_entropy` does the work")


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (token_loss(largest="own"), "ranks' sums are on different scales"),
        (token_loss(total=False), "The sum of exponentials covers only this rank's entries"),
        (token_loss(label=False), "Only the rank that has the right entry"),
        (token_loss(masks=False), "They should add 0"),
        (every_rank_adds(lambda at, n: at % n), "They should add 0"),
        (every_rank_adds(lambda at, n: at.clamp(0, n - 1)), "They should add 0"),
        (every_rank_adds(lambda at, n: at % n, detached=True), "What cuts off the sum of exponentials"),
        (rescaled_in_part, "from the logit of the right entry, its rank's own maximum"),
        (token_loss(largest="none"), "exp of a large logit overflows"),
        (token_loss(largest="mean"), "the mean of\nthe ranks' maxima"),
        (token_loss(largest="min"), "or the smallest of them"),
        (token_loss(largest="first"), "if another\nrank's maximum is"),
        (log_of_softmax, "the logarithm of an unlikely entry is log 0"),
        (token_loss(largest="sum"), "far larger than all of its logits"),
        (token_loss(largest="of all"), "The sum of exponentials is 0 for some token"),
        (token_loss(largest="attached"), "the maximum of logits.detach()"),
        (lambda z, t: token_loss()(tt.copy_to(z, "tp"), t), "pieces of this gradient are added up"),
        (lambda z, t: tt.copy_to(token_loss()(z, t), "tp"), "R times too large"),
        (token_loss(in_label=False), "not from the logit of the right entry"),
        (
            lambda z, t: F.cross_entropy(tt.all_gather(z, "tp", dim=1), t, reduction="none"),
            "The backward pass of all_gather",
        ),
        (gathers_sums, "the part of its gradient that comes from the sum is R times too large"),
        (lambda z, t: token_loss()(z, t).mean(), "loss has shape []"),
        (lambda z, t: token_loss()(z, t).detach(), "it has no gradient"),
        (lambda z, t: F.cross_entropy(z, t, reduction="none"), "IndexError"),
    ],
)
def test_token_loss_gone_wrong(fn: Callable[..., Any], hint: str):
    expect(check_token_loss(fn), False, hint, "Mesh(tp=2)")


def test_a_loss_that_changes_the_logits_is_refused():
    changing = lambda z, t: token_loss()(z, t) + 0 * z.clamp_(max=0)[0, 0]  # noqa: E731
    expect(check_token_loss(changing), False, "it changes logits in place")


def test_gathering_the_logits_has_the_right_numbers_and_is_refused():
    gathers = lambda z, t: F.cross_entropy(tt.gather_from(z, "tp"), t, reduction="none")  # noqa: E731
    expect(check_token_loss(gathers), False, "the numbers are right, but on Mesh(tp=4) it sends", "for 400,000")


def test_the_plain_gradient_of_the_loss_is_its_slope():
    tensors = dict(lab.TOKEN_LOSS.tensors(np.random.default_rng(0), Mesh(tp=2)))

    def loss(logits: np.ndarray) -> float:
        found = lab.TOKEN_LOSS.plain(logits, tensors["ids"])
        return float((found * weight(found)).sum())

    assert np.allclose(
        lab.TOKEN_LOSS.right("dlogits", tensors), finite_differences(loss, tensors["logits"]), rtol=1e-6, atol=1e-6
    )


def test_the_lab_shows_the_first_bug():
    """The check refuses it, with the hint about units; ranks agree on it, so that `run` has no complaint."""
    names: dict[str, Any] = {"torch": torch, "tt": tt}
    bug = code_of("token_loss")
    exec(bug, names)
    expect(check_token_loss(names["token_loss"]), False, "ranks' sums are on different scales")
    logits, ids = lab.TOKEN_LOSS.tensors(np.random.default_rng(0), Mesh(tp=4)).values()
    loss = tt.run(names["token_loss"], Mesh(tp=4), logits, ids, in_specs=(P(None, "tp"), P()), out_specs=P()).value
    assert (loss >= 0).all()
    own = "largest = logits.detach().amax(-1)"
    mended = bug.replace(own, 'largest = tt.all_reduce(logits.detach().amax(-1), "tp", "max")')
    assert mended != bug
    exec(mended, names)
    expect(check_token_loss(names["token_loss"]), True)


# -------------------------------------------------------------------------------------------- the most likely token


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
        if where == "zero":
            return ops.all_reduce(np_like.where(is_best, ids, 0), "tp", "min")
        if where == "highest":
            return ops.all_reduce(np_like.where(is_best, ids, -1), "tp", "max")
        return ops.all_reduce(np_like.where(is_best, ids, n * ops.axis_size("tp")), "tp", "min")

    return solution


def most_probable(logits):
    best, ids = logits.softmax(-1).max(-1)
    is_best = best == tt.all_reduce(best, "tp", "max")
    return tt.all_reduce(torch.where(is_best, ids + tt.axis_index("tp") * logits.shape[-1], 10**9), "tp", "min")


def by_pairs(logits):
    """One gather of two numbers a token and rank, in place of two all_reduces."""
    n = logits.shape[-1]
    best, place = logits.max(-1)
    pairs = tt.all_gather(torch.stack([best, (place + tt.axis_index("tp") * n).double()])[None], "tp")
    winner = pairs[:, 0].argmax(0)
    return pairs[winner, 1, torch.arange(len(winner))].long()


def with_sentinel(logits, sentinel):
    """Ranks without the largest logit contribute this number."""
    own, ids = logits.max(-1)
    is_best = own == tt.all_reduce(own, "tp", "max")
    return tt.all_reduce(torch.where(is_best, ids + tt.axis_index("tp") * logits.shape[-1], sentinel), "tp", "min")


def in_the_logits_dtype(logits):
    """An id beside its logit, in one tensor."""
    best, place = logits.max(-1)
    ids = (place + tt.axis_index("tp") * logits.shape[-1]).to(logits.dtype)
    pairs = tt.all_gather(torch.stack([best, ids])[None], "tp")
    return pairs[pairs[:, 0].argmax(0), 1, torch.arange(len(best))].long()


def within_a_percent(logits):
    own, ids = logits.max(-1)
    n, best = logits.shape[-1], tt.all_reduce(own, "tp", "max")
    is_best = torch.isclose(own, best, rtol=1e-2)
    return tt.all_reduce(torch.where(is_best, ids + tt.axis_index("tp") * n, 10**9), "tp", "min")


def last_on_its_rank(logits):
    n = logits.shape[-1]
    own, ids = logits.amax(-1), n - 1 - logits.flip(-1).argmax(-1) + tt.axis_index("tp") * n
    return tt.all_reduce(torch.where(own == tt.all_reduce(own, "tp", "max"), ids, 10**9), "tp", "min")


def in_one_number(logits):
    """One all_reduce of a number that is made of a logit and its id."""
    n = logits.shape[-1]
    ids = tt.axis_index("tp") * n + torch.arange(n)
    best = tt.all_reduce((logits * 1e6 - ids).amax(-1), "tp", "max")
    return (-best % 1e6).round().long()


def test_most_likely():
    verdict = check_most_likely(most_likely(tt, torch))
    expect(verdict, True, "ids equals the unsharded result", "It sends the same however many entries there are.")
    assert "do without" not in verdict.text
    expect(check_most_likely(most_likely(tj, jnp), framework="jax"), True, "It sends the same")
    expect(check_most_likely(by_pairs), True, "It sends the same")
    for sentinel in (10**9, torch.inf):
        expect(check_most_likely(lambda z, large=sentinel: with_sentinel(z, large).long()), True)
    expect(check_most_likely(lambda z: with_sentinel(z, 2**31 - 1).int()), True)


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (most_likely(tt, torch, "own"), "the most likely of this rank's own entries"),
        (most_likely(tt, torch, "place"), "the entry's place on the rank that has it"),
        (most_likely(tt, torch, "sum"), "their ids were added"),
        (most_likely(tt, torch, "highest"), "this is the higher one"),
        (lambda z: z.amax(-1), "entries are off"),
        (lambda z: tt.all_gather(z, "tp", dim=1).argmax(-1), "where 128 would do.\nTwo numbers per token are enough"),
        (most_probable, "Each rank's probabilities are divided by its own sum"),
        (lambda z: with_sentinel(z, 1000), "With 400,000 entries, in float32, token 0 gets 1,000 instead of 399,998"),
        (lambda z: with_sentinel(z, 100_000), "large enough"),
        (in_one_number, "exact enough, only for a few entries"),
        (within_a_percent, "gets 1 instead of 22.\nThe logits of these two entries are as close as two numbers can be"),
        (last_on_its_rank, "two entries of a rank have equally large logits. Return the lower id"),
        (lambda z: z.argmax(-1), "1 of 4 entries is off: it is 2, and should be 22"),
        (lambda z: with_sentinel(z, torch.inf), "they are float32"),
        (most_likely(tt, torch, "zero"), "contributes 0, and no id is smaller"),
        (in_the_logits_dtype, "With 400,000 entries, in bfloat16, token 0 gets 399,360"),
        (lambda z: with_sentinel(z, 10**9) + 0 * int(z.zero_().sum()), "it changes logits in place"),
    ],
)
def test_most_likely_gone_wrong(fn: Callable[..., Any], hint: str):
    expect(check_most_likely(fn), False, hint)


# ------------------------------------------------------------------------------------------------------------ stubs


def test_untouched_stubs_are_not_started():
    for check, name in ((check_token_loss, "token_loss"), (check_most_likely, "most_likely")):

        def stub(*args): ...

        expect(check(stub), None, f"{name}: not started")
