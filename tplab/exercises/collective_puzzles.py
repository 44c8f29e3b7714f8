"""The puzzles of lab 02: collectives with a budget of rounds, and of bytes that the busiest rank may send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tplab.exercises.check import Answer, Verdict, grade, who_works
from tplab.exercises.drawn import Moving
from tplab.exercises.exercise import RING, Exercise, Framework, Mistakes, Seen, Tensors, Wrong
from tplab.exercises.verdict import Refused, with_task
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.trace.event import Event
from tplab.trace.trace import Trace

PIECE = 3 * 4  # bytes of three float32


@dataclass(frozen=True)
class Puzzle:
    """A puzzle: write a collective that takes at most this many rounds, and in which no rank sends more than this many
    pieces.

    asked       what each rank has, and what it should return
    sizes       the numbers of ranks that it is tried on; the budget is stated for the first
    rounds      number of ranks -> the most sequential hops
    pieces      number of ranks -> the most pieces that a rank may send
    late, much  hints for a program that takes too many rounds, or sends too much
    exercise    what is computed; every piece has three numbers
    neighbours  only neighbours are linked, and a rank may use both of its links in one round. Otherwise a rank may send
                to any rank, but in each round it sends only one message and receives only one
    """

    asked: str
    sizes: tuple[int, ...]
    rounds: Callable[[int], int]
    pieces: Callable[[int], int]
    late: str
    much: str
    exercise: Exercise
    neighbours: bool = False

    def __str__(self) -> str:
        return f"{self.asked}\n   {self.budget()}"

    def budget(self) -> str:
        """ "On 8 ranks: 3 rounds, 36 bytes"."""
        ranks = self.sizes[0]
        return f"On {ranks} ranks: {self.rounds(ranks)} rounds, {self.pieces(ranks) * PIECE} bytes"


def _doublings(num_ranks: int) -> int:
    """ceil(log2 R): the rounds until data reaches all ranks, if every rank that has it sends it on."""
    return (num_ranks - 1).bit_length()


def _pieces(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """One piece per rank."""
    return {"x": rng.integers(0, 10, (mesh.size, 3)).astype(np.float32)}


def _pieces_for_each(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """On each rank, one piece for every rank."""
    return {"x": rng.integers(0, 10, (mesh.size**2, 3)).astype(np.float32)}


def _square(x: np.ndarray) -> np.ndarray:
    """[R, R, 3]: all pieces, by rank and place."""
    ranks = round(len(x) ** 0.5)
    return x.reshape(ranks, ranks, 3)


# --- known mistakes ------------------------------------------------------------------------------------------------


def _places(order: Callable[[int, np.ndarray, int], np.ndarray]) -> Wrong:
    """The right pieces, in another order: place k has piece order(index of the rank, k, number of ranks)."""

    def wrong(seen: Seen) -> np.ndarray:
        num_ranks = seen.mesh.size
        return seen.want[order(seen.rank, np.arange(num_ranks), num_ranks)]

    return wrong


def _up(i: int, k: np.ndarray, num_ranks: int) -> np.ndarray:
    return (i + k) % num_ranks


def _down(i: int, k: np.ndarray, num_ranks: int) -> np.ndarray:
    return (i - k) % num_ranks


def _pairs(i: int, k: np.ndarray, num_ranks: int) -> np.ndarray:
    return np.minimum(i ^ k, num_ranks - 1)


def _alternating(i: int, k: np.ndarray, num_ranks: int) -> np.ndarray:
    """i, i - 1, i + 1, i - 2, ..."""
    return (i + (k + 1) // 2 * np.where(k % 2, -1, 1)) % num_ranks


IN_OTHER_ORDER = tuple(_places(order) for order in (_down, _up, _pairs, _alternating))


def _around_the_end(seen: Seen) -> np.ndarray:
    """The sum of this rank's number and those before it, also around the end of the ring."""
    x, reach = seen.tensors["x"], 1 << _doublings(seen.mesh.size)
    return x[[(seen.rank - away) % seen.mesh.size for away in range(reach)]].sum(0, keepdims=True)


OWN: Mistakes = {"This is what the rank had at first: nothing has arrived.": lambda seen: seen.own["x"]}

# --- what is computed ----------------------------------------------------------------------------------------------

