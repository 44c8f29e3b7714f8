"""A program's dispatch modes see collectives as over gloo, and hooks for all modules are each rank's own."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from tplab import Mesh
from tplab.torch import run


class Seen(TorchDispatchMode):
    """Notes the collectives: their names, and the shapes of their tensors in the lists they are in."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, Any]] = []
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not kwargs or not str(func).startswith("c10d")
        result = func(*args, **(kwargs or {}))
        if str(func).startswith("c10d."):
            self.calls.append((str(func), shapes(args)))
            self.results.append(shapes(result))
        return result


def shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return type(value)(map(shapes, value))
    return value if isinstance(value, int) else "..."


def every_collective() -> Seen:
    n, rank = dist.get_world_size(), dist.get_rank()
    x, many = torch.ones(2), [torch.ones(2) for _ in range(n)]
    with warnings.catch_warnings(), Seen() as seen:
        warnings.simplefilter("ignore", FutureWarning)  # deprecated names are used too
        dist.all_reduce(x)
        work: Any = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.reduce(x, 0)
        dist.broadcast(x, 0)
        dist.all_gather(many, x)
        dist.all_gather_into_tensor(torch.empty(2 * n), x)
        dist.all_gather_coalesced([[torch.empty(2)] for _ in range(n)], [x])
        dist.reduce_scatter(x, many)
        dist.reduce_scatter_tensor(x, torch.ones(2 * n))
        dist.all_to_all_single(torch.ones(n), torch.ones(n))
        dist.all_to_all_single(torch.ones(n), torch.ones(n), [1] * n, [1] * n)
        dist.gather(x, many if rank == 0 else None)
        dist.scatter(x, many if rank == 0 else None)
        dist.barrier()
        dist.monitored_barrier()
        dist.all_reduce_coalesced([x, torch.ones(3)])
        dist.all_gather_object([None] * n, "hello")
    return seen


def test_every_collective_is_seen_as_over_gloo():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        gloo = every_collective()
    finally:
        dist.destroy_process_group()
    ours = run(every_collective, Mesh(world=1), distributed=True).per_rank[0]
    # all_reduce_coalesced gives gloo a list; the reduction and the group are objects of torch
    assert [name for name, _ in ours.calls] == [name for name, _ in gloo.calls]
    for (name, mine), (_, theirs) in zip(ours.calls, gloo.calls, strict=True):
        assert mine[: len(theirs)] == theirs or name == "c10d.monitored_barrier_.default", name
    assert ours.results == gloo.results


def test_each_rank_sees_its_own_and_nothing_of_ours():
    names = [name for name, _ in run(every_collective, Mesh(world=1), distributed=True).per_rank[0].calls]
    for out in (run(every_collective, Mesh(world=3), distributed=True, cluster="h100"),
                run(every_collective, Mesh(world=2), distributed=True, count_memory=True)):  # fmt: skip
        for seen in out.per_rank:
            assert [name for name, _ in seen.calls] == names


def test_messages_are_seen():
    def program() -> list[str]:
        other = 1 - dist.get_rank()
        with Seen() as seen:
            x = torch.ones(1)
            if other:
                dist.send(x, 1)
                dist.recv(x)
            else:
                dist.recv(x, 0)
                dist.send(x, 0)
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, x, other)]):
                work.wait()
        return [name.split(".")[1] for name, _ in seen.calls]

    first, second = run(program, Mesh(world=2), distributed=True).per_rank
    assert first == ["send", "recv_any_source_", "send", "recv_"] and second == ["recv_", "send", "send", "recv_"]


def test_every_mode_sees_it_once_and_none_sees_its_own_work():
    class Outer(Seen):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            torch.ones(1).add_(1)  # it would go on for ever if it saw this
            return result

    def program() -> tuple[list[str], list[str], float]:
        x = torch.ones(1)
        group: Any = dist.group.WORLD
        with Outer() as outer, Seen() as inner:
            dist.all_reduce(x)
            y = functional.wait_tensor(functional.all_reduce(x, "sum", group))
        return [name for name, _ in outer.calls], [name for name, _ in inner.calls], float(y)

    for outer, inner, total in run(program, Mesh(world=2), distributed=True).per_rank:
        assert outer == inner == ["c10d.allreduce_.default"] and total == 4.0


