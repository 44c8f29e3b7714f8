"""The picture of a trace is a pure function of (trace, step): what is held, in flight and said, at every step."""

from __future__ import annotations

import numpy as np
import pytest

from tests.hand_traces import ALL, megatron_mlp, overlapped_matmul, ring_all_gather, ring_all_reduce
from tests.widgets.frames import Frame, frame
from tplab import Mesh, Trace
from tplab.trace import Recorder
from tplab.widgets.score import words
from tplab.widgets.score.holds import HELD, OWN, PASSED
from tplab.widgets.score.score import COMPUTE, Score, score
from tplab.widgets.score.table import contributors

RINGS = [(Mesh(tp=size), "tp") for size in (2, 3, 4, 5, 8)]
RINGS += [(Mesh(data=2, model=4), "model"), (Mesh(data=3, model=2), "data"), (Mesh(a=2, b=2, c=3), "c")]


def held(piece: Score, now: Frame, rank: int) -> dict[int, tuple[tuple[int, ...], int]]:
    """item -> (contributors, state) of what a rank holds."""
    found = {item: hold for (of, item), hold in now.cells.items() if of == rank}
    return {item: (piece.members(hold), int(piece.holds["state"][hold])) for item, hold in found.items()}


@pytest.mark.parametrize(("mesh", "axis"), RINGS, ids=str)
def test_in_a_ring_all_gather_rank_i_holds_chunk_i_minus_k_after_k_steps(mesh: Mesh, axis: str):
    piece = score(ring_all_gather(mesh, axis))
    size = mesh.axis_size(axis)
    assert piece.num_steps == size - 1
    for step in range(size):
        now = frame(piece, step)
        assert now.flights == []
        assert now.sent == [4096 * step] * mesh.size
        for rank in mesh.ranks:
            origins = [mesh.neighbor(rank, axis, -back) for back in range(step + 1)]
            assert set(held(piece, now, rank)) == set(origins)
            for origin in origins:
                state = OWN if origin == rank else HELD
                assert held(piece, now, rank)[origin] == ((origin,), state)
                assert piece.values[piece.holds["value"][now.cells[rank, origin]]] == [origin]
    for step in range(size - 1):
        now = frame(piece, step + 0.25)
        assert now.round == step + 1
        assert [u for _, u in now.flights] == [0.25] * mesh.size
        for row, _ in now.flights:
            rank = int(piece.bars["rank"][row])
            assert piece.bars["peer"][row] == mesh.neighbor(rank, axis)
            assert piece.bars["item"][row] == mesh.neighbor(rank, axis, -step)
        assert now.arriving == {(rank, mesh.neighbor(rank, axis, -step - 1)) for rank in mesh.ranks}


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_in_a_ring_reduce_scatter_a_sum_grows_by_one_rank_a_step(size: int):
    piece = score(ring_all_reduce(Mesh(tp=size), "tp", gather=False))
    for step in range(size):
        now = frame(piece, step)
        for rank in range(size):
            at = held(piece, now, rank)
            for item in range(size):
                behind = (rank - item) % size  # how many hops the sum makes from where it starts to this rank
                through = tuple(sorted((item + hop) % size for hop in range(behind + 1)))
                if behind < step:
                    assert at[item] == (through, PASSED)
                elif behind == step and step > 0:
                    assert at[item] == (through, HELD)
                else:
                    assert at[item] == ((rank,), OWN)
    now = frame(piece, size)
    whole = tuple(range(size))
    assert [item for rank in range(size) for item, at in held(piece, now, rank).items() if at == (whole, HELD)] == [
        (rank + 1) % size for rank in range(size)
    ]


def test_a_sum_is_not_called_finished_before_every_rank_of_the_group_has_added_its_part():
    """The trace of a reduce-scatter whose last addition was not taken down."""
    whole = ring_all_reduce(Mesh(tp=4), "tp", gather=False)
    piece = score(Trace.from_json(whole.to_json()).select(kind="send"))
    assert all(item.pools == ((0, 1, 2, 3),) for item in piece.items)
    assert "finished" not in " ".join(words.sentences(piece))
    piece = score(ring_all_reduce(Mesh(tp=4), "tp"))
    told = words.sentences(piece)
    assert told[4] == "every rank adds the last missing part, and sends the finished sum on"
    assert told[5:] == ["every rank passes on the finished sum just received"] * 2


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_ring_all_reduce_ends_with_every_sum_on_every_rank(size: int):
    piece = score(ring_all_reduce(Mesh(tp=size), "tp"))
    assert piece.num_steps == 2 * (size - 1)
    now = frame(piece, piece.num_steps)
    for rank in range(size):
        for item, at in held(piece, now, rank).items():
            assert at == (tuple(range(size)), HELD)
            value = piece.values[piece.holds["value"][now.cells[rank, item]]]
            assert value == [sum(10 * other + item for other in range(size))]


