"""Objects that ranks exchange, groups of some of them, and the store, all by way of torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.torch.distributed.test_collectives import each_size, group_of, on, put_in, same, sent
from tplab import Mesh
from tplab.errors import CollectiveMismatchError, CrossedOrderWarning, DeadlockError, RankError
from tplab.torch import device_mesh, run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# --- objects ---------------------------------------------------------------------------------------------------------


def thing(rank: int) -> dict[str, Any]:
    """Larger on later ranks."""
    return {"rank": rank, "names": ["x" * rank] * rank, "tensor": [put_in(rank, 2).tolist()]}


@each_size
def test_objects(num_ranks: int):
    def program() -> list[Any]:
        rank, root = dist.get_rank(), num_ranks - 1
        everyones: list[Any] = [None] * num_ranks
        dist.all_gather_object(everyones, thing(rank))
        at_root: list[Any] | None = [None] * num_ranks if rank == root else None
        dist.gather_object(thing(rank), at_root, dst=root)
        roots = [thing(10), "second"] if rank == root else [None, None]
        dist.broadcast_object_list(roots, src=root)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [thing(other) for other in range(num_ranks)] if rank == 0 else None, src=0)
        return [everyones, at_root, roots, mine]

    things = [thing(rank) for rank in range(num_ranks)]
    for rank, (everyones, at_root, roots, mine) in enumerate(on(num_ranks, program).per_rank):
        assert everyones == things
        assert at_root == (things if rank == num_ranks - 1 else None)
        assert roots == [thing(10), "second"]
        assert mine == [thing(rank)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_objects_from_one_rank_to_another(num_ranks: int):
    def program() -> Any:
        rank = dist.get_rank()
        got: list[Any] = [None, None]
        if rank > 0:
            dist.recv_object_list(got, src=rank - 1)
        if rank < num_ranks - 1:
            dist.send_object_list([thing(rank), got[0]], dst=rank + 1)
        return got

    _, *others = on(num_ranks, program).per_rank
    for rank, got in enumerate(others):
        assert got == [thing(rank), thing(rank - 1) if rank else None]


# --- barriers --------------------------------------------------------------------------------------------------------


@each_size
def test_nobody_passes_a_barrier_before_all_have_come(num_ranks: int):
    come: list[int] = []

    def program() -> list[int]:
        seen = []
        for barrier in (dist.barrier, lambda: dist.monitored_barrier(timeout=timedelta(seconds=1))):
            come.append(dist.get_rank())
            barrier()
            seen.append(len(come))
            dist.barrier()
        work = dist.barrier(async_op=True)
        assert work is not None
        work.wait()
        return seen

    out = on(num_ranks, program)
    assert out.per_rank == [[num_ranks, 2 * num_ranks]] * num_ranks
    assert sum(event.bytes for event in out.trace.events) == 0


# --- groups ----------------------------------------------------------------------------------------------------------


def reduced(group: Any) -> float:
    """The sum of the ranks in a group, as the group finds it."""
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x, group=group)
    return x.item()


def test_new_group():
    def program() -> list[Any]:
        rank = dist.get_rank()
        odd, even = group_of([1, 3]), group_of([0, 2])
        group = odd if rank % 2 else even
        assert (dist.get_rank(odd) == -1) == (rank % 2 == 0)
        assert dist.get_process_group_ranks(group) == [rank % 2, rank % 2 + 2]
        assert dist.get_group_rank(group, rank) == rank // 2 and dist.get_global_rank(group, 1) == rank % 2 + 2
        x = torch.tensor(float(rank))
        dist.broadcast(x, group=group, group_src=1)
        return [reduced(group), x.item(), dist.get_world_size(group), dist.get_rank(group)]

    out = on(4, program)
    assert out.per_rank == [[2, 2, 2, 0], [4, 3, 2, 0], [2, 2, 2, 1], [4, 3, 2, 1]]
    assert {event.axis for event in out.trace.events} == {"ranks 0,2", "ranks 1,3"}


def test_groups_of_the_same_ranks_do_not_meet_each_other():
    """Each rank starts with another one of two groups; in one group the calls would be a mismatch."""

    def program() -> list[Any]:
        rank = dist.get_rank()
        groups = [group_of([0, 1, 2]), group_of([0, 1, 2])]
        x, y = torch.full((2,), float(rank)), torch.full((3,), float(rank))
        works = [lambda: dist.all_reduce(x, group=groups[0], async_op=True),
                 lambda: dist.broadcast(y, 2, group=groups[1], async_op=True)]  # fmt: skip
        for work in [start() for start in (works if rank else works[::-1])]:
            assert work is not None
            work.wait()
        return [x.tolist(), y.tolist()]

    with pytest.warns(CrossedOrderWarning, match=r"rank \d in this order, rank \d in the other"):
        assert on(3, program).per_rank == [[[3, 3], [2, 2, 2]]] * 3


def test_subgroups():
    def program() -> list[Any]:
        mine, all_of_them = dist.new_subgroups(2)
        listed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        return [reduced(mine), len(all_of_them), reduced(listed)]

    assert on(4, program).per_rank == [[1, 2, 3], [1, 2, 3], [5, 2, 3], [5, 2, 3]]


def test_split_group():
    def program() -> list[Any]:
        halves = dist.split_group(split_ranks=[[0, 1], [2, 3]])
        alone = dist.split_group(halves, split_ranks=[[0], [1]])
        return [reduced(halves), reduced(alone), dist.get_world_size(alone)]

    assert on(4, program).per_rank == [[1, 0, 1], [1, 1, 1], [5, 2, 1], [5, 3, 1]]


def test_a_rank_that_is_in_no_part_of_a_split_gets_none():
    def program() -> Any:
        group = dist.split_group(split_ranks=[[0, 2]])
        return group if group is None else reduced(group)

    assert on(3, program).per_rank == [2, None, 2]


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_the_mesh_is_on_the_device_of_the_run(device: str | None):
    """Tensors without numbers count as the CPU's."""

    def program() -> tuple[bool, str]:
        return device_mesh() is device_mesh("cpu"), device_mesh().device_type

    assert run(program, Mesh(dp=2), distributed=True, device=device).per_rank == [(True, "cpu")] * 2


