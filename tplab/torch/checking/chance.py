"""Stand-ins for the random functions of a model: they draw as always, and the model does not get the numbers. Dropout
drops nothing, and the draws of a forward pass are the same for every sample."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.torch.checking.groups import StandIn
from tplab.torch.checking.pending import DRAW_SAMPLES
from tplab.torch.checking.watched import Watched
from tplab.torch.private import graph_task, local_of, python_random

_dropped = torch.dropout


def _is_off(rank: Watched, original: Any) -> bool:
    """Return whether this function is to leave chance out."""
    return rank.plan.ends and original not in rank.inside


# --- dropout ----------------------------------------------------------------------------------------------------------


def _dropout(
    rank: Watched, original: Any, /, input: Tensor, p: float = 0.5, training: bool | None = None, inplace: bool = False
) -> Any:
    x, training = input, not original.__name__.endswith("alpha_dropout") if training is None else training
    if not training or original in rank.inside:
        return original(x, p, training, inplace)
    rank.seen.kinds.add("Dropout")
    if not rank.plan.ends:
        return original(x, p, training, inplace)
    if p == 0 or graph_task() != -1:
        return x
    with torch.no_grad(), rank.calls(original):  # keeps the generator's state as with dropout
        mask = original(torch.ones_like(local_of(x)), p, True, False)
    rank.draw(x, mask)
    return x


def _torch_dropout(rank: Watched, original: Any, /, input: Tensor, p: float, train: bool) -> Tensor:
    """Stand in for torch.dropout(x, p, train) and its variants."""
    if not _is_off(rank, original) or not train or not p:
        return original(input, p, train)
    _draw(rank, input, local_of(input).shape, p)
    return input


def _draw(rank: Watched, x: Tensor, shape: Sequence[int], p: float) -> None:
    """Draw a mask of this shape for x."""
    if graph_task() == -1:
        with torch.no_grad():
            rank.draw(x, _dropped(torch.ones(*shape), p, True))


def _attention(rank: Watched, original: Any, /, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Stand in for attention. torch's order: query, key, value, attn_mask, dropout_p, is_causal."""
    p = kwargs.get("dropout_p", args[2] if len(args) > 2 else 0.0)
    if not _is_off(rank, original) or not p:
        return original(query, key, *args, **kwargs)
    _draw(rank, query, (*local_of(query).shape[:-1], local_of(key).shape[-2]), p)  # as in F.dropout
    if len(args) > 2:
        return original(query, key, *args[:2], 0.0, *args[3:], **kwargs)
    return original(query, key, *args, **{**kwargs, "dropout_p": 0.0})


