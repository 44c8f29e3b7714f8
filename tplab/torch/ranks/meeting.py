"""Meetings: a group's collectives, from the first member's arrival until the last one has its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import Tensor

from tplab.cost import collectives as cost
from tplab.errors import CollectiveMismatchError
from tplab.torch.ranks.chronicle import Chronicle
from tplab.torch.ranks.outcomes import signature
from tplab.torch.ranks.rank import Call
from tplab.torch.ranks.texts import no_room, side_text
from tplab.torch.ranks.turns import Seat
from tplab.torch.ranks.values import dtype_name
from tplab.trace.event import VALUES_UP_TO
from tplab.trace.label import Label, of_all


class Group:
    """The ranks of one group, and the collectives that some of its members, but not all, have reached.

    Each member's k-th call over the group belongs to the k-th meeting, so members pass through meetings in order.
    """

    __slots__ = ("_fresh", "is_all", "num_calls", "open", "ranks", "signatures", "size")

    def __init__(self, ranks: tuple[int, ...], num_ranks: int):
        self.ranks, self.size = ranks, len(ranks)
        self.is_all = self.size == num_ranks
        # labels of results whose inputs were the ranks' own data
        self._fresh: dict[tuple[Any, ...], dict[int, Label]] = {}
        self.num_calls = [0] * len(ranks)  # for the member at each position
        self.open: dict[int, Meeting] = {}  # by number
        self.signatures: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # each one once, so that they compare by identity

    def labels_after(self, call: Call, given: dict[int, Label]) -> dict[int, Label]:
        """The label of each position's result. `given`: those of inputs that are not their rank's own data."""
        known = self._fresh.get(call.key) if not given or self.is_all else None
        if known is None:
            own = [Label(-1, (rank,)) for rank in self.ranks]
            labels = own if self.is_all else [given.get(index, label) for index, label in enumerate(own)]
            known = dict(enumerate(of_all(call.op, labels, call.root)))
            if not given or self.is_all:
                self._fresh[call.key] = known
        return known


class Site:
    """What a rank's calls of a collective from one line, in one phase and with one shape and dtype, have in common.

    signature   what must be the same for every member of the group
    target      for operations between pairs: the rank to send to, None if there is none; `source`: the rank to receive
                from
    num_sent    for other collectives: the bytes that this rank sends in the ring algorithm, if always the same
    """

    def __init__(
        self, call: Call, x: Tensor, rank: int, group: Group, where: str, phase: str, code: CodeType, noted: Chronicle
    ):
        recorder, log = noted.recorder, noted.log
        self.call, self.group, self.where, self.phase = call, group, where, phase
        self.code = code  # kept alive: sites are found by its identity
        self.index, axis = call.place.index, call.place.label
        brought = signature(call, x)
        self.signature = group.signatures.setdefault(brought, brought)
        self.shape, self.dtype, self.num_bytes = tuple(x.shape), dtype_name(x.dtype), x.nbytes
        self.is_small = x.numel() <= VALUES_UP_TO
        self.num_sent: int | None = None
        self.target, self.source = call.peers or (None, None)
        about = {"axis": axis, "group": group.ranks, "shape": self.shape, "dtype": self.dtype}
        about |= {"where": where, "phase": phase}
        if self.target is not None and self.target != rank:
            self.form = recorder.form(rank, "message", call.op, peer=self.target, **about)
            self.log_form = log.message_form(rank, self.target, self.num_bytes, where, call.op, self.num_bytes, axis)
        elif call.peers is None:
            self.form = recorder.form(rank, "collective", call.op, reduction=call.reduction, **about)
            self.log_form = log.collective_form(
                call.op, group.ranks, self.num_bytes, where, call.op, self.num_bytes, axis
            )
        self.wait_form = recorder.form(rank, "wait", call.op, axis=axis, where=where, phase=phase)

    def __str__(self) -> str:
        return side_text(self.call.key, self.dtype, self.shape, self.where)


@dataclass(slots=True, eq=False)
class Meeting:
    """One collective over one group.

    number       the number of earlier meetings of the group
    sites        position in the group -> that member's call; the first one says which collective it is
    waiting      the seats that wait in it
    messages     for operations between pairs: receiver -> its copy, its log entry (None if sent to itself), its label,
                 its number in the trace, and the sender's site
    inputs       for other collectives: the input of each position
    entries      for other collectives: each position's log entry, where the collective has the number `log_number`
    labels       of the inputs that are not their rank's own data; later, of all results
    outputs      each position's result, from the last arrival until that member takes it
    """

    number: int
    signature: tuple[Any, ...]
    sites: dict[int, Site] = field(default_factory=dict)
    waiting: list[Seat] = field(default_factory=list)
    messages: dict[int, tuple[Tensor, int | None, Label, int, Site]] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)
    labels: dict[int, Label] = field(default_factory=dict)
    outputs: dict[int, Tensor] | None = None
    entries: dict[int, int] = field(default_factory=dict)
    log_number: int = -1

    @property
    def first(self) -> tuple[int, Site]:
        """The first rank to arrive, and its call."""
        index, site = next(iter(self.sites.items()))
        return site.group.ranks[index], site

    @property
    def absent(self) -> list[int]:
        """The members that have not arrived."""
        ranks = self.first[1].group.ranks
        return [rank for index, rank in enumerate(ranks) if index not in self.sites]


def unfit(meeting: Meeting) -> CollectiveMismatchError | None:
    """The error if a member has room for pieces of other sizes than it is sent; None if everything fits."""
    sites, given = meeting.sites, sorted(meeting.inputs.items())
    for index, site in sites.items():
        sent = [x.numel() if (splits := sites[at].call.splits) is None else splits[index] for at, x in given]
        if (error := no_room(site.call, index, sent, lambda at: str(sites[at]))) is not None:
            return error
    return None


def bytes_sent(call: Call, shape: Sequence[int], itemsize: int, numels: Sequence[int], index: int) -> int:
    """The bytes that the rank at `index` sends in the ring algorithm, exactly.

    shape    of this rank's input; numels: the number of elements in each rank's input
    """
    num_ranks, numel = len(numels), numels[index]
    row, sizes = call.row, call.about.get("sizes", call.splits)
    if row.gathers and row.gives == "all":
        return cost.bytes_sent(call.op, numels, itemsize, num_ranks, index)
    from_root = (index - call.root) % num_ranks
    if sizes is not None and numel and (not from_root or row.takes != "root"):  # the pieces that it cuts its input into
        return (sum(sizes) - sizes[index]) * (numel // shape[call.dims[0]]) * itemsize
    return cost.bytes_sent(call.op, numel, itemsize, num_ranks, from_root)
