"""What was recorded of a training script while it ran: step by step, on each rank, as NumPy arrays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

import numpy as np

MOST_OF_A_PART = 512
"""How many elements are kept of each microbatch's gradient of a parameter."""


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor.

    shape   of the whole tensor if the script gives it, as a DTensor does; otherwise None
    start   the index of the first element in the whole, likewise
    dtype   in which the script keeps it
    """

    values: np.ndarray
    dtype: str = "float32"
    shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Sent:
    """A collective.

    moment  "between" (before the backward pass), "forward", "backward", "reduction" (after it), "step" (in the
            optimizer), "after"
    is_open whether the script itself must wait for it
    size    of this rank's input, in elements; value: the input if it is a single number
    mark    of the input of an all_reduce of several numbers before the backward pass
    on      "parameter", "gradient" or "buffer" if the input is one, otherwise ""; names: its name
    is_sparse   whether it is the values of a sparse gradient
    """

    op: str
    reduction: str
    ranks: tuple[int, ...]
    where: str
    moment: str
    size: int
    on: str = ""
    names: tuple[str, ...] = ()
    value: float | None = None
    is_open: bool = False
    mark: float | None = None
    is_sparse: bool = False


@dataclass(frozen=True)
class Drawn:
    """A mask: the line or the module, the input's `mark`, the mask's checksum, and its number of elements, which is 0
    for a DTensor because torch itself synchronises its masks."""

    where: str
    given: float
    mask: int
    size: int


@dataclass
class Step:
    """One step of the optimizer on one rank, with everything since the step before.

    samples     the data that the model is called with: for each microbatch, name -> array
    targets     the targets of losses, how many of them count, and the line
    draws       samples that the script drew itself, by line and number of the draw there
    losses      where a backward pass begins: value and line
    made        the lines that computed the first loss, the last one first, and the factor of each that only multiplies
    terms       other lines that multiply terms of it, and their factors
    parts       for each microbatch, name -> some elements of its gradient before anything is reduced
    gradients   after the backward pass and the reduction over ranks, and before a norm of them is taken
    finals      as the optimizer gets them, if such a norm was taken
    norms       that gradients are clipped by: value, line, and the names of the parameters
    settings    name -> the optimizer's settings for it
    parameters  after the step, and so are `states` (name, key -> array) and `buffers`
    sent, masks, prints (text and line)
    lines       of "forward", "backward", "step"; "zero_grad" between microbatches; "clip"; "clamp", by value; "early
                clip", "early clamp" and "early hook", before gradients are reduced; "scale", where the script scales
                them itself, and "scale in", inside of that; "call", which calls the function that computes the loss;
                "loader", which creates the loader of its samples; "drawn", which last drew random numbers; "set lr" and
                so on, which gave the optimizer this setting; "loaded", its states; "norm", where the script reduces
                gradients to a number; "label", which last shifted, cut or padded the targets; "buffer NAME", where the
                script changed it; "parameter NAME", where it did so after the step
    scaled      the lines at which the script multiplies gradients between backward pass and step, and the factors
    skipped     updates that a GradScaler has skipped since the step before: their samples do not belong to the step
    evaluated   losses that were computed without gradients, with their numbers of targets
    """

    samples: list[dict[str, np.ndarray]] = field(default_factory=list)
    targets: list[tuple[np.ndarray, int, str]] = field(default_factory=list)
    draws: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    losses: list[tuple[float, str]] = field(default_factory=list)
    made: list[tuple[str, float | None]] = field(default_factory=list)
    terms: list[tuple[str, float]] = field(default_factory=list)
    parts: list[dict[str, np.ndarray]] = field(default_factory=list)
    gradients: dict[str, Piece] = field(default_factory=dict)
    finals: dict[str, Piece] = field(default_factory=dict)
    norms: list[tuple[float, str, tuple[str, ...]]] = field(default_factory=list)
    settings: dict[str, dict[str, float]] = field(default_factory=dict)
    parameters: dict[str, Piece] = field(default_factory=dict)
    states: dict[tuple[str, str], Piece] = field(default_factory=dict)
    buffers: dict[str, Piece] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    masks: list[Drawn] = field(default_factory=list)
    prints: list[tuple[str, str]] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    scaled: list[tuple[str, float]] = field(default_factory=list)
    evaluated: list[tuple[float, int]] = field(default_factory=list)
    skipped: int = 0

    @property
    def has_stepped(self) -> bool:
        return "step" in self.lines


@dataclass
class Seen:
    """The recording of one rank.

    weights     at the start, and so are `buffers`; `states` likewise, of a run that goes on, and None otherwise
    late        names of the parameters that an optimizer got in a later step
    unfilled    parameters that to_empty left uninitialised and that nothing has filled since
    order       the parameters in the order in which their gradients arrive
    used        parameters that an operation of the forward pass has used directly
    shared      the first name of a parameter that has several, by its other names
    seeds       that were set: value and line
    samplers    each shuffle of a sampler that gives ranks parts of one order: its seed, and the sampler's line
    made        the lines that create layers of these kinds
    lines       of "wrapped", where the model was wrapped in DistributedDataParallel; "no sync", where gradients stop
                being synchronised; "no broadcast", where broadcast_buffers is turned off; "weights", where the model
                was loaded; "freed", where an optimizer was created with parameters whose memory is freed; "padded",
                which created a sampler that repeats samples
    places      the file and the number of each line that was named
    groups      the sizes of groups of ranks; members: the ranks of each that the script creates
    has_sent    whether it has sent anything to another rank, or received anything
    options     of the command line, as the script has parsed them
    kinds       parts of the model that depend on the whole batch, or on chance: "BatchNorm", "Dropout"; the dtypes that
                values are rounded to on the way; "torch.compile", if the script calls it; "FullyShardedDataParallel",
                "FSDPModule"
    strided     lines of collectives that were given a tensor that is not contiguous: their names, and whether that was
                in a backward pass
    cut         lines of collectives whose input needs a gradient, and that pass none back: their names
    random      lines at which a forward pass draws random numbers, and the shape of the draw for each sample; None for
                draws of Python or NumPy
    """

    weights: dict[str, Piece] = field(default_factory=dict)
    buffers: dict[str, Piece] = field(default_factory=dict)
    states: dict[tuple[str, str], Piece] | None = None
    late: set[str] = field(default_factory=set)
    unfilled: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    shared: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    seeds: list[tuple[int, str]] = field(default_factory=list)
    samplers: list[tuple[int, str]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    groups: set[int] = field(default_factory=set)
    members: set[tuple[int, ...]] = field(default_factory=set)
    has_sent: bool = False
    kinds: set[str] = field(default_factory=set)
    strided: dict[str, tuple[str, bool]] = field(default_factory=dict)
    cut: dict[str, str] = field(default_factory=dict)
    random: set[tuple[str, tuple[int, ...] | None]] = field(default_factory=set)

    @property
    def num_steps(self) -> int:
        return sum(step.has_stepped for step in self.steps)

    def computes_with(self, name: str) -> bool:
        """Return whether the rank used this parameter in any step, in an operation or in a backward pass."""
        return name in self.used or any(name in part for step in self.steps for part in step.parts)


def unequal_steps(seen: Sequence[Seen]) -> str:
    """Return the number of steps of each rank if they differ; "" if they are equal."""
    counts = ", ".join(f"rank {rank}: {one.num_steps}" for rank, one in enumerate(seen))
    return counts if len({one.num_steps for one in seen}) > 1 else ""


def idle(seen: Sequence[Seen], held: Mapping[tuple[int, str], Any]) -> list[tuple[int, str]]:
    """Return copies that their rank does not use while another rank uses its own, such as layers of other stages: they
    have no influence. held: by rank and name, a value that is equal for copies"""
    used = {what for (rank, name), what in held.items() if seen[rank].computes_with(name)}
    return [at for at, what in held.items() if what in used and not seen[at[0]].computes_with(at[1])]


class Arrays:
    """Stores arrays of the same content once, such as those of ranks that hold copies."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[np.ndarray]] = {}

    def once(self, x: np.ndarray) -> np.ndarray:
        """Return this array, or an earlier one that is bitwise equal to it."""
        x = np.ascontiguousarray(x)
        like = self._known.setdefault((x.shape, x.dtype.str, checksum(x)), [])
        for known in like:
            if np.array_equal(known, x, equal_nan=x.dtype.kind in "fc"):
                return known
        like.append(x)
        return x


