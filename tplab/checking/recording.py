"""What was seen of a training script while it ran: step by step, on each rank, as NumPy arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

from tplab.checking.masks import Drawn

MOST_OF_A_PART = 512
"""How many elements are kept of each microbatch's gradient of a parameter."""


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a tensor.

    shape   of the whole tensor, where the script says it, as a DTensor does; otherwise None
    start   the place of the first element in the whole, likewise
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
    size    of this rank's input, in elements; value: of one that is a single number
    on      "parameter", "gradient" or "buffer" if it was given one, otherwise ""; names: its name
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


@dataclass
class Step:
    """One step of the optimizer on one rank, with everything since the step before.

    samples     the data that the model is called with: for each microbatch, name -> array
    targets     what losses compare with, how many of them count, and the line
    draws       samples that the script drew itself, by their line and the how-manieth time there
    losses      where a backward pass begins: value and line
    made        the lines that made the first of them, the last operation first, and what each multiplies by, if it does
    terms       other lines that multiply numbers that it is made of, and by what
    parts       for each microbatch, name -> some elements of its gradient before anything is reduced
    gradients   as the backward pass and what adds them up over ranks leave them: before a norm of them is taken
    finals      as the optimizer gets them, where such a norm was taken
    norms       that gradients are clipped by: value, line, and the names of the parameters
    settings    name -> the optimizer's settings for it
    parameters  after the step, and so are `states` (name, key -> array) and `buffers`
    sent, masks, prints (text and line)
    lines       of "forward", "backward", "step"; "zero_grad" between microbatches; "clip"; "clamp", by value; "early
                clip", "early clamp" and "early hook", before gradients are reduced; "scale", where the script scales
                them itself, and "scale in", inside of that; "call", where the script calls what computes the loss;
                "loader", where that of its samples is made; "drawn", where random numbers were, last; "set lr" and so
                on, where the optimizer got this setting; "loaded", its states; "norm", where the script makes one
                number of gradients itself; "label", where what the loss compares with was last shifted, cut or padded;
                "buffer NAME", where the script changed it; "parameter NAME", where it did so after the step
    scaled      the lines at which the script multiplies gradients, and by what, between the backward pass and the step
    skipped     updates that a GradScaler has left out since the step before: their samples are not the step's
    evaluated   losses that were computed without gradients, and of how many targets
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
    """What was seen of one rank.

    weights     at the start, and so are `buffers`; `states` likewise, of a run that goes on, and None otherwise
    late        names of those that an optimizer has got in a later step
    unfilled    parameters that to_empty left as they were in memory, and that nothing has filled since
    order       the parameters in the order in which their gradients arrive
    used        parameters that an operation of the forward pass has taken as they are
    shared      the first name of a parameter that has several, by its other names
    seeds       that were set: value and line
    samplers    each shuffle of a sampler that gives ranks parts of one order: by which number, and the sampler's line
    made        where layers of these kinds are made
    lines       of "wrapped", where the model was made DistributedDataParallel; "no sync", where a script keeps it or
                FSDP from adding up gradients; "no broadcast", where it makes it leave buffers alone; "weights", where
                the model was loaded; "freed", where an optimizer was made of parameters that have no memory; "padded",
                where a sampler was that repeats samples
    places      the file and the number of each line that was named
    groups      how many ranks there are in each group of them; members: the ranks of each that the script makes
    has_sent    whether it has sent anything to another rank, or was sent anything
    options     of the command line, as the script has parsed them
    kinds       what the model has that depends on the whole batch, or on chance: "BatchNorm", "Dropout"; the
                dtypes that it rounds to on its way; "torch.compile", where the script calls it;
                "FullyShardedDataParallel", "FSDPModule"
    strided     lines of collectives that were given a tensor that is not contiguous: their names, and whether that was
                in a backward pass
    cut         lines of collectives that were given what needs a gradient, and pass none back: their names
    random      lines at which a forward pass draws random numbers, and the shape of what it draws for each sample; None
                where Python or NumPy draws them
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
        """Whether the rank has used this parameter in any step: an operation took it, or a backward pass reached it."""
        return name in self.used or any(name in part for step in self.steps for part in step.parts)


def unequal_steps(seen: Sequence[Seen]) -> str:
    """How many steps each rank has made, where these are not equally many; "" where they are."""
    counts = ", ".join(f"rank {rank}: {one.num_steps}" for rank, one in enumerate(seen))
    return counts if len({one.num_steps for one in seen}) > 1 else ""


def idle(seen: Sequence[Seen], held: Mapping[tuple[int, str], Any]) -> list[tuple[int, str]]:
    """Copies that their rank does not use while another uses its own, such as layers of other stages: nothing depends
    on these. held: by rank and name, what is equal for copies"""
    used = {what for (rank, name), what in held.items() if seen[rank].computes_with(name)}
    return [at for at, what in held.items() if what in used and not seen[at[0]].computes_with(at[1])]


class Arrays:
    """Arrays of the same content are kept once: those of ranks that hold copies."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[np.ndarray]] = {}

    def once(self, x: np.ndarray) -> np.ndarray:
        """This array, or one that was given before and is equal to it to the last bit."""
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
    """The places of a few elements of a flat array, spread over all of it."""
    return np.unique(np.linspace(0, max(size - 1, 0), min(size, MOST_OF_A_PART)).astype(np.int64))


_SETTINGS = re.compile(r"(^|_)(lr|betas?|eps|\w*decay|momentum|dampening|alpha|rho|lambd|etas)(?![a-z])")
"""What ranks must agree on. Optimizers of a script's own may have other numbers, such as that of a rank's heads."""


def settings_that_differ(got: Mapping[str, float], want: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """The settings of an optimizer that are not the same."""
    for key, value in want.items():
        if key in got and _SETTINGS.search(key) and not np.isclose(got[key], value, rtol=1e-6, atol=0):
            yield key, got[key], value
