"""Crossed orders: collectives of two groups that are in flight together, and that ranks have issued in opposite orders.

On NCCL, each group is a communicator with a queue of its own. Where one rank's GPU has begun the first of two
collectives, and another one's the second, each may occupy what the other one needs, and neither ends. Whether that
happens depends on the sizes and on the GPU, so such a program may run a thousand times and hang once.

What two threads of a rank issue is not compared: no line of the program says which comes first, and the operating
system may decide otherwise each time. In JAX there is nothing to compare: all ranks run one compiled program, in which
XLA has put the collectives into one order; where ranks take different branches, the deadlock check speaks.
"""

from __future__ import annotations

from tplab.cost.lanes import ISSUE, WAIT, Log


def crossed(log: Log) -> list[str]:
    """What is issued in opposite orders, one sentence for each pair of lines. Threads of a rank count apart."""
    issued: dict[tuple[int, int], int] = {}  # (collective, rank) -> the entry
    forms: dict[tuple[int, int], int] = {}
    together: dict[tuple[int, int], int] = {}  # two collectives, in the order of this rank
    flying: list[dict[int, int]] = [{} for _ in log.ranks]  # of each lane: entry -> collective
    entries = log.since(0)
    wanted = entries[:, 1]
    for entry in ((wanted == ISSUE) | (wanted == WAIT)).nonzero()[0].tolist():
        lane, does, a, b = (int(value) for value in entries[entry])
        rank = log.ranks[lane]
        if does == WAIT:
            flying[lane].pop(a, None)
            continue
        group = log.collectives[b][1]
        for other in flying[lane].values():
            before = log.collectives[forms[other, rank]][1]
            if before != group and len(set(before).intersection(group)) > 1:
                together.setdefault((other, a), rank)
        issued[a, rank], forms[a, rank] = entry, b
        flying[lane][entry] = a
    found: dict[frozenset[str], str] = {}  # by what it is about
    for (first, second), rank in together.items():
        members = (set(log.collectives[forms[one, rank]][1]) for one in (first, second))
        for other in sorted(set.intersection(*members)):
            theirs = [issued.get((one, other)) for one in (first, second)]
            if theirs[0] is not None and theirs[1] is not None and theirs[1] < theirs[0]:
                lines = [_text(log, forms[one, rank]) for one in (first, second)]
                found.setdefault(frozenset(lines), _SENTENCE.format(*lines, rank, other))
                break
    return list(found.values())


_SENTENCE = (
    "{0} and {1} are in flight together, and ranks issue them in opposite orders: rank {2} the one, then the other; "
    "rank {3} the other way. NCCL may hang here; issue them in the same order on every rank, or wait for one of them "
    "before you start the other"
)


def _text(log: Log, form: int) -> str:
    op, _, _, said = log.collectives[form]
    return f"{op} over {said[-1]!r} at {said[0]}"
