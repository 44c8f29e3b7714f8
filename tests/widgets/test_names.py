"""What travels has the name that the program gives it, in both frameworks; a maximum is not called a sum."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

import tplab.torch as tt
from tests.widgets.frames import frame
from tplab import Mesh, P
from tplab.widgets.score import words
from tplab.widgets.score.names import Name, names
from tplab.widgets.score.payload import of_animation
from tplab.widgets.score.score import Score, score
from tplab.widgets.score.table import cell_text

FRAMEWORKS = ("torch", "jax")
TABLE = np.array([[0, 7, 6, 4], [4, 8, 0, 6], [2, 0, 5, 9], [7, 7, 7, 7]], np.float32)  # sums 13, 22, 18, 26


def by_library(lab: Any, x: Any) -> Any:
    return lab.ring_all_reduce(x, "tp")


def by_hand(lab: Any, x: Any) -> Any:
    ranks, i = lab.axis_size("tp"), lab.axis_index("tp")
    pieces = x.reshape(ranks, -1)
    total = pieces[(i - 1) % ranks]
    for hop in range(1, ranks):
        total = lab.ring_shift(total, "tp") + pieces[(i - 1 - hop) % ranks]
    return lab.ring_all_gather(total, "tp")


def scored(framework: str, program: Any, x: np.ndarray, **options: Any) -> Score:
    lab = importlib.import_module(f"tplab.{framework}")
    return score(lab.run(lambda x: program(lab, x), Mesh(tp=len(x)), x, in_specs=P("tp"), **options).trace)


def finals(piece: Score) -> dict[int, dict[str, tuple[str, str]]]:
    """rank -> name of the item -> (whose data, value), at the end."""
    found: dict[int, dict[str, tuple[str, str]]] = {}
    for (rank, item), hold in frame(piece, piece.num_steps).cells.items():
        found.setdefault(rank, {})[piece.items[item].name] = cell_text(piece, item, hold)
    return found


def doubling(lab: Any, x: Any) -> Any:
    for away in (1, 2):
        x = x + lab.ppermute(x, "tp", [(k, k ^ away) for k in range(4)])
    return x


def doubling_turned_round(lab: Any, x: Any) -> Any:
    for away in (1, 2):
        x = lab.ppermute(x, "tp", [(k, k ^ away) for k in range(4)]) + x
    return x


def passing_on(lab: Any, x: Any) -> Any:
    total = x
    for _ in range(3):
        x = lab.ring_shift(x, "tp")
        total = total + x
    return total


@pytest.mark.parametrize("cluster", [None, "h100"])
@pytest.mark.parametrize("program", [doubling, doubling_turned_round], ids=lambda program: program.__name__)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_recursive_doubling_is_one_variable_that_grows_on_every_rank(framework: str, program: Any, cluster: str | None):
    piece = scored(framework, program, TABLE[:, :1], cluster=cluster)
    assert [(item.name, item.text, item.origin, item.how) for item in piece.items] == [("x", "x", -1, "sum")]
    for step, expected in (
        (0, [((0,), "0"), ((1,), "4"), ((2,), "2"), ((3,), "7")]),
        # adding takes a moment on a cluster's clock
        (1.5, [((0, 1), "4"), ((0, 1), "4"), ((2, 3), "9"), ((2, 3), "9")]),
        (2, [((0, 1, 2, 3), "13")] * 4),
    ):
        cells = [frame(piece, step).cells[rank, 0] for rank in range(4)]
        assert [(piece.members(cell), *cell_text(piece, 0, cell)) for cell in cells] == [
            (members, number, "") for members, number in expected
        ]
    assert piece.table_caption == "what each rank holds"


def own_piece_first(lab: Any, x: Any) -> Any:
    """A ring whose ranks all begin with a variable of one name."""
    parts = [x.reshape(4, -1)[(lab.axis_index("tp") - hop) % 4] for hop in range(4)]
    part = parts[0] * 1
    for hop in range(1, 4):
        part = lab.ring_shift(part, "tp") + parts[hop]
    return part


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_a_rank_passed_on_is_not_said_to_be_held(framework: str):
    """The program keeps one piece, and a gather would keep all: the messages are the same."""

    def rebound(lab: Any, x: Any) -> Any:
        for _ in range(3):
            x = lab.ring_shift(x, "tp")
        return x

    piece = scored(framework, rebound, TABLE[:, :1])
    assert piece.tells_past and piece.table_caption == "what has been on each rank"
    assert [key.text for key in of_animation(piece)] == ["has been here", "arriving"]


@pytest.mark.parametrize("program", [passing_on, own_piece_first], ids=lambda program: program.__name__)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_pieces_that_are_passed_on_are_no_versions_of_one_variable(framework: str, program: Any):
    piece = scored(framework, program, TABLE)
    assert len(piece.items) == 4 and [item.origin for item in piece.items] == [0, 1, 2, 3]
    assert len(finals(piece)[0]) == 4


def test_halves_are_no_versions_of_one_variable():
    """Recursive halving: what is sent in the second hop is half as large."""

    def halving(lab: Any, x: Any) -> Any:
        for away in (1, 2):
            low, high = x.chunk(2, 1)
            upper = lab.axis_index("tp") // away % 2
            y = low if upper else high
            x = (high if upper else low) + lab.ppermute(y, "tp", [(k, k ^ away) for k in range(4)])
        return x

    assert all(item.origin >= 0 for item in scored("torch", halving, TABLE).items)


@pytest.mark.parametrize("cluster", [None, "h100"])
@pytest.mark.parametrize("program", [by_library, by_hand], ids=lambda program: program.__name__)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_sum_of_piece_k_is_seen_at_place_k(framework: str, program: Any, cluster: str | None):
    piece = scored(framework, program, TABLE, cluster=cluster)
    assert [item.name for item in piece.items] == ["x₀", "x₁", "x₂", "x₃"]
    assert [item.text for item in piece.items] == ["x[0]", "x[1]", "x[2]", "x[3]"]
    for rank in range(4):
        said = [finals(piece)[rank][name] for name in ("x₀", "x₁", "x₂", "x₃")]
        assert said == [("0+1+2+3", "13"), ("0+1+2+3", "22"), ("0+1+2+3", "18"), ("0+1+2+3", "26")]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_misplaced_sum_looks_misplaced(framework: str):
    def wrong(lab: Any, x: Any) -> Any:  # rank i begins with its own piece, so that it ends with the sum of piece i + 1
        ranks, i = lab.axis_size("tp"), lab.axis_index("tp")
        total = x.reshape(ranks, -1)[i]
        for hop in range(1, ranks):
            total = lab.ring_shift(total, "tp") + x.reshape(ranks, -1)[(i - hop) % ranks]
        return total

    ends = finals(scored(framework, wrong, TABLE))
    assert [ends[rank][f"x{'₀₁₂₃'[(rank + 1) % 4]}"][1] for rank in range(4)] == ["22", "18", "26", "13"]


def test_a_maximum_beside_a_sum_is_said_of_the_maximum_alone():
    def both(lab: Any, x: Any) -> Any:
        return lab.all_reduce(x, "tp", "max") + lab.all_reduce(x, "tp")

    piece = scored("torch", both, np.array([3.0, 1, 4, 2], np.float32))
    assert [item.how for item in piece.items] == ["max", "sum"]
    assert piece.table_caption == "what each rank holds: the maximum of these ranks' parts in a"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_maximum_is_no_sum(framework: str):
    def largest(lab: Any, x: Any) -> Any:
        maximum = torch.maximum if framework == "torch" else importlib.import_module("jax.numpy").maximum
        total = x
        for _ in range(3):
            total = maximum(lab.ring_shift(total, "tp"), x)
        return total

    piece = scored(framework, largest, np.array([3.0, 1, 4, 2], np.float32))
    assert {item.how for item in piece.items} == {"max"}
    assert piece.table_caption == "what each rank holds: the maximum of these ranks' parts"
    assert not any("+" in label for cells in finals(piece).values() for label, _ in cells.values())
    told = words.sentences(piece)
    assert told[2] == "every rank compares its own part with what it has just received, and sends the maximum on"
    assert not any("sum" in sentence for sentence in told)


def test_what_has_another_name_on_each_rank_keeps_a_letter_and_says_whose_it_is():
    piece = scored("torch", lambda lab, x: lab.ring_all_gather(x, "tp"), np.arange(3, dtype=np.float32))
    assert [item.name for item in piece.items] == ["a", "b", "c"]
    assert [item.text for item in piece.items] == [f"piece {letter} (x of rank {r})" for r, letter in enumerate("abc")]


def test_of_several_names_a_tensor_has_the_one_that_the_call_gives_it():
    """In the first hop, `total` is `x`."""

    def add_up(lab: Any, x: Any) -> Any:
        total = x
        for _ in range(3):
            total = lab.ring_shift(total, "tp") + x
        return total

    def within(lab: Any, x: Any) -> Any:
        y = x

        def shift(z: Any) -> Any:
            return lab.ring_shift(z, "tp")

        return x + shift(
            y,
        )

    def plain(lab: Any, x: Any) -> Any:
        y = x
        return lab.ring_shift(x, "tp") + y

    numbers = np.arange(4, dtype=np.float32)
    piece = scored("torch", add_up, numbers)
    assert [(item.name, item.text) for item in piece.items] == [("total", "total")]
    assert "its own total" in words.sentences(piece)[1]
    for program, name in ((within, "y"), (plain, "x")):
        assert set(scored("torch", program, numbers).trace.chunk_names) == {name}


def test_an_accumulated_product_is_about_the_piece_it_multiplies():
    def accumulates(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        for _ in range(3):
            x = tt.ring_shift(x, "tp")
            y.addmm_(x, w)
        return y

    x, w = torch.ones(8, 4), torch.ones(4, 4)
    trace = tt.run(accumulates, Mesh(tp=4), x, w, in_specs=(P("tp"), P()), cluster="h100").trace
    for rank in range(4):
        products = [event for event in trace.events if event.rank == rank and event.op == "addmm_"]
        assert [trace.chunks[event.chunk][0] for event in products] == [(rank - hop) % 4 for hop in (1, 2, 3)]


def test_names_are_used_where_they_tell_chunks_apart():
    chunks = [(0, 0), (1, 0), (2, 0)]
    everywhere = {chunk: {0, 1, 2} for chunk in range(3)}
    assert [names(chunks, [], everywhere)[chunk].short for chunk in range(3)] == ["a", "b", "c"]
    found = names(chunks, ["x[10]", "x[2]", "x[0]"], everywhere)
    assert [found[chunk] for chunk in range(3)] == [
        Name("x₁₀", "x[10]", (0, 10)), Name("x₂", "x[2]", (0, 2)), Name("x₀", "x[0]", (0, 0))]  # fmt: skip
    found = names(chunks, ["a", "", "activations[1]"], everywhere)  # the letter is taken by a variable
    assert [found[chunk].short for chunk in range(3)] == ["a", "b", "[1]"]
    apart = {0: {0, 1}, 1: {2, 3}, 2: {4, 5}}  # three groups, each with an x of its own
    assert {name.short for name in names(chunks, ["x[0]"] * 3, apart).values()} == {"x₀"}


def test_large_tensors_and_copies_have_no_false_name():
    def of_a_copy(lab: Any, x: Any) -> Any:
        return lab.ring_shift(x[:, :1] * 2, "tp")

    assert scored("torch", of_a_copy, TABLE).trace.chunk_names == []
    assert scored("jax", of_a_copy, TABLE).trace.chunk_names == []
