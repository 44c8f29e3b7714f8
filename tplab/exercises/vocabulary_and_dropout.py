"""The exercises of lab 06: mend a loss on sharded logits, find the most likely word. The masks: dropout_masks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tplab.exercises.check import (
    Exercise,
    Framework,
    Mistake,
    Seen,
    Tensors,
    Verdict,
    added_up_again,
    grade,
    weight,
)
from tplab.exercises.dropout_masks import run_of
from tplab.mesh import Mesh
from tplab.sharding import P

WORDS = P(None, "tp")  # of logits [tokens, words]


def _all_ranks(mesh: Mesh, num_tokens: int, numbers: int) -> int:
    """The bytes that all ranks together send to all_reduce so many numbers a token, of 8 bytes."""
    num_ranks = mesh.axis_size("tp")
    return 2 * (num_ranks - 1) * num_tokens * numbers * 8 * (mesh.size // num_ranks)


# --- the first bug: the loss -----------------------------------------------------------------------------------------


def _token_loss(tensors: Tensors) -> Tensors:
    logits, ids = tensors["logits"], tensors["ids"]
    z = logits - logits.max(-1, keepdims=True)
    total = np.exp(z).sum(-1)
    loss = np.log(total) - z[np.arange(len(ids)), ids]
    one_hot = ids[:, None] == np.arange(logits.shape[-1])
    return {"loss": loss, "dlogits": (np.exp(z) / total[:, None] - one_hot) * weight(loss)[:, None]}


def _token_loss_tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """Twelve words. The second token's logits are large: exp of them is infinite. The owners of the labels differ."""
    logits = rng.integers(-3, 4, (4, 12)).astype(float)
    logits[1] += 1000
    return {"logits": logits, "ids": np.array([1, 7, 10, 4])}


class _Parts:
    """What a program of the loss works with, of one rank: by token, from all ranks' pieces of the logits."""

    def __init__(self, seen: Seen):
        logits, self.ids = seen.tensors["logits"], seen.tensors["ids"]
        self.pieces = np.stack(np.split(logits, seen.mesh.axis_size("tp"), axis=-1))  # [R, T, n]
        self.index, self.width = seen.mesh.index(seen.rank, "tp"), self.pieces.shape[-1]
        self.own_max = self.pieces.max(-1)  # [R, T]
        self.max = self.own_max.max(0)
        self.owner, self.tokens = self.ids // self.width, np.arange(len(self.ids))
        self.of_id = logits[self.tokens, self.ids]
        self.total = np.exp(logits - self.max[:, None]).sum(-1)


def _own_maximum(seen: Seen) -> np.ndarray:
    p = _Parts(seen)
    total = np.exp(p.pieces - p.own_max[..., None]).sum((0, -1))
    return np.log(total) - (p.of_id - p.own_max[p.owner, p.tokens])


def _own_sum(seen: Seen) -> np.ndarray:
    p = _Parts(seen)
    return np.log(np.exp(p.pieces[p.index] - p.max[:, None]).sum(-1)) - (p.of_id - p.max)


def _own_label(seen: Seen) -> np.ndarray:
    p = _Parts(seen)
    return np.log(p.total) - np.where(p.owner == p.index, p.of_id - p.max, 0)


def _label_of_every_rank(seen: Seen) -> np.ndarray:
    """Ranks that do not have the word add their first logit."""
    p = _Parts(seen)
    others = (p.pieces[..., 0] - p.max).sum(0) - (p.pieces[p.owner, p.tokens, 0] - p.max)
    return np.log(p.total) - (p.of_id - p.max) - others


def _without_maximum(seen: Seen) -> np.ndarray:
    p = _Parts(seen)
    with np.errstate(over="ignore"):
        return np.log(np.exp(seen.tensors["logits"]).sum(-1)) - p.of_id


def _maximum_in_one_place(seen: Seen) -> np.ndarray:
    p = _Parts(seen)
    return np.log(p.total) - p.of_id


TOKEN_LOSS = Exercise(
    name="token_loss",
    tensors=_token_loss_tensors,
    specs={"logits": WORDS, "ids": P()},
    plain=_token_loss,
    results={"loss": P()},
    gradients=("logits",),
    mistakes=(
        Mistake(
            "loss",
            "Each rank measures its exponentials against its own largest logit, and then they are added up: numbers "
            "in different units.\nSubtract the same number on every rank: which one makes no logit too large?",
            _own_maximum,
        ),
        Mistake(
            "loss",
            "The sum of exponentials is this rank's own: what the other ranks' words add to it is missing.",
            _own_sum,
        ),
        Mistake(
            "loss",
            "Only the rank that has the right word knows its logit. The others go on with a zero in its place.",
            _own_label,
        ),
        Mistake(
            "loss",
            "To the logit of the right word, the ranks that do not have that word add another one. They should add 0.",
            _label_of_every_rank,
        ),
        Mistake(
            "loss",
            "exp of a large logit is infinite: the second token's are about 1000. Subtract the largest logit first.",
            _without_maximum,
        ),
        Mistake(
            "loss",
            "The maximum is subtracted from the logits that are added up, and not from that of the right word.",
            _maximum_in_one_place,
        ),
        added_up_again(
            "dlogits",
            "tp",
            "It is R times too large: the backward pass adds up what every rank has computed already. all_gather's "
            "does;\nbut no logits need to be gathered here.",
        ),
    ),
    fewest=lambda mesh, tensors: _all_ranks(mesh, len(tensors["ids"]), 3),
)