def test_groups_that_are_axes_have_their_names():
    """However they were made: by DeviceMesh, or by hand."""

    def program() -> list[float]:
        mesh = device_mesh()
        rank = dist.get_rank()
        columns = [group_of([0, 2]), group_of([1, 3])]
        return [reduced(mesh["tp"].get_group()), reduced(columns[rank % 2]), reduced(None)]

    out = run(program, Mesh(dp=2, tp=2), distributed=True)
    assert out.per_rank == [[1, 2, 6], [1, 4, 6], [5, 2, 6], [5, 4, 6]]
    assert {event.axis for event in out.trace.events} == {"tp", "dp", "dp,tp"}
    assert sum(sent(out, "all_reduce")) == 2 * (2 * 1 * 4) + 2 * (2 * 1 * 4) + 2 * 3 * 4


def test_the_programs_own_device_mesh_names_the_groups():
    """Where the run's mesh has no names: in the trace, and where something goes wrong."""

    def program(is_wrong: bool = False) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        pairs = [group_of([0, 3]), group_of([1, 2])]
        group = mesh["tp"].get_group()
        if is_wrong and dist.get_rank() == 0:
            dist.barrier(group)
        return [reduced(group), reduced(mesh["dp"].get_group()), reduced(pairs[dist.get_rank() % 3 > 0]), reduced(None)]

    out = on(4, program)
    assert out.per_rank == [[1, 2, 3, 6], [1, 4, 3, 6], [5, 2, 3, 6], [5, 4, 3, 6]]
    assert out.trace.mesh == Mesh(dp=2, tp=2)
    axes = ["tp", "dp", "ranks 0,3", "dp,tp"]
    assert [event.axis for event in out.trace.events if event.rank == 0 and event.kind == "collective"] == axes
    assert out.trace.bytes_sent(axis="tp") == 4 * 4
    with pytest.raises(CollectiveMismatchError, match="over axis 'tp' is not the same on all of ranks 0, 1"):
        on(4, lambda: program(is_wrong=True))


