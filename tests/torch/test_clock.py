"""Time: the modelled clock to the last digit, by hand; overlap; unit times; and the measured clock."""

import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from tplab import Mesh, P
from tplab.cost import Chip, Cluster, Link
from tplab.errors import ShapeError
from tplab.pipeline import LayerSpec
from tplab.schedules import one_f_one_b
from tplab.torch import (
    Result,
    all_gather,
    all_reduce,
    axis_index,
    barrier,
    broadcast,
    gpt2_plan,
    parallelize,
    ppermute,
    reduce_scatter,
    ring_shift,
    run,
    shard_parameters,
    stages_of,
    start,
)
from tplab.torch.ranks import clocked, simulated
from tplab.trace import critical_path

# Figures that floating point holds exactly. An operation takes 1/4 + max(flops / 64, bytes / 32) s, in float64
# 1/4 + max(flops / 16, bytes / 32); a message 2 + bytes / 16 s, between nodes of two ranks 8 + bytes / 4 s.
CHIP = Chip("abacus", flops={"float32": 64.0, "float64": 16.0}, memory_bandwidth=32.0, memory=1e9, launch=0.25)
NEAR, FAR = Link("wire", 2.0, 16.0), Link("string", 8.0, 4.0)
SWITCH = Cluster("desk", CHIP, NEAR)
TORUS = Cluster("ring of desks", CHIP, NEAR, wiring="torus")
NODES = Cluster("two rooms", CHIP, NEAR, node_size=2, outer_link=FAR)
TWO = Mesh(tp=2)


def timeline(out: Result, rank: int, *kinds: str) -> list[tuple]:
    """(kind, op, start, end) of a rank's events, in order."""
    found = [e for e in out.trace.events if e.rank == rank and (not kinds or e.kind in kinds)]
    return [(e.kind, e.op, e.start, e.end) for e in found]


def costs(program: Callable, *args: Any, mesh: Mesh | None = None) -> list[tuple]:
    """(op, flops, bytes) of what one rank computes."""
    out = run(program, mesh or Mesh(tp=1), *args, cluster=SWITCH)
    return [(e.op, e.flops, e.bytes) for e in out.trace.events if e.kind == "compute"]


# --- computing --------------------------------------------------------------------------------------------------------


def test_a_product_takes_as_long_as_its_arithmetic_or_its_bytes():
    def program(x: Tensor, w: Tensor) -> None:
        x @ w  # 2 x 16 x 16 x 16 = 8192 flops, 3 x 1024 bytes
        x[:1] @ w[:, :1]  # 2 x 16 flops, (16 + 16 + 1) x 4 bytes
        x.double() @ w.double()

    out = run(program, Mesh(tp=1), torch.ones(16, 16), torch.ones(16, 16), cluster=SWITCH)
    first = 0.25 + 8192 / 64
    second = first + 0.25 + 132 / 32
    casts = 0.25 + 3072 / 32
    assert timeline(out, 0) == [
        ("compute", "mm", 0.0, first),
        ("compute", "mm", first, second),
        ("compute", "_to_copy", second, second + casts),
        ("compute", "_to_copy", second + casts, second + 2 * casts),
        ("compute", "mm", second + 2 * casts, second + 2 * casts + 0.25 + 8192 / 16),
    ]
    assert out.trace.makespan == second + 2 * casts + 0.25 + 512
    assert (out.trace.unit, out.trace.cluster, out.trace.clock) == ("s", "desk", "modelled")


@pytest.mark.parametrize("a, b, size", [
    ((24, 16), (3, 16, 32), 8), ((3, 8, 16), (16, 96), 32), ((8, 48), (48, 32), 16), ((3, 8, 16), (3, 16, 32), None),
])  # fmt: skip
def test_a_product_of_groups_is_that_many_products(a, b, size):
    """As grouped_mm has them for experts: groups of rows, of columns, of summands."""
    x, w, both = (torch.ones(shape, dtype=torch.bfloat16) for shape in (a, b, (3, 8, 16)))
    offs = None if size is None else torch.arange(size, 3 * size + 1, size, dtype=torch.int32)
    grouped, each = (
        run(program, Mesh(tp=1), cluster="h100-measured").trace.events[-1]
        for program in (lambda: torch._grouped_mm(x, w, offs=offs), lambda: both @ torch.ones(3, 16, 32).bfloat16())
    )
    assert grouped.op == "_grouped_mm" and each.op == "bmm"
    assert grouped.flops == each.flops == 2 * 3 * 8 * 16 * 32
    assert grouped.end - grouped.start == pytest.approx(each.end - each.start)