def check_token_loss(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn` gives each token's cross-entropy, and its gradient, on logits whose words are spread over "tp".

    logits [T, V/tp]   ids [T]   ->   loss [T], the same on every rank
    """
    return grade(fn, TOKEN_LOSS, framework)


# --- the exercise: the most likely word ------------------------------------------------------------------------------


def _most_likely_tensors(rng: np.random.Generator, mesh: Mesh, num_words: int = 24) -> Tensors:
    """The first token has two largest logits, the first on the first rank and the other on the last.

    The second token's logits are all negative. The third's largest is in the second half, on whatever mesh.
    """
    logits = rng.permuted(np.tile(np.arange(num_words, dtype=float), (4, 1)), axis=1) - num_words // 2
    logits[0, [1, -3]] = num_words
    logits[1] -= num_words
    logits[2, -2] = num_words
    return {"logits": logits}


def _best_of_ranks(seen: Seen) -> tuple[np.ndarray, np.ndarray, int]:
    """By rank and token: the place of the largest logit among this rank's, and that logit; and how many words it has"""
    pieces = np.stack(np.split(seen.tensors["logits"], seen.mesh.axis_size("tp"), axis=-1))
    return pieces.argmax(-1), pieces.max(-1), pieces.shape[-1]


def _own_best(seen: Seen) -> np.ndarray:
    places, _, width = _best_of_ranks(seen)
    index = seen.mesh.index(seen.rank, "tp")
    return places[index] + index * width


def _place_on_its_rank(seen: Seen) -> np.ndarray:
    return seen.want % _best_of_ranks(seen)[2]


def _of_several(combine: Callable[..., np.ndarray]) -> Callable[[Seen], np.ndarray]:
    """The ids of all ranks that have the largest logit, combined in this way."""

    def wrong(seen: Seen) -> np.ndarray:
        places, best, width = _best_of_ranks(seen)
        ids = places + width * np.arange(len(places))[:, None]
        return combine(np.where(best == best.max(0), ids, 0), axis=0)

    return wrong


MOST_LIKELY = Exercise(
    name="most_likely",
    tensors=_most_likely_tensors,
    specs={"logits": WORDS},
    plain=lambda tensors: {"ids": tensors["logits"].argmax(-1)},
    results={"ids": P()},
    mistakes=(
        Mistake(
            "ids",
            "It is the best of this rank's own words. Another rank may have a better one: how large is the largest "
            "logit of all?",
            _own_best,
        ),
        Mistake(
            "ids",
            "It is the place among the words of the rank that has it. The first word of the rank at index i is number "
            "i * n.",
            _place_on_its_rank,
        ),
        Mistake(
            "ids",
            "Two ranks have a largest logit for the first token, equally large, and their ids were added up. The lower "
            "id counts.",
            _of_several(np.sum),
        ),
        Mistake(
            "ids",
            "Two ranks have a largest logit for the first token, equally large. The lower id counts, and this is the "
            "higher.",
            _of_several(np.max),
        ),
    ),
    fewest=lambda mesh, tensors: _all_ranks(mesh, len(tensors["logits"]), 2),
)


def check_most_likely(fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Whether `fn` finds each token's most likely word, and sends no more when there are more words.

    logits [T, V/tp]   ->   ids [T], the same on every rank: the lowest id, where several words are equally likely
    """
    verdict = grade(fn, MOST_LIKELY, framework)
    if not verdict.passed:
        return verdict
    mesh, sizes = Mesh(tp=4), (24, 48)
    sent = [_bytes_sent(fn, mesh, num_words, framework) for num_words in sizes]
    if sent[1] > sent[0]:
        return Verdict(
            False,
            f"most_likely is right, but on {mesh} it sends {sent[0]:,} bytes for {sizes[0]} words and {sent[1]:,} for "
            f"{sizes[1]}: logits are gathered.\nEach rank can say with two numbers a token what the others must know.",
        )
    return Verdict(True, f"{verdict.text}\nHowever many words there are, it sends the same.")


def _bytes_sent(fn: Callable[..., Any], mesh: Mesh, num_words: int, framework: Framework) -> int:
    run = run_of(framework)
    logits = _most_likely_tensors(np.random.default_rng(0), mesh, num_words)["logits"].astype(np.float32)
    return run(fn, mesh, logits, in_specs=WORDS).trace.bytes_sent()
