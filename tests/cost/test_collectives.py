"""The closed forms of tplab.cost against every algorithm played out message by message.

Each player below moves real pieces (which rank's data, which part of it) in rounds over a `Network` that refuses what
one port cannot do, and ends by asserting that every rank holds what the collective promises. Only then are hops,
bytes and seconds compared with the formulas.
"""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tplab import cost
from tplab.cost.kernels import matmul_bytes, matmul_flops
from tplab.cost.link import NO_LINK, ONE_HOP, Link
from tplab.cost.named import H100_NODE
from tplab.errors import ClusterError

LINK = Link("test", latency=3.0, bandwidth=0.5)  # dyadic, so that sums are exact
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16)


class Network:
    """Rounds of messages. `ports` links leave each rank and as many arrive; a link carries one message a round."""

    def __init__(self, num_ranks: int, ports: int = 1):
        self.num_ranks, self.ports = num_ranks, ports
        self.hops, self.seconds, self.sent = 0, 0.0, [0] * num_ranks
        self.log: list[list[tuple[int, int, int]]] = []

    def round(self, messages: list[tuple[int, int, int]]) -> None:
        """messages: (from, to, bytes). The round lasts as long as its longest message."""
        for place in (0, 1):
            used = [message[place] for message in messages]
            assert max(used.count(rank) for rank in used) <= self.ports
        assert all(a != b for a, b, _ in messages)
        assert len({(a, b) for a, b, _ in messages}) == len(messages) or self.num_ranks == 2
        self.log.append(messages)
        self.hops += 1
        self.seconds += max(LINK.seconds(size) for _, _, size in messages)
        for a, _, size in messages:
            self.sent[a] += size


def start_with_terms(R):
    """all_reduce, reduce_scatter: rank r holds its own term of every piece."""
    return [{piece: {rank} for piece in range(R)} for rank in range(R)]


def start_with_own(R):
    """all_gather: rank r holds piece r."""
    return [{rank} for rank in range(R)]


def everything(R):
    return set(range(R))


# ------------------------------------------------------------------------------------ ring, both directions, halves


def reduce_ring(net, held, size, step=1):
    """Piece i ends on rank i: it starts on the rank after i (in the ring's direction) and collects terms on its way."""
    R = net.num_ranks
    for hop in range(R - 1):
        moving = [(rank, (rank - step * (hop + 1)) % R) for rank in range(R)]
        arriving = [((rank + step) % R, piece, set(held[rank][piece])) for rank, piece in moving]
        net.round([(rank, (rank + step) % R, size(piece)) for rank, piece in moving])
        for rank, piece, terms in arriving:
            assert not held[rank][piece] & terms, "a term must not be added twice"
            held[rank][piece] |= terms


def gather_ring(net, held, size, step=1):
    R = net.num_ranks
    for hop in range(R - 1):
        moving = [(rank, (rank - step * hop) % R) for rank in range(R)]
        assert all(piece in held[rank] for rank, piece in moving)
        net.round([(rank, (rank + step) % R, size(piece)) for rank, piece in moving])
        for rank, piece in moving:
            held[(rank + step) % R].add(piece)


def play_all_gather_ring(R, n, step=1):
    net, held = Network(R), start_with_own(R)
    gather_ring(net, held, lambda piece: n, step)
    assert all(pieces == everything(R) for pieces in held)
    return net


