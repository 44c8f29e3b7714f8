"""The running rank: its place on the mesh, and the interface through which it starts collectives."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from types import CodeType, FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

from tplab.comm import ROWS, Row
from tplab.errors import OutsideRunError
from tplab.lines import line_text
from tplab.mesh import Axis, Mesh
from tplab.torch.private import not_compiled
from tplab.torch.ranks.labels import Labels
from tplab.torch.ranks.program import OURS, is_program, outwards
from tplab.trace.journal import Doing
from tplab.trace.label import Label

Peers = tuple[int | None, int | None]
"""The rank to send to and the rank to receive from; None where there is none."""

PeersOf = Callable[..., Peers]
"""(place, the collective's parameters) -> peers"""

Params = ParamSpec("Params")
Made = TypeVar("Made")


class Apart(tuple[int, ...]):
    """A group's ranks whose collectives are counted separately from those of other groups with the same ranks.
    torch.distributed can have several such groups, under different names; and the messages from one rank to another are
    those of the group (source, target), whose name in tplab's own programs is "pair"."""

    name: str

    def __new__(cls, ranks: Iterable[int], name: str = "pair") -> Apart:
        self = super().__new__(cls, ranks)
        self.name = name
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Apart) and self.name == other.name and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.name, tuple(self)))


class Place(NamedTuple):
    """A rank's place along an axis: the axis as text, the group's ranks in order, and its own position among them."""

    label: str
    group: tuple[int, ...]
    index: int


class Call:
    """A collective as one rank calls it: its row of the table, the rank's place, and its parameters (`about`: by name).

    key      what must be the same on every rank
    peers    for ppermute, ring_shift, send, receive: the ranks to send to and to receive from, None if there is none
    splits   the size of this rank's piece for each position, where ranks may split their inputs differently
    takes    the size that this rank has room for from each position: empty if it receives nothing, None if unsaid

    A call is made once and compared by identity.
    """

    __slots__ = ("about", "axis", "key", "op", "params", "peers", "place", "row", "splits", "takes")

    def __init__(
        self,
        op: str,
        axis: Axis,
        place: Place,
        params: tuple[Any, ...],
        peers: Peers | None,
        splits: tuple[int, ...] | None = None,
        takes: tuple[int, ...] | None = None,
    ):
        self.op, self.axis, self.place, self.params, self.peers = op, axis, place, params, peers
        self.splits, self.takes = splits, takes
        self.row: Row = ROWS[op]
        self.about = self.row.about(params)
        self.key = (op, place.label, params)

    @property
    def reduction(self) -> str:
        """How the ranks' inputs are combined: "sum", "max", ...; "" if they are not."""
        return str(self.about.get("op", ""))

    @property
    def root(self) -> int:
        """The position that all data comes from or goes to; 0 where there is none."""
        return self.about.get("root", 0)

    @property
    def dims(self) -> tuple[int, int]:
        """The dim along which an input is split, and the dim along which pieces are joined."""
        dim = self.about.get("dim", 0)
        return self.about.get("split_dim", dim), self.about.get("concat_dim", dim)

    def __str__(self) -> str:
        return call_text(*self.key)


def message(op: str, axis: Axis, place: Place, other: int, params: tuple[Any, ...] = (), name: str = "pair") -> Call:
    """The send to, or the receive from, position `other` of a place. The k-th send between two ranks matches the k-th
    receive under this `name`."""
    here, there = place.group[place.index], place.group[other]
    pair, peers = ((here, there), (there, None)) if op == "send" else ((there, here), (None, there))
    between = Place(place.label, Apart(pair, name), int(op == "receive"))
    return Call(op, axis, between, (other, *params), peers)


def call_text(op: str, label: str, params: tuple[Any, ...]) -> str:
    """A call as the program wrote it."""
    row = ROWS[op]
    return f"{op}({', '.join(['x'] * bool(row.takes) + [repr(label), *map(repr, params[: len(row.params)])])})"


MESSAGES = ("send", "receive")
"""The operation that a rank calls to send to another, and the one that the receiver calls."""


class Pending(ABC):
    """A collective that has been started. It is not a tensor: using it as one raises an error."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: {UNWAITED}")

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        raise TypeError(f"{getattr(func, '__name__', func)}: {UNWAITED}")

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """For an all_gather that is done: the size along `dim` of each rank's input."""
        return None

    @property
    def sent_with(self) -> tuple[Any, ...]:
        """For a receive that is done: the parameters of the matching send."""
        return ()

    @abstractmethod
    def wait(self) -> Tensor:
        """This rank's result, once it is ready."""

    def read(self) -> Tensor:
        """The same, but read-only: other ranks may share its memory."""
        return self.wait()

    def __init_subclass__(cls) -> None:
        if "wait" in vars(cls):
            not_compiled(vars(cls)["wait"])


