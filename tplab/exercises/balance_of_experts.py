"""The exercises of lab 23: the rule that balances experts by a bias, and how a router uses that bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tplab.errors import OutsideRunError
from tplab.exercises.damage import Untouched
from tplab.exercises.verdict import Case, Verdict, beside, check, compare, on, refuse, refuse_damage, right

LOADS: tuple[tuple[Sequence[float], Sequence[int], float], ...] = (
    ((0.5, -0.25, 0.0, 0.125, 1.0), (4, 4, 0, 11, 1), 0.5),  # the mean is 4, and the median too
    ((0.0, 0.0, 0.0, 0.0), (9, 3, 2, 2), 0.01),
    ((0.25, -1.0, 2.0), (0, 0, 12), 0.001),
    ((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), (7, 1, 5, 40, 6, 1), 0.02),
    ((0.3, 0.7), (3, 2), 0.1),  # the mean is not an integer
    ((0.3, 0.7, 0.1, 0.2), (4097, 4098, 4096, 4097), 0.1),  # 16 bits cannot represent them
    ((0.3, 0.7), (3, 2), 0.75),  # a step is larger than the distance to the mean
)
"""(bias, how often each expert was chosen, rate)."""


@check(not_with=("balanced_bias",))
def check_update(fn: Callable[..., Any]) -> Verdict:
    """Check that fn(bias, counts, rate), in torch, is bias + rate * sign(mean(counts) - counts).

    bias [E]   counts [E], whole numbers, of the whole batch   ->   the next bias [E]
    """
    import torch

    def cases() -> Iterator[Case]:
        for old, chosen, rate in LOADS:
            where = f"for counts {list(chosen)}, bias {list(old)} and rate {rate}"
            bias, counts = torch.tensor(old, dtype=torch.float64), torch.tensor(chosen)
            untouched = Untouched({"bias": bias, "counts": counts})
            with on(where):
                try:
                    got = fn(bias, counts, rate)
                except OutsideRunError:
                    refuse(": `counts` are those of all ranks already, so it needs no collective.")
            refuse_damage(untouched)
            if got is None:
                refuse(f": {where} it returns None. Return the next bias.")
            if not isinstance(got, torch.Tensor) or got.requires_grad:
                what = "a tensor with requires_grad" if isinstance(got, torch.Tensor) else f"a {type(got).__name__}"
                refuse(f": {where} it returns {what}. Return a plain tensor: the router has the bias as a buffer.")
            found, before, loads = np.asarray(got, float), np.array(old), np.array(chosen)
            if found.shape != before.shape:
                shapes = f"{list(found.shape)}; the bias has {list(before.shape)}"
                refuse(f": {where} it returns something of shape {shapes}.")
            want = before + rate * np.sign(loads.mean() - loads)
            yield Case(found, want, _wrong_updates(before, loads, rate, found), f" is wrong {where}.")

    compare(cases(), 1e-6)
    return right(" is right: each expert moves by the same small step, towards the mean load.")


def _wrong_updates(before: np.ndarray, loads: np.ndarray, rate: float, found: np.ndarray) -> dict[str, Any]:
    """The bias that each known mistake gives; the last one is any step in the right direction."""
    gap, least, most = loads.mean() - loads, loads == loads.min(), loads == loads.max()
    step = rate * np.sign(gap)
    is_directed = (np.sign(found - before) == np.sign(gap)).all()

    def towards(load: float) -> np.ndarray:
        return before + rate * np.sign(load - loads)

    return {
        "The bias has not changed.": before,
        "Here the mean load is no whole number, and it has been rounded down.": towards(np.floor(loads.mean())),
        "Experts that are chosen too often get a higher bias, so they are chosen more still.": before - step,
        "The step grows with the excess. Only its direction counts: each step is as long as `rate`.": (
            before + rate * gap
        ),
        "The step grows with the relative excess. Only its direction counts.": before + rate * gap / loads.mean(),
        "This is only the change. Add it to the bias that there was.": step,
        "Compare each expert with the mean load, not with the median.": towards(float(np.median(loads))),
        "Compare each expert with the mean load. `median` is the lower of the two in the middle.": (
            towards(np.sort(loads)[(len(loads) - 1) // 2])
        ),
        "It compares counts with 1/E. 1/E is a share: compare it with counts / counts.sum().": towards(1 / len(loads)),
        "Its mean has been taken off. Its mean may change: leave it.": before + step - (before + step).mean(),
        "An expert with exactly the mean load needs no change.": before + np.where(gap >= 0, rate, -rate),
        "An expert whose load is exactly the mean needs no change.": before + np.where(gap > 0, rate, -rate),
        "Experts that are chosen too often must get a lower bias too.": before + rate * (gap > 0),
        "Experts that are chosen too rarely must get a higher bias too.": before - rate * (gap < 0),
        "Only the expert with the smallest load changes. All experts below the mean need more.": before + rate * least,
        "Only the experts with the smallest and the largest load change. All others need a step too.": (
            before + rate * least - rate * most
        ),
        "The bias is multiplied. Add to it, or a bias of 0 never changes.": before * (1 + step),
        "The direction is right, and the length of the step is not `rate`.": found if is_directed else np.nan,
    }


SCORES: tuple[tuple[int, int, int], ...] = ((9, 6, 2), (7, 6, 3), (4, 8, 1), (6, 3, 3), (1, 5, 2))
"""(tokens, experts, k)."""


@check(not_with=("Router", "MixtureOfExperts"))
def check_choose(fn: Callable[..., Any]) -> Verdict:
    """Check that fn(scores, bias, k), in torch, chooses by scores + bias, and weights by the scores alone.

    scores [T, E], each above 0   bias [E]   ->   choices [T, k], in any order, and weights [T, k], which add up to 1

    The weights have the gradient of scores[choices] / their sum: without it, the task would teach the router nothing.
    """
    import torch

    tried = list[tuple[str, int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]()

    def chosen() -> Iterator[Case]:
        for number, (tokens, experts, k) in enumerate(SCORES):
            where = f"for {tokens} tokens, {experts} experts and k = {k}"
            scores, bias = _scores(number)
            given = torch.tensor(scores), torch.tensor(bias)
            untouched = Untouched({"scores": given[0], "bias": given[1]})
            with on(where):
                got = fn(*given, k)
            refuse_damage(untouched)
            if not (isinstance(got, tuple | list) and len(got) == 2):
                refuse(f": {where} it returns a {type(got).__name__}. Return two tensors: choices, weights.")
            for name, one in zip(("choices", "weights"), got):
                if not isinstance(one, torch.Tensor):
                    what = f"{name} are a {type(one).__name__}"
                    refuse(f": {where} its {what}. Return tensors, which can have a gradient.")
                if tuple(one.shape) != (tokens, k):
                    refuse(f": {where} its {name} have shape {list(one.shape)}, and not [{tokens}, {k}].")
            if got[0].is_floating_point():
                way = "First the choices, then their weights"
                if got[1].is_floating_point():
                    way = "Return whole numbers, with which a tensor can be indexed"
                refuse(f": {where} its choices are {got[0].dtype}. {way}.")
            choices, weights = np.asarray(got[0]), np.asarray(got[1].detach(), float)
            order = np.argsort(choices, 1)
            choices, weights = np.take_along_axis(choices, order, 1), np.take_along_axis(weights, order, 1)
            tried.append((where, k, scores, bias, choices, weights))
            known = _wrong_choices(scores, bias, k)
            yield Case(choices, _best(scores + bias, k), known, f" chooses wrong experts {where}.")

    compare(chosen())
    compare((_weighted(*one) for one in tried), 1e-6)
    for number, (where, k, *_) in enumerate(tried):
        _teaches(fn, _scores(number), k, where)
    return right(" is right: the bias selects, and the scores alone weight and get a gradient.")


def _scores(number: int) -> tuple[np.ndarray, np.ndarray]:
    """The scores [T, E] and the bias [E] of a case."""
    tokens, experts, _ = SCORES[number]
    rng = np.random.default_rng(number)
    return rng.uniform(0.05, 0.95, (tokens, experts)), rng.normal(0, 0.6, experts)


def _best(of: np.ndarray, k: int) -> np.ndarray:
    """The experts with the k highest values [T, E], sorted   ->   [T, k]"""
    return np.sort(np.argsort(-of, 1)[:, :k], 1)


def _softmax(of: np.ndarray) -> np.ndarray:
    return np.exp(of) / np.exp(of).sum(1, keepdims=True)


def _wrong_choices(scores: np.ndarray, bias: np.ndarray, k: int) -> dict[str, np.ndarray]:
    """The choices of each known mistake."""
    return {
        "It chooses by the scores alone. The bias decides which experts are chosen.": _best(scores, k),
        "It chooses the experts with the lowest sums.": _best(-scores - bias, k),
        "It subtracts the bias. A higher bias makes an expert be chosen more often.": _best(scores - bias, k),
        "It multiplies scores and bias. Add the bias.": _best(scores * bias, k),
        "It multiplies the scores by 1 + bias. Add the bias.": _best(scores * (1 + bias), k),
        "It adds the bias to a softmax of the scores. Add it to the scores themselves.": (
            _best(_softmax(scores) + bias, k)
        ),
    }


def _weighted(
    where: str, k: int, scores: np.ndarray, bias: np.ndarray, choices: np.ndarray, weights: np.ndarray
) -> Case:
    """The weights of the right choices, with the right weights and those of known mistakes."""
    of, sums = np.take_along_axis(scores, choices, 1), scores + bias
    share, biased = of / of.sum(1, keepdims=True), np.take_along_axis(sums, choices, 1)
    order = np.argsort(-biased, 1)  # as topk returns them
    place = np.argsort(order, 1)
    highest = np.take_along_axis(-np.sort(-scores, 1), place, 1)
    in_weights = "The bias is in the weights"
    is_moved = np.allclose(np.sort(weights), np.sort(share), rtol=0, atol=1e-6)
    known = {
        "The weights are in another order than the choices that they belong to.": weights if is_moved else np.nan,
        f"{in_weights}. It only selects: weights come from the scores alone.": biased / biased.sum(1, keepdims=True),
        f"{in_weights}, and they do not add up to 1 for each token.": biased,
        f"{in_weights}, and they are divided by the sum over all experts.": biased / sums.sum(1, keepdims=True),
        f"{in_weights}, and they come from a softmax of all sums.": np.take_along_axis(_softmax(sums), choices, 1),
        "These are the k highest scores, and not those of the experts that were chosen.": (
            highest / highest.sum(1, keepdims=True)
        ),
        "The weights do not add up to 1 for each token.": of,
        "The scores are divided by the sum over all experts, and not over those that were chosen.": (
            of / scores.sum(1, keepdims=True)
        ),
        "The scores are divided by their sum over the tokens. Divide by that over each token's experts, in dim 1.": (
            of / np.take_along_axis(of, order, 1).sum(0)[place]
        ),
        "This is a softmax of the chosen scores. Divide them by their sum.": _softmax(of),
        "All weights are equal. An expert with a higher score counts for more.": np.full_like(of, 1 / k),
    }
    return Case(weights, share, known, f" weights wrongly {where}.")


def _teaches(fn: Callable[..., Any], given: tuple[Any, Any], k: int, where: str) -> None:
    """Refuse weights whose gradient is not that of scores[choices] / their sum."""
    import torch

    scores, bias = (torch.tensor(one, requires_grad=True) for one in given)
    with on(where):
        choices, weights = fn(scores, bias, k)
    share = scores.gather(1, choices.long())
    share = share / share.sum(1, keepdim=True)
    of_expert = torch.arange(1.0, scores.shape[1] + 1, dtype=torch.float64)[choices.long()]  # in any order
    none = [torch.zeros_like(one) for one in (scores, bias)]
    found = none
    if weights.requires_grad:
        loss = (weights * of_expert).sum()
        grads = torch.autograd.grad(loss, (scores, bias), allow_unused=True)
        found = [zero if grad is None else grad for grad, zero in zip(grads, none)]
    (want,) = torch.autograd.grad((share * of_expert).sum(), scores)
    if found[1].abs().max() > 1e-6:
        refuse(f": {where} the weights are right, but a gradient reaches the bias. It only selects.")
    if not torch.allclose(found[0].to(want.dtype), want, rtol=0, atol=1e-5):
        what = "a wrong" if found[0].abs().max() > 0 else "no"
        refuse(
            f": {where} the weights are right, but {what} gradient goes through them to the scores.\nThe router learns "
            "the task by this gradient. Is something detached, or computed under no_grad?",
            beside("your gradient", found[0], want),
        )
