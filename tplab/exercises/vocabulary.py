"""The exercises of lab 06: repair a loss on sharded logits, and find the most likely token of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.any_vocabulary import for_any_vocabulary
from tplab.exercises.check import Verdict, grade
from tplab.exercises.exercise import (
    Exercise,
    Framework,
    Seen,
    Tensors,
    Wrong,
    added_over,
    added_up_again,
    bytes_of_a_sum,
)
from tplab.exercises.slopes import weight
from tplab.exercises.split_a_layer import APART
from tplab.mesh import Mesh
from tplab.sharding import P

ENTRIES = P(None, "tp")  # of logits [tokens, vocabulary]


# --- the bug: the loss ------------------------------------------------------------------------------------------------


def _token_loss(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    z = logits - logits.max(-1, keepdims=True)
    return np.log(np.exp(z).sum(-1)) - z[..., np.arange(len(ids)), ids]


def _token_loss_tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """Twelve entries. The second token's logits are so large that exp overflows; the first token's are only that large
    for the entries of the first rank, and the last token's for those of the last. The labels are on different ranks."""
    logits = rng.integers(-3, 4, (4, 12)).astype(float)
    logits[1] += 1000
    logits[[0, 0, 3, 3], [0, 1, -2, -1]] += (
        1900  # on up to four ranks, exp overflows even if the mean of the ranks' maxima is subtracted
    )
    return {"logits": logits, "ids": np.array([1, 7, 10, 4])}


class _Parts:
    """Values per token that a program for the loss can use on one rank, from the logits of all ranks."""

    def __init__(self, seen: Seen):
        logits, self.ids = seen.tensors["logits"], seen.tensors["ids"]
        self.pieces = np.stack(seen.parts(logits, -1))  # [R, T, n]
        self.index, self.width = seen.index, self.pieces.shape[-1]
        own = self.index * self.width + np.arange(self.width)  # this rank's entries [n]
        self.is_label = 1.0 * (self.ids[:, None] == own)  # [T, n]
        self.own_max = self.pieces.max(-1)  # [R, T]
        self.max = self.own_max.max(0)
        self.owner, self.tokens = self.ids // self.width, np.arange(len(self.ids))
        self.of_id = logits[self.tokens, self.ids]
        self.total = np.exp(logits - self.max[:, None]).sum(-1)


def _own_sum(seen: Seen) -> np.ndarray:
    p = _Parts(seen)
    with np.errstate(divide="ignore"):  # log 0 if the largest logits are on another rank
        return np.log(np.exp(p.pieces[p.index] - p.max[:, None]).sum(-1)) - (p.of_id - p.max)


def _own_label(seen: Seen) -> np.ndarray:
    p = _Parts(seen)
    return np.log(p.total) - np.where(p.owner == p.index, p.of_id - p.max, 0)


def _label_of_every_rank(place: Callable[[np.ndarray, int], Any]) -> Wrong:
    """Ranks that do not have the entry add another of their n logits instead, at place(id - the rank's first, n)."""

    def wrong(seen: Seen) -> np.ndarray:
        p = _Parts(seen)
        added = sum(
            piece[p.tokens, np.where(p.owner == rank, p.ids - rank * p.width, place(p.ids - rank * p.width, p.width))]
            - p.max
            for rank, piece in enumerate(p.pieces)
        )
        return np.log(p.total) - added

    return wrong


Chosen = Callable[[np.ndarray], np.ndarray]
"""All ranks' own maxima [R, T] -> what is subtracted, on every rank or on each."""


def _subtracting(inside: Chosen, outside: Chosen | None = None) -> Wrong:
    """The loss if other numbers than the maximum are subtracted: `inside` the sum of exponentials, and `outside`, or
    the same, from the logit of the right entry."""

    def wrong(seen: Seen) -> np.ndarray:
        p = _Parts(seen)
        summed, label = (np.broadcast_to(of(p.own_max), p.own_max.shape) for of in (inside, outside or inside))
        with np.errstate(over="ignore", divide="ignore"):
            total = np.log(np.exp(p.pieces - summed[..., None]).sum((0, -1)))
        return total - (p.of_id - label[p.owner, p.tokens])

    return wrong


def _largest(maxima: np.ndarray) -> np.ndarray:
    return maxima.max(0)


def _nothing(maxima: np.ndarray) -> np.ndarray:
    return 0 * maxima


