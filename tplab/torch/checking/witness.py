"""What ranks tell each other when a model is checked: facts as text, tensors as pieces; and how a model is put back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tplab.layout import Layout
from tplab.torch.comm.collectives import all_gather
from tplab.torch.ranks.outcomes import own
from tplab.torch.ranks.rank import this_rank

JUDGE = 0
"""The rank that runs the reference and holds everything against it; the others hand in their pieces."""


def is_judge() -> bool:
    return this_rank().rank == JUDGE


@torch.no_grad()
def tell(fact: Any) -> list[Any]:
    """What every rank says, in the order of ranks, on every rank. Facts are what JSON can hold."""
    text = np.frombuffer(json.dumps(fact).encode(), np.uint8).copy()
    axes = this_rank().mesh.axis_names
    sizes = all_gather(torch.tensor([len(text)]), axes).tolist()
    said = all_gather(torch.from_numpy(text), axes).numpy().tobytes()
    ends = np.cumsum(sizes).tolist()
    return [json.loads(said[end - size : end]) for size, end in zip(sizes, ends)]


@torch.no_grad()
def pieces_of(x: Tensor | None, shapes: Sequence[Sequence[int] | None]) -> list[np.ndarray | None]:
    """What every rank holds of a tensor, on the judge; elsewhere the same list of None.

    shapes   each rank's, as they have told; None where a rank has no such tensor
    """
    rank = this_rank()
    mine = torch.empty(0, dtype=torch.float64) if x is None else as_doubles(x).reshape(-1)
    everything = all_gather(mine, rank.mesh.axis_names)
    if not is_judge():
        return [None] * rank.mesh.size
    values, found, first = everything.numpy(), [], 0
    for shape in shapes:
        count = 0 if shape is None else int(np.prod(shape, dtype=np.int64))
        found.append(None if shape is None else values[first : first + count].reshape(shape))
        first += count
    return found


def as_doubles(x: Tensor) -> Tensor:
    """In a type that NumPy has, and in which nothing is lost."""
    return x.detach().to("cpu", torch.float64)


def as_numpy(x: Tensor | None) -> np.ndarray | None:
    return None if x is None else as_doubles(x).numpy()


def shape_of(x: Tensor | None) -> list[int] | None:
    return None if x is None else list(x.shape)


def to_told(layout: Layout | None) -> Any:
    """A layout as JSON can hold it; and back."""
    return None if layout is None else [list(layout.spec), list(layout.parts)]


def from_told(told: Any) -> Layout | None:
    from tplab.sharding import P

    if told is None:
        return None
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in told[0]]
    return Layout(P(*entries), tuple(told[1]))


def floats_in(output: Any, name: str = "output") -> dict[str, Tensor]:
    """The floating-point tensors of an output, by name: of a dict or a dataclass its keys, of a tuple the places."""
    if isinstance(output, Tensor):
        return {name: output} if output.is_floating_point() else {}
    if isinstance(output, Mapping):
        pairs = [(str(key), value) for key, value in output.items()]
    elif isinstance(output, tuple | list):
        pairs = [(f"{name}[{place}]", value) for place, value in enumerate(output)]
    else:
        return {}
    return {key: x for path, value in pairs for key, x in floats_in(value, path).items()}


@contextmanager
def left_as_it_was(*modules: nn.Module) -> Iterator[None]:
    """Parameters, gradients, buffers, modes and the generator are afterwards what they were."""
    tensors = {id(x): x for module in modules for x in (*module.parameters(), *module.buffers())}
    gradients = [(p, p.grad) for module in modules for p in module.parameters()]
    with torch.no_grad():  # what is never written to is never copied
        kept = [(x, x._version, own(x)) for x in tensors.values()]
    modes = [(one, one.training) for module in modules for one in module.modules()]
    state = torch.get_rng_state()
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        with torch.no_grad():
            for x, version, value in kept:
                if x._version != version:
                    x.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for one, mode in modes:
            one.training = mode
        torch.set_rng_state(state)
