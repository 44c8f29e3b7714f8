"""What goes wrong in programs for torch.distributed is named, with the lines of the user's file, and leaves nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.torch.distributed.test_collectives import group_of
from tplab import Mesh
from tplab.errors import CollectiveMismatchError, DeadlockError, MeshError, RankError, ShapeError
from tplab.torch import run
from tplab.widgets import timeline
from tplab.widgets.paper.wire import unpack

HERE = "test_faults.py"


def rank_() -> int:
    return dist.get_rank()


# --- mismatches ------------------------------------------------------------------------------------------------------


def of_kind() -> None:
    x = torch.ones(2)
    if rank_():
        dist.broadcast(x, 0)
    else:
        dist.all_reduce(x)


def of_shape() -> None:
    dist.all_reduce(torch.ones(2 + rank_()))


def of_dtype() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank_() else torch.float32))


def of_reduction() -> None:
    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank_() else dist.ReduceOp.SUM)


def of_root() -> None:
    dist.broadcast(torch.ones(2), rank_())


def of_order() -> None:
    x, y = torch.ones(2), torch.ones(3)
    for z in (x, y) if rank_() else (y, x):
        dist.all_reduce(z)


def of_what_is_started() -> None:
    work = dist.all_reduce(torch.ones(2 + rank_()), async_op=True)
    assert work is not None
    work.wait()


@pytest.mark.parametrize(
    "program",
    [of_kind, of_shape, of_dtype, of_reduction, of_root, of_order, of_what_is_started],
    ids=lambda program: program.__name__,
)
def test_a_mismatch_names_both_ranks_and_lines(program: Callable[[], None]):
    with unchanged(), pytest.raises(CollectiveMismatchError) as caught:
        run(program, Mesh(world=2), distributed=True)
    text = str(caught.value)
    assert "rank 0" in text and "rank 1" in text
    assert text.count(HERE) == 2


def all_gather_into_less() -> None:
    dist.all_gather([torch.ones(2), torch.ones(1 + rank_())], torch.ones(2))


def gather_into_less() -> None:
    dist.gather(torch.ones(2), [torch.ones(3), torch.ones(1)] if rank_() == 0 else None, dst=0)


def splits_that_do_not_match() -> None:
    """Their sums do, so that on a real network elements would end up in the wrong place."""
    dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3] if rank_() else None, [2, 2])


def lists_that_do_not_match() -> None:
    sizes = (1, 3) if rank_() else (2, 2)
    dist.all_to_all([torch.ones(size) for size in sizes], [torch.ones(2), torch.ones(2)])


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (all_gather_into_less, r"rank 0 have sizes \[2, 1\].*send it \[2, 2\]"),
        (gather_into_less, r"rank 0 have sizes \[3, 1\].*send it \[2, 2\]"),
        (splits_that_do_not_match, r"rank 1 have sizes \[1, 3\].*send it \[2, 2\]"),
        (lists_that_do_not_match, r"rank 1 have sizes \[1, 3\].*send it \[2, 2\]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_outputs_of_other_sizes_than_what_is_sent(program: Callable[[], None], words: str):
    with unchanged(), pytest.raises(CollectiveMismatchError, match=f"(?s){words}.*{HERE}"):
        run(program, Mesh(world=2), distributed=True)


def test_a_collective_that_one_rank_leaves_out():
    def program() -> None:
        if rank_() != 1:
            dist.all_reduce(torch.ones(2))

    with unchanged(), pytest.raises((CollectiveMismatchError, DeadlockError), match=r"(?s)rank 1 .*returned") as caught:
        run(program, Mesh(world=3), distributed=True)
    assert str(caught.value).count(HERE) == 2


def test_a_started_collective_to_which_others_never_come():
    def program() -> None:
        if rank_() == 0:
            dist.all_reduce(torch.ones(2), async_op=True)

    with unchanged(), pytest.raises((CollectiveMismatchError, DeadlockError), match=HERE):
        run(program, Mesh(world=2), distributed=True)


# --- groups ----------------------------------------------------------------------------------------------------------


def made(ranks: list[int]) -> Any:
    """A group that is made on a line of this file; torch's type of it has room for ranks outside of it."""
    return dist.new_group(ranks)


def own_groups_only() -> Any:
    """gloo adds up over ranks 1 and 3 for 1 and 2, and kills the others."""
    return made([0, 3] if rank_() in (0, 3) else [1, 2])


