"""Lab 08's exercises: right and overlapped passes; right but blocking, and wrong, each get their hint."""

from __future__ import annotations

import base64
from collections.abc import Callable

import torch

import tplab.torch
from labs.source import build
from tplab.exercises.check import Verdict
from tplab.exercises.overlap import check_gather_product, check_product_scatter
from tplab.torch import (
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    reduce_scatter,
    ring_shift,
    start,
)


def gather_by_hand(x: torch.Tensor, w: torch.Tensor, order: int = -1, waits_at_once: bool = False) -> torch.Tensor:
    num_ranks, index = axis_size("tp"), axis_index("tp")
    columns = w.chunk(num_ranks, 1)
    piece, y = x, torch.zeros(1, dtype=x.dtype, device=x.device)
    for k in range(num_ranks):
        flight = start(ring_shift, piece, "tp") if k < num_ranks - 1 else None
        arrived = flight.wait() if flight and waits_at_once else None
        y = y + piece @ columns[(index + order * k) % num_ranks if order else k].T
        if flight:
            piece = flight.wait() if arrived is None else arrived
    return y


def scatter_by_hand(x: torch.Tensor, w: torch.Tensor, first: int = 1, adds: bool = True) -> torch.Tensor:
    num_ranks, index = axis_size("tp"), axis_index("tp")
    rows = w.chunk(num_ranks, 0)
    total = x @ rows[(index - first) % num_ranks].T
    for k in range(1, num_ranks):
        flight = start(ring_shift, total, "tp")
        part = x @ rows[(index - first - k) % num_ranks].T
        arrived = flight.wait()
        total = arrived + part if adds else part
    return total


def shows_a_timeline(verdict: Verdict) -> None:
    data, metadata = verdict._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"] == data["text/plain"] == verdict.text


def test_right_and_overlapped():
    for verdict in (check_gather_product(gather_by_hand), check_product_scatter(scatter_by_hand)):
        assert verdict.passed and "100% of the communication that can be hidden is hidden" in verdict.text, verdict
        shows_a_timeline(verdict)
    assert "can you keep both directions?" in check_gather_product(gather_by_hand).text


