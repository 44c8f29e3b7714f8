"""The algorithms of collectives as formulas: hops, bytes and seconds over equal links. collectives.py has the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tplab.comm import ROWS
from tplab.cost.link import Link
from tplab.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a collective: seconds from start to end, sequential hops, and bytes that the busiest rank sends.

    latency   s of `seconds` spent waiting for hops between nodes, as measured; no computation hides these
    """

    seconds: float
    hops: int
    bytes: float
    algorithm: str = "ring"
    latency: float = 0.0


Terms = tuple[int, float, float]
"""(hops, bytes the busiest rank sends, bytes that pass one link one after another)."""

# n: bytes of a rank's input, R: ranks (2 or more), L: ceil(log2 R)
ALGORITHMS: dict[str, dict[str, Callable[[float, int, int], Terms]]] = {
    "all_reduce": {
        "ring": lambda n, R, L: (2 * (R - 1), 2 * (R - 1) * n / R, 2 * (R - 1) * n / R),
        "halving_doubling": lambda n, R, L: (2 * L, 2 * (R - 1) * n / R, 2 * (R - 1) * n / R),
        "recursive_doubling": lambda n, R, L: _recursive_doubling(n, R),
        "bidirectional": lambda n, R, L: (2 * (R // 2), 2 * (R - 1) * n / R, 2 * (R // 2) * n / R),
        "split": lambda n, R, L: (2 * (R - 1), 2 * (R - 1) * n / R, (R - 1) * n / R),
    },
    "all_gather": {
        "ring": lambda n, R, L: (R - 1, (R - 1) * n, (R - 1) * n),
        "halving_doubling": lambda n, R, L: (L, (R - 1) * n, (R - 1) * n),
        "bidirectional": lambda n, R, L: (R // 2, (R - 1) * n, R // 2 * n),
        "split": lambda n, R, L: (R - 1, (R - 1) * n, (R - 1) * n / 2),
    },
    "reduce_scatter": {
        "ring": lambda n, R, L: (R - 1, (R - 1) * n / R, (R - 1) * n / R),
        "halving_doubling": lambda n, R, L: (L, (R - 1) * n / R, (R - 1) * n / R),
        "bidirectional": lambda n, R, L: (R // 2, (R - 1) * n / R, R // 2 * n / R),
        "split": lambda n, R, L: (R - 1, (R - 1) * n / R, (R - 1) * n / R / 2),
    },
    "all_to_all": {
        "ring": lambda n, R, L: (R - 1, (R - 1) * n / R, (R - 1) * n / R),
        # the piece for the rank j ahead travels by the powers of two in j: once for each 1 bit of j
        "bruck": lambda n, R, L: (L, _bits(R) * n / R, _bits(R) * n / R),
        # the piece for the rank j ahead passes j links
        "neighbor": lambda n, R, L: (R - 1, (R - 1) * n / 2, (R - 1) * n / 2),
        "bidirectional": lambda n, R, L: (
            R // 2,
            (_triangle(R // 2) + _triangle((R - 1) // 2)) * n / R,
            _triangle(R // 2) * n / R,
        ),
    },
    "broadcast": {
        "tree": lambda n, R, L: (L, L * n, L * n),
        "scatter_all_gather": lambda n, R, L: (L + R - 1, 2 * (R - 1) * n / R, 2 * (R - 1) * n / R),
    },
    "ppermute": {"ring": lambda n, R, L: (1, n, n)},
    "ring_shift": {"ring": lambda n, R, L: (1, n, n)},
    "reduce": {"tree": lambda n, R, L: (L, n, L * n)},
    "gather": {
        "ring": lambda n, R, L: (R - 1, n, (R - 1) * n),
        # a rank that has gathered half of the others passes on everything it has
        "tree": lambda n, R, L: (L, max(R - (1 << L >> 1), 1 << L >> 2) * n, (R - 1) * n),
    },
    "scatter": {
        "ring": lambda n, R, L: (R - 1, (R - 1) * n / R, (R - 1) * n / R),
        "tree": lambda n, R, L: (L, (R - 1) * n / R, (R - 1) * n / R),
    },
    "barrier": {"ring": lambda n, R, L: (R - 1, 0, 0), "dissemination": lambda n, R, L: (L, 0, 0)},
}
_TWO_LINKS = ("bidirectional", "split")
PIPELINED = (("broadcast", "ring"), ("reduce", "ring"))

GATHERS = [name for name, row in ROWS.items() if row.gathers]
"""In these, a rank's input is only a part of the whole tensor."""

OPS = tuple(ALGORITHMS)
"""The collectives that have a cost."""


def algorithms(op: str, links_per_rank: int = 1) -> tuple[str, ...]:
    """The algorithms known for `op`, the default first. Algorithms that use two links per rank are listed only if there
    are two."""
    check_op(op)
    names = dict.fromkeys(["ring", *ALGORITHMS[op]])  # the ring of a broadcast is pipelined: see pipelined_broadcast
    return tuple(name for name in names if links_per_rank > 1 or name not in _TWO_LINKS)


def over_link(op: str, nbytes: float, num_ranks: int, link: Link, algorithm: str) -> Cost:
    """One collective over ranks that have equal links: see tplab.cost.collective."""
    known = algorithms(op, links_per_rank=2)
    if algorithm not in known:
        raise ClusterError(f"no algorithm is named {algorithm!r} for {op}; there are {', '.join(known)}")
    check(nbytes, num_ranks)
    if num_ranks == 1:
        return Cost(0.0, 0, 0, algorithm)
    hops, sent, carried = terms(op, nbytes, num_ranks, link, algorithm)
    return Cost(hops * link.latency + carried / link.bandwidth, hops, whole(sent), algorithm)


def terms(op: str, nbytes: float, num_ranks: int, link: Link, algorithm: str) -> Terms:
    """Hops and bytes of an algorithm over two ranks or more."""
    if (op, algorithm) in PIPELINED:
        return pipelined_broadcast(nbytes, num_ranks, link)
    return ALGORITHMS[op][algorithm](nbytes, num_ranks, (num_ranks - 1).bit_length())


def _recursive_doubling(n: float, R: int) -> Terms:
    """Pairs at distance 1, 2, 4, ... exchange and add all of n. Thakur et al. 2005, 4.5.

    If R is not a power of 2, the ranks beyond the largest power of 2 below R first send their input to a partner, sit
    out, and get the result at the end: two more hops, and one more message from that partner.
    """
    rounds = R.bit_length() - 1
    rest = 0 if R.bit_count() == 1 else 1
    return rounds + 2 * rest, (rounds + rest) * n, (rounds + 2 * rest) * n


def pipelined_broadcast(n: float, R: int, link: Link) -> Terms:
    """Down the chain root, root + 1, ... in m pieces: the last piece leaves after m - 1 others and passes R - 1 links.

    T(m) = (R - 2 + m) (latency + n / m / bandwidth), least at m = sqrt((R - 2) n / (latency bandwidth)).
    """
    most = max(1, int(n))  # a piece holds at least one byte
    if R == 2 or math.isinf(link.bandwidth):
        ideal = 1.0
    else:
        in_latency = link.latency * link.bandwidth  # bytes; a tiny latency may underflow to 0
        ideal = math.sqrt((R - 2) * n / in_latency) if in_latency else math.inf
    around = {1 if ideal < 1 else min(most, m) for m in ([most] if ideal >= most else [int(ideal), int(ideal) + 1])}
    m = min(around, key=lambda m: ((R - 2 + m) * link.seconds(n / m), m))
    return R - 2 + m, n, (R - 2 + m) * n / m


def _bits(R: int) -> int:
    return sum(j.bit_count() for j in range(R))


def _triangle(k: int) -> int:
    return k * (k + 1) // 2


def whole(value: float) -> float:
    """12.0 -> 12: bytes are ints if they are whole numbers."""
    return int(value) if value == int(value) else value


def check_op(op: str) -> None:
    if op not in ALGORITHMS:
        raise ClusterError(f"no collective is named {op!r}; there are {', '.join(OPS)}")


def check(nbytes: float, num_ranks: int) -> None:
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ClusterError(f"num_ranks is {num_ranks!r}; it must be a whole number of ranks, 1 or more")
    if not (0 <= nbytes < math.inf):
        raise ClusterError(f"nbytes is {nbytes!r}; it must be the size of a rank's input in bytes, 0 or more")
