"""The cost of each collective, by algorithm: seconds, hops and bytes.

R ranks; n bytes: the size of *this rank's input* to the operation; L = ceil(log2 R); one message of b bytes takes
latency + b / bandwidth (tplab.cost.Link). A rank can send one message and receive another at the same time, not more.
`hops` counts the messages that follow one another; `bytes` is what the busiest rank sends:

    operation          algorithm           hops            bytes                 best for
    all_reduce         ring                2(R-1)          2(R-1)/R n            large n
                       halving_doubling    2L              2(R-1)/R n            any n, where all ranks are linked
                       recursive_doubling  L               L n                   small n
    all_gather         ring                R-1             (R-1) n
                       halving_doubling    L               (R-1) n
    reduce_scatter     ring                R-1             (R-1)/R n
                       halving_doubling    L               (R-1)/R n
    all_to_all         ring                R-1             (R-1)/R n             large n: in round k to the rank k ahead
                       bruck               L               about L/2 n           small n
                       neighbor            R-1             (R-1)/2 n             only neighbours are linked
    broadcast          ring                R-2+m           n                     large n: m pieces, one after the other
                       tree                L               L n (the root)        small n
                       scatter_all_gather  L+R-1           2(R-1)/R n            between the two
    reduce             ring                R-2+m           n                     a broadcast backwards, pipelined
                       tree                L               n                     small n
    gather             ring                R-1             n                     large n: the root receives in turn
                       tree                L               about R/2 n           small n
    scatter            ring                R-1             (R-1)/R n (the root)  large n: the root sends in turn
                       tree                L               (R-1)/R n (the root)  small n
    ppermute           ring                1               n                     one message per rank
    ring_shift         ring                1               n
    barrier            ring                R-1             0
                       dissemination       L               0

If a rank has two links, one to each neighbour (as in a TPU's torus), both can carry messages at once. `bidirectional`
sends each piece in the direction in which it is closer: R//2 hops instead of R-1. `split` sends half of every piece in
each direction: just as many hops, each half as long. Behind a switch, both directions leave a rank through the same
port, so neither gains anything.

By these formulas, halving and doubling always beats the ring. But it assumes a free link between any two ranks. If
ranks are wired in a ring or a torus, its long-distance messages share links, and only the ring's formula still holds.
The arithmetic of a reduction is not counted here: it is compute.

Sources. Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations in MPICH" (ring,
recursive doubling, halving and doubling, pairwise exchange, scatter + all-gather); Rabenseifner 2004 (halving and
doubling); Bruck et al. 1997 and Träff 2023, arXiv:2304.13559 (the same hops and bytes if R is not a power of 2);
Patarasuk & Yuan 2009 and Chan et al. 2007 (lower bounds: see `lower_bound`); Hensgen, Finkel & Manber 1988
(dissemination).
"""

from __future__ import annotations

from collections.abc import Sequence

from tplab.comm import ROWS
from tplab.cost.algorithms import (
    Cost,
    algorithms,
    check,
    check_op,
    over_link,
    whole,
)
from tplab.cost.cluster import Cluster
from tplab.cost.link import Link
from tplab.cost.named import find
from tplab.errors import ClusterError
from tplab.sharding import cut


def collective(
    op: str, nbytes: float, num_ranks: int | Sequence[int], link: Link | Cluster | str, algorithm: str | None = None
) -> Cost:
    """Seconds, hops and bytes of one collective over `num_ranks` ranks.

    op          one of OPS
    nbytes      size of this rank's input: the shard for all_gather, the whole tensor for the others
    num_ranks   how many ranks; on a cluster, these are the first ones, or give a sequence of their numbers
    link        the link between every two ranks; or a cluster or its name, on which a run takes just as long
    algorithm   a name from the table at the top of this file. By default, the ring over a link, and on a cluster the
                fastest: between nodes, a tree if there are few bytes (tplab.cost.nodes)

    seconds = hops * latency + (bytes that pass one link one after another) / bandwidth. One rank alone sends nothing.
    """
    if isinstance(link, Link):
        over = len(num_ranks) if isinstance(num_ranks, Sequence) else num_ranks
        return over_link(op, nbytes, over, link, algorithm or "ring")
    return find(link).collective_cost(op, nbytes, num_ranks, algorithm)


def best(
    op: str, nbytes: float, num_ranks: int | Sequence[int], link: Link | Cluster | str, links_per_rank: int = 1
) -> Cost:
    """The fastest of the known algorithms for these figures; `.algorithm` says which one it is.

    On a cluster, these are the algorithms that its collectives use, so a run takes exactly this long.
    """
    if not isinstance(link, Link):
        return collective(op, nbytes, num_ranks, link)
    costs = [collective(op, nbytes, num_ranks, link, name) for name in algorithms(op, links_per_rank)]
    return min(costs, key=lambda cost: cost.seconds)