def test_products_count_two_flops_a_term_in_every_form():
    x, w, v = torch.ones(4, 8), torch.ones(8, 6), torch.ones(8)
    batch, q = torch.ones(3, 4, 8), torch.ones(1, 2, 4, 8)
    programs: dict[str, tuple[Callable, int]] = {
        "mm": (lambda: x @ w, 2 * 4 * 8 * 6),
        "addmm": (lambda: nn.functional.linear(x, w.t(), torch.ones(6)), 2 * 4 * 8 * 6),
        "bmm": (lambda: torch.einsum("bij,bjk->bik", batch, batch.transpose(1, 2)), 2 * 3 * 4 * 8 * 4),
        "mm, batched": (lambda: batch @ w, 2 * 12 * 8 * 6),
        "baddbmm": (lambda: torch.baddbmm(torch.ones(1), batch, batch.transpose(1, 2)), 2 * 3 * 4 * 8 * 4),
        "mv": (lambda: x @ v, 2 * 4 * 8),
        "addmv": (lambda: torch.addmv(torch.ones(4), x, v), 2 * 4 * 8),
        "dot": (lambda: v @ v, 2 * 8),
        "convolution": (lambda: nn.functional.conv1d(torch.ones(2, 3, 9), torch.ones(5, 3, 2)), 2 * 2 * 5 * 8 * 3 * 2),
        "_scaled_dot_product_flash_attention_for_cpu": (
            lambda: nn.functional.scaled_dot_product_attention(q, q, q),
            2 * 2 * (2 * 4 * 4 * 8),
        ),
        "_scaled_dot_product_flash_attention_for_cpu, causal": (
            lambda: nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
            2 * 2 * (2 * (1 + 2 + 3 + 4) * 8),
        ),
    }
    for name, (program, flops) in programs.items():
        op = name.split(",")[0]
        assert [f for found, f, _ in costs(program) if found == op] == [flops], name
        with torch.no_grad():
            assert [f for found, f, _ in costs(program) if found == op] == [flops], name
        with torch.inference_mode():  # where torch hands over `linear` and `einsum` whole
            assert [f for found, f, _ in costs(program) if found == op] == [flops], name


def test_views_and_allocations_are_free():
    def program(x: Tensor) -> None:
        x.t(), x.reshape(-1), x.view(2, -1), x[1:], x[:, None], x.expand(3, 4, 4), x.unsqueeze(0).squeeze(0)
        x.split(2), x.chunk(4, 1), x.unbind(), x.narrow(0, 0, 1), x.diagonal(), x.permute(1, 0), x.detach(), x.mT
        x.contiguous(), x.flatten(), x.unfold(0, 2, 1), torch.empty(9), torch.empty_like(x), x.real
        x.requires_grad_().view_as(x), x.to(torch.float32), x.cpu()

    assert costs(program, torch.ones(4, 4)) == []
    with torch.inference_mode():
        assert costs(lambda x: (x.t(), x.reshape(-1), x[1:].flatten(), x.split(2)), torch.ones(4, 4)) == []


ROWS, TARGETS = torch.tensor([1, 3]), torch.tensor([0, 7, 2, 2])


def nll_backward(x: Tensor, _: Tensor) -> None:
    F.nll_loss(x.requires_grad_(), TARGETS).backward()