def checksum(x: np.ndarray) -> int:
    return crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data) if x.size else 0


def some_of(size: int) -> np.ndarray:
    """Return the indices of a few elements of a flat array, evenly spaced."""
    return np.unique(np.linspace(0, max(size - 1, 0), min(size, MOST_OF_A_PART)).astype(np.int64))


_SETTINGS = re.compile(r"(^|_)(lr|betas?|eps|\w*decay|momentum|dampening|alpha|rho|lambd|etas)(?![a-z])")
"""Settings that ranks must agree on. A script's own optimizer may have others, such as the number of its heads."""


def settings_that_differ(got: Mapping[str, float], want: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """Yield the settings of an optimizer that differ."""
    for key, value in want.items():
        if key in got and _SETTINGS.search(key) and not np.isclose(got[key], value, rtol=1e-6, atol=0):
            yield key, got[key], value


# --- dropout masks: equal where ranks hold the same tensor, different where they hold different pieces of one --------

FEWEST = 32
"""The fewest elements of a mask that are compared: small masks may be equal by chance."""


_WAVE = np.cos(np.arange(1 << 16))


def mark(x: np.ndarray) -> float:
    """Return a number that identifies an array up to rounding. A plain sum would not do: each row of attention weights
    sums to 1."""
    return float(x.reshape(-1).astype(np.float64) @ np.resize(_WAVE, x.size))


def compared(a: Drawn, b: Drawn) -> Literal["", "two", "one"]:
    """Return what may be wrong with masks of two ranks: "two" masks for the same tensor, or "one" for different ones.
    One mask is right for terms of a sum and wrong for pieces of a tensor: see `are_pieces`."""
    if np.isclose(a.given, b.given, rtol=1e-6, atol=0):
        return "two" if a.mask != b.mask else ""
    return "one" if (a.where, a.mask, a.size) == (b.where, b.mask, b.size) and a.size >= FEWEST else ""


def are_pieces(ours: Iterable[Drawn], theirs: Iterable[Drawn]) -> bool:
    """Return whether ranks drop from pieces of the reference's tensor, and not from copies of it or terms of a sum."""
    return sum(a.size for a in set(ours)) <= sum(a.size for a in theirs)