UNWAITED = "this is a collective that has been started, not its result; call .wait(), which returns the tensor"


def _refused(self: Pending, *_: Any) -> Any:
    raise TypeError(UNWAITED)


for _name in ("add", "sub", "mul", "matmul", "truediv", "pow"):
    setattr(Pending, f"__{_name}__", _refused)
    setattr(Pending, f"__r{_name}__", _refused)
for _name in ("neg", "getitem", "float", "lt", "gt"):
    setattr(Pending, f"__{_name}__", _refused)


class Rank(ABC):
    """One rank of a running program: simulated in this process, or a process of its own."""

    seed: int = 0  # of the run: every rank can draw the same numbers from it
    lines: Lines
    provenance: Any  # what it knows about whose data its tensors hold
    fuses_attention = False  # whether one kernel computes attention, as on a GPU

    def __init__(self, rank: int, mesh: Mesh):
        self.rank, self.mesh = rank, mesh
        self.draws: dict[Any, int] = {}  # how many draws it has shared with other ranks, by axis
        self.drawn: Any = None  # the record of those draws, for a backward pass that repeats them
        self.labels = Labels()  # of what it has received, and computed from that
        self._places: dict[Axis, Place] = {}
        self._calls: dict[tuple[Any, ...], Call] = {}
        self.receipts: dict[tuple[int, ...], Any] = {}  # the last one that was reserved for each sender, on any axis
        self.held = -1  # bytes that it keeps for backward passes, if the program reports them
        self.after_batch: list[Callable[[], None]] | None = None  # called at the end of the current batch
        self.pair: Any = None  # two passes that run concurrently: each continues while the other waits
        self.types: Any = None  # the recorder of its operations, if `run` was asked for types
        self.unit = ""  # whose parameters or gradients are being sent, if known

    def place(self, axis: Axis) -> Place:
        """This rank's place along `axis`. Raises MeshError for an axis that the mesh does not have."""
        if axis.__class__ is list:
            axis = tuple(axis)
        found = self._places.get(axis) if isinstance(axis, str | tuple) else None
        if found is None:
            label = ",".join(self.mesh.names(axis))
            found = Place(label, self.mesh.group(self.rank, axis), self.mesh.index(self.rank, axis))
            self._places[axis] = found
        return found

    def call(
        self,
        op: str,
        axis: Axis,
        params: tuple[Any, ...] = (),
        peers: PeersOf | None = None,
        *,
        splits: tuple[int, ...] | None = None,
        takes: tuple[int, ...] | None = None,
    ) -> Call:
        """The collective `op` along `axis` as this rank calls it. Cached, because programs repeat their calls."""
        if axis.__class__ is list:
            axis = tuple(axis)
        key = (op, axis, params) if splits is None else (op, axis, params, splits, takes)
        found = self._calls.get(key)
        if found is None:
            place = self.place(axis)
            found = self._calls[key] = Call(op, axis, place, params, peers and peers(place, *params), splits, takes)
        return found

    def message(self, op: str, axis: Axis, other: int, params: tuple[Any, ...] = ()) -> Call:
        """The send to, or the receive from, the rank at position `other` of `axis`."""
        if axis.__class__ is list:
            axis = tuple(axis)
        key = (op, axis, (other, *params))
        found = self._calls.get(key)
        if found is None:
            found = self._calls[key] = message(op, axis, self.place(axis), other, params)
        return found

    @contextmanager
    def sends_for(self, unit: str) -> Iterator[None]:
        """Attribute what is sent inside to `unit`: the trace names it beside the line."""
        before, self.unit = self.unit, unit
        try:
            yield
        finally:
            self.unit = before

    def written(self, line: str) -> str:
        """The source line of a collective, with the unit if one line sends for many units."""
        return f"{line}, for {self.unit}" if self.unit else line

    @abstractmethod
    def begin(self, call: Call, x: Tensor) -> Pending:
        """Start a collective on `x`, outside any graph. Later writes to `x` do not change what is sent."""

    def do(self, call: Call, x: Tensor) -> Tensor:
        """Run a collective on `x` to completion."""
        return self.begin(call, x).wait()

    def moment(self) -> float:
        """The current time in seconds; if time is modelled, a placeholder that is resolved after the run."""
        return time.perf_counter()

    def doing(self, about: Doing) -> AbstractContextManager[Any]:
        """A context in which everything that the rank computes is one action, with its name in the trace."""
        return nullcontext()

    def preparing(self) -> AbstractContextManager[Any]:
        """A context for work that is not part of a step: it takes no time on a modelled clock."""
        return nullcontext()

    def label(self, origin_rank: int, piece: int, contributors: tuple[int, ...]) -> Label:
        """The label of piece `piece` of the data that `origin_rank` began with."""
        return Label(origin_rank + piece * self.mesh.size, contributors)

    def added_to(self, op: str, x: Tensor, label: Label) -> None:  # noqa: B027  # optional
        """Note that `x`, computed by `op`, combines this rank's own data with what it received."""

    def starts_with(self, x: Tensor) -> None:
        """Treat `x`, which has not been sent yet, as a new chunk, whatever it was computed from."""
        self.provenance.starts_with(x)