def lower_bound(op: str, nbytes: float, num_ranks: int, link: Link, links_per_rank: int = 1) -> Cost:
    """A bound that no algorithm can beat, as long as only ranks compute (a switch that adds, such as SHARP's, can).

    hops    every rank's data must reach every other rank. With k links, a hop multiplies the number of ranks that have
            it by at most k + 1: log(R) / log(k + 1) hops. A permutation needs one.
    bytes   all_reduce       2(R-1)/R n: adding R values moves R-1 of them, and spreading the sum moves R-1 more; over n
                             bytes that is 2(R-1) n in total, 1/R of it from the average rank (Patarasuk & Yuan 2009)
            all_gather       (R-1) n: every rank needs the R-1 other inputs
            reduce_scatter   (R-1)/R n: each of R pieces of n/R lacks R-1 terms where it ends
            all_to_all       (R-1)/R n: everything but a rank's own piece
            broadcast        n: the root sends everything at least once
            reduce, gather   n: every rank but the root sends its input at least once
            scatter          (R-1)/R n: the root sends every piece but its own
    The ring all_reduce sends exactly 2(R-1)/R n and never waits for a link, so it is bandwidth-optimal.

    Hops and bytes each bound the seconds, so the larger bound holds: max(hops * latency, latency + bytes / (k
    bandwidth)).
    Chan, Heimlich, Purkayastha & van de Geijn 2007, section 3.
    """
    check_op(op)
    check(nbytes, num_ranks)
    R = num_ranks
    if R == 1:
        return Cost(0.0, 0, 0, "lower bound")
    hops, reached = 0, 1
    while reached < R:
        hops, reached = hops + 1, reached * (links_per_rank + 1)
    row = ROWS[op]
    if row.takes == "all" and row.gives == "all":
        factor = 2 * (R - 1) if row.combines else (R - 1) * R
    else:
        factor = R - 1 if row.gives == "pieces" else R if row.takes else 0
    sent = factor * nbytes / R
    if row.takes == "one":
        hops = 1
    seconds = max(hops * link.latency, link.latency + sent / links_per_rank / link.bandwidth)
    return Cost(seconds, hops, whole(sent), "lower bound")


# ------------------------------------------------------------------------------------------------------ exact bytes


def bytes_sent(op: str, num_elements: int | Sequence[int], itemsize: int, num_ranks: int, index: int) -> int:
    """The exact bytes that the rank at `index` of the axis sends with the ring algorithm, uneven pieces included.

    num_elements   elements of this rank's input, or of every rank's input if they differ. If a tensor is split along
                   one dim, give the size of that dim, and the bytes of one slice as itemsize
    index          position on the axis; counted from the root if there is one

    Rank i ends a reduce_scatter with piece i, and so never passes it on: n - piece_i. In an all_gather it never sends
    its successor's input back to it. An all_reduce is the one, then the other: 2n - piece_i - piece_(i+1). Summed over
    all ranks, that is 2(R-1) n, however uneven the pieces are.
    """
    check_op(op)
    alike = isinstance(num_elements, int)
    elements = num_elements if alike else num_elements[index] if -1 < index < len(num_elements) else -1
    if not 0 <= index < num_ranks or elements < 0 or itemsize < 0 or not (alike or len(num_elements) == num_ranks):
        raise ClusterError(
            f"{op}: index {index} of {num_ranks} ranks, inputs of {num_elements} elements of {itemsize} bytes; "
            "index must be one of the ranks (0 or more), with one input for each, and sizes cannot be negative"
        )
    row = ROWS[op]
    if num_ranks == 1 or not row.takes:
        return 0
    following = (index + 1) % num_ranks
    pieces = cut(elements, num_ranks, "even")
    if row.takes == "all" and row.gives == "all" and row.combines:
        sent = 2 * elements - len(pieces[index]) - len(pieces[following])
    elif row.takes == "all" and row.gives == "all":
        sent = (num_ranks - 1) * elements if alike else sum(num_elements) - num_elements[following]
    elif row.gives == "pieces":
        sent = elements - len(pieces[index]) if row.takes == "all" or not index else 0
    elif row.takes == "root":
        sent = elements if index < num_ranks - 1 else 0
    else:  # to the root; or a message
        sent = elements if index or row.takes == "one" else 0
    return sent * itemsize