GATHER = Exercise(
    name="",
    tensors=_pieces,
    specs={"x": P("tp")},
    plain=lambda x: x,
    results={"y": P()},
    mistakes={"y": {"All pieces are there, in the order in which they came. Put piece j at place j.": IN_OTHER_ORDER}},
    not_with=RING,
    is_precise=True,
)
RUNNING_SUM = replace(
    GATHER,
    plain=lambda x: x.cumsum(0),
    results={"y": P("tp")},
    mistakes={
        "y": {
            **OWN,
            "The sums go on around the end: rank 0 has added what other ranks have.\n"
            "`ppermute` sends only along the pairs that you name. Ranks to which nothing is sent receive zeros.": (
                _around_the_end
            ),
            "These are the sums of the ranks *before* rank i. Its own number is missing.": (
                lambda seen: seen.want - seen.own["x"]
            ),
            "This is the sum of rank i and all ranks *after* it. In which direction do the sums travel?": (
                lambda seen: seen.tensors["x"][seen.rank :].sum(0, keepdims=True)
            ),
        }
    },
)
ALL_TO_ALL = replace(
    GATHER,
    tensors=_pieces_for_each,
    plain=lambda x: _square(x).swapaxes(0, 1).reshape(x.shape),
    results={"y": P("tp")},
    mistakes={
        "y": {
            **OWN,
            "All pieces have arrived, but row j is not the one from rank j. Put them back into that order.": (
                IN_OTHER_ORDER
            ),
        }
    },
)
ALL_REDUCE = replace(
    GATHER,
    tensors=_pieces_for_each,
    plain=lambda x: _square(x).sum(0),
    mistakes={
        "y": {
            **OWN,
            "Every sum is right, but not in its place. Put the sum of piece j at place j.": IN_OTHER_ORDER,
        }
    },
)

# --- the puzzles ---------------------------------------------------------------------------------------------------

PUZZLES = {
    1: Puzzle(
        "x [1, 3]. A running sum: rank i returns the sum of x over ranks 0 to i.",
        (8, 9, 3, 1),  # 9: distances of 1, 2 and 4 are too few
        _doublings,
        _doublings,
        "Every rank can add something in every round. After round 1 each can know the sum of two numbers.\n"
        "Of how many after round 2?",
        "A sum is as small as one number. Send sums, not the numbers that are in them.",
        RUNNING_SUM,
    ),
    2: Puzzle(
        "x [1, 3]. Every rank returns all pieces [R, 3], piece j in row j. R is a power of two.",
        (8, 4, 2, 1),
        _doublings,
        lambda ranks: ranks - 1,
        "A rank that has two pieces can send both at once. How many pieces can it have after round 2?",
        "A rank has 1 piece before round 1, 2 before round 2 and 4 before round 3. Send these, and nothing else.",
        GATHER,
    ),
    3: Puzzle(
        "x [1, 3]. As in puzzle 2, for any number of ranks. Only neighbours have links, one in each direction.",
        (5, 4, 3, 2, 1),
        lambda ranks: ranks // 2,
        lambda ranks: ranks - 1,
        "`start` begins a hop without waiting for it. Start a hop in each direction before you wait for either.",
        "Does a rank receive a piece twice? Think of an even number of ranks.",
        GATHER,
        neighbours=True,
    ),
    4: Puzzle(
        "x [R, 3]. An all-to-all: rank i returns piece i of every rank, rank j's in row j. R is a power of two.",
        (8, 4, 2, 1),
        _doublings,
        lambda ranks: sum(away.bit_count() for away in range(ranks)),
        "Let the pieces for ranks 1, 3, 5 and 7 places on share a message that goes 1 place on.\n"
        "Which pieces share the message that goes 2 places on?",
        "Each message needs only half of the pieces. A piece that goes 5 places on travels 1 and then 4, and never 2.",
        ALL_TO_ALL,
    ),
    5: Puzzle(
        "x [R, 3]. An all-reduce: every rank returns the sum of all x. R is a power of two.",
        (8, 4, 2, 1),
        lambda ranks: 2 * _doublings(ranks),
        lambda ranks: 2 * (ranks - 1),
        "Pieces that go around one by one need 2(R - 1) rounds. Let two partners share the work: each sends the half\n"
        "that the other will add up. What do they do with their halves in the next round?",
        "In recursive doubling, both partners add up the same numbers. If each adds up only one half, the next round\n"
        "has half as much to send. In the end the sums go back the way they came.",
        ALL_REDUCE,
    ),
    6: Puzzle(
        "x [R, 3]. As in puzzle 5, for any number of ranks.",
        (6, 5, 7, 1),
        lambda ranks: 2 * _doublings(ranks),
        lambda ranks: 2 * (ranks - 1),
        "Put piece i + j at place j. Send places 3 to 5 to the rank 3 places on, to be added to its places 0 to 2.\n"
        "Now three places are left. How far does place 2 go?",
        "Every rank must add up the same number of pieces. Put piece i + j at place j: then each round halves the\n"
        "places that are left, and 6 become 3, then 2, then 1.",
        ALL_REDUCE,
    ),
}