def other_order() -> Any:
    """gloo adds up wrongly, or fails."""
    groups = [made(pair) for pair in ([[0, 1], [2, 3]] if rank_() < 2 else [[2, 3], [0, 1]])]
    return groups[rank_() >= 2]


def by_members_then_all() -> Any:
    """gloo waits for ever: the second group of two ranks is the first one of the others."""
    if rank_() < 2:
        made([0, 1])
    return made([0, 1, 2, 3])


@pytest.mark.parametrize(
    "make", [own_groups_only, other_order, by_members_then_all], ids=lambda make: getattr(make, "__name__", "")
)
def test_groups_that_ranks_make_differently(make: Callable[[], Any]):
    with unchanged(), pytest.raises(CollectiveMismatchError, match="new_group number 1 is not") as caught:
        run(lambda: dist.all_reduce(torch.ones(1), group=make()), Mesh(world=4), distributed=True)
    assert str(caught.value).count("new_group([") == str(caught.value).count(HERE) == 2


@pytest.mark.parametrize("alone", [False, True])
def test_a_group_that_only_its_members_make(alone: bool):
    """The others may leave it out, as on gloo, where no group of theirs has its number or it says that it is local."""

    def program() -> list[float]:
        sums = []
        for ranks in [[0, 1], [2, 3]][: 2 - alone]:
            if rank_() in ranks:
                x = torch.tensor([float(rank_())])
                dist.all_reduce(x, group=dist.new_group(ranks, use_local_synchronization=not alone))
                sums.append(x.item())
        dist.barrier()
        return sums

    expected = [[1.0], [1.0], [], []] if alone else [[1.0], [1.0], [5.0], [5.0]]
    assert run(program, Mesh(world=4), distributed=True).per_rank == expected


def test_a_group_that_a_member_never_makes():
    def program() -> None:
        if rank_() == 0:
            dist.new_group([0, 1])
        dist.barrier()

    with unchanged(), pytest.raises(DeadlockError, match=rf"(?s)waits in new_group\(\[0, 1\]\) at .*{HERE}.*barrier"):
        run(program, Mesh(world=2), distributed=True)


def test_groups_are_counted_anew_after_the_end_of_all_groups():
    def program() -> list[Any]:
        sizes = [dist.get_world_size(group_of([0, 1, 2]))]
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        sizes.append(dist.get_world_size(group_of([0, 1])))
        return sizes

    assert run(program, Mesh(world=3), distributed=True).per_rank == [[3, 2], [3, 2], [3, -1]]


# --- gradients -------------------------------------------------------------------------------------------------------


