"""The modelled clock, a discrete-event simulation, and the links that it assigns to messages and collectives in turn.

Time moves from instant to instant. At each instant, ranks advance as far as they can, and every message or collective
that has become ready requests its links. The links are then assigned first come, first served, each from the moment it
is free: a request that becomes ready later waits behind, even if it would fit in a gap. Requests of one rank that
become ready at the same instant are served in program order. Requests of different ranks are ordered by what the
program says of them: line, operation, bytes, axis. Requests that are equal in all of these share the links equally. So
neither rank numbers nor the scheduling of threads affect the result: renumbering the ranks of a program renumbers its
trace, and changes no time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from typing import Any, NamedTuple

from tplab.cost import collectives as cost
from tplab.cost.cluster import Cluster


class Route(NamedTuple):
    """The ports and cards, as numbers, that a message or a collective occupies, and for how long.

    owned     (port or card, rank) pairs; a card that several ranks share appears once for each of them
    ways      these ports and cards, each once
    held      how long it holds all of them
    latency   the time from their release to its arrival
    slows     the ranks whose computing it slows meanwhile
    """

    owned: tuple[tuple[int, int], ...]
    ways: tuple[int, ...]
    held: float
    latency: float = 0.0
    slows: tuple[int, ...] = ()


class Links:
    """The outgoing ports and network cards of a cluster's ranks. Each carries one message or collective at a time.

    On a switch, a rank has a port for all its messages within its node, and a network card for those to other nodes;
    with fewer cards than ranks, neighbours share one (`Cluster.cards`). On a torus, it has a port to each other rank.
    A message occupies its sender's port or card for bytes / bandwidth seconds and arrives a latency later. A collective
    occupies each member's port for its whole duration, and each member's card too if they are in several nodes. So the
    collectives of one group run one after another.
    Without a cluster, time counts hops: each message and each collective takes 1, and every pair of ranks has its own
    link.

    Incoming ports are not modelled: if seven ranks send to one rank at once on a switch, all seven messages arrive as
    soon as a single one would, while a real switch carries one after the other. This does not affect rings and
    collectives, in which a rank receives as much as it sends.
    """

    def __init__(self, cluster: Cluster | None):
        self.share = 0.0 if cluster is None else cluster.communication_share
        self._cluster = cluster
        self._shared = cluster is not None and cluster.wiring == "switch"
        self._numbers: dict[tuple[str | int, ...], int] = {}

    def message(self, source: int, target: int, num_bytes: int) -> Route:
        """A message from `source` to `target`."""
        owned = ((self._link(source, target), source),)
        if self._cluster is None:
            return _route(owned, 1.0)
        link = self._cluster.link(source, target)
        return _route(owned, num_bytes / link.bandwidth, link.latency)

    def collective(self, op: str, num_bytes: int, group: tuple[int, ...]) -> Route:
        """A collective over `group`, with an input of `num_bytes` on each rank."""
        if self._shared:
            owned = [(self._number("port", rank), rank) for rank in group]
            if len({self._node(rank) for rank in group}) > 1:
                owned += [(self._card(rank), rank) for rank in group]
        else:
            owned = [(self._link(a, b), a) for a, b in zip(group, group[1:] + group[:1], strict=True)]
        held = 1.0 if self._cluster is None else cost.collective(op, num_bytes, group, self._cluster).seconds
        return _route(tuple(owned), held, slows=group if self.share else ())

    def _link(self, source: int, target: int) -> int:
        """The port or card that a message from one rank to another occupies."""
        if not self._shared:
            return self._number("port", source, target)
        return self._number("port", source) if self._node(source) == self._node(target) else self._card(source)

    def _card(self, rank: int) -> int:
        assert self._cluster is not None
        return self._number("card", self._cluster.port(rank))

    def _node(self, rank: int) -> int:
        size = None if self._cluster is None else self._cluster.node_size
        return 0 if size is None else rank // size

    def _number(self, *way: str | int) -> int:
        return self._numbers.setdefault(way, len(self._numbers))


def _route(owned: tuple[tuple[int, int], ...], held: float, latency: float = 0.0, slows: tuple[int, ...] = ()) -> Route:
    return Route(owned, tuple(dict.fromkeys(way for way, _ in owned)), held, latency, slows)


_ROUNDING = 1 + 2.0**-40
"""Times that differ by less than this factor are one instant."""


class Request:
    """A request for links, by a message or by a collective that all its ranks have reached.

    ready    the earliest time at which it could run
    said     what the program says about it: orders requests of different ranks that become ready at once
    places   rank -> its place in the order of this rank's requests
    what     the caller's name for it
    after    the caller's name for what made it ready
    start    once known, when its links begin to carry it
    until    when its links are free again
    end      when it has arrived
    """

    __slots__ = ("after", "end", "places", "ready", "route", "said", "start", "until", "what")

    def __init__(
        self, route: Route, ready: float, said: tuple[Any, ...], places: Mapping[int, Any], what: Any, after: Any
    ):
        self.route, self.ready, self.said, self.places, self.what, self.after = route, ready, said, places, what, after
        self.start = self.until = self.end = ready

    def seen_from(self, other: Request) -> int:
        """One of its ranks; if possible, one that it shares with the other."""
        return next((rank for rank in self.places if rank in other.places), next(iter(self.places)))


class Clock:
    """Runs events and serves requests in the order of modelled time.

    happens   called with each entry of the agenda, at its time
    booked    called with each request once its start and end are known, and with the request that held its links until
              then; None if it did not have to wait for them
    until     the end of the current instant
    share     the share of its ranks' computing rate that a running collective takes
    """

    def __init__(
        self, happens: Callable[..., None], booked: Callable[[Request, Request | None], None], share: float = 0.0
    ):
        self.until = 0.0
        self._share = share
        self._slow: dict[int, list[tuple[float, float]]] = {}  # rank -> spans in which collectives run on it, in order
        self._happens, self._booked = happens, booked
        self._agenda: list[tuple[Any, ...]] = []
        self._asking: list[Request] = []
        self._last: dict[int, Request] = {}  # link -> the request that it carries, or carried last

    def at(self, time: float, *what: Any) -> None:
        """Call `happens(time, *what)` at that time. At equal times, the smallest `what` is first."""
        heappush(self._agenda, (time, *what))

    def ask(self, request: Request) -> None:
        """Request links at this instant."""
        self._asking.append(request)

    def run(self, is_known: Callable[[float], bool] = lambda time: True) -> None:
        """Run until nothing is left, or up to the first time at which requests may be missing: `is_known` is False."""
        agenda = self._agenda
        while agenda or self._asking:
            if not self._asking:
                if not is_known(agenda[0][0] / _ROUNDING):
                    return
                self.until = agenda[0][0] * _ROUNDING
            while agenda and agenda[0][0] <= self.until:
                self._happens(*heappop(agenda))
            if self._asking:
                if not is_known(self.until):
                    return
                asking, self._asking = self._asking, []
                if len(asking) == 1:
                    self._serve(asking[0])
                else:
                    self._serve_all(asking)

    def _serve(self, request: Request) -> None:
        """Assign its links, from the time at which all of them are free."""
        start, before = self._begins(request.route.ways, request.ready)
        self._is_served(request, start, start + request.route.held, before)

    def _begins(self, ways: Iterable[int], ready: float) -> tuple[float, Request | None]:
        """When all of these links are free, and the request that holds one of them until then."""
        start, before = ready, None
        for way in ways:
            other = self._last.get(way)
            if other is not None and other.until > start:
                start, before = other.until, other
        return start, before

    def _is_served(self, request: Request, start: float, done: float, before: Request | None) -> None:
        route, last = request.route, self._last
        request.start, request.until, request.end = start, done, done + route.latency
        for way in route.ways:
            if way not in last or last[way].until <= done:
                last[way] = request
        for rank in route.slows:
            _insert(self._slow.setdefault(rank, []), (start, done))
        self._booked(request, before)

    def computed(self, rank: int, start: float, seconds: float) -> float:
        """When a computation that a rank begins at `start` ends, given the collectives known so far. Calls for a rank
        must be in the order of `start`."""
        slow, now, left = self._slow.get(rank, []), start, seconds
        while slow and slow[0][1] <= start:
            slow.pop(0)
        for begin, end in slow:
            if begin >= now + left:
                break
            if begin > now:
                left -= begin - now
                now = begin
            if left <= (end - now) * (1 - self._share):
                return now + left / (1 - self._share)
            left -= (end - now) * (1 - self._share)
            now = end
        return now + left

    def _serve_all(self, asking: list[Request]) -> None:
        """Serve the requests of one instant."""
        wanted = Counter(way for request in asking for way in request.route.ways)
        contested: list[Request] = []
        for request in asking:
            if any(wanted[way] > 1 for way in request.route.ways):
                contested.append(request)
            else:
                self._serve(request)
        for requests in _in_turn(contested):
            self._serve_alike(requests)

    def _serve_alike(self, requests: list[Request]) -> None:
        """Serve requests that are equal in the order: those that need the same link share it, and end together."""
        for sharing in _sharing(requests):
            load = Counter(way for request in sharing for way in request.route.ways)
            start, before = self._begins(load, max(request.ready for request in sharing))
            for request in sharing:
                done = start + request.route.held * max(load[way] for way in request.route.ways)
                self._is_served(request, start, done, before)


def _insert(spans: list[tuple[float, float]], span: tuple[float, float]) -> None:
    """Add a span to sorted disjoint spans; spans that touch are merged."""
    if not spans or span[0] > spans[-1][1]:
        spans.append(span)
        return
    apart = [other for other in spans if other[1] < span[0] or other[0] > span[1]]
    touching = [span, *(other for other in spans if not (other[1] < span[0] or other[0] > span[1]))]
    spans[:] = sorted([*apart, (min(begin for begin, _ in touching), max(end for _, end in touching))])


def _in_turn(requests: list[Request]) -> Iterable[list[Request]]:
    """The requests of one instant in order; equal ones are in one list."""
    queues: dict[tuple[int, int], list[Request]] = defaultdict(list)
    for request in requests:
        for owned in request.route.owned:
            queues[owned].append(request)
    for (_, rank), queue in queues.items():
        queue.sort(key=lambda request: request.places[rank], reverse=True)  # the first is at the end
    left = requests
    while left:
        # If the orders of the ranks form a cycle, no request is first on all of its ranks.
        first = [one for one in left if all(queues[owned][-1] is one for owned in one.route.owned)] or left
        said = min(request.said for request in first)
        chosen = [request for request in first if request.said == said]
        yield chosen
        for request in chosen:
            for owned in request.route.owned:
                queue = queues[owned]
                if queue[-1] is request:
                    queue.pop()
                else:
                    queue.remove(request)
        taken = set(map(id, chosen))
        left = [request for request in left if id(request) not in taken]


def _sharing(requests: list[Request]) -> list[list[Request]]:
    """The requests, grouped with those that need one of the same links."""
    if max(Counter(way for request in requests for way in request.route.ways).values(), default=1) == 1:
        return [[request] for request in requests]
    groups: list[tuple[set[int], list[Request]]] = []
    for request in requests:
        ways, members = set(request.route.ways), [request]
        apart = []
        for group in groups:
            if group[0].isdisjoint(ways):
                apart.append(group)
            else:
                ways |= group[0]
                members = group[1] + members
        groups = [*apart, (ways, members)]
    return [members for _, members in groups]