def check_puzzle(number: int, fn: Callable[..., Any], framework: Framework = "torch") -> Verdict:
    """Check that `fn`, the program of one rank, solves puzzle `number`. Never raises.

    fn takes x and returns what the puzzle asks for, over axis "tp"; it sends with `ring_shift` and `ppermute`
    """
    if number not in PUZZLES:
        return Verdict(False, f"There is no puzzle {number!r}; there are {', '.join(map(str, PUZZLES))}.")
    puzzle, name = PUZZLES[number], f"puzzle_{number}"
    exercise = replace(puzzle.exercise, name=name, meshes=tuple(Mesh(tp=ranks) for ranks in puzzle.sizes))

    def within_budget(answer: Answer) -> Verdict:
        for trace in answer.traces:
            if fault := _fault(trace, puzzle):
                raise Refused(Moving(False, f": the numbers are right, but {fault}", trace))
        tried = " and ".join(str(ranks) for ranks in puzzle.sizes[1:] if ranks > 2)
        text = f" is solved.\n{puzzle.budget()}. It also keeps its budgets on {tried} ranks."
        return Moving(True, text, answer.traces[0])

    return with_task(grade(fn, exercise, framework, within_budget), puzzle.budget())


def _fault(trace: Trace, puzzle: Puzzle) -> str:
    """The fault in a program that returns the right result, in words; "" if there is none."""
    ranks, sends = trace.mesh.size, trace.select(kind="send").events
    if ops := sorted({event.op for event in trace.select(kind="collective").events}):
        return f"{who_works(ops)}.\nBuild it from ring_shift and ppermute."
    for event in sends:
        away = ((event.peer or 0) - event.rank) % ranks
        if puzzle.neighbours and away not in (1, ranks - 1):
            text = f"on {ranks} ranks, rank {event.rank} sends to rank {event.peer}, {away} places on.\n"
            return f"{text}Only neighbours are linked here: ring_shift by 1 and by -1."
    if trace.num_steps > puzzle.rounds(ranks):
        text = f"it takes {_rounds(trace.num_steps)} on {ranks} ranks, where {puzzle.rounds(ranks)} will do."
        return f"{text}\n{puzzle.late}"
    if not puzzle.neighbours and (crowd := _crowd(sends, puzzle.rounds(ranks))):
        return f"on {ranks} ranks, {crowd}"
    busiest = max(trace.mesh.ranks, key=lambda rank: trace.bytes_sent(rank=rank))
    sent, enough = trace.bytes_sent(rank=busiest), puzzle.pieces(ranks) * PIECE
    if sent > enough:
        text = f"on {ranks} ranks, rank {busiest} sends {sent} bytes, where {enough} will do."
        return f"{text}\n{puzzle.much}"
    return ""


def _crowd(sends: Sequence[Event], rounds: int) -> str:
    """The first rank that has more messages to send, or to receive, than there are rounds left; "" if there is none.

    A message may be sent later than it could be, so the messages of a single round are not counted.
    """
    for first in range(rounds):
        late = [event for event in sends if event.step >= first]
        for does, ends in (("sends", [event.rank for event in late]), ("receives", [event.peer for event in late])):
            for rank, number in Counter(ends).most_common(1):
                if number > rounds - first:
                    text = f"rank {rank} {does} {number} messages in {_rounds(rounds - first)}."
                    return f"{text}\nIn each round a rank may send one message and receive one."
    return ""


def _rounds(number: int) -> str:
    return f"{number} round{'' if number == 1 else 's'}"