def test_a_device_mesh_of_some_ranks_or_of_another_order_names_its_groups():
    def program() -> list[float]:
        init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
        other = init_device_mesh("cpu", (3, 2), mesh_dim_names=("b", "a"))
        return [reduced(other["b"].get_group()), reduced(other["a"].get_group())]

    out = on(6, program)
    assert out.trace.mesh == Mesh(a=2, b=3)
    assert [event.axis for event in out.trace.events if event.rank == 0 and event.kind == "collective"] == ["b", "a"]


def test_two_device_meshes_with_the_same_names_keep_their_groups_apart():
    def program() -> None:
        for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
            for name in ("dp", "tp"):
                reduced(mesh[name].get_group())

    events = on(4, program).trace.events
    assert [event.axis for event in events if event.rank == 0 and event.kind == "collective"] == ["dp", "tp"] * 2


def test_groups_may_be_destroyed_and_made_again():
    def program() -> list[Any]:
        group = group_of([0, 1])
        first = reduced(group)
        dist.destroy_process_group(group)
        second = reduced(group_of([0, 1]))
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        return [first, second, reduced(None), dist.get_backend()]

    assert on(2, program).per_rank == [[1, 1, 1, "gloo"]] * 2


def test_a_second_world_is_found_by_its_name():
    """Functional collectives look a group up by its name, which is "0" for each world, also in a thread of the rank."""
    from torch.distributed._functional_collectives import all_reduce

    def summed(found: list[float]) -> None:
        name: Any = "0"
        found.append(float(all_reduce(torch.ones(2), "sum", name)[0]))

    def program() -> list[float]:
        found: list[float] = []
        for _ in range(3):
            dist.init_process_group("gloo")
            summed(found)
            thread = Thread(target=summed, args=(found,))
            thread.start()
            thread.join()
            dist.destroy_process_group()
        return found

    assert on(3, program).per_rank == [[3.0] * 6] * 3


# --- the store -------------------------------------------------------------------------------------------------------