_thread = threading.local()


def this_rank() -> Rank:
    """The rank whose program this thread runs. Raises OutsideRunError if there is none."""
    try:
        return _thread.rank
    except AttributeError:
        if threading.current_thread() is not threading.main_thread():
            raise OutsideRunError(
                "this thread belongs to no rank: collectives, axis_index and axis_size work in the thread in which run "
                "calls a rank's program. If the program starts threads that use them, call "
                "run(function, mesh, ..., distributed=True), where threads belong to the rank that starts them"
            ) from None
        raise OutsideRunError(
            "there are no ranks here: collectives, axis_index and axis_size work only inside a function that "
            "tplab.torch.run runs on a mesh; call run(function, Mesh(tp=4), ...)"
        ) from None


def current_rank_or_none() -> Rank | None:
    return getattr(_thread, "rank", None)


def prepares(function: Callable[Params, Made]) -> Callable[Params, Made]:
    """Decorate a function that makes or shards a model: it takes no time on a modelled clock."""

    @wraps(function)
    def prepared(*args: Params.args, **kwargs: Params.kwargs) -> Made:
        rank = current_rank_or_none()
        with nullcontext() if rank is None else rank.preparing():
            return function(*args, **kwargs)

    return prepared


def enter(rank: Rank) -> None:
    """Make this thread run the program of `rank`."""
    _thread.rank = rank


def leave() -> None:
    """Make this thread run no rank."""
    del _thread.rank


def around(frame: FrameType) -> None:
    """Set the frame that this thread's work is called from: a line of the program may be above it."""
    _thread.around = frame


class Lines:
    """The running line of the user's program, as text: "cell 3, line 4" or "file.py:12".

    An object belongs to one run: in a notebook, a cell that runs again gets another number.
    """

    def __init__(self) -> None:
        self._is_program = cache(is_program)  # of a file
        self._texts: dict[tuple[str, int], str] = {}

    def frame(self, above: int = 0) -> FrameType:
        """The innermost frame of the program; if the program is an installed package, the frame that calls tplab.

        above   how many frames above the caller's are known not to be the program's: skipping them saves time
        """
        is_program = self._is_program
        frame: FrameType | None = sys._getframe(1 + above)
        while frame is not None:
            if is_program(frame.f_code.co_filename):
                return frame
            frame = frame.f_back
        if (frame := self.program_frame(getattr(_thread, "around", None))) is not None:
            return frame
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
            frame = frame.f_back
        return frame

    def program_frame(self, frame: FrameType | None) -> FrameType | None:
        """The innermost frame of the program from `frame` outwards; None if there is none."""
        return next(filter(self.is_program, outwards(frame)), None)

    def is_program(self, frame: FrameType) -> bool:
        """Whether a frame belongs to the program, and not to an installed package."""
        return self._is_program(frame.f_code.co_filename)

    def here(self) -> str:
        """The line of the program's innermost frame."""
        return self.text(self.frame())

    def warning(self, text: str) -> Callable[..., None]:
        """A function that warns of `text`, as `warnings.warn` would on the program's current line."""
        frame = self.frame()
        at = frame.f_code.co_filename, frame.f_lineno
        seen = frame.f_globals.setdefault("__warningregistry__", {})  # where Python records a module's warnings
        return lambda *_: warnings.warn_explicit(text, UserWarning, *at, registry=seen)

    def chain(self) -> list[tuple[CodeType, str]]:
        """The code and the line of each frame of the program, innermost first."""
        frames = filter(self.is_program, outwards(sys._getframe(1)))
        return [(frame.f_code, self.text(frame)) for frame in frames]

    def text(self, frame: FrameType) -> str:
        """The line of a frame."""
        return self._text(frame.f_code.co_filename, frame.f_lineno)

    @property
    def places(self) -> dict[str, tuple[str, int]]:
        """The file and line number of every line that has been named so far."""
        return {text: place for place, text in self._texts.items()}

    def of(self, error: BaseException) -> str | None:
        """The innermost line of the program in the traceback of `error`; None if there is none."""
        found, step = None, error.__traceback__
        while step is not None:
            filename = step.tb_frame.f_code.co_filename
            if self._is_program(filename):
                found = filename, step.tb_lineno
            step = step.tb_next
        return self._text(*found) if found else None

    def _text(self, filename: str, line: int) -> str:
        text = self._texts.get((filename, line))
        if text is None:
            text = self._texts[filename, line] = line_text(filename, line)
        return text