def test_what_other_operations_cost():
    x, y = torch.ones(4, 8), torch.ones(4, 8)
    n = 32
    cases = [
        (lambda x, y: x + y, ("add", n, 3 * 4 * n)),
        (lambda x, y: x.add_(y), ("add_", n, 3 * 4 * n)),
        (lambda x, y: x.tanh(), ("tanh", n, 2 * 4 * n)),
        (lambda x, y: x.sum(), ("sum", n, 4 * n + 4)),
        (lambda x, y: x > y, ("gt", n, 2 * 4 * n + n)),
        (lambda x, y: x.clone(), ("clone", 0, 2 * 4 * n)),
        (lambda x, y: x.copy_(y), ("copy_", 0, 2 * 4 * n)),
        (lambda x, y: x.zero_(), ("zero_", 0, 4 * n)),
        (lambda x, y: torch.zeros(4, 8), ("zeros", 0, 4 * n)),
        (lambda x, y: torch.cat([x, y]), ("cat", 0, 4 * 4 * n)),
        (lambda x, y: x.t().contiguous(), ("clone", 0, 2 * 4 * n)),
        (lambda x, y: torch.mul(x, y, out=torch.empty(4, 8)), ("mul", n, 3 * 4 * n)),
        (lambda x, y: x[torch.tensor([1])], ("index", 0, 2 * 4 * 8 + 8)),
        (lambda x, y: nn.functional.embedding(torch.tensor([3, 1]), x), ("embedding", 0, 2 * 2 * 4 * 8 + 16)),
        (lambda x, y: x.half(), ("_to_copy", 0, 4 * n + 2 * n)),
        # two rows of four: read and written, and read once more where they are added to what is there
        (lambda x, y: x.index_put_((ROWS,), y[:2]), ("index_put_", 0, 2 * 4 * 16 + 16)),
        (lambda x, y: x.index_put_((ROWS,), y[:2], accumulate=True), ("index_put_", 16, 3 * 4 * 16 + 16)),
        (lambda x, y: x.index_put_((ROWS,), y[0, 0]), ("index_put_", 0, 4 * 16 + 4 + 16)),
        (lambda x, y: x.__setitem__((slice(None), ROWS), y[:, :2]), ("index_put_", 0, 2 * 4 * 8 + 16)),
        (lambda x, y: x.index_copy_(0, ROWS, y[:2]), ("index_copy_", 0, 2 * 4 * 16 + 16)),
        (lambda x, y: x.index_add_(0, ROWS, y[:2]), ("index_add_", 16, 3 * 4 * 16 + 16)),
        (lambda x, y: x.scatter_(0, ROWS[:, None], y[:2]), ("scatter_", 0, 2 * 4 * 2 + 16)),
        (lambda x, y: x.scatter_add_(0, ROWS[:, None], y[:2]), ("scatter_add_", 2, 3 * 4 * 2 + 16)),
        # of four rows of scores, one score each; torch also returns what the weights of the targets add up to
        (lambda x, y: F.nll_loss(x, TARGETS), ("nll_loss_forward", 4, 4 * 4 + 4 * 8 + 2 * 4)),
        # zeros in the place of all scores, and one number in each row
        (nll_backward, ("nll_loss_backward", 4, 4 * n + 4 * 4 + 4 * 8 + 2 * 4)),
    ]
    for program, wanted in cases:
        assert costs(program, x, y)[-1] == wanted, wanted


def test_the_backward_pass_is_computed_too():
    def program(x: Tensor, w: Tensor) -> None:
        (x @ w).sum().backward()

    x, w = torch.ones(4, 8, requires_grad=True), torch.ones(8, 2, requires_grad=True)
    found = [(op, flops) for op, flops, _ in costs(program, x, w) if op == "mm"]
    assert found == [("mm", 128)] * 3
    kinds = [op for op, _, _ in costs(program, x, w)]
    assert kinds[:2] == ["mm", "sum"]


def test_an_optimizer_step_is_computed_too():
    def program() -> None:
        w = nn.Parameter(torch.ones(8))
        w.grad = torch.ones(8)
        torch.optim.SGD([w], lr=0.1, foreach=False).step()

    assert ("add_", 8, 3 * 32) in costs(program)