def _not_detached(seen: Seen) -> np.ndarray:
    """The gradient if a rank's part of the maximum's gradient goes to those of its logits that are as large."""
    p = _Parts(seen)
    piece = p.pieces[p.index]
    through = (p.owner == p.index) - np.exp(piece - p.max[:, None]).sum(-1) / p.total
    largest = piece == p.max[:, None]
    ties = np.maximum(largest.sum(-1), 1) * (p.own_max == p.max).sum(0)  # on this rank, times the ranks that have any
    return seen.want + (through * weight(p.ids) / ties)[:, None] * largest


def _gathered_sums(seen: Seen) -> np.ndarray:
    """The gradient if the ranks' sums, or their logarithms, are gathered: its positive part is R times too large."""
    p, num_ranks = _Parts(seen), seen.size
    return num_ranks * seen.want + (num_ranks - 1) * p.is_label * weight(p.ids)[:, None]


TOKEN_LOSS = Exercise(
    name="token_loss",
    tensors=_token_loss_tensors,
    specs={"logits": ENTRIES, "ids": P()},
    plain=_token_loss,
    results={"loss": P()},
    gradients=("logits",),
    mistakes={
        "loss": {
            "Each rank subtracts its own largest logit, so the ranks' sums are on different scales when they are "
            "added.\nSubtract the same number on every rank. Which number keeps every exponent at or below "
            "zero?": _subtracting(lambda maxima: maxima),
            "The sum of exponentials covers only this rank's entries. The terms of the other ranks are "
            "missing.": _own_sum,
            "Only the rank that has the right entry knows its logit. The other ranks continue with a zero "
            "instead.": _own_label,
            "The sums of exponentials are on one scale, but from the logit of the right entry, its rank's own maximum\n"
            "is subtracted. Subtract the same number there.": _subtracting(_largest, lambda maxima: maxima),
            "The ranks that do not have the right entry add some other logit to that of the right entry. They "
            "should add 0.": (
                _label_of_every_rank(lambda at, n: 0 * at),
                _label_of_every_rank(lambda at, n: at % n),
                _label_of_every_rank(lambda at, n: np.clip(at, 0, n - 1)),
            ),
            "exp of a large logit overflows, and the second token has logits of about 1000. Subtract the largest logit "
            "first.": _subtracting(_nothing),
            "exp overflows for the first token and for the last, whose large logits are all on one rank: the mean of\n"
            "the ranks' maxima, or the smallest of them, is not large enough. Subtract the largest of the "
            "maxima.": _subtracting(lambda maxima: maxima.mean(0)),
            "The loss of one token is infinite. Its large logits are all on one rank: exp overflows if another\n"
            "rank's maximum is subtracted, and after exp, the logarithm of an unlikely entry is log 0. Subtract\n"
            "the largest of all ranks' maxima, and take the logarithm of the sum only.": (
                _subtracting(lambda maxima: maxima[0]),
                _subtracting(lambda maxima: maxima[-1]),
            ),
            "The sum of exponentials is 0 for some token, because what is subtracted is far larger than all of its "
            "logits.\nSubtract the largest logit of this very token.": (
                _subtracting(np.max),
                _subtracting(lambda maxima: maxima.sum(0)),
            ),
            "The maximum is subtracted inside the sum of exponentials, but not from the logit of the right "
            "entry.": _subtracting(_largest, _nothing),
        },
        "dlogits": {
            "It is R times too large. The backward pass of all_gather, ring_all_reduce and copy_to adds up the\n"
            "gradients of all ranks, but here each rank has already computed the whole gradient. That of all_reduce\n"
            "passes it on unchanged, and all_reduces of one number per token are enough.": added_up_again,
            APART: added_over(1),
            "The loss is right, but part of its gradient goes to each rank's largest logit, through the maximum. The "
            "loss does not\ndepend on what is subtracted, so compute the maximum of logits.detach().": _not_detached,
            "The loss is right, but only its logit of the right entry has a gradient. What cuts off the sum of "
            "exponentials,\nsuch as `detach()`?": lambda seen: (
                -_Parts(seen).is_label * weight(seen.tensors["ids"])[:, None]
            ),
            "The loss is right, but the part of its gradient that comes from the sum is R times too large.\n"
            "The backward pass of all_gather adds up the gradients of all ranks, which are the same here. That of "
            "all_reduce\npasses them on unchanged.": _gathered_sums,
        },
    },
    fewest=lambda mesh, tensors: bytes_of_a_sum(np.empty((3, len(tensors["ids"]))), mesh),
    excess="Three numbers per token are enough, however many entries there are.",
    slack=2,
    not_with=("vocab_parallel_cross_entropy",),
)