def _recurrent(rank: Watched, original: Any, module: nn.RNNBase, /, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for a recurrent network, which drops parts of the outputs between its layers."""
    p = module.dropout
    if not _is_off(rank, original) or not p or not module.training:
        return original(module, input, *args, **kwargs)
    given = input if isinstance(input, Tensor) else input.data
    width = module.hidden_size * (1 + module.bidirectional)
    _draw(rank, given, (module.num_layers - 1, *local_of(given).shape[:-1], width), p)
    module.dropout = 0.0
    try:
        return original(module, input, *args, **kwargs)
    finally:
        module.dropout = p


# --- random draws -----------------------------------------------------------------------------------------------------


def _rrelu(
    rank: Watched, original: Any, /, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    inplace: bool = False,
) -> Any:  # fmt: skip
    return original(input, lower, upper, training and not _is_off(rank, original), inplace)


def _gumbel(
    rank: Watched, original: Any, /, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10,
    dim: int = -1,
) -> Tensor:  # fmt: skip
    if not _is_off(rank, original):
        return original(logits, tau, hard, eps, dim)
    soft = (logits / tau).softmax(dim)
    if not hard:
        return soft
    chosen = torch.zeros_like(logits).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return chosen - soft.detach() + soft


def _drawn(rank: Watched, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Draw as the model asks, and return other numbers instead."""
    is_weight = bool(args) and isinstance(args[0], nn.Parameter)
    found, frame = original(*args, **kwargs), sys._getframe(2)
    if not _is_off(rank, original) or is_weight:
        return found
    if not rank.depth and graph_task() == -1:
        return rank.draws_sample(frame.f_code, found) if original.__name__ in DRAW_SAMPLES else found
    rank.seen.random.add((rank.line(), tuple(local_of(found).shape[1:])))
    draw_again(original.__name__, found, args, kwargs, f"{frame.f_code.co_name} {frame.f_lineno}")
    return found


def states() -> tuple[Any, ...]:
    """Return the states of Python's and NumPy's random generators."""
    _, keys, place, *gauss = np.random.get_state()  # noqa: NPY002
    return python_random.get(), np.asarray(keys).tobytes(), place, *gauss


_STEP = (math.sqrt(5) - 1) / 2
"""The fractional parts of multiples of the golden ratio are spread evenly over 0 to 1."""


@torch.no_grad()
def draw_again(name: str, found: Tensor, args: Any, kwargs: Mapping[str, Any], place: str) -> None:
    """Overwrite a random draw of torch with other numbers: all rows, along dim 0, are the same.

    place   in the program: another place gives other numbers
    """
    x = local_of(found)
    row = x.shape[1:].numel()
    start = crc32(place.encode()) / 2**32
    u = ((torch.arange(1, row + 1, dtype=torch.float64) * _STEP + start) % 1).clamp(1e-6, 1 - 1e-6).reshape(x.shape[1:])
    x.copy_(AGAIN[name](u.to(x.device), args, kwargs))


def _normal(u: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    return mean + std * torch.special.ndtri(u)


def _uniform(u: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * u


def _given(args: Any, kwargs: Mapping[str, Any], *names: str) -> dict[int, Any]:
    """Return arguments by position, some of which may be given by name."""
    return dict(enumerate(args)) | {place: kwargs[name] for place, name in enumerate(names) if name in kwargs}


def _of_normal(u: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    given = _given(args, kwargs, "mean", "std")
    return _normal(u, given.get(0, 0.0), given.get(1, 1.0))


def _of_uniform_(u: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    given = _given(args[1:], kwargs, "from", "to") | _given((), kwargs, "a", "b")
    return _uniform(u, given.get(0, 0.0), given.get(1, 1.0))


def _of_randint(u: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    bounds = [x for x in args if isinstance(x, int)][:2]
    low, high = kwargs.get("low", bounds[0] if len(bounds) > 1 else 0), kwargs.get("high", bounds[-1] if bounds else 1)
    return _uniform(u, low, high).floor()


def _of_multinomial(u: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Return the likeliest indices."""
    given = _given(args, kwargs, "input", "num_samples")
    likely = given[0].sort(dim=-1, descending=True, stable=True).indices
    return likely[..., torch.arange(given[1], device=likely.device) % likely.shape[-1]]


AGAIN: Mapping[str, Callable[[Tensor, Any, Mapping[str, Any]], Tensor]] = {
    "rand": lambda u, args, kwargs: u,
    "rand_like": lambda u, args, kwargs: u,
    "randn": lambda u, args, kwargs: _normal(u),
    "randn_like": lambda u, args, kwargs: _normal(u),
    "normal": _of_normal,
    "normal_": lambda u, args, kwargs: _of_normal(u, args[1:], kwargs),
    "uniform_": _of_uniform_,
    "exponential_": lambda u, args, kwargs: -torch.log1p(-u) / _given(args[1:], kwargs, "lambd").get(0, 1.0),
    "bernoulli": lambda u, args, kwargs: u < (given := _given(args, kwargs, "input", "p")).get(1, given[0]),
    "bernoulli_": lambda u, args, kwargs: u < _given(args[1:], kwargs, "p").get(0, 0.5),
    "randint": _of_randint,
    "randint_like": lambda u, args, kwargs: _of_randint(u, args[1:], kwargs),
    "randperm": lambda u, args, kwargs: torch.arange(args[0] if args else kwargs["n"], device=u.device),
    "multinomial": _of_multinomial,
}
"""For each random function of torch: a possible draw, made from numbers spread over 0 to 1."""

_DROPS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_TORCH_DROPS = ("dropout", "dropout_", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
CHANCE: Sequence[StandIn] = (
    *((F, name, _dropout) for name in _DROPS),
    *((torch, name, _torch_dropout) for name in _TORCH_DROPS),
    (F, "scaled_dot_product_attention", _attention),
    *((kind, "forward", _recurrent) for kind in (nn.RNN, nn.LSTM, nn.GRU)),
    (F, "rrelu", _rrelu),
    (F, "gumbel_softmax", _gumbel),
    *((owner, name, _drawn) for name in AGAIN for owner in (torch, Tensor) if hasattr(owner, name)),
)