def test_a_step_begins_when_its_model_is_made_cast_and_cut():
    """None of that takes time on the modelled clock; its memory counts as always."""
    schedule = one_f_one_b(2, 2)

    def layer() -> nn.Module:
        return nn.Linear(8, 8).bfloat16()

    def program(gpt2: nn.Module) -> None:
        stages = stages_of([LayerSpec(layer)] * 2, schedule, axis="tp")
        shard_parameters(stages[axis_index("tp")], "tp", prefetch=False)
        parallelize(gpt2, gpt2_plan(gpt2))

    sizes: dict[str, Any] = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 10, "n_positions": 8}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    out = run(program, TWO, GPT2LMHeadModel(GPT2Config(**sizes)), cluster=SWITCH, count_memory=True)
    assert [event.kind for event in out.trace.events if event.end > event.start] == []
    assert {"normal_", "uniform_", "_to_copy", "clone"} & {*out.memory[0].ops}

    def goes_on() -> None:
        with suppress(ShapeError):  # one layer cannot make two stages
            stages_of([LayerSpec(layer)], schedule, axis="tp")
        torch.ones(8).add(1)

    assert [op for op, _, _ in costs(goes_on, mesh=TWO)] == ["ones"] * 2 + ["add"] * 2


def test_collectives_own_operations_are_not_the_programs():
    def program() -> None:
        x = torch.empty(8)
        all_reduce(x, "tp"), all_gather(x, "tp"), reduce_scatter(x, "tp"), broadcast(x, "tp"), barrier()
        ring_shift(x, "tp"), ppermute(x, "tp", [(0, 1)]), start(all_reduce, x, "tp", op="max").wait()

    assert costs(program, mesh=TWO) == []


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_message_takes_latency_and_bytes_and_its_receiver_waits():
    def program() -> None:
        x = torch.empty(8)  # 32 bytes: 2 + 2 s
        if axis_index("tp") == 0:
            x = x.zero_()  # 0.25 + 32 / 32 s
        ring_shift(x, "tp")

    out = run(program, TWO, cluster=SWITCH)
    assert timeline(out, 0) == [
        ("compute", "zero_", 0.0, 1.25),
        ("receive", "ring_shift", 0.0, 4.0),
        ("send", "ring_shift", 1.25, 5.25),
        ("wait", "ring_shift", 1.25, 4.0),
    ]
    assert timeline(out, 1) == [
        ("send", "ring_shift", 0.0, 4.0),
        ("wait", "ring_shift", 0.0, 5.25),
        ("receive", "ring_shift", 1.25, 5.25),
    ]


def two_messages() -> None:
    x = torch.empty(16)  # 64 bytes: 4 s on the wire, and 2
    up, down = start(ring_shift, x, "tp"), start(ring_shift, x, "tp", -1)
    up.wait(), down.wait()


@pytest.mark.parametrize("cluster, second", [(SWITCH, 4.0), (TORUS, 0.0)])
def test_two_messages_share_a_switchs_port_and_not_a_torus_links(cluster: Cluster, second: float):
    out = run(two_messages, Mesh(tp=3), cluster=cluster)
    for rank in range(3):
        sent = timeline(out, rank, "send")
        assert sent == [("send", "ring_shift", 0.0, 6.0), ("send", "ring_shift", second, second + 6.0)]
    assert out.trace.makespan == second + 6.0


def test_messages_behind_one_another_fill_the_wire():
    def program() -> None:
        flights = [start(ppermute, torch.empty(16), "tp", [(0, 1)]) for _ in range(3)]
        for flight in flights:
            flight.wait()

    out = run(program, TWO, cluster=TORUS)
    assert timeline(out, 0, "send") == [("send", "ppermute", 4.0 * k, 4.0 * k + 6.0) for k in range(3)]
    assert timeline(out, 1, "wait") == [("wait", "ppermute", a, b) for a, b in ((0.0, 6.0), (6.0, 10.0), (10.0, 14.0))]
    assert timeline(out, 0, "wait") == []  # who sends does not wait


@pytest.mark.parametrize("cluster", [None, SWITCH])
def test_zeros_where_nobody_sends_are_no_computing(cluster):
    def program(x: Tensor) -> None:
        ppermute(x, "tp", [(0, 1)])
        start(ppermute, x, "tp", [(0, 1)]).wait()
        ppermute(x.requires_grad_(), "tp", [(0, 1)]).backward(torch.ones(()))

    out = run(program, Mesh(tp=3), torch.tensor(1.0), cluster=cluster)
    assert {e.op for e in out.trace.events if e.kind == "compute"} <= {"ones", "detach"}
    assert timeline(out, 2, "send", "receive", "wait") == []


