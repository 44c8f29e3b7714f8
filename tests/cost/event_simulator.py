"""An event simulator for tests of the clock: slow and simple, written from the rules alone.

A program is one list per rank of
    ("compute", seconds)
    ("send", name, target, bytes, said)
    ("issue", name, group, bytes, said)     its part of a collective
    ("wait", name)                          for a message to this rank, or one of its collectives
"""

from __future__ import annotations

import random
from collections.abc import Callable

Op = tuple
Span = tuple[float, float]
LATENCY, BANDWIDTH = 3e-6, 1e9


def collective_seconds(num_bytes: int, num_ranks: int) -> float:
    """The time of a ring all_reduce."""
    return 2 * (num_ranks - 1) * LATENCY + 2 * (num_ranks - 1) * num_bytes / num_ranks / BANDWIDTH


def simulated(programs: list[list[Op]], seconds: Callable[[int, int], float] = collective_seconds) -> dict[str, Span]:
    """name of a message or collective -> when it runs; "end 3" -> when rank 3 is done."""
    num = len(programs)
    clock, place, port = [0.0] * num, [0] * num, [0.0] * num
    spans: dict[str, Span] = {}
    came: dict[str, dict[int, tuple[float, int]]] = {}
    ready: dict[str, tuple] = {}  # name -> (when, {rank: place in its program}, how long ports are held, latency, said)

    def can_go_on(rank: int) -> bool:
        if place[rank] == len(programs[rank]):
            return False
        op = programs[rank][place[rank]]
        return op[0] != "wait" or op[1] in spans

    while True:
        going = [rank for rank in range(num) if can_go_on(rank)]
        first = min((clock[rank] for rank in going), default=float("inf"))
        at = min((when for when, *_ in ready.values()), default=float("inf"))
        if first == at == float("inf"):
            break
        instant = at * (1 + 1e-12)  # times that differ only by rounding are equal
        if first <= instant:
            rank = min(going, key=lambda rank: clock[rank])
            kind, *about = programs[rank][place[rank]]
            if kind == "compute":
                clock[rank] += about[0]
            elif kind == "wait":
                clock[rank] = max(clock[rank], spans[about[0]][1])
            elif kind == "send":
                name, _, num_bytes, said = about
                ready[name] = clock[rank], {rank: place[rank]}, num_bytes / BANDWIDTH, LATENCY, said
            else:
                name, group, num_bytes, said = about
                came.setdefault(name, {})[rank] = clock[rank], place[rank]
                if len(came[name]) == len(group):
                    when = max(time for time, _ in came[name].values())
                    places = {member: there for member, (_, there) in came[name].items()}
                    ready[name] = when, places, seconds(num_bytes, len(group)), 0.0, said
            place[rank] += 1
            continue
        now = {name: one for name, one in ready.items() if one[0] <= instant}

        def is_first(name: str, now: dict[str, tuple] = now) -> bool:
            mine = now[name][1]
            return not any(rank in other[1] and other[1][rank] < mine[rank] for other in now.values() for rank in mine)

        names = [name for name in now if is_first(name)] or list(now)
        name = min(names, key=lambda name: now[name][4])
        when, places, held, latency, _ = ready.pop(name)
        start = max(when, *(port[rank] for rank in places))
        for rank in places:
            port[rank] = start + held
        spans[name] = start, start + held + latency
    assert all(place[rank] == len(programs[rank]) for rank in range(num)), "a deadlock"
    return spans | {f"end {rank}": (clock[rank], clock[rank]) for rank in range(num)}


def random_programs(chance: random.Random, groups: list[tuple[int, ...]], num_ranks: int) -> list[list[Op]]:
    """Programs with overlap and no deadlock: in each phase, each rank issues its operations in its own order, computes
    in between, and then waits for some operations that are pending. Some computations take equally long."""
    programs: list[list[Op]] = [[] for _ in range(num_ranks)]
    pending: list[list[str]] = [[] for _ in range(num_ranks)]
    usual = [chance.choice((1e-5, 3e-5, 1e-4)) for _ in range(2)]
    for phase in range(chance.randint(1, 5)):
        queues: list[dict[object, list[Op]]] = [{} for _ in range(num_ranks)]  # by communicator, in its order
        for number in range(chance.randint(1, 6)):
            name, line = f"{phase}.{number}", f"line {chance.randint(1, 99)}"
            num_bytes = chance.choice((1_000, 4_000, 20_000, chance.randrange(4, 80_000, 4)))
            if chance.random() < 0.4:
                source, target = chance.sample(range(num_ranks), 2)
                op = "send", name, target, num_bytes, (line, "send", num_bytes, name)
                queues[source].setdefault((source, target), []).append(op)
                pending[target].append(name)
            else:
                group = chance.choice(groups)
                for rank in group:
                    op = "issue", name, group, num_bytes, (line, "all_reduce", num_bytes, name)
                    queues[rank].setdefault(group, []).append(op)
                    pending[rank].append(name)
        for rank, program in enumerate(programs):
            while queues[rank]:
                key = chance.choice(list(queues[rank]))
                if chance.random() < 0.5:
                    program.append(("compute", chance.choice((*usual, chance.uniform(1e-6, 1e-4)))))
                program.append(queues[rank][key].pop(0))
                if not queues[rank][key]:
                    del queues[rank][key]
            chance.shuffle(pending[rank])
            for _ in range(chance.randint(0, len(pending[rank]))):
                if chance.random() < 0.3:
                    program.append(("compute", chance.choice((*usual, chance.uniform(1e-6, 1e-4)))))
                program.append(("wait", pending[rank].pop()))
    for rank, program in enumerate(programs):
        program += [("wait", name) for name in pending[rank]]
    return programs


def renamed(programs: list[list[Op]], names: list[int]) -> list[list[Op]]:
    """The same programs, with rank r renamed to names[r]."""
    found: list[list[Op]] = [[] for _ in programs]
    for rank, program in enumerate(programs):
        for kind, *about in program:
            if kind == "send":
                about[1] = names[about[1]]
            elif kind == "issue":
                about[1] = tuple(names[member] for member in about[1])
            found[names[rank]].append((kind, *about))
    return found