def test_a_mode_finds_the_result_after_the_call():
    class After(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func == torch.ops.c10d.allreduce_.default and func in {torch.ops.c10d.allreduce_.default: 1}:
                found.append(float(args[0][0]))
                assert func._overloadpacket is torch.ops.c10d.allreduce_ and isinstance(func, torch._ops.OpOverload)
            return result

    found: list[float] = []

    def program() -> None:
        with After():
            dist.all_reduce(torch.ones(1))

    run(program, Mesh(world=3), distributed=True)
    assert found == [3.0] * 3


def test_a_mode_that_does_not_know_it_lets_it_through():
    class Unaware(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return NotImplemented if "c10d" in str(func) else func(*args, **(kwargs or {}))

    def program() -> float:
        x = torch.ones(1)
        with Unaware():
            dist.all_reduce(x)
        return float(x)

    assert run(program, Mesh(world=2), distributed=True).per_rank == [2.0, 2.0]


def test_an_error_in_a_collective_leaves_the_modes_as_they_were():
    def program() -> int:
        with Seen() as seen:
            with pytest.raises(Exception, match="has 1 tensors; it needs"):
                dist.all_to_all([torch.empty(1)], [torch.ones(1)])
            torch.ones(1)
            dist.barrier()
        return len(seen.calls)

    assert run(program, Mesh(world=2), distributed=True).per_rank == [1, 1]


def test_the_line_is_the_programs_not_the_modes():
    def program() -> None:
        with Seen():
            dist.all_reduce(torch.ones(1))

    event = run(program, Mesh(world=2), distributed=True).trace.select(kind="collective").events[0]
    assert event.where == f"test_dispatch_modes.py:{program.__code__.co_firstlineno + 2}"


def test_tensors_are_freed_at_once():
    def program() -> bool:
        gc.disable()
        try:
            with Seen() as seen:
                x = torch.ones(8)
                dist.all_reduce(x)
                gone = weakref.ref(x)
                del x
            return gone() is None and bool(seen.calls)
        finally:
            gc.enable()

    assert run(program, Mesh(world=1), distributed=True).per_rank == [True]


class Row(nn.Module):
    """Other ranks go on in the middle of its forward pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        dist.all_reduce(y.detach())
        return y


def tracked() -> tuple[list[Any], dict[str, int], dict[str, Any]]:
    model, tracker, parents = nn.Sequential(Row(), nn.Sequential(Row())), ModuleTracker(), []
    with tracker, CommDebugMode() as counted:
        for module in model.modules():
            module.register_forward_hook(lambda *_: parents.append(sorted(tracker.parents)))
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    in_modules = {name: dict(counts["forward"]) for name, counts in counted.comm_module_counts.items()}
    return parents, {str(op): count for op, count in counted.get_comm_counts().items()}, in_modules


def test_the_module_trackers_of_ranks_do_not_mix():
    (alone,) = run(tracked, Mesh(world=1), distributed=True).per_rank
    assert alone[1] == {"c10d.allreduce_": 2} and alone[0][0] == ["Global", "Sequential", "Sequential.0"]
    assert alone[2]["Sequential.1.0"] == {torch.ops.c10d.allreduce_: 1}
    assert run(tracked, Mesh(world=3), distributed=True).per_rank == [alone] * 3


def test_hooks_for_all_modules():
    """A rank has those of the notebook, and those that it registers; afterwards the notebook has its own."""
    called: list[str] = []
    hooks = nn.modules.module
    kept = hooks.register_module_forward_hook(lambda *_: called.append("notebook"))
    try:

        def program() -> list[str]:
            mine: list[str] = []
            hooks.register_module_forward_hook(lambda *_: mine.append("mine"))
            hooks.register_module_full_backward_hook(lambda *_: None)
            dist.barrier()
            nn.Identity()(torch.ones(1))
            return mine

        assert run(program, Mesh(world=2), distributed=True).per_rank == [["mine"], ["mine"]]
        nn.Identity()(torch.ones(1))
        assert called == ["notebook"] * 3
        assert not hooks._global_backward_hooks and hooks._global_is_full_backward_hook is None
    finally:
        kept.remove()
