"""How long NCCL takes within one node, as measured: start, hops, three protocols, rings and sums in the switch.

S bytes (the whole tensor; for an all_to_all the input of each rank), R ranks, h hops: R-1, and 2(R-1) for an
all_reduce. y = (h + 1)/R S bytes pass a rank, and its link carries x = (h + copy)/R S: `copy` is for the part that a
rank only copies within its own memory.

    few bytes      start + h hop + min(y / ll, middle + y / ll128)              protocols LL and LL128
    y >= switch    start + h hop + ramp sqrt(x) + |(h wait, x / bandwidth)|     protocol Simple
    all_reduce     S (1 + 1/R) / in_switch for x / bandwidth where the switch adds (NVLS: three ranks or more, H100 on)
    all_to_all     start' + (R-1) hop' + min(S/R / ll', large' + ramp' sqrt(x') + x' / bandwidth'); x' has peer_copy

|(a, b)| is the root of a^2 + b^2: each hop waits for a whole chunk, and if there are many bytes, the following chunks
hide that. NCCL chooses the protocol by its own tuning table, which is not always the fastest. So the time jumps at
`switch`, as the measurements do. ramp sqrt(x) is not NCCL's formula but describes its measured time: it reaches the
full bandwidth only gradually, as it uses more channels and larger pieces.

Nine constants belong to a kind of GPU. The ratios between protocols are the same for all: `Ratios`, of which eight are
fitted to all kinds together, and one, peer_ramp, was chosen. `python -m benchmarks.fit.chips` fits them.

Sources. NCCL, src/graph/tuning.cc (protocols, start and hops); Hu et al. 2025, "Demystifying NCCL".
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import hypot
from typing import NamedTuple

from tplab.errors import ClusterError


class Ratios(NamedTuple):
    """The ratios between protocols, the same on every kind of GPU.

    ll128, ll           s per byte: of LL128 as a multiple of Simple's, of LL as a multiple of LL128's
    copy                parts of the tensor that each rank copies, besides those that it sends
    start               of an all_to_all, as a multiple of the other collectives'
    peer_hop            s per rank in an all_to_all, as a multiple of `hop`
    peer_ll             s per byte that one rank has for another, in a small all_to_all
    peer_large          s more in a large all_to_all, as a multiple of `start`
    peer                s per byte of a large all_to_all, as a multiple of Simple's
    peer_ramp           ramp of a large all_to_all, as a multiple of the others'
    """

    ll128: float
    ll: float
    copy: float
    start: float
    peer_hop: float
    peer_ll: float
    peer_large: float
    peer: float
    peer_ramp: float = 0.3


class Taken(NamedTuple):
    """The time of a collective, and its protocol: "LL", "LL128", "Simple", "NVLS"."""

    seconds: float
    protocol: str


@dataclass(frozen=True, slots=True)
class Nccl:
    """NCCL on one kind of node: the constants of the formulas above, in plain units.

    start       s before the first byte
    hop         s for each hop
    middle      s more with LL128
    wait        s that a hop waits for a chunk, with Simple
    ramp        s per square root of a byte
    bandwidth   B/s over a rank's link, with Simple
    switch      B passing a rank from which NCCL uses Simple
    in_switch   B/s of a sum in the switch; 0: the switch does not add
    peer_copy   `copy` of an all_to_all
    """

    start: float
    hop: float
    middle: float
    wait: float
    ramp: float
    bandwidth: float
    switch: float
    in_switch: float
    peer_copy: float
    ratios: Ratios

    def __post_init__(self):
        for name in [field.name for field in fields(self) if field.name != "ratios"]:
            if not getattr(self, name) >= 0:
                raise ClusterError(f"NCCL's constant {name} is {getattr(self, name)!r}; it must be 0 or more")

    @property
    def message_latency(self) -> float:
        """s for a message from one rank to another, before its bytes."""
        return self.start * self.ratios.start + self.hop * self.ratios.peer_hop

    @property
    def message_bandwidth(self) -> float:
        return self.bandwidth / self.ratios.peer

    def taken(self, op: str, nbytes: float, num_ranks: int) -> Taken:
        """One of OPS over `num_ranks` ranks of a node; `nbytes` is the whole tensor."""
        if num_ranks == 1:
            return Taken(0.0, "none")
        if op == "all_to_all":
            return self._all_to_all(nbytes, num_ranks)
        hops = (num_ranks - 1) * (2 if op == "all_reduce" else 1)
        latency = self.start + hops * self.hop
        carried = (hops + self.ratios.copy) / num_ranks * nbytes
        whole = (hops + 1) / num_ranks * nbytes
        few = self._few(min(whole, self.switch))
        if whole < self.switch:
            return Taken(latency + few.seconds, few.protocol)
        passing, protocol = carried / self.bandwidth, "Simple"
        if op == "all_reduce" and self.in_switch and num_ranks > 2:
            added = (1 + 1 / num_ranks) * nbytes / self.in_switch
            if added < passing:
                passing, protocol = added, "NVLS"
        many = self.ramp * carried**0.5 + hypot(hops * self.wait, passing)
        return Taken(latency + max(few.seconds, many), protocol)  # more bytes never take less time

    def _few(self, carried: float) -> Taken:
        ll128 = self.ratios.ll128 / self.bandwidth
        ll = Taken(carried * self.ratios.ll * ll128, "LL")
        return min(ll, Taken(self.middle + carried * ll128, "LL128"))

    def _all_to_all(self, nbytes: float, num_ranks: int) -> Taken:
        ratios = self.ratios
        latency = self.start * ratios.start + (num_ranks - 1) * self.hop * ratios.peer_hop
        carried = (num_ranks - 1 + self.peer_copy) / num_ranks * nbytes
        few = Taken(nbytes / num_ranks * ratios.peer_ll, "LL")
        many = self.start * ratios.peer_large + ratios.peer_ramp * self.ramp * carried**0.5
        most = Taken(many + carried * ratios.peer / self.bandwidth, "Simple")
        taken = min(few, most)
        return Taken(latency + taken.seconds, taken.protocol)


MEASURED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""The collectives that were measured."""