def test_a_hop_that_brings_nothing_is_remarked_on():
    def from_zeros(x, w):
        num_ranks, index = axis_size("tp"), axis_index("tp")
        rows, total = w.chunk(num_ranks, 0), x.new_zeros(len(x), len(w) // num_ranks)
        for k in range(num_ranks):
            flight = start(ring_shift, total, "tp")
            part = x @ rows[(index - 1 - k) % num_ranks].T
            total = flight.wait() + part
        return total

    verdict = check_product_scatter(from_zeros)
    assert verdict.passed and "sends 8 pieces of the sum, and 7 would do" in verdict.text, verdict
    assert "would do" not in check_product_scatter(scatter_by_hand).text


def test_pieces_that_no_rank_needs_are_remarked_on():
    """Both directions to the end: each piece comes twice, and one of them is not used."""

    def both_ways(x, w):
        num_ranks, index = axis_size("tp"), axis_index("tp")
        columns, up, down, y = w.chunk(num_ranks, 1), x, x, 0
        for k in range(num_ranks):
            if k < num_ranks - 1:
                flights = start(ring_shift, up, "tp"), start(ring_shift, down, "tp", -1)
            y = y + up @ columns[(index - k) % num_ranks].T
            if k < num_ranks - 1:
                up, down = (flight.wait() for flight in flights)
        return y

    assert "sends 14 pieces, and 7 would do: is each of them used?" in check_gather_product(both_ways).text


def test_a_tensor_may_be_made_without_naming_its_device():
    def from_zeros(x, w):
        assert torch.zeros(1).device == x.device
        return scatter_by_hand(x, w)

    assert check_product_scatter(from_zeros).passed


def test_pieces_that_pass_over_ranks_are_remarked_on():
    def straight(x, w):
        num_ranks, index = axis_size("tp"), axis_index("tp")
        columns = w.chunk(num_ranks, 1)
        flights = [start(ring_shift, x, "tp", away) for away in range(1, num_ranks)]
        y = x @ columns[index].T
        for away, flight in enumerate(flights, 1):
            y = y + flight.wait() @ columns[(index - away) % num_ranks].T
        return y

    verdict = check_gather_product(straight)
    assert verdict.passed and "straight to ranks that are several places away" in verdict.text, verdict


def test_damage_to_gradients_and_digits_is_refused():
    for wrong, hint in (
        (lambda x, w: scatter_by_hand(x.detach(), w.detach()), "it has no gradient"),
        (lambda x, w: scatter_by_hand(x.detach(), w), "\nAll of it is zero, as if x were detached"),
        (lambda x, w: scatter_by_hand(x.bfloat16(), w.bfloat16()).to(x.dtype), "dx is not right yet"),
    ):
        verdict = check_product_scatter(wrong)
        assert verdict.passed is False and hint in verdict.text, verdict
    assert check_product_scatter(lambda x, w: scatter_by_hand(x.float(), w.float()).to(x.dtype)).passed


def test_the_librarys_own_layers_are_refused():
    from tplab.torch import all_gather_matmul, matmul_reduce_scatter

    expect = "does the work. Here you write it yourself."
    assert expect in check_gather_product(lambda x, w: all_gather_matmul(x, w, "tp")).text
    assert expect in check_product_scatter(lambda x, w: matmul_reduce_scatter(x, w, "tp")).text


def all_matmuls_first(x, w):
    """Each piece is waited for before the next hop; then all are multiplied."""
    num_ranks, index = axis_size("tp"), axis_index("tp")
    pieces, columns = [x], w.chunk(num_ranks, 1)
    for _ in range(num_ranks - 1):
        pieces.append(start(ring_shift, pieces[-1], "tp").wait())
    return sum(piece @ columns[(index - k) % num_ranks].T for k, piece in enumerate(pieces))


def test_right_and_blocking():
    for verdict in (
        check_gather_product(lambda x, w: all_gather(x, "tp", -1) @ w.T),
        check_gather_product(all_matmuls_first),
        check_gather_product(lambda x, w: gather_by_hand(x, w, waits_at_once=True)),
        check_product_scatter(lambda x, w: reduce_scatter(x @ w.T, "tp", -1)),
    ):
        assert verdict.passed is False and ": the numbers are right, but it hides 0% of" in verdict.text, verdict
        assert "Matmuls before or after it do not hide it" in verdict.text
        shows_a_timeline(verdict)


def test_a_rank_that_computes_all_parts_again_for_every_hop():
    """Then much is computed behind each hop, and all is hidden."""

    def all_parts(x, w):
        num_ranks, index = axis_size("tp"), axis_index("tp")
        total = (x @ w.T).chunk(num_ranks, 1)[(index - 1) % num_ranks]
        for k in range(1, num_ranks):
            flight = start(ring_shift, total, "tp")
            part = (x @ w.T).chunk(num_ranks, 1)[(index - 1 - k) % num_ranks]
            total = flight.wait() + part
        return total

    verdict = check_product_scatter(all_parts)
    assert verdict.passed is False, verdict
    assert "the numbers are right, but a rank computes 8.0 times as much as in one matmul." in verdict.text
    shows_a_timeline(verdict)


def wrong_rows(x: torch.Tensor, w: torch.Tensor, away: Callable[[int], int]) -> torch.Tensor:
    """In step k, the term for the rank that is `away` from this one."""
    num_ranks, index, total = axis_size("tp"), axis_index("tp"), None
    for k in range(1, num_ranks + 1):
        part = x @ w.chunk(num_ranks)[(index + away(k)) % num_ranks].T
        total = part if total is None else start(ring_shift, total, "tp").wait() + part
    assert total is not None
    return total


def test_known_mistakes():
    cells = [cell.source for cell in build.read_source("08_overlap").cells if cell.cell_type == "code"]
    always = next(source for source in cells if "def tidied(" in source).replace("if 2 * k < R:", "if True:")
    for verdict, hint in (
        (
            check_gather_product(lambda x, w: gather_by_hand(x, w, order=0)),
            "Multiply it by the columns of w for that rank",
        ),
        (
            check_gather_product(lambda x, w: x @ w.chunk(axis_size("tp"), 1)[axis_index("tp")].T),
            "Add the products of the pieces that arrive",
        ),
        (check_gather_product(lambda x, w: gather_by_hand(x, w, order=1)), "comes from the other side"),
        (check_gather_product(made("tidied", always)), "both ways bring the same last piece"),
        (
            check_product_scatter(lambda x, w: wrong_rows(x, w, lambda k: k)),
            "Each sum adds up terms for different ranks",
        ),
        (
            check_product_scatter(lambda x, w: wrong_rows(x, w, lambda k: -1)),
            "Each sum adds up terms for different ranks",
        ),
        (
            check_product_scatter(lambda x, w: all_reduce(x @ w.T, "tp").chunk(axis_size("tp"), 1)[axis_index("tp")]),
            "what comes back from this rank's own part of y alone",
        ),
        (check_product_scatter(lambda x, w: scatter_by_hand(x, w, adds=False)), "This is the rank's own term alone"),
        (check_product_scatter(lambda x, w: scatter_by_hand(x, w, first=0)), "Which part must a rank add last"),
    ):
        assert verdict.passed is False and hint in verdict.text, verdict


def test_not_started_and_raising():
    assert check_gather_product(lambda x, w: ...).passed is None
    verdict = check_product_scatter(lambda x, w: x @ w)
    assert verdict.passed is False and "RuntimeError" in verdict.text


def test_the_lab_shows_the_bug():
    """Its numbers are right; nothing is hidden. If each pair of hops starts before the product above it, all is."""
    cells = [cell.source for cell in build.read_source("08_overlap").cells if cell.cell_type == "code"]
    bug = next(source for source in cells if "def tidied(" in source)
    assert "tidied: the numbers are right, but it hides 0% of" in check_gather_product(made("tidied", bug)).text
    first, wait = "    y = x @ columns[i].T\n", "        up, down = going_up.wait(), going_down.wait()\n"
    up, down = (f"{line.strip()}\n" for line in bug.splitlines() if " = tt.start(" in line)
    starts, indent = f"        {up}        {down}", " " * 12
    assert bug.count(first) == bug.count(starts + wait) == 1
    mended = bug.replace(starts + wait, f"{wait}        if k < R // 2:\n{indent}{up}{indent}{down}")
    mended = mended.replace(first, f"    {up}    {down}{first}")
    verdict = check_gather_product(made("tidied", mended))
    assert verdict.passed and "both directions" not in verdict.text


def made(name: str, source: str) -> Callable[..., torch.Tensor]:
    names = {"tt": tplab.torch}
    exec(source, names)
    return names[name]  # type: ignore[return-value]