def test_ways_in_are_not_taken():
    """As `Links` says."""

    def program(x: Tensor) -> None:
        for source in (1, 2):
            ppermute(x, "tp", [(source, 0)])

    out = run(program, Mesh(tp=3), torch.empty(16), cluster=SWITCH)
    assert [timeline(out, rank, "send") for rank in (1, 2)] == [[("send", "ppermute", 0.0, 6.0)]] * 2


def test_between_nodes_a_message_takes_the_slower_link():
    out = run(lambda: ring_shift(torch.empty(4), "tp"), Mesh(tp=4), cluster=NODES)
    spans = {e.rank: (e.start, e.end) for e in out.trace.events if e.kind == "send"}
    near, far = 2 + 16 / 16, 8 + 16 / 4
    assert spans == {0: (0, near), 1: (0, far), 2: (0, near), 3: (0, far)}


# --- overlap ----------------------------------------------------------------------------------------------------------


def product(n: int) -> Tensor:
    """n x n times n x n of float32: 1/4 + max(n^3 / 32, 3 n^2 / 8) s: 6.25 for n = 4, 24.25 for 8, 128.25 for 16."""
    x = torch.empty(n, n)
    return x @ x


def test_what_is_computed_between_start_and_wait_hides_the_message():
    def blocking() -> None:
        ring_shift(torch.empty(16), "tp")  # 6 s
        product(8)
        ring_shift(torch.empty(16), "tp")
        product(4)

    def overlapped() -> None:
        flight = start(ring_shift, torch.empty(16), "tp")
        product(8)
        flight.wait()  # has been there for long
        flight = start(ring_shift, torch.empty(64), "tp")  # 2 + 16 s
        product(4)
        flight.wait()  # 11.75 s more

    assert run(blocking, TWO, cluster=SWITCH).trace.makespan == 6 + 24.25 + 6 + 6.25
    out = run(overlapped, TWO, cluster=SWITCH)
    assert timeline(out, 0, "compute", "send", "wait") == [
        ("send", "ring_shift", 0.0, 6.0),
        ("compute", "mm", 0.0, 24.25),
        ("send", "ring_shift", 24.25, 42.25),
        ("compute", "mm", 24.25, 30.5),
        ("wait", "ring_shift", 30.5, 42.25),
    ]
    assert out.trace.busy().tolist() == [30.5, 30.5]
    assert out.trace.idle_share().tolist() == [1 - 30.5 / 42.25] * 2


def test_a_collective_starts_when_the_last_of_its_group_is_there():
    """A ring all_reduce of 64 bytes over 4: 6 hops of 2 + 16 / 16 s."""

    def program() -> None:
        for _ in range(axis_index("tp")):
            product(4)
        all_reduce(torch.empty(16), "tp")

    out = run(program, Mesh(tp=4), cluster=SWITCH)
    begin, end = 3 * 6.25, 3 * 6.25 + 18.0
    for rank in range(4):
        assert timeline(out, rank, "collective") == [("collective", "all_reduce", begin, end)]
        assert timeline(out, rank, "wait") == [("wait", "all_reduce", rank * 6.25, end)]
        (event,) = (e for e in out.trace.events if e.rank == rank and e.kind == "collective")
        assert (event.bytes, event.shape, event.group, event.axis) == (96, (16,), (0, 1, 2, 3), "tp")
    assert out.trace.makespan == end


def test_a_started_collective_overlaps_and_the_wire_carries_one_thing_after_another():
    def program() -> None:
        flight = start(all_reduce, torch.empty(16), "tp")  # over 2: 2 hops of 2 + 32 / 16 = 8 s
        other = start(all_gather, torch.empty(8), "tp")  # 1 hop of 2 + 32 / 16 = 4 s, after it
        product(4)
        flight.wait()
        other.wait()

    out = run(program, TWO, cluster=SWITCH)
    assert timeline(out, 1, "collective", "wait") == [
        ("collective", "all_reduce", 0.0, 8.0),
        ("wait", "all_reduce", 6.25, 8.0),
        ("collective", "all_gather", 8.0, 12.0),
        ("wait", "all_gather", 8.0, 12.0),
    ]


