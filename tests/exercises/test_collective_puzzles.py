"""The puzzles of lab 02: solutions keep their budgets in both frameworks, and each known wrong answer gets its hint."""

import base64
import io
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image

import tplab.jax as tj
import tplab.torch as tt
from labs.source import build
from tplab.exercises.check import Verdict
from tplab.exercises.collective_puzzles import PUZZLES, check_puzzle
from tplab.exercises.drawn import Moving

# ---------------------------------------------------------------------------------------------------- solutions


def running_sum(ops: Any = tt) -> Callable:
    def solution(x):
        R, away = ops.axis_size("tp"), 1
        while away < R:
            x = x + ops.ppermute(x, "tp", [(k, k + away) for k in range(R - away)])
            away *= 2
        return x

    return solution


def joined(ops: Any, parts: list[Any]) -> Any:
    return torch.cat(parts) if ops is tt else jnp.concatenate(parts)


def doubled(x):
    """Pieces i, i - 1, i - 2, ... by doubling, and then in order."""
    R, i, y = tt.axis_size("tp"), tt.axis_index("tp"), x
    while len(y) < R:
        y = torch.cat([y, tt.ring_shift(y[: R - len(y)], "tp", len(y))])
    return y[(i - np.arange(R)) % R]


def both_ways(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    pieces, up, down = {i: x}, x, x
    for hop in range(1, R // 2 + 1):
        rising = tt.start(tt.ring_shift, up, "tp", 1)
        if hop <= (R - 1) // 2:
            down = tt.start(tt.ring_shift, down, "tp", -1).wait()
            pieces[(i + hop) % R] = down
        up = rising.wait()
        pieces[(i - hop) % R] = up
    return torch.cat([pieces[j] for j in range(R)])


def both_ways_in_jax(x):
    R, i = tj.axis_size("tp"), tj.axis_index("tp")
    from_below, from_above = [x], []  # pieces i, i - 1, ... and i + 1, i + 2, ...
    for hop in range(1, R // 2 + 1):
        rising = tj.start(tj.ring_shift, from_below[-1], "tp", 1)
        if hop <= (R - 1) // 2:
            from_above.append(tj.start(tj.ring_shift, [x, *from_above][-1], "tp", -1).wait())
        from_below.append(rising.wait())
    return jnp.concatenate([*from_below, *reversed(from_above)])[(i - np.arange(R)) % R]


def bruck(x):
    R, i, places = tt.axis_size("tp"), tt.axis_index("tp"), np.arange(tt.axis_size("tp"))
    y, away = x[(i + places) % R], 1  # place k: for the rank k places on
    while away < R:
        far = (places & away) > 0
        y[far] = tt.ring_shift(y[far], "tp", away)
        away *= 2
    return y[(i - places) % R]  # place k: from the rank k places back


def halved(x):
    R, i, away = tt.axis_size("tp"), tt.axis_index("tp"), tt.axis_size("tp") // 2
    while away:
        mine, theirs = (slice(away), slice(away, None)) if not i & away else (slice(away, None), slice(away))
        x = x[mine] + tt.ppermute(x[theirs], "tp", [(k, k ^ away) for k in range(R)])
        away //= 2
    while len(x) < R:
        news = tt.ppermute(x, "tp", [(k, k ^ len(x)) for k in range(R)])
        x = torch.cat([news, x] if i & len(x) else [x, news])
    return x


def on_any_number(ops: Any = tt) -> Callable:
    """Träff 2023: places are halved, rounded up, until one is left, and then doubled again."""

    def solution(x):
        R, i, places = ops.axis_size("tp"), ops.axis_index("tp"), np.arange(ops.axis_size("tp"))
        y, left = x[(i + places) % R], [R]
        while left[-1] > 1:
            left.append((left[-1] + 1) // 2)
        for many, few in pairwise(left):
            news = ops.ring_shift(y[few:many], "tp", few)
            y = joined(ops, [y[: many - few] + news, y[many - few : few]])
        for few, many in pairwise(left[::-1]):
            y = joined(ops, [y, ops.ring_shift(y[: many - few], "tp", -few)])
        return y[(places - i) % R]

    return solution


def chain(x):
    for k in range(tt.axis_size("tp") - 1):
        x = x + tt.ppermute(x, "tp", [(k, k + 1)])
    return x


SOLVED = {1: running_sum(), 2: doubled, 3: both_ways, 4: bruck, 5: halved, 6: on_any_number()}


@pytest.mark.parametrize("number", PUZZLES)
def test_a_solution_keeps_its_budgets(number: int):
    verdict = check_puzzle(number, SOLVED[number])
    assert verdict.passed, verdict
    assert isinstance(verdict, Moving) and verdict.trace.mesh.size == PUZZLES[number].sizes[0]
    assert f"puzzle_{number} is solved" in verdict.text and PUZZLES[number].budget() in verdict.text


def test_a_solution_for_any_number_is_one_for_powers_of_two():
    assert check_puzzle(5, on_any_number()).passed


def test_digits_are_not_lost():
    right = running_sum()
    for dtype in (torch.bfloat16, torch.int32):
        verdict = check_puzzle(1, lambda x, dtype=dtype: right(x.to(dtype)).to(x.dtype))
        assert verdict.passed is False and "right for small whole numbers" in verdict.text


@pytest.mark.parametrize(("number", "program"), [(1, running_sum()), (1, chain)], ids=["solved", "slow"])
def test_the_picture_of_a_run_moves_below_the_words(number: int, program: Callable):
    shown = picture(check_puzzle(number, program))
    assert getattr(shown, "n_frames", 1) > 4
    assert shown.width > 600


def test_a_verdict_on_a_run_plays_where_there_is_a_kernel():
    verdict = check_puzzle(1, chain)
    assert isinstance(verdict, Moving)
    data, metadata = verdict._repr_mimebundle_()
    assert data.keys() == verdict.card()._repr_mimebundle_()[0].keys() and data["text/plain"] == verdict.text
    assert metadata["image/png"]["alt"] == verdict.text


@pytest.mark.parametrize(("number", "program"), [(1, running_sum(tj)), (3, both_ways_in_jax)], ids=["1", "3"])
def test_a_solution_in_jax(number: int, program: Callable):
    verdict = check_puzzle(number, program, "jax")
    assert verdict.passed, verdict


def test_budgets_are_those_of_the_formulas():
    """As in tplab.cost: halving and doubling, both directions, Bruck."""
    from tplab import cost

    link = cost.find("h100").inner_link
    for number, name, algorithm, per_rank in [
        (2, "all_gather", "halving_doubling", 1),
        (3, "all_gather", "bidirectional", 1),
        (4, "all_to_all", "bruck", 8),
        (5, "all_reduce", "halving_doubling", 8),
        (6, "all_reduce", "halving_doubling", 6),
    ]:
        puzzle = PUZZLES[number]
        ranks = puzzle.sizes[0]
        formula = cost.collective(name, per_rank * 12, ranks, link, algorithm)
        assert (formula.hops, formula.bytes) == (puzzle.rounds(ranks), puzzle.pieces(ranks) * 12)


# ------------------------------------------------------------------------------------------------- wrong answers


def around(x):
    away = 1
    while away < tt.axis_size("tp"):
        x, away = x + tt.ring_shift(x, "tp", away), 2 * away
    return x


def three_distances(x):
    """Right on up to eight ranks."""
    for away in (1, 2, 4):
        x = x + tt.ppermute(x, "tp", [(k, k + away) for k in range(tt.axis_size("tp") - away)])
    return x


def from_the_other_side(x):
    R, away = tt.axis_size("tp"), 1
    while away < R:
        x, away = x + tt.ppermute(x, "tp", [(k + away, k) for k in range(R - away)]), 2 * away
    return x


def lists_of_numbers(x):
    return doubled(x)[: tt.axis_index("tp") + 1].sum(0, keepdim=True)


def at_once(x):
    """Every rank sends its number to all ranks after it, without waiting."""
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    flights = [tt.start(tt.ring_shift, x, "tp", k) for k in range(1, R)]
    return x + sum(flight.wait() * (k + 1 <= i) for k, flight in enumerate(flights))


def without_its_own(x):
    return running_sum()(x) - x


def passed_on(x):
    arrived = [x]
    for _ in range(tt.axis_size("tp") - 1):
        arrived.append(tt.ring_shift(arrived[-1], "tp"))
    return arrived


def ring_gather(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    return torch.cat(passed_on(x))[(i - np.arange(R)) % R]


def straight(x):
    """Every rank sends its own piece to each other rank."""
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    got = [tt.ring_shift(x, "tp", away) if away else x for away in range(R)]
    return torch.cat([got[(i - place) % R] for place in range(R)])


def by_way_of_rank_0(x):
    """All ranks send to rank 0 at the same time, and the sum goes back along a tree."""
    R, i, know = tt.axis_size("tp"), tt.axis_index("tp"), 1
    for k in range(1, R):
        x = x + tt.ppermute(x, "tp", [(k, 0)])
    while know < R:
        news = tt.ppermute(x, "tp", [(k, k + know) for k in range(know)])
        x, know = news if know <= i < 2 * know else x, 2 * know
    return x


def padded(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    y, away = torch.zeros(R, 3), 1
    y[i] = x[0]
    while away < R:
        y, away = y + tt.ppermute(y, "tp", [(k, k ^ away) for k in range(R)]), 2 * away
    return y


def paired(x):
    R, away = tt.axis_size("tp"), 1
    while away < R:
        x, away = torch.cat([x, tt.ppermute(x, "tp", [(k, k ^ away) for k in range(R)])]), 2 * away
    return x


def blocking(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    pieces, up, down = {i: x}, x, x
    for hop in range(1, R // 2 + 1):
        up = tt.ring_shift(up, "tp", 1)
        pieces[(i - hop) % R] = up
        if hop <= (R - 1) // 2:
            down = tt.ring_shift(down, "tp", -1)
            pieces[(i + hop) % R] = down
    return torch.cat([pieces[j] for j in range(R)])


def one_message_too_many(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    pieces, up, down = {i: x}, x, x
    for hop in range(1, R // 2 + 1):
        rising, sinking = tt.start(tt.ring_shift, up, "tp", 1), tt.start(tt.ring_shift, down, "tp", -1)
        up, down = rising.wait(), sinking.wait()
        pieces |= {(i - hop) % R: up, (i + hop) % R: down}
    return torch.cat([pieces[j] for j in range(R)])


def twice_at_once(x):
    """A link carries one message after another, also those that start together."""
    y = both_ways(x)
    again = tt.start(tt.ring_shift, x, "tp", 1), tt.start(tt.ring_shift, x, "tp", 1)
    return y + sum(0 * flight.wait() for flight in again)


def from_afar(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    flights = {(i - k) % R: tt.start(tt.ring_shift, x, "tp", k) for k in range(1, R)}
    return torch.cat([x if j == i else flights[j].wait() for j in range(R)])


def both_sides_in_turn(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    arrived = both_ways(x)[(i - np.arange(R)) % R]
    return torch.cat([arrived[[(hop + 1) // 2 if hop % 2 else -(hop // 2) % R]] for hop in range(R)])


def trade(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    got = {i: x[i]}
    for k in range(1, R):
        got[(i - k) % R] = tt.ring_shift(x[(i + k) % R], "tp", k)
    return torch.stack([got[j] for j in range(R)])


def bruck_with_all(x):
    R, i, places = tt.axis_size("tp"), tt.axis_index("tp"), np.arange(tt.axis_size("tp"))
    y, away = x[(i + places) % R], 1
    while away < R:
        far = torch.tensor((places & away) > 0)[:, None]
        y, away = torch.where(far, tt.ring_shift(y, "tp", away), y), 2 * away
    return y[(i - places) % R]


def bruck_unsorted(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    return bruck(x)[(i - np.arange(R)) % R]


def ring_sum(x):
    R, i, hops = tt.axis_size("tp"), tt.axis_index("tp"), np.arange(tt.axis_size("tp"))
    total = x[[(i - 1) % R]]
    for hop in hops[1:]:
        total = tt.ring_shift(total, "tp") + x[[(i - 1 - hop) % R]]
    return torch.cat(passed_on(total))[(i - hops) % R]


def doubling(x):
    R, away = tt.axis_size("tp"), 1
    while away < R:
        x, away = x + tt.ppermute(x, "tp", [(k, k ^ away) for k in range(R)]), 2 * away
    return x


def sums_in_disorder(x):
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    return halved(x)[(i + np.arange(R)) % R]


def folded(x):
    """Ranks that are too many for a power of two give their tensors to others first, and get the sums at the end."""
    R, i = tt.axis_size("tp"), tt.axis_index("tp")
    many = 1 << (R.bit_length() - 1)
    x = x + tt.ppermute(x, "tp", [(k, k - many) for k in range(many, R)])
    away = 1
    while away < many:
        x, away = x + tt.ppermute(x, "tp", [(k, k ^ away) for k in range(many)]), 2 * away
    last = tt.ppermute(x, "tp", [(k - many, k) for k in range(many, R)])
    return last if i >= many else x


@pytest.mark.parametrize(
    ("number", "program", "hint"),
    [
        (1, chain, "takes 7 rounds on 8 ranks, where 3 will do.\nEvery rank can add something in every round"),
        (1, around, "The sums go on around the end"),
        (1, three_distances, "rank 8 of Mesh(tp=9)"),
        (1, from_the_other_side, "all ranks *after* it"),
        (1, without_its_own, "Its own number is missing"),
        (1, lambda x: x, "nothing has arrived"),
        (1, lists_of_numbers, "sends 84 bytes, where 36 will do.\nA sum is as small as one number"),
        (1, at_once, "rank 0 sends 7 messages in 3 rounds.\nIn each round a rank may send one message"),
        (2, ring_gather, "takes 7 rounds on 8 ranks, where 3 will do.\nA rank that has two pieces can send both"),
        (2, straight, "takes 7 rounds on 8 ranks, where 3 will do.\nA rank that has two pieces can send both"),
        (2, padded, "sends 288 bytes, where 84 will do.\nA rank has 1 piece before round 1"),
        (2, paired, "Put piece j at place j"),
        (2, lambda x: tt.all_gather(x, "tp"), "`all_gather` does the work"),
        (3, ring_gather, "takes 4 rounds on 5 ranks, where 2 will do.\n`start` begins a hop"),
        (3, blocking, "takes 4 rounds on 5 ranks, where 2 will do.\n`start` begins a hop"),
        (3, one_message_too_many, "rank 0 sends 48 bytes, where 36 will do.\nDoes a rank receive a piece twice?"),
        (3, twice_at_once, "takes 4 rounds on 5 ranks, where 2 will do."),
        (3, from_afar, "rank 0 sends to rank 2, 2 places on"),
        (3, lambda x: torch.cat(passed_on(x)), "Put piece j at place j"),
        (3, both_sides_in_turn, "Put piece j at place j"),
        (4, trade, "takes 7 rounds on 8 ranks, where 3 will do.\nLet the pieces for ranks 1, 3, 5"),
        (4, bruck_with_all, "sends 288 bytes, where 144 will do.\nEach message needs only half"),
        (4, bruck_unsorted, "row j is not the one from rank j"),
        (4, lambda x: x, "nothing has arrived"),
        (5, ring_sum, "takes 14 rounds on 8 ranks, where 6 will do.\nPieces that go around"),
        (5, by_way_of_rank_0, "rank 0 receives 7 messages in 6 rounds.\nIn each round a rank may send one message"),
        (5, doubling, "sends 288 bytes, where 168 will do.\nIn recursive doubling"),
        (5, sums_in_disorder, "not in its place"),
        (5, lambda x: tt.all_gather(tt.reduce_scatter(x, "tp"), "tp"), "`all_gather` and `reduce_scatter` do the work"),
        (5, lambda x: tt.all_reduce(halved(x), "tp"), "R times too large, for R ranks along tp"),
        (6, ring_sum, "takes 10 rounds on 6 ranks, where 6 will do.\nPut piece i + j"),
        (6, folded, "sends 216 bytes, where 120 will do.\nEvery rank must add up the same"),
        (6, halved, "puzzle_6"),
    ],
)  # fmt: skip
def test_a_wrong_answer_gets_its_hint_and_is_drawn(number: int, program: Callable, hint: str):
    verdict = check_puzzle(number, program)
    assert verdict.passed is False
    assert hint in verdict.text, verdict
    if program is not halved:  # which raises an error on five ranks
        assert isinstance(verdict, Moving) or verdict.panels


def test_an_untouched_puzzle_says_its_budget():
    def puzzle_2(x): ...

    verdict = check_puzzle(2, puzzle_2)
    assert verdict.passed is None
    assert "puzzle_2: not started. On 8 ranks: 3 rounds, 84 bytes" in verdict.text
    assert "There is no puzzle 7; there are 1, 2, 3, 4, 5, 6." in check_puzzle(7, puzzle_2).text


def test_the_labs_first_answer_is_the_slow_one():
    cells = [cell.source for cell in build.read_source("02_collectives").cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"tt": tt, "check_puzzle": check_puzzle}
    exec(next(source for source in cells if source.startswith("def puzzle_1")), names)
    assert "takes 7 rounds" in check_puzzle(1, names["puzzle_1"]).text


def picture(verdict: Verdict) -> Image.Image:
    bundle = verdict._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    return Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