def test_a_collective_that_is_one_event_is_drawn_too():
    mesh = Mesh(dp=2, tp=3)
    piece = score(megatron_mlp(mesh, "tp"))
    assert [(item.op, item.pools) for item in piece.items] == [("all_reduce", ((0, 1, 2), (3, 4, 5)))]
    during = frame(piece, 22 / 26)
    assert len(during.together) == 6
    assert during.together[0][1] == pytest.approx(0.5)
    assert held(piece, during, 4) == {0: ((4,), OWN)}
    after = frame(piece, 1)
    assert held(piece, after, 4) == {0: ((3, 4, 5), HELD)}
    assert piece.values[piece.holds["value"][after.cells[4, 0]]].tolist() == [[12.0] * 4]
    assert frame(piece, 4 / 26).computing[0][1] == pytest.approx(0.5)
    assert after.sent == [768] * 6


@pytest.mark.parametrize("name", ALL)
def test_time_goes_forward_and_whole_steps_lie_between_messages(name: str):
    piece = score(ALL[name]())
    times = [frame(piece, position).time for position in np.linspace(0, piece.num_steps, 101)]
    assert times == sorted(times)
    assert times[0] == piece.trace.start
    assert times[-1] == pytest.approx(piece.trace.start + piece.trace.makespan, abs=1e-18)
    before = frame(piece, 0)
    assert (before.flights, before.round, set(before.sent)) == ([], 0, {0})
    assert frame(piece, -3) == before
    assert frame(piece, 99) == frame(piece, piece.num_steps)
    end = frame(piece, piece.num_steps)
    assert end.sent == piece.total_sent.tolist()
    assert sum(end.sent) == piece.trace.bytes_sent()
    assert not end.flights
    assert not end.arriving


def test_own_work_beside_the_messages():
    piece = score(overlapped_matmul(4))
    now = frame(piece, 1.5)
    assert len(now.flights) == len(now.computing) == 4
    assert piece.computes
    assert {piece.ops[piece.bars["op"][row]] for row, _ in now.computing} == {"dot_general"}
    assert all(piece.bars["kind"][row] == COMPUTE for row, _ in now.computing)


def one_hop(op: str, shape: tuple[int, ...]) -> Score:
    """A chunk makes one hop, and its receiver computes something from it and a tensor of its own."""
    recorder = Recorder(Mesh(tp=2), "one hop", "torch")
    chunk = recorder.chunk(0, 0)
    about = {"axis": "tp", "group": (0, 1), "bytes": 4, "shape": (1,), "message": 0, "step": 0, "chunk": chunk}
    recorder.add(0, "send", "ring_shift", 0, 1, peer=1, contributors=(0,), **about)
    recorder.add(1, "receive", "ring_shift", 0, 1, peer=0, contributors=(0,), **about)
    recorder.add(1, "compute", op, 1, 1, shape=shape, chunk=chunk, contributors=(0, 1))
    return score(recorder.trace(unit="steps"))


@pytest.mark.parametrize(("op", "shape", "is_sum"), [("add", (1,), True), ("mm", (1,), False), ("add", (2,), False)])
def test_what_makes_one_hop_is_a_sum_where_a_tensor_of_its_shape_is_added(op, shape, is_sum: bool):
    piece = one_hop(op, shape)
    now = frame(piece, 1)
    assert held(piece, now, 1) == {0: ((0, 1) if is_sum else (0,), HELD)}
    assert held(piece, now, 0) == {0: ((0,), PASSED if is_sum else OWN)}


def test_what_is_passed_on_unchanged_is_no_sum_whatever_else_is_computed_from_it():
    whole = ring_all_gather(Mesh(tp=3), "tp")
    recorder = Recorder(whole.mesh, whole.title, "torch")
    for chunk in whole.chunks:
        recorder.chunk(*chunk)
    for event in whole.events:
        about = {name: getattr(event, name) for name in ("axis", "group", "peer", "bytes", "shape", "message", "step")}
        about |= {"chunk": event.chunk, "contributors": event.contributors, "values": event.values}
        recorder.add(event.rank, event.kind, event.op, event.start, event.end, **about)
        if event.kind == "receive":  # y = y + x, where x has y's shape: a use of x, not a new version of it
            members = tuple(sorted({*event.contributors, event.rank}))
            recorder.add(
                event.rank,
                "compute",
                "add",
                event.end,
                event.end,
                shape=event.shape,
                chunk=event.chunk,
                contributors=members,
            )
    piece = score(recorder.trace(unit="steps"))
    assert {state for rank in range(3) for _, state in held(piece, frame(piece, 2), rank).values()} == {OWN, HELD}
    assert all(len(members) == 1 for members in piece.sets)


def test_an_empty_trace_has_a_picture():
    piece = score(Recorder(Mesh(tp=2), "nothing", "torch").trace())
    now = frame(piece, 0.5)
    assert (piece.num_steps, now.cells, now.flights, now.sent) == (1, {}, [], [0, 0])
    assert words.sentences(piece) == ["nothing has been sent yet", "nothing is sent"]
    assert words.summary(piece) == "Animation of nothing on Mesh(tp=2): 1 step, nothing is sent (modelled)."


