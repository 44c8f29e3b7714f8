"""Random numbers that all samples get alike, so that ranks with some of the samples get what one rank gets for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from tplab.torch.private import local_of

_STEP = (math.sqrt(5) - 1) / 2
"""Multiples of the golden ratio, without their whole parts, are spread evenly over 0 to 1."""


@torch.no_grad()
def draw_again(name: str, found: Tensor, args: Any, kwargs: Mapping[str, Any], place: str) -> None:
    """Put other numbers into what a function of torch has drawn: rows, along dim 0, are all the same.

    place   in the program: numbers at another one are others
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
    """Arguments by their places, of which some may be given by name."""
    return dict(enumerate(args)) | {place: kwargs[name] for place, name in enumerate(names) if name in kwargs}


def _of_normal(u: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    given = _given(args, kwargs, "mean", "std")
    return _normal(u, given.get(0, 0.0), given.get(1, 1.0))


def _of_normal_(u: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    return _of_normal(u, args[1:], kwargs)


def _of_uniform_(u: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    given = _given(args[1:], kwargs, "from", "to") | _given((), kwargs, "a", "b")
    return _uniform(u, given.get(0, 0.0), given.get(1, 1.0))


def _of_exponential_(u: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    return -torch.log1p(-u) / _given(args[1:], kwargs, "lambd").get(0, 1.0)


def _of_bernoulli(u: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    given = _given(args, kwargs, "input", "p")
    return u < given.get(1, given[0])


def _of_bernoulli_(u: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    return u < _given(args[1:], kwargs, "p").get(0, 0.5)


def _of_randint(u: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    bounds = [x for x in args if isinstance(x, int)][:2]
    low, high = kwargs.get("low", bounds[0] if len(bounds) > 1 else 0), kwargs.get("high", bounds[-1] if bounds else 1)
    return _uniform(u, low, high).floor()


def _of_multinomial(u: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """The likeliest ones."""
    given = _given(args, kwargs, "input", "num_samples")
    likely = given[0].sort(dim=-1, descending=True, stable=True).indices
    return likely[..., torch.arange(given[1], device=likely.device) % likely.shape[-1]]


AGAIN: Mapping[str, Callable[[Tensor, Any, Mapping[str, Any]], Tensor]] = {
    "rand": lambda u, args, kwargs: u,
    "rand_like": lambda u, args, kwargs: u,
    "randn": lambda u, args, kwargs: _normal(u),
    "randn_like": lambda u, args, kwargs: _normal(u),
    "normal": _of_normal,
    "normal_": _of_normal_,
    "uniform_": _of_uniform_,
    "exponential_": _of_exponential_,
    "bernoulli": _of_bernoulli,
    "bernoulli_": _of_bernoulli_,
    "randint": _of_randint,
    "randint_like": lambda u, args, kwargs: _of_randint(u, args[1:], kwargs),
    "randperm": lambda u, args, kwargs: torch.arange(args[0] if args else kwargs["n"], device=u.device),
    "multinomial": _of_multinomial,
}
"""For each function of torch that draws: from numbers spread over 0 to 1, what it might have drawn."""