def play_reduce_scatter_ring(R, n, step=1):
    net, held = Network(R), start_with_terms(R)
    reduce_ring(net, held, lambda piece: n // R, step)
    assert all(held[rank][rank] == everything(R) for rank in range(R))
    return net


def play_all_reduce_ring(R, n, step=1, sizes=None):
    net, held = Network(R), start_with_terms(R)
    size = (lambda piece: n // R) if sizes is None else (lambda piece: sizes[piece])
    reduce_ring(net, held, size, step)
    assert all(held[rank][rank] == everything(R) for rank in range(R))
    whole = start_with_own(R)
    gather_ring(net, whole, size, step)
    assert all(pieces == everything(R) for pieces in whole)
    return net


def both_ways(net, held, size):
    """All-gather: R//2 hops up, (R-1)//2 down, at once."""
    R = net.num_ranks
    for hop in range(R // 2):
        steps = [1] + ([-1] if hop < (R - 1) // 2 else [])
        moving = [(rank, step, (rank - step * hop) % R) for rank in range(R) for step in steps]
        assert all(piece in held[rank] for rank, _, piece in moving)
        net.round([(rank, (rank + step) % R, size) for rank, step, _ in moving])
        for rank, step, piece in moving:
            held[(rank + step) % R].add(piece)


def both_ways_reduce(net, size):
    """Reduce-scatter is all_gather backwards: each piece collects terms up from one side, down from the other."""
    R = net.num_ranks
    up, down = start_with_terms(R), start_with_terms(R)
    num_up, num_down = R // 2, (R - 1) // 2
    for hop in range(num_up):
        messages, arriving = [], []
        for held, step, hops in ((up, 1, num_up), (down, -1, num_down)):
            if hop < hops:
                for rank in range(R):
                    piece = (rank + step * (hops - hop)) % R  # `hops - hop` links before it is home
                    messages.append((rank, (rank + step) % R, size))
                    arriving.append((held, (rank + step) % R, piece, set(held[rank][piece])))
        net.round(messages)
        for held, rank, piece, terms in arriving:
            assert not held[rank][piece] & terms
            held[rank][piece] |= terms
    for rank in range(R):
        from_up, from_down = up[rank][rank], down[rank][rank]
        assert from_up & from_down == {rank}  # its own term, counted once
        assert from_up | from_down == everything(R)


def play_all_gather_bidirectional(R, n):
    net, held = Network(R, ports=2), start_with_own(R)
    both_ways(net, held, n)
    assert all(pieces == everything(R) for pieces in held)
    return net


def play_reduce_scatter_bidirectional(R, n):
    net = Network(R, ports=2)
    both_ways_reduce(net, n // R)
    return net


def play_all_reduce_bidirectional(R, n):
    net, held = Network(R, ports=2), start_with_own(R)
    both_ways_reduce(net, n // R)
    both_ways(net, held, n // R)
    assert all(pieces == everything(R) for pieces in held)
    return net


def play_in_halves(player):
    """`split`: the ring upwards for one half, mirrored downwards for the other, in the same rounds."""

    def play(R, n):
        net = Network(R, ports=2)
        for up, down in zip(player(R, n // 2, step=1).log, player(R, n // 2, step=-1).log):
            net.round(up + down)
        return net

    return play


# ------------------------------------------------------------------------------------------- halving and doubling


def skips(R):
    """R, ceil(R/2), ..., 1: in halving each rank keeps so many pieces."""
    kept = [R]
    while kept[-1] > 1:
        kept.append(-(-kept[-1] // 2))
    return list(pairwise(kept))


def halving(net, size):
    """Reduce-scatter: hand the far part of what is kept to the rank that far ahead. Träff 2023."""
    R = net.num_ranks
    held = start_with_terms(R)
    for before, after in skips(R):
        net.round([(rank, (rank + after) % R, (before - after) * size) for rank in range(R)])
        arriving = []
        for rank in range(R):
            for place in range(after, before):
                piece = (rank + place) % R
                arriving.append(((rank + after) % R, piece, held[rank].pop(piece)))
        for rank, piece, terms in arriving:
            assert not held[rank][piece] & terms
            held[rank][piece] |= terms
    assert all(held[rank] == {rank: everything(R)} for rank in range(R))


def doubling(net, size):
    """All-gather, the same backwards. Bruck et al. 1997."""
    R = net.num_ranks
    held = start_with_own(R)
    for before, after in reversed(skips(R)):
        net.round([(rank, (rank - after) % R, (before - after) * size) for rank in range(R)])
        arriving = []
        for rank in range(R):
            for place in range(before - after):
                assert (rank + place) % R in held[rank]
                arriving.append(((rank - after) % R, (rank + place) % R))
        for rank, piece in arriving:
            assert piece not in held[rank], "nothing is sent twice"
            held[rank].add(piece)
    assert all(pieces == everything(R) for pieces in held)


def play_reduce_scatter_halving(R, n):
    net = Network(R)
    halving(net, n // R)
    return net


def play_all_gather_doubling(R, n):
    net = Network(R)
    doubling(net, n)
    return net


def play_all_reduce_halving_doubling(R, n):
    net = Network(R)
    halving(net, n // R)
    doubling(net, n // R)
    return net


def play_all_reduce_recursive_doubling(R, n):
    net = Network(R)
    held = [{rank} for rank in range(R)]
    power = 1 << (R.bit_length() - 1)
    rest = range(power, R)
    if rest:
        net.round([(rank, rank - power, n) for rank in rest])
        for rank in rest:
            held[rank - power] |= held[rank]
    distance = 1
    while distance < power:
        net.round([(rank, rank ^ distance, n) for rank in range(power)])
        held[:power] = [held[rank] | held[rank ^ distance] for rank in range(power)]
        distance *= 2
    if rest:
        net.round([(rank - power, rank, n) for rank in rest])
        for rank in rest:
            held[rank] = held[rank - power]
    assert all(terms == everything(R) for terms in held)
    return net


# --------------------------------------------------------------------------------------------- all_to_all, broadcast


def play_all_to_all_ring(R, n):
    net, got = Network(R), [{rank} for rank in range(R)]
    for distance in range(1, R):
        net.round([(rank, (rank + distance) % R, n // R) for rank in range(R)])
        for rank in range(R):
            got[(rank + distance) % R].add(rank)
    assert all(sources == everything(R) for sources in got)
    return net


def play_all_to_all_bruck(R, n):
    net = Network(R)
    at = {(rank, to): rank for rank in range(R) for to in range(R)}  # where the piece from `rank` for `to` is now
    for bit in range((R - 1).bit_length()):
        going = [piece for piece in at if ((piece[1] - piece[0]) % R) >> bit & 1]
        net.round([(r, (r + (1 << bit)) % R, n // R * sum(at[p] == r for p in going)) for r in range(R)])
        for piece in going:
            at[piece] = (at[piece] + (1 << bit)) % R
    assert all(place == to for (_, to), place in at.items())
    return net


def neighbours_only(R, n, both):
    net = Network(R, ports=2 if both else 1)
    at = {(rank, to): rank for rank in range(R) for to in range(R)}

    def way(piece):
        return -1 if both and (piece[1] - piece[0]) % R > R // 2 else 1

    while any(place != piece[1] for piece, place in at.items()):
        going = [(piece, way(piece)) for piece, place in at.items() if place != piece[1]]
        loads = {(r, s): sum(at[p] == r for p, step in going if step == s) for r in range(R) for s in (1, -1)}
        net.round([(r, (r + s) % R, n // R * load) for (r, s), load in loads.items() if load])
        for piece, step in going:
            at[piece] = (at[piece] + step) % R
    return net


def play_broadcast_tree(R, n):
    net, have = Network(R), {0}
    while len(have) < R:
        reached = len(have)
        messages = [(rank, rank + reached, n) for rank in sorted(have) if rank + reached < R]
        net.round(messages)
        have |= {to for _, to, _ in messages}
    return net


def play_broadcast_scatter_all_gather(R, n):
    net = Network(R)
    parts = {0: (0, R)}  # rank -> the pieces it holds for itself and the ranks below it in the tree
    while any(last - first > 1 for first, last in parts.values()):
        messages = []
        for rank, (first, last) in list(parts.items()):
            middle = first + -(-(last - first) // 2)
            if middle < last:
                messages.append((rank, middle, (last - middle) * n // R))
                parts[rank], parts[middle] = (first, middle), (middle, last)
        net.round(messages)
    assert parts == {rank: (rank, rank + 1) for rank in range(R)}
    held = start_with_own(R)
    gather_ring(net, held, lambda piece: n // R)
    assert all(pieces == everything(R) for pieces in held)
    return net


def play_broadcast_ring(R, n, num_pieces):
    net = Network(R)
    held = [set(range(num_pieces))] + [set() for _ in range(R - 1)]
    while any(len(pieces) < num_pieces for pieces in held):
        messages = []
        for rank in range(R - 1):
            missing = held[rank] - held[rank + 1]
            if missing:
                messages.append((rank, rank + 1, min(missing)))
        net.round([(a, b, n / num_pieces) for a, b, _ in messages])
        for _, to, piece in messages:
            held[to].add(piece)
    return net


def play_tree_to_root(R, n, is_sum):
    """In round k each odd multiple of 2^k hands what it has to the rank 2^k before it."""
    net, held = Network(R), start_with_own(R)
    distance = 1
    while distance < R:
        senders = range(distance, R, 2 * distance)
        net.round([(rank, rank - distance, n if is_sum else n * len(held[rank])) for rank in senders])
        for rank in senders:
            held[rank - distance] |= held[rank]
        distance *= 2
    assert held[0] == everything(R)
    return net


def play_scatter_tree(R, n):
    """A gather by the tree, its messages turned round."""
    net = Network(R)
    for messages in reversed(play_tree_to_root(R, n // R, is_sum=False).log):
        net.round([(to, rank, size) for rank, to, size in messages])
    return net


def play_with_root(R, n, to_root):
    """The root and one other rank at a time."""
    net = Network(R)
    for rank in range(1, R):
        net.round([(rank, 0, n) if to_root else (0, rank, n // R)])
    return net


def play_one_message(R, n):
    net = Network(R)
    net.round([(rank, (rank + 1) % R, n) for rank in range(R)])
    return net


def play_barrier(distances):
    def play(R, n):
        net, heard = Network(R), [{rank} for rank in range(R)]
        for distance in distances(R):
            net.round([(rank, (rank + distance) % R, 0) for rank in range(R)])
            heard = [heard[rank] | heard[(rank - distance) % R] for rank in range(R)]
        assert all(ranks == everything(R) for ranks in heard)
        return net

    return play


PLAYERS = {
    ("all_reduce", "ring"): play_all_reduce_ring,
    ("all_reduce", "halving_doubling"): play_all_reduce_halving_doubling,
    ("all_reduce", "recursive_doubling"): play_all_reduce_recursive_doubling,
    ("all_reduce", "bidirectional"): play_all_reduce_bidirectional,
    ("all_reduce", "split"): play_in_halves(play_all_reduce_ring),
    ("all_gather", "ring"): play_all_gather_ring,
    ("all_gather", "halving_doubling"): play_all_gather_doubling,
    ("all_gather", "bidirectional"): play_all_gather_bidirectional,
    ("all_gather", "split"): play_in_halves(play_all_gather_ring),
    ("reduce_scatter", "ring"): play_reduce_scatter_ring,
    ("reduce_scatter", "halving_doubling"): play_reduce_scatter_halving,
    ("reduce_scatter", "bidirectional"): play_reduce_scatter_bidirectional,
    ("reduce_scatter", "split"): play_in_halves(play_reduce_scatter_ring),
    ("all_to_all", "ring"): play_all_to_all_ring,
    ("all_to_all", "bruck"): play_all_to_all_bruck,
    ("all_to_all", "neighbor"): lambda R, n: neighbours_only(R, n, both=False),
    ("all_to_all", "bidirectional"): lambda R, n: neighbours_only(R, n, both=True),
    ("broadcast", "tree"): play_broadcast_tree,
    ("broadcast", "scatter_all_gather"): play_broadcast_scatter_all_gather,
    ("reduce", "tree"): lambda R, n: play_tree_to_root(R, n, is_sum=True),
    ("gather", "ring"): lambda R, n: play_with_root(R, n, to_root=True),
    ("gather", "tree"): lambda R, n: play_tree_to_root(R, n, is_sum=False),
    ("scatter", "ring"): lambda R, n: play_with_root(R, n, to_root=False),
    ("scatter", "tree"): play_scatter_tree,
    ("ppermute", "ring"): play_one_message,
    ("ring_shift", "ring"): play_one_message,
    ("barrier", "ring"): play_barrier(lambda R: [1] * (R - 1)),
    ("barrier", "dissemination"): play_barrier(lambda R: [1 << k for k in range((R - 1).bit_length())]),
}
EVERY = [(op, name) for op in cost.OPS for name in cost.algorithms(op, links_per_rank=2)]


def test_every_algorithm_is_played():
    assert set(EVERY) == {*PLAYERS, ("broadcast", "ring"), ("reduce", "ring")}


@pytest.mark.parametrize("op, algorithm", PLAYERS, ids=map("-".join, PLAYERS))
def test_closed_forms_are_what_the_messages_add_up_to(op, algorithm):
    for R, piece in product(WORLDS[1:], (1, 6)):
        n = 2 * R * piece  # divisible: into R pieces, and into halves of those
        net = PLAYERS[op, algorithm](R, n)
        got = cost.collective(op, n, R, LINK, algorithm)
        assert (got.hops, got.bytes) == (net.hops, max(net.sent)), (R, piece)
        assert got.seconds == pytest.approx(net.seconds, rel=1e-12), (R, piece)  # the formula adds in another order
        assert got.algorithm == algorithm


@pytest.mark.parametrize("R", WORLDS[1:])
@pytest.mark.parametrize("n", [0, 1, 5, 64, 150])
def test_the_pipelined_broadcast_takes_the_best_number_of_pieces(R, n):
    assert cost.collective("reduce", n, R, LINK) == cost.collective("broadcast", n, R, LINK)  # the same, backwards
    played = [play_broadcast_ring(R, n, pieces) for pieces in range(1, max(n, 1) + 1)]
    best = min(net.seconds for net in played)
    got = cost.collective("broadcast", n, R, LINK)
    assert got.seconds == pytest.approx(best, rel=1e-12)  # as above
    assert got.bytes == n
    assert any(net.hops == got.hops and net.seconds == pytest.approx(best) for net in played)


@pytest.mark.parametrize("R", WORLDS)
@given(data=st.data())
def test_bytes_sent_is_exact_for_uneven_pieces(R, data):
    elements = data.draw(st.integers(0, 200))
    sizes = [len(piece) for piece in np.array_split(np.arange(elements), R)]
    if R == 1:
        assert all(cost.bytes_sent(op, elements, 4, 1, 0) == 0 for op in cost.OPS)
        return

    def sent(op, num_elements=elements):
        return [cost.bytes_sent(op, num_elements, 4, R, index) for index in range(R)]

    net = play_all_reduce_ring(R, elements, sizes=[4 * size for size in sizes])
    assert sent("all_reduce") == net.sent
    assert sum(net.sent) == 2 * (R - 1) * elements * 4

    net, held = Network(R), start_with_terms(R)
    reduce_ring(net, held, lambda piece: 4 * sizes[piece])
    assert sent("reduce_scatter") == net.sent == sent("all_to_all")

    net, held = Network(R), start_with_own(R)
    gather_ring(net, held, lambda piece: 4 * sizes[piece])
    assert sent("all_gather", sizes) == net.sent
    assert sent("all_gather") == [(R - 1) * elements * 4] * R
    assert sent("broadcast") == [elements * 4] * (R - 1) + [0]
    assert sent("reduce") == sent("gather") == [0] + [elements * 4] * (R - 1)
    assert sent("scatter") == [4 * (elements - sizes[0])] + [0] * (R - 1)
    assert sent("ring_shift") == sent("ppermute") == [elements * 4] * R
    assert sent("barrier") == [0] * R


@pytest.mark.parametrize("op", cost.OPS)
@given(R=st.integers(1, 40), piece=st.integers(0, 10**6), itemsize=st.sampled_from((1, 2, 4, 8)))
def test_bytes_sent_agrees_with_the_ring_where_pieces_are_even(op, R, piece, itemsize):
    elements = R * piece
    most = max(cost.bytes_sent(op, elements, itemsize, R, index) for index in range(R))
    assert most == cost.collective(op, elements * itemsize, R, LINK).bytes


def test_a_tensor_split_along_one_dim_counts_slices():
    # [10, 3] float32 over 4 ranks: rows 3 3 2 2, of 12 bytes each
    assert [cost.bytes_sent("reduce_scatter", 10, 3 * 4, 4, index) for index in range(4)] == [84, 84, 96, 96]


@pytest.mark.parametrize("op, algorithm", EVERY, ids=map("-".join, EVERY))
@example(R=3, n=0, link=Link("any", 5e-324, 0.5))  # no time at all, in floating point, until a byte is through
@given(
    R=st.integers(1, 300),
    n=st.integers(0, 2**40),
    link=st.builds(Link, st.just("any"), st.floats(0, 1), st.floats(1e-3, 1e12)),
)
def test_nothing_beats_the_lower_bound(op, algorithm, R, n, link):
    links = 1 if algorithm in cost.algorithms(op) else 2
    got, least = cost.collective(op, n, R, link, algorithm), cost.lower_bound(op, n, R, link, links)
    slack = 1 + 1e-9  # the same quotients, rounded in another order
    assert got.hops >= least.hops
    assert got.bytes * slack >= least.bytes
    assert got.seconds * slack >= least.seconds
    assert cost.best(op, n, R, link, links).seconds <= got.seconds


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
@given(R=st.integers(2, 64), n=st.integers(1, 2**40))
def test_the_ring_is_bandwidth_optimal(op, R, n):
    ring, least = cost.collective(op, n, R, LINK), cost.lower_bound(op, n, R, LINK)
    assert ring.bytes == pytest.approx(least.bytes, rel=1e-12)  # as above
    huge = 2**60
    ring, least = cost.collective(op, huge, R, LINK), cost.lower_bound(op, huge, R, LINK)
    assert ring.seconds == pytest.approx(least.seconds, rel=1e-6)  # hops are all that is left between them


@pytest.mark.parametrize("op", [op for op in cost.OPS if op not in ("ppermute", "ring_shift")])
@given(R=st.integers(2, 2000))
def test_the_fewest_hops_are_known_and_reached(op, R):
    least = cost.lower_bound(op, 8, R, LINK).hops
    assert 2 ** (least - 1) < R <= 2**least
    with_two = cost.lower_bound(op, 8, R, LINK, links_per_rank=2).hops
    assert 3 ** (with_two - 1) < R <= 3**with_two
    few = [cost.collective(op, 8, R, LINK, name).hops for name in cost.algorithms(op)]
    # where R is no power of two, recursive doubling folds the rest in and out: one hop more
    assert min(few) <= least + (1 if op == "all_reduce" else 0)


@pytest.mark.parametrize("op, algorithm", EVERY, ids=map("-".join, EVERY))
def test_one_rank_alone_sends_nothing(op, algorithm):
    got = cost.collective(op, 1000, 1, LINK, algorithm)
    assert (got.seconds, got.hops, got.bytes) == (0, 0, 0)
    assert cost.lower_bound(op, 1000, 1, LINK).seconds == 0


@pytest.mark.parametrize("op, algorithm", EVERY, ids=map("-".join, EVERY))
@given(R=st.integers(2, 100), n=st.integers(0, 2**40))
def test_in_unit_times_a_collective_takes_its_hops(op, algorithm, R, n):
    got = cost.collective(op, n, R, ONE_HOP, algorithm)
    assert got.seconds == got.hops
    assert cost.collective(op, n, R, NO_LINK, algorithm).seconds == 0


@given(R=st.integers(2, 64))
def test_relations_between_the_rings(R):
    n = 2 * R * 5
    gather = cost.collective("all_gather", n // R, R, LINK)
    scatter = cost.collective("reduce_scatter", n, R, LINK)
    reduce = cost.collective("all_reduce", n, R, LINK)
    assert gather.seconds == pytest.approx(scatter.seconds)
    assert reduce.seconds == pytest.approx(scatter.seconds + gather.seconds)
    assert (reduce.hops, reduce.bytes) == (scatter.hops + gather.hops, scatter.bytes + gather.bytes)


def test_the_quickest_algorithm_depends_on_the_size():
    link = H100_NODE.inner_link
    assert cost.best("all_reduce", 1024, 8, link).algorithm == "recursive_doubling"
    assert cost.best("all_reduce", 2**30, 8, link).algorithm == "halving_doubling"
    assert cost.best("all_to_all", 1024, 8, link).algorithm == "bruck"
    assert cost.best("all_to_all", 2**30, 8, link).algorithm == "ring"
    assert cost.best("broadcast", 1024, 8, link).algorithm == "tree"
    assert cost.best("broadcast", 2**30, 8, link).algorithm == "ring"
    assert cost.best("all_gather", 2**30, 8, link, links_per_rank=2).algorithm == "split"
    assert cost.best("all_gather", 1024, 8, link, links_per_rank=2).algorithm == "halving_doubling"


def test_algorithms_that_need_two_links_are_offered_where_there_are_two():
    assert cost.algorithms("all_reduce") == ("ring", "halving_doubling", "recursive_doubling")
    assert {"bidirectional", "split"} <= set(cost.algorithms("all_reduce", links_per_rank=2))
    assert all(cost.algorithms(op)[0] == "ring" for op in cost.OPS)


def test_the_two_nodes_of_sixteen():
    """All-reduce of 1 GB over 16 H100: the hop between nodes sets the pace of the whole ring."""
    inside = cost.collective("all_reduce", 1e9, 8, H100_NODE.group_link(range(8)))
    across = cost.collective("all_reduce", 1e9, 16, H100_NODE.group_link(range(16)))
    assert inside.seconds == pytest.approx(14 * (1.9e-6 + 125e6 / 450e9))
    assert across.seconds == pytest.approx(30 * (4e-6 + 62.5e6 / 50e9))


@given(m=st.integers(0, 9), k=st.integers(0, 9), n=st.integers(0, 9), batch=st.integers(1, 3))
def test_a_product_is_counted_term_by_term(m, k, n, batch):
    flops = sum(2 for _ in range(batch) for _ in range(m) for _ in range(n) for _ in range(k))
    assert matmul_flops(m, k, n, batch) == flops
    a, b = np.zeros((batch, m, k), np.float32), np.zeros((batch, k, n), np.float32)
    assert matmul_bytes(m, k, n, 4, batch) == a.nbytes + b.nbytes + (a @ b).nbytes


def test_what_cannot_be_is_refused():
    with pytest.raises(ClusterError, match="no collective is named 'allreduce'; there are all_reduce, all_gather"):
        cost.collective("allreduce", 8, 4, LINK)
    with pytest.raises(ClusterError, match="no algorithm is named 'tree' for all_reduce; there are ring, halving"):
        cost.collective("all_reduce", 8, 4, LINK, "tree")
    for num_ranks in (0, -1, 2.0, True):
        with pytest.raises(ClusterError, match="it must be a whole number of ranks, 1 or more"):
            cost.collective("all_reduce", 8, num_ranks, LINK)  # type: ignore[arg-type]
        with pytest.raises(ClusterError, match="num_ranks is "):
            cost.lower_bound("all_reduce", 8, num_ranks, LINK)  # type: ignore[arg-type]
    for nbytes in (-1, math.nan, math.inf):
        with pytest.raises(ClusterError, match="nbytes is "):
            cost.collective("all_reduce", nbytes, 4, LINK)
    with pytest.raises(ClusterError, match="no collective is named 'collect'"):
        cost.lower_bound("collect", 8, 4, LINK)
    with pytest.raises(ClusterError, match="no collective is named 'collect'"):
        cost.bytes_sent("collect", 8, 4, 4, 0)
    for elements, ranks, index in ((8, 4, 4), (8, 4, -1), (-8, 4, 0), ((1, 2), 4, 0), ((1, 2), 4, 3), (8, 0, 0)):
        with pytest.raises(ClusterError, match=f"index {index} of {ranks} ranks"):
            cost.bytes_sent("all_gather", elements, 4, ranks, index)