@pytest.mark.parametrize(
    ("members", "pool", "how", "most", "text"),
    [
        ((2,), (0, 1, 2), "", 4, "2"),
        ((0, 1, 2), (0, 1, 2, 3), "sum", 4, "0+1+2"),
        ((0, 1, 2), (0, 1, 2, 3), "product", 4, "0·1·2"),
        ((0, 1, 2), (0, 1, 2, 3), "max", 4, "0,1,2"),
        ((0, 1), (0, 1), "", 4, "0,1"),
        ((0, 1, 2, 3, 4), tuple(range(8)), "", 4, "5 of 8"),
        ((0, 1, 2, 3), tuple(range(8)), "", 3, "4 of 8"),
        ((0, 1), (0, 1, 2), "", 1, "2/3"),
        (tuple(range(12)), tuple(range(16)), "", 1, "12"),
    ],
)
def test_contributors_in_a_few_letters(members, pool, how, most, text):
    assert contributors(members, pool, how, most) == text


SENTENCES = {
    "gather 4": [
        "every rank holds its own piece",
        "every rank sends its own piece to the next rank",
        "every rank passes on the piece it has just received",
        "every rank passes on the piece it has just received",
    ],
    "gather 2x4": [
        "every rank holds its own piece",
        "every rank sends its own piece to the next rank along model",
        "every rank passes on the piece it has just received",
        "every rank passes on the piece it has just received",
    ],
    "reduce-scatter 4": [
        "every rank holds its own part of 4 pieces",
        "every rank sends its own piece to the next rank",
        "every rank adds its own part to what it has just received, and sends the sum on",
        "every rank adds its own part to what it has just received, and sends the sum on",
    ],
    "mlp 2x3": [
        "nothing has been sent yet",
        "all_reduce over tp: every rank of a group of 3 ends with the sum of all their tensors, "
        "after computing (matmul, tanh)",
    ],
    "overlap 4": [
        "every rank holds its own piece",
        "every rank sends its own piece to the next rank, and computes meanwhile (dot_general)",
        "every rank passes on the piece it has just received, and computes meanwhile (dot_general)",
        "every rank passes on the piece it has just received, and computes meanwhile (dot_general)",
    ],
}


@pytest.mark.parametrize("name", SENTENCES)
def test_each_step_is_told_from_what_its_events_are(name: str):
    assert words.sentences(score(ALL[name]())) == SENTENCES[name]


def test_single_messages_are_told_by_name():
    recorder = Recorder(Mesh(pp=3), "pipeline", "torch")
    for step in range(2):
        about = {"axis": "pp", "bytes": 64, "message": step, "step": step, "chunk": recorder.chunk(0, 0)}
        recorder.add(step, "send", "ppermute", step, step + 1, peer=step + 1, contributors=(0,), **about)
        recorder.add(step + 1, "receive", "ppermute", step, step + 1, peer=step, contributors=(0,), **about)
    piece = score(recorder.trace(unit="steps"))
    assert words.sentences(piece)[1:] == ["rank 0 sends piece a to rank 1", "rank 1 sends piece a to rank 2"]
    assert words.sent_text(piece, piece.time(1)) == "sent so far: 0 B to 64 B of 0 B to 64 B per rank"


def test_the_title_line_and_the_clock():
    piece = score(ALL["gather 2x4"]())
    assert words.about(piece) == "8 ranks · data 2 × model 4 · over model · 4 KiB pieces"
    assert words.clock(piece.trace) == "modelled · unit times"
    assert words.clock(ALL["mlp 4"]()) == "modelled · h100"
    assert words.sent_text(piece, piece.time(2)) == "sent so far: 8 KiB of 12 KiB per rank"


def test_on_the_measured_clock_a_message_is_there_when_it_was_received():
    recorder = Recorder(Mesh(tp=2), "measured", "torch")
    about = {"axis": "tp", "bytes": 64, "message": 0, "step": 0, "chunk": recorder.chunk(0, 0), "contributors": (0,)}
    recorder.add(0, "send", "ring_shift", 0, 1e-6, peer=1, **about)
    recorder.add(1, "receive", "ring_shift", 0, 5e-6, peer=0, **about)
    piece = score(recorder.trace(clock="measured"))
    now = frame(piece, 0.5)
    assert now.time == 2.5e-6
    assert now.flights == [(0, 0.5)]
    assert "e-0" not in words.summary(piece)
    assert words.summary(piece) == (
        "Animation of measured on Mesh(tp=2): 1 step, each rank sends 0 B to 64 B (measured)."
    )


def test_one_rank_that_sends_several_chunks_is_named():
    """The root of a broadcast tree sends to several ranks in one round."""
    recorder = Recorder(Mesh(r=4), "broadcast", "torch")
    for peer in (1, 2, 3):
        about = {"step": 0, "bytes": 4, "message": peer, "chunk": recorder.chunk(0, peer), "contributors": (0,)}
        recorder.add(0, "send", "ppermute", 0.0, 1.0, peer=peer, **about)
        recorder.add(peer, "receive", "ppermute", 0.0, 1.0, peer=0, **about)
    assert words.sentences(score(recorder.trace(unit="steps")))[1].startswith("rank 0 sends its own pieces")