def reduced_loss(y: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(y)
    return y


def sent_to_all(y: torch.Tensor) -> torch.Tensor:
    dist.broadcast(y, 0)
    return y


def exchanged(y: torch.Tensor) -> torch.Tensor:
    outputs = [y * 1, y * 2]
    dist.all_to_all(outputs, [torch.ones(3), torch.ones(3)])
    return outputs[1]


@pytest.mark.parametrize(
    ("send", "operation"), [(reduced_loss, "allreduce_"), (sent_to_all, "broadcast_"), (exchanged, "alltoall_")]
)
def test_a_backward_pass_through_a_collective_warns_as_over_gloo(send: Callable[..., torch.Tensor], operation: str):
    def program() -> None:
        for _ in range(2):
            send(torch.ones(3, requires_grad=True) * 2).sum().backward()

    with pytest.warns(UserWarning, match=f"^c10d::{operation}: an autograd kernel was not registered") as warned:
        run(program, Mesh(world=2), distributed=True)
    assert {os.path.basename(one.filename) for one in warned} == {HERE}
    (line,) = {one.lineno for one in warned}
    assert "dist." in Path(__file__).read_text(encoding="utf8").splitlines()[line - 1]


def test_what_is_only_looked_at_warns_of_nothing():
    """Warnings are errors here. A reduced loss has no backward pass after it, and a copy has no gradient."""

    def program() -> float:
        x = torch.ones(3, requires_grad=True)
        loss = (x * 2).sum()
        loss.backward()
        dist.all_reduce(loss)
        with torch.no_grad():
            dist.broadcast(x, 0)
        logged = (x * 3).sum()
        dist.all_reduce(logged.detach())
        logged.backward()
        return loss.item()

    assert run(program, Mesh(world=2), distributed=True).per_rank == [12.0, 12.0]


# --- deadlocks -------------------------------------------------------------------------------------------------------


def receive_without_send() -> None:
    if rank_() == 0:
        dist.recv(torch.ones(2), 1)


def send_without_receive() -> None:
    if rank_() == 0:
        dist.send(torch.ones(2), 1)


def both_send_first() -> None:
    """Real networks hide this as long as messages are small."""
    dist.send(torch.ones(2), 1 - rank_())
    dist.recv(torch.ones(2), 1 - rank_())


def both_receive_first() -> None:
    dist.recv(torch.ones(2), 1 - rank_())
    dist.send(torch.ones(2), 1 - rank_())


def other_tag() -> None:
    if rank_():
        dist.send(torch.ones(2), 0, tag=1)
    else:
        dist.recv(torch.ones(2), 1, tag=2)


def any_source_without_send() -> None:
    if rank_() == 0:
        dist.recv(torch.ones(2))


def groups_in_another_order() -> None:
    one, two = group_of([0, 1]), group_of([0, 1])
    for group in (one, two) if rank_() else (two, one):
        dist.all_reduce(torch.ones(2), group=group)


def wrong_key() -> None:
    store = c10d._get_default_store()
    if rank_():
        store.set("ready", "1")
    else:
        store.wait(["raedy"])


def barrier_of_some() -> None:
    if rank_() == 0:
        dist.monitored_barrier(timeout=timedelta(hours=1))


def test_the_trace_of_a_deadlock_says_how_it_ended():
    """Before, its page looked like that of a run that went well."""
    with pytest.raises(DeadlockError) as caught:
        run(both_send_first, Mesh(world=2), distributed=True)
    (said,) = caught.value.trace.warnings
    assert said.startswith(f"the run ended with DeadlockError: {caught.value}\n")
    assert said.endswith("\n2 messages shown as sent were never received")
    assert unpack(timeline(caught.value.trace).score)[0]["warning"] == f"Warning: {said}."


@pytest.mark.parametrize(
    "program",
    [
        receive_without_send,
        send_without_receive,
        both_send_first,
        both_receive_first,
        other_tag,
        any_source_without_send,
        groups_in_another_order,
        wrong_key,
        barrier_of_some,
    ],
    ids=lambda program: program.__name__,
)
def test_a_deadlock_is_named_at_once(program: Callable[[], None]):
    with unchanged(), pytest.raises(DeadlockError) as caught:
        run(program, Mesh(world=2), distributed=True)  # torch would wait for half an hour: longer than a test may take
    text = str(caught.value)
    assert "rank 0 waits in" in text and HERE in text
    assert "rank 1" in text
    assert ("raedy" in text) == ("key" in program.__name__)


# --- what ranks raise ------------------------------------------------------------------------------------------------


def test_a_rank_that_raises():
    def program() -> None:
        if rank_() == 1:
            raise KeyError("of the program")
        dist.all_reduce(torch.ones(2))

    with unchanged(), pytest.raises(RankError, match=rf"rank 1 raised KeyError at {HERE}"):
        run(program, Mesh(world=3), distributed=True)


def test_a_rank_that_raises_in_a_gradient_hook():
    def program() -> None:
        layer = torch.nn.Linear(2, 2)
        model = torch.nn.parallel.DistributedDataParallel(layer)

        def hook(grad: Any) -> None:
            if rank_() == 1:
                raise KeyError("of the hook")

        layer.weight.register_hook(hook)
        model(torch.ones(1, 2)).sum().backward()

    with unchanged(), pytest.raises(RankError, match=rf"rank 1 raised KeyError at {HERE}"):
        run(program, Mesh(world=2), distributed=True)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (lambda: dist.all_gather([torch.ones(2)], torch.ones(2)), "all_gather.*has 1 tensors.*each of the 2 ranks"),
        (lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)), r"output.*\[3\].*must have 4"),
        (lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(3)), r"input.*\[3\].*must have 4"),
        (lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "3, which 2 ranks cannot share equally"),
        (lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3], [1, 2]), r"\[1, 2\] must be 2 numbers"),
        (lambda: dist.reduce_scatter(torch.ones(3), [torch.ones(2)] * 2), r"output.*\[3\].*must have 2"),
        (lambda: dist.scatter(torch.ones(1), [torch.ones(2)] * 2 if not rank_() else None), "output.*must have 2"),
        (lambda: receive_another_size(), "output.*must have 3"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sizes_that_do_not_fit(start: Callable[[], Any], words: str):
    with unchanged(), pytest.raises(ShapeError, match=f"(?s){words}"):
        run(lambda: start(), Mesh(world=2), distributed=True)


def receive_another_size() -> None:
    if rank_():
        dist.send(torch.ones(3), 0)
    else:
        dist.recv(torch.ones(2), 1)


@pytest.mark.parametrize(
    ("op", "dtype", "error"),
    [
        (dist.ReduceOp.BAND, torch.float32, "bitwise and needs whole numbers"),
        (dist.ReduceOp.AVG, torch.int64, "would not be whole numbers"),
    ],
)
def test_reductions_that_a_dtype_does_not_have(op: Any, dtype: torch.dtype, error: str):
    with unchanged(), pytest.raises(RankError, match=error):
        run(lambda: dist.all_reduce(torch.ones(2, dtype=dtype), op), Mesh(world=2), distributed=True)


def test_a_world_of_another_size():
    def program() -> None:
        dist.init_process_group("gloo", rank=rank_(), world_size=8)

    with unchanged(), pytest.raises(MeshError, match=r"world_size=8.*2 ranks"):
        run(program, Mesh(world=2), distributed=True)


# --- everything as before --------------------------------------------------------------------------------------------


@contextmanager
def unchanged() -> Iterator[None]:
    """What a process has is the same after as before."""
    before = state()
    yield
    for name, value in state().items():
        assert value == before[name], name


def state() -> dict[str, Any]:
    pythons = random.getstate()
    numpys = np.random.get_state()  # noqa: NPY002
    return {
        "environ": dict(os.environ),
        "RANK in C": subprocess.check_output("echo $RANK $OF_THE_PROGRAM", shell=True),
        "argv": list(sys.argv),
        "main": sys.modules["__main__"],
        "path": list(sys.path),
        "finders": list(sys.meta_path),
        "world": c10d._world,
        "default group": c10d._world.default_pg,
        "groups": dict(c10d._world.pg_map),
        "is initialised": dist.is_initialized(),
        "init": c10d.init_process_group,
        "code of init": inspect_code(dist.init_process_group),
        "torch's generator": torch.get_rng_state().tolist(),
        "numpy's generator": (numpys[0], numpys[1].tolist(), *numpys[2:]),  # type: ignore[index, union-attr]
        "python's generator": pythons,
        "default dtype": torch.get_default_dtype(),
        "stdout": sys.stdout,
        "threads": torch.autograd.is_multithreading_enabled(),  # type: ignore[attr-defined]
    }


def inspect_code(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__


def draw() -> list[float]:
    """One number from each library's own generator."""
    return [torch.rand(1).item(), float(np.random.rand()), random.random()]  # noqa: NPY002


def spoil() -> None:
    """Change whatever a program might change, then go on with something that needs the others."""
    rank = rank_()
    os.environ["RANK"], os.environ["OF_THE_PROGRAM"] = "77", str(rank)
    sys.argv.append("--of-the-program")
    torch.manual_seed(rank)
    np.random.seed(rank)  # noqa: NPY002
    random.seed(rank)
    draw()
    torch.set_default_dtype(torch.float64)
    group_of([0])
    dist.barrier()
    assert os.environ["OF_THE_PROGRAM"] == str(rank)


def fail() -> None:
    spoil()
    if rank_() == 1:
        raise ValueError("of the program")
    dist.barrier()


@pytest.mark.parametrize("is_initialized", [False, True], ids=["alone", "with a gloo group of its own"])
@pytest.mark.parametrize("program", [spoil, fail], ids=lambda program: program.__name__)
def test_the_notebook_is_as_before(program: Callable[[], None], is_initialized: bool, tmp_path):
    if is_initialized:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with unchanged():
            if program is fail:
                with pytest.raises(RankError, match="of the program"):
                    run(program, Mesh(world=2), distributed=True)
            else:
                run(program, Mesh(world=2), distributed=True)
        assert "OF_THE_PROGRAM" not in os.environ
        if is_initialized:
            x = torch.ones(2)
            dist.all_reduce(x)
            assert x.tolist() == [1, 1] and dist.get_world_size() == 1
    finally:
        if is_initialized:
            dist.destroy_process_group()


def test_each_rank_draws_its_own_and_the_same_in_every_run():
    once, twice = (run(draw, Mesh(world=3), distributed=True).per_rank for _ in range(2))
    assert once == twice
    assert len({number for rank in once for number in rank}) == 9
