"""A frame: the message that precedes a collective or a tensor between two processes, and describes it."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.errors import TplabError
from tplab.torch.ranks import texts
from tplab.torch.ranks.outcomes import signature
from tplab.torch.ranks.rank import MESSAGES, Call, Lines
from tplab.torch.ranks.values import dtype_name
from tplab.trace.label import Label

SIZE = 1 << 13
"""Bytes of the buffer that a frame arrives in."""

_HELD_UP_TO = 1000
"""Characters of an error that travel in a frame."""


class Side(NamedTuple):
    """A collective as one rank called it: enough to compare it with another rank's call, and to name both.

    key, dtype, fixed_shape must be the same on every rank of the group; fixed_shape is None where shapes may differ.
    splits are the sizes of its pieces, where ranks may split their inputs differently.
    held is the error that the rank was handling when it called this, by `texts.while_handling`; "" if none.
    """

    rank: int
    key: tuple[Any, ...]
    dtype: str
    fixed_shape: tuple[int, ...] | None
    shape: tuple[int, ...]
    where: str
    held: str = ""
    splits: tuple[int, ...] = ()

    def agrees(self, other: Side) -> bool:
        mine, its = ((one.key, one.dtype, one.fixed_shape) for one in (self, other))
        return self.key[0] in MESSAGES or mine == its

    @property
    def text(self) -> str:
        return texts.side_text(self.key, self.dtype, self.shape, self.where)


def side_of(call: Call, x: Tensor, rank: int, lines: Lines, where: str) -> Side:
    """How `rank` calls the collective on `x`, at `where` in the program."""
    key, dtype, fixed_shape = signature(call, x) or (call.key, x.dtype, None)
    side = Side(rank, key, dtype_name(dtype), fixed_shape, tuple(x.shape), where, splits=call.splits or ())
    error = sys.exception()
    if error is None or (line := lines.of(error)) is None:
        return side
    return side._replace(held=texts.while_handling(rank, error, line, f"{call} at {where}")[-_HELD_UP_TO:])


class Header(NamedTuple):
    """The contents of a frame: the sender's side of the collective, and the number of its hops so far.

    label      of the data that is carried
    """

    side: Side
    hops: int
    label: Label

    def to_text(self) -> bytes:
        return json.dumps(self, ensure_ascii=False).encode(errors="surrogatepass")

    @classmethod
    def from_text(cls, text: bytes) -> Header:
        side, hops, label = with_tuples(json.loads(text))
        return cls(Side(*side), hops, Label(*label))


def with_tuples(x: Any) -> Any:
    """Turn the lists that JSON has made of nested tuples into tuples again.

    Ranks describe their messages to each other in JSON, never in a pickle: reading a pickle runs whatever code it
    names, and any process that can connect could send one.
    """
    return tuple(map(with_tuples, x)) if isinstance(x, list) else x


def encode(header: Header) -> Tensor:
    """A frame as bytes."""
    text = header.to_text()
    if len(text) > SIZE:
        raise TplabError(
            f"a message's header has {len(text):,} bytes, and there is room for {SIZE:,}: it names too many ranks; use "
            "an axis with fewer"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def empty_frame() -> Tensor:
    """A buffer for a frame."""
    return torch.zeros(SIZE, dtype=torch.uint8, device="cpu")


def decode(frame: Tensor) -> Header:
    """The header of a frame that has arrived."""
    return Header.from_text(frame.numpy().tobytes().rstrip(b"\0"))


def bytes_of(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as one row of bytes. A dim of size 1 may have any stride."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