def test_waiting_late_or_twice_or_never_takes_no_time():
    def program() -> None:
        flight = start(all_reduce, torch.empty(16), "tp")
        start(ring_shift, torch.empty(16), "tp")
        product(16)
        flight.wait(), flight.wait()

    out = run(program, TWO, cluster=TORUS)
    assert timeline(out, 0, "wait") == []
    assert out.trace.makespan == 0.25 + 16**3 / 32


def test_in_the_backward_pass_started_collectives_overlap_as_well():
    """Forward and backward: the gradient's gather is on its way while the other branch's product is computed."""

    def program(w: Tensor) -> None:
        x = torch.empty(8, 8, requires_grad=True)
        flight = start(reduce_scatter, x, "tp")
        side = w @ w
        (flight.wait().sum() + side.sum()).backward()

    out = run(program, TWO, torch.empty(8, 8, requires_grad=True), cluster=SWITCH)
    (gather,) = (e for e in out.trace.events if e.rank == 0 and e.op == "all_gather" and e.kind == "collective")
    during = [
        e for e in out.trace.events if e.rank == 0 and e.kind == "compute" and gather.start <= e.start < gather.end
    ]
    assert [e.op for e in during] == ["mm"]  # one of the gradients of w @ w; the gather takes 2 + 128 / 16 s
    assert (gather.end - gather.start, during[0].start) == (10.0, gather.start)
    assert [e for e in out.trace.events if e.rank == 0 and e.kind == "wait" and e.op == "all_gather"] == []


def test_the_slowest_rank_sets_the_pace_of_a_ring():
    def program() -> None:
        x = torch.empty(16)
        for _ in range(3):
            if axis_index("tp") == 1:
                product(4)
            x = ring_shift(x, "tp")

    out = run(program, Mesh(tp=3), cluster=SWITCH)
    ends = [max(e.end for e in out.trace.events if e.rank == rank and e.kind == "send") for rank in range(3)]
    assert ends[1] == 3 * 6.25 + 6.0  # what it gets is there before it has computed
    assert ends[2] == 2 * 6.25 + 6.0 + 6.0  # waits for rank 1's second message
    assert out.trace.makespan == max(ends)
    assert critical_path(out.trace)[-1].end == out.trace.makespan


def layer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return all_reduce((x @ a).relu() @ b, "tp")


def test_a_whole_layer_by_hand():
    """x [4, 8], a [8, 8/2], b [4, 8]: mm, relu, mm, all_reduce of 128 bytes over 2."""
    args = torch.ones(4, 8), torch.ones(8, 8), torch.ones(8, 8)
    out = run(layer, TWO, *args, in_specs=(P(), P(None, "tp"), P("tp")), out_specs=P(), cluster=SWITCH)
    first = 0.25 + max(2 * 4 * 8 * 4 / 64, (32 + 32 + 16) * 4 / 32)
    relu = 0.25 + 2 * 64 / 32
    second = 0.25 + max(2 * 4 * 4 * 8 / 64, (16 + 32 + 32) * 4 / 32)
    summed = 2 * (2 + 64 / 16)
    assert out.trace.makespan == first + relu + second + summed
    assert out.trace.bytes_sent(rank=0) == 128
    assert torch.equal(out.value, torch.full((4, 8), 64.0))


def test_no_cluster_counts_hops():
    def program() -> None:
        product(8)
        x = ring_shift(ring_shift(torch.ones(1000), "tp"), "tp")
        all_reduce(x, "tp")
        h = start(ring_shift, x, "tp")
        ring_shift(x, "tp", -1)
        h.wait()

    out = run(program, Mesh(tp=3))
    assert (out.trace.unit, out.trace.cluster) == ("steps", None)
    assert [
        (e.op, e.start, e.end, e.step) for e in out.trace.events if e.rank == 1 and e.kind in ("send", "collective")
    ] == [
        ("ring_shift", 0, 1, 0),
        ("ring_shift", 1, 2, 1),
        ("all_reduce", 2, 3, 2),
        ("ring_shift", 3, 4, 3),
        ("ring_shift", 3, 4, 3),
    ]
    assert out.trace.makespan == 4
    assert out.trace.num_steps == 4