@each_size
def test_the_store(num_ranks: int):
    """All of it, by way of prefixes too. A rank that waits for a key lets the rank run that sets it."""

    def program() -> list[Any]:
        rank = dist.get_rank()
        store: Any = dist.distributed_c10d._get_default_store()
        mine: Any = dist.PrefixStore("of the test", store)
        total = mine.add("count", rank + 1)
        mine.set(f"rank {rank}", str(rank))
        if rank == num_ranks - 1:
            mine.set("last", "it is there")
        mine.wait(["last"])
        mine.wait([f"rank {other}" for other in range(num_ranks)], timedelta(seconds=1))
        theirs = [mine.get(f"rank {other}") for other in range(num_ranks)]
        first = mine.compare_set("winner", "", str(rank))
        second = mine.compare_set("winner", "nobody", "me")
        there = [mine.check(["winner"]), mine.check(["winner", "nothing"])]
        dist.barrier()
        deleted = mine.delete_key("last") if rank == 0 else None
        return [total, theirs, first == second, there, int(mine.get("count")), deleted]

    totals, theirs, same_winner, there, counts, deleted = zip(*on(num_ranks, program).per_rank, strict=True)
    assert sorted(totals)[-1] == num_ranks * (num_ranks + 1) // 2
    assert set(map(tuple, theirs)) == {tuple(str(rank).encode() for rank in range(num_ranks))}
    assert all(same_winner) and set(map(tuple, there)) == {(True, False)}
    assert set(counts) == {num_ranks * (num_ranks + 1) // 2}
    assert deleted == (True, *[None] * (num_ranks - 1))


def test_a_program_can_catch_a_timeout_of_its_own():
    """Before, it was a deadlock, which nothing can catch. No rank waits for the time itself."""

    def program() -> list[str]:
        store: Any = dist.distributed_c10d._get_default_store()
        said = []
        for name, one in (("direct", store), ("prefix", dist.PrefixStore("mine", store))):
            if dist.get_rank() == 0:
                with pytest.raises(dist.DistStoreError) as caught:
                    one.wait(["never"], timedelta(seconds=200))
                said.append(str(caught.value).replace("mine/", ""))
                one.set(name, "1")
            else:
                one.wait([name], timedelta(seconds=200))
                one.wait([name])
            dist.barrier()
        return said

    said, nothing = on(2, program).per_rank
    assert (
        nothing == [] and [text.replace("0//", "") for text in said] == ["wait timeout after 200000ms, keys: never"] * 2
    )
    with pytest.raises(DeadlockError, match=r"in the store, for '.*never'"):
        on(2, lambda: dist.distributed_c10d._get_default_store().wait(["never"]))


def test_many_keys_at_once_and_appending():
    def program() -> list[Any]:
        store: Any = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.multi_set(["a", "b"], ["1", "2"])
            store.append("c", "first ")
            store.append("c", "second")
        return [store.multi_get(["a", "b"]), store.get("c"), store.num_keys() >= 3]

    assert on(2, program).per_rank == [[[b"1", b"2"], b"first second", True]] * 2


@pytest.mark.parametrize("kind", ["of the group", "TCPStore", "FileStore"])
def test_keys_and_queues_of_every_store(kind: str):
    def program() -> list[Any]:
        rank, size = dist.get_rank(), dist.get_world_size()
        store: Any = dist.distributed_c10d._get_default_store()
        if kind == "TCPStore":
            store = dist.TCPStore("127.0.0.1", 29511, size, is_master=rank == 0, timeout=timedelta(seconds=5))
            assert (store.host, store.port) == ("127.0.0.1", 29511)
        elif kind == "FileStore":
            store = dist.FileStore("never written", size)
        mine: Any = dist.PrefixStore("mine", store)
        if rank == 0:
            store.set("first", "1")
            mine.set("second", "2")
            for item in ("a", "b", "c"):
                mine.queue_push("jobs", item)
        popped = mine.queue_pop("jobs")  # a rank that waits lets the first one go on
        dist.barrier()
        keys = sorted(key for key in store.list_keys() if "first" in key or "second" in key)
        if rank == 0:
            with pytest.raises(dist.QueueEmptyError):
                store.queue_pop("jobs", block=False)
        return [popped, keys, mine.list_keys(), mine.queue_len("jobs"), store.queue_len("jobs")]

    found = on(3, program).per_rank
    assert sorted(popped for popped, *_ in found) == [b"a", b"b", b"c"]
    assert all(rest == [["first", "mine/second"], ["second"], 0, 0] for _, *rest in found)


def test_stores_of_other_addresses_are_others():
    def program() -> list[bool]:
        own = dist.TCPStore("127.0.0.1", 0, is_master=True)
        own.set("rank", str(dist.get_rank()))
        dist.barrier()
        other = dist.TCPStore("127.0.0.1", 29512)
        return [own.get("rank") == str(dist.get_rank()).encode(), other.check(["rank"])]

    assert on(2, program).per_rank == [[True, False]] * 2


def test_ranks_of_a_node_and_a_barrier_that_names_who_is_missing():
    def program(is_wrong: bool = False, timeout: timedelta | None = None) -> list[Any]:
        if is_wrong and dist.get_rank() == 1:
            dist.recv(torch.empty(1), 0)
        dist.monitored_barrier(timeout=timeout)
        return [dist.get_node_local_rank(), dist.get_node_local_rank(fallback_rank=9)]

    assert on(2, program).per_rank == [[0, 0], [1, 1]]
    with pytest.raises(DeadlockError, match=r"rank 0 waits in barrier\('world'\) at .* for rank 1\n"):
        on(2, lambda: program(is_wrong=True))
    with pytest.raises(RankError, match="Rank 1 failed to pass monitoredBarrier in 1000 ms"):  # as torch says it
        on(2, lambda: program(is_wrong=True, timeout=timedelta(seconds=1)))


# --- joining ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"backend": "gloo"},
        {"backend": "nccl"},
        {"backend": "cpu:gloo,cuda:nccl"},
        {"init_method": "env://"},
        {"rank": 0, "world_size": 1, "init_method": "tcp://127.0.0.1:29500"},
        {"timeout": timedelta(seconds=5)},
    ],
    ids=str,
)
def test_init_process_group_joins(given: dict[str, Any]):
    def program() -> tuple[bool, str]:
        dist.init_process_group(**given)
        x = torch.ones(1)
        dist.all_reduce(x)
        same(x, torch.ones(1))
        return dist.is_initialized(), dist.get_backend()

    ((is_initialized, backend),) = on(1, program).per_rank
    assert is_initialized and backend in ("gloo", "nccl", "cpu:gloo,cuda:nccl", "undefined")
    assert not dist.is_initialized()