def check_token_loss(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` returns each token's cross-entropy with the right gradient, for logits whose entries are split
    over "tp".

    logits [T, V/tp]   ids [T]   ->   loss [T], the same on every rank
    """
    return grade(fn, TOKEN_LOSS, framework, lambda answer: for_any_vocabulary(answer, 3))


# --- the exercise: the most likely token ------------------------------------------------------------------------------


def _last(seen: Seen) -> np.ndarray:
    """The highest of the ids with the largest logit."""
    return seen.tensors["logits"].shape[-1] - 1 - seen.tensors["logits"][:, ::-1].argmax(-1)


def _most_likely_tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """The first token has two equally large logits, one on the first rank and one on the last.

    The second token's logits are all negative. The third token's largest is in the second half on every mesh.
    """
    num_entries = 24
    logits = rng.permuted(np.tile(np.arange(num_entries, dtype=float), (4, 1)), axis=1) - num_entries // 2
    logits[0, [1, -3]] = num_entries
    logits[1] -= num_entries
    logits[2, -2] = num_entries
    return {"logits": logits}


def _best_of_ranks(seen: Seen) -> tuple[np.ndarray, np.ndarray, int]:
    """By rank and token, the index of the rank's largest logit and that logit; and how many entries a rank has."""
    pieces = np.stack(seen.parts(seen.tensors["logits"], -1))
    return pieces.argmax(-1), pieces.max(-1), pieces.shape[-1]


def _most_probable(seen: Seen) -> np.ndarray:
    """The entry with the largest probability, if each rank divides by its own sum of exponentials."""
    pieces = np.stack(seen.parts(seen.tensors["logits"], -1))
    exps = np.exp(pieces - pieces.max(-1, keepdims=True))
    return np.concatenate(list(exps / exps.sum(-1, keepdims=True)), axis=-1).argmax(-1)


def _of_several(combine: Callable[..., np.ndarray]) -> Wrong:
    """The ids from all ranks that have the largest logit, combined by `combine`."""

    def wrong(seen: Seen) -> np.ndarray:
        places, best, width = _best_of_ranks(seen)
        ids = places + width * np.arange(len(places))[:, None]
        return combine(np.where(best == best.max(0), ids, 0), axis=0)

    return wrong


MOST_LIKELY = Exercise(
    name="most_likely",
    tensors=_most_likely_tensors,
    specs={"logits": ENTRIES},
    plain=lambda logits: logits.argmax(-1),
    results={"ids": P()},
    mistakes={
        "ids": {
            "This is the most likely of this rank's own entries, but another rank may have a larger logit. How large "
            "is the largest logit of all?": lambda seen: (
                seen.own["logits"].argmax(-1) + seen.index * seen.own["logits"].shape[1]
            ),
            "This is the entry's place on the rank that has it. The first entry of the rank with index i has the id "
            "i * n.": lambda seen: seen.want % seen.own["logits"].shape[1],
            "Each rank's probabilities are divided by its own sum, so those of two ranks cannot be compared. Compare "
            "logits.": _most_probable,
            "For the first token, two ranks have equally large logits, and their ids were added. Return the lower "
            "id.": _of_several(np.sum),
            "A rank without the largest logit contributes 0, and no id is smaller. It must contribute a number that is "
            "larger than every id.": _of_several(np.min),
            "For the first token, two entries have equally large logits. Return the lower id; this is the higher "
            "one.": _last,
            "For the first token, two entries of a rank have equally large logits. Return the lower id.": lambda seen: (
                _last(seen) if seen.size == 1 else seen.want
            ),
        },
    },
    fewest=lambda mesh, tensors: bytes_of_a_sum(np.empty((2, len(tensors["logits"]))), mesh),
    excess="Two numbers per token are enough, however many entries there are.",
    slack=2,
)


def check_most_likely(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn` finds the most likely entry for each token, and sends the same amount for any number of entries.

    logits [T, V/tp]   ->   ids [T], the same on every rank: the lowest id if several entries are equally likely
    """
    return grade(fn, MOST_LIKELY, framework, lambda answer: for_any_vocabulary(answer, 2))