def test_steps_are_counted_in_hops_also_where_a_cluster_tells_the_time():
    def program() -> None:
        x = ring_shift(torch.ones(4), "tp")
        if axis_index("tp") == 0:
            product(32)
        all_reduce(ring_shift(x, "tp"), "tp")

    plain, timed = run(program, Mesh(tp=3)).trace, run(program, Mesh(tp=3), cluster=SWITCH).trace

    def steps(trace: Any) -> list[tuple]:
        return sorted((e.rank, e.op, e.step) for e in trace.events if e.kind in ("send", "collective"))

    assert steps(plain) == steps(timed)


def test_lines_are_each_ranks_own():
    def program() -> None:
        if axis_index("tp") == 0:
            all_reduce(torch.ones(1), "tp")
        else:
            all_reduce(torch.ones(1), "tp")

    first = program.__code__.co_firstlineno
    events = run(program, TWO).trace.select(kind="collective").events
    assert [e.where for e in events] == [f"test_clock.py:{first + 2}", f"test_clock.py:{first + 4}"]


def test_a_group_of_one_sends_nothing_and_takes_no_time():
    def program() -> float:
        x = torch.ones(3)
        for op in (all_reduce, all_gather, reduce_scatter, broadcast, ring_shift):
            x = op(x, "tp")
        barrier("tp")
        return start(all_reduce, x, "tp", op="mean").wait().sum().item()

    out = run(program, Mesh(dp=3, tp=1), cluster="h100")
    assert out.per_rank == [3.0] * 3
    assert [e for e in out.trace.events if e.kind != "compute"] == []


# --- measured ---------------------------------------------------------------------------------------------------------


class Stopwatch:
    """In place of this machine's time: it goes on when it is told to, and not by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seconds = 0.0
        monkeypatch.setattr(clocked, "time", SimpleNamespace(perf_counter=lambda: self.seconds))

    def go_on(self, seconds: float) -> None:
        self.seconds += seconds


def test_the_measured_clock_times_each_ranks_own_computing(monkeypatch: pytest.MonkeyPatch):
    stopwatch = Stopwatch(monkeypatch)

    def program() -> None:
        for _ in range(2):
            stopwatch.go_on(1.0 + axis_index("tp"))
            ring_shift(torch.ones(4), "tp")

    out = run(program, TWO, clock="measured")
    assert (out.trace.clock, out.trace.unit, out.trace.cluster) == ("measured", "s", "laptop")
    assert out.trace.busy().tolist() == pytest.approx([2, 4])  # a rank's own, without what the other one took
    assert out.trace.makespan == pytest.approx(4, abs=1e-4)  # and what the laptop takes for a message
    for rank in range(2):  # events of one rank do not overlap, and leave no gap
        spans = [(e.start, e.end) for e in out.trace.events if e.rank == rank and e.kind in ("compute", "wait")]
        assert all(b[0] == pytest.approx(a[1]) for a, b in pairwise(spans))


def test_the_measured_clock_is_this_machines_time():
    out = run(lambda: time.sleep(0.02), TWO, clock="measured")
    assert out.trace.busy().min() >= 0.02


def test_the_measured_clock_on_a_named_cluster_models_its_messages():
    def program() -> None:
        start(ring_shift, torch.empty(16), "tp").wait()

    out = run(program, TWO, clock="measured", cluster=SWITCH)
    assert out.trace.cluster == "desk"
    assert [e.end - e.start for e in out.trace.events if e.kind == "send"] == pytest.approx([6.0, 6.0])


def test_what_tplab_does_itself_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    """The sum that tplab computes for the last rank to come is communication, not that rank's work."""
    stopwatch, results = Stopwatch(monkeypatch), simulated.results
    took = []

    def slow_results(*args: Any) -> Any:
        stopwatch.go_on(1.0)
        took.append(1.0)
        return results(*args)

    monkeypatch.setattr(simulated, "results", slow_results)

    def program() -> None:
        x = torch.zeros(4)
        for _ in range(4):
            all_reduce(x, "tp")

    out = run(program, Mesh(tp=4), clock="measured")
    assert took == [1.0] * 4
    assert out.trace.busy().tolist() == pytest.approx([0] * 4, abs=1e-12)
