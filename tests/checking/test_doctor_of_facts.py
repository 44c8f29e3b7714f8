"""What the doctor concludes from runs that are made up: norms, sums of gradients, shards, operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tplab.checking.blame import loss_and_gradients
from tplab.checking.facts import Facts
from tplab.checking.norms import norm
from tplab.checking.observed import deals
from tplab.checking.recording import Piece, Seen, Sent, Step
from tplab.checking.reference import Reference
from tplab.checking.same_model import Finding, Row
from tplab.checking.sends import adds_up
from tplab.checking.starts import weights
from tplab.checking.trail import Op, Trail
from tplab.checking.trails import Trails

DRAWN = np.random.default_rng(0)
Arrays = Mapping[str, np.ndarray]


def facts_of(
    ours: Sequence[Arrays], whole: Arrays, *, grads: Sequence[Arrays] = (), norms: Sequence[float] = (), sent: int = 0
) -> Facts:
    """One step, in which the reference's gradients are its weights, and so are the ranks' unless they are given. sent:
    how many elements each rank has put into a sum in the optimizer"""

    def seen(held: Arrays, gradients: Arrays, norm: float | None) -> Seen:
        pieces, every = ({name: Piece(x) for name, x in arrays.items()} for arrays in (held, gradients))
        step = Step(gradients=every, parameters=pieces, settings={name: {} for name in held}, lines={"step": "t.py:9"})
        step.norms += [(norm, "t.py:5", tuple(held))] if norm is not None else []
        step.sent += [Sent("all_reduce", "sum", tuple(range(len(ours))), "o.py:1", "step", sent)] * bool(sent)
        return Seen(weights=pieces, steps=[step])

    theirs = seen(whole, whole, sum(float((x**2).sum()) for x in whole.values()) ** 0.5 if norms else None)
    given = zip(ours, grads or ours, norms or [None] * len(ours), strict=True)
    return Facts([seen(*one) for one in given], Reference([theirs]))


def whole_of(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: DRAWN.standard_normal(shape) for name, shape in shapes.items()}


def cause_of_norm(facts: Facts) -> str:
    (fault,) = (one for one in norm(facts) if isinstance(one, Finding))
    return fault.hypotheses[0].cause


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_each_stage_of_a_pipeline_takes_its_own_norm(stages: int):
    whole = whole_of(**{f"layers.{stage}": (3, 2) for stage in range(stages)})
    held = [{name: x} for name, x in whole.items()]
    own = [float(np.linalg.norm(x)) for x in whole.values()]
    assert "takes the norm of only what it holds" in cause_of_norm(facts_of(held, whole, norms=own))


@pytest.mark.parametrize(
    ("copies", "share", "cause"),
    [
        (2, 1.0, "squares are added up over ranks that hold copies"),
        (1, 0.5, "this is not the norm of the whole gradient"),
        (2, 0.5, "this is not the norm of the whole gradient"),
    ],
    ids=["copies count twice", "half is missing", "both"],
)
def test_squares_are_counted_in_one_wrong_way_or_in_no_known_one(copies: int, share: float, cause: str):
    whole = whole_of(dense=(4, 3), experts=(8, 2))
    held = [{"dense": whole["dense"], "experts": half} for half in np.split(whole["experts"], 2)]
    counted = [part[: int(share * len(part))] for part in np.split(whole["experts"], 2)]
    square = copies * (whole["dense"] ** 2).sum() + sum((x**2).sum() for x in counted)
    assert cause_of_norm(facts_of(held, whole, norms=[float(square**0.5)] * 2)).startswith(cause)


@pytest.mark.parametrize(("sent", "is_added"), [(0, False), (4, False), (6, True)])
def test_an_optimizer_adds_up_gradients_if_it_reduces_as_many_elements(sent: int, is_added: bool):
    whole = whole_of(w=(3, 2))
    parts = [{"w": 0.25 * whole["w"]}, {"w": 0.75 * whole["w"]}]
    found = list(loss_and_gradients(facts_of([whole, whole], whole, grads=parts, sent=sent)))
    assert any(isinstance(one, Finding) for one in found) != is_added
    words = " ".join(one.words for one in found if isinstance(one, Row))
    assert ("once the optimizer has added them up over ranks at o.py:1" in words) == is_added, words
    (_, row) = loss_and_gradients(facts_of([whole, whole], whole, sent=sent))
    assert isinstance(row, Row) and row.ok and "added" not in row.words  # they were right before the step


def test_only_gradients_of_the_same_part_add_up():
    half = DRAWN.standard_normal((2, 3))
    whole = {"w": np.concatenate([half, half + 1])}
    held = [{"w": x} for x in np.split(whole["w"], 2)]
    facts = facts_of(held, whole, grads=[{"w": 0.5 * half}, {"w": 0.5 * half}])
    facts.reference.gradients(0)["w"][:] = np.concatenate([half, half])
    assert not adds_up(facts, "w", [(0, 1)], "sum", 1e-6)
    ones = {"w": np.ones((2, 3))}
    for shape, is_right in ((2, 3), True), ((1, 3), False), ((2,), False):
        facts = facts_of([ones, ones], ones, grads=[{"w": np.full(shape, 0.5)}] * 2)
        assert adds_up(facts, "w", [(0, 1)], "sum", 1e-6) == is_right


@pytest.mark.parametrize(("ranks", "rows", "own", "tried"), [(3, 10, 3, 0), (3, 9, 3, 1), (6, 8, 4, 2)])
def test_equal_shards_are_given_the_parts_that_there_are(ranks: int, rows: int, own: int, tried: int):
    whole = whole_of(w=(rows, 4))
    held = [{"w": np.ones((own, 1)) * [2.0, 3, 4, 5]}] * ranks
    first = next(one for one in weights(facts_of(held, whole), may_ask=False) if isinstance(one, Finding))
    assert first.text_of_factor == "every rank's shard is the same"
    assert [one.repair.values.keys() for one in first.hypotheses] == [{(rank, "w") for rank in range(ranks)}] * tried
    for one in first.hypotheses:
        values = [one.repair.values[rank, "w"] for rank in range(ranks)]
        assert np.array_equal(np.unique(np.concatenate(values)), np.unique(whole["w"]))


def test_parts_are_dealt_to_all_ranks():
    whole = np.arange(24).reshape(4, 6)

    def firsts(shape: tuple[int, ...], ranks: int) -> list[list[int]]:
        return [[int(part[0, 0]) for part in parts.values()] for parts in deals(whole, shape, ranks)]

    assert firsts((2, 6), 4) == [[0, 12, 0, 12], [0, 0, 12, 12]]
    assert firsts((4, 3), 6) == [[0, 3] * 3, [0, 0, 0, 3, 3, 3]]
    assert firsts((2, 3), 4) == [[0, 12, 3, 15], [0, 3, 12, 15]]
    assert firsts((4, 6), 3) == [[0, 0, 0]]
    assert firsts((3, 6), 2) == [[0, 18], [0, 6]]  # the last part is padded, or begins with a row of another


def test_an_operation_that_not_all_ranks_have_is_no_other_rank_s():
    x = np.arange(4.0)

    def op(turn: int) -> Op:
        return Op(("t.py:3", "mul", turn), ["t.py:3"], [], [x], given={1: (x, "t.py:2")})

    trails = Trails([Trail([op(0)]), Trail([op(0), op(1)], end=1)], Trail([op(0), op(1)], end=1))
    assert list(trails.wanted_by(op(1))) == []


def test_operations_of_two_ranks_that_say_the_same_are_two():
    """As on two stages of a pipeline, of which only the last has a loss."""

    def ops(*values: float) -> list[Op]:
        return [Op(("t.py:3", "mul", turn), ["t.py:3"], [], [np.full(3, x)]) for turn, x in enumerate(values)]

    trails = Trails([Trail(ops(1.0)), Trail(ops(2.0), end=0)], Trail(ops(3.0), end=0))
    op = trails.first_wrong()
    assert op is not None and op.values[0][0] == 2.0 and list(trails.parts_in(op)) == []
