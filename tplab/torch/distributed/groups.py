"""torch.distributed's tables of one rank's process groups, and how groups are made."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tplab.errors import CollectiveMismatchError, MeshError
from tplab.mesh import APART, DIM, Mesh, label_of, mesh_of_dims
from tplab.torch.distributed.group import Group
from tplab.torch.distributed.identity import IDENTITY
from tplab.torch.distributed.profiling import Profiling
from tplab.torch.distributed.replaced import Replaced, Value, on_ranks
from tplab.torch.distributed.store import FileStore, Made, PrefixStore, Shared, Store, TCPStore
from tplab.torch.private import c10d_C
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.watcher import resize

_INIT = inspect.signature(dist.init_process_group)
_SPLIT = inspect.signature(dist.split_group)
_NEW = inspect.signature(c10d._new_process_group_helper)


class Groups:
    """The process groups of one rank: what torch.distributed otherwise keeps once per process, under the same names.

    Groups are made as torch makes them, up to the point where it would open connections. is_joined: whether the program
    finds torch.distributed initialised before it calls init_process_group. dims: gets every group.
    """

    def __init__(self, member: SimulatedRank, shared: Shared, is_joined: bool, dims: Dims):
        self.member, self.shared, self.store, self._dims = member, shared, Store(shared, member), dims
        self.pg_map: dict[Any, tuple[str, Any]] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []
        self.group_count = self._num_inits = 0
        self.meshes: dict[str, Any] = {}
        self.default_pg: Group | None = None
        self._registered = threading.local()
        self._is_implicit = False
        if is_joined:
            self._join("gloo")
            self._is_implicit = True

    pg_config_info = c10d._World.pg_config_info

    def register(self) -> None:
        """Let torch's C++ code find all groups by name, in the running thread."""
        known: dict[Any, str] = vars(self._registered).setdefault("groups", {})
        if known == self.pg_names:
            return
        for group in known.keys() - self.pg_names.keys():  # destroyed, and another group may have its name now
            c10d_C._unregister_process_group(known.pop(group))
        for group in self.pg_names.keys() - known.keys():
            known[group] = self.pg_names[group]
            c10d_C._register_process_group(known[group], group)

    # --- what the program calls through torch ---------------------------------------------------------------------

    def init_process_group(self, *args: Any, **kwargs: Any) -> None:
        """`torch.distributed.init_process_group`: the ranks of the run form the group, whatever the backend."""
        given = _INIT.bind(*args, **kwargs).arguments
        if self.default_pg is not None and not self._is_implicit:
            raise ValueError("trying to initialize the default process group twice!")  # torch's words
        world, rank = self.member.mesh.size, self.member.rank
        for name, true in (("world_size", world), ("rank", rank)):
            value = given.get(name, -1)
            if value not in (-1, true):
                raise MeshError(
                    f"init_process_group: {name}={value}, but this is rank {rank} of the {world} ranks of "
                    f"{self.member.mesh}; leave {name} out, or run on as many ranks as the program wants"
                )
        backend = str(given.get("backend") or "gloo")
        if self._is_implicit and self.default_pg is not None:
            self._is_implicit = False
            self.default_pg.backend = backend
            self.pg_map[self.default_pg] = (backend, self.store)
            self.pg_backend_config[self.default_pg] = backend
        else:
            self._join(backend)

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        """`torch.distributed.split_group`: the part of a group that this rank is in; no communication is needed."""
        given = _SPLIT.bind(*args, **kwargs).arguments
        parent = given.get("parent_pg") or self.default_pg
        if parent is None or not given.get("split_ranks"):
            raise ValueError("split_group needs an initialised process group and split_ranks, a list of lists of ranks")
        whole, mine = parent.place.group, None
        for number, positions in enumerate(given["split_ranks"]):
            ranks = sorted(whole[position] for position in positions)
            if self.member.rank in ranks:
                name = f"{parent.group_name}:split:{self.group_count}:{number}"
                mine = self._made(ranks, name, parent.backend, about=given.get("group_desc") or "")
        self.group_count += 1
        return mine

    # --- how torch makes a group ---------------------------------------------------------------------------------

    def new_group(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Replaces torch's `_new_process_group_helper`. Returns the group and its store."""
        given = _NEW.bind(*args, **kwargs).arguments
        ranks, name, backend = list(given["global_ranks_in_group"]), str(given["group_name"]), str(given["backend"])
        self._meet(name, ranks, backend)
        tag = given.get("pg_tag") or None
        if tag is not None and (existing := c10d._find_pg_by_ranks_and_tag(tag, ranks)):
            return existing, self.pg_map[existing][1]
        if self.member.rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        group = self._made(ranks, name, backend, tag, given.get("group_desc") or "")
        return group, group.store

    def _meet(self, name: str, ranks: list[int], backend: str) -> None:
        """Compare this group with the groups that other ranks make under the name, which torch joins. gloo connects a
        group's members at once, so they wait for each other. Names are numbers, but for groups that only members
        make."""
        member = self.member.here()
        where = member.world.lines.here()
        made = self.shared.groups.setdefault((self._num_inits, name), Made(member.rank, ranks, where, set()))
        if made.ranks != ranks:
            sides = [(made.rank, made.ranks, made.where), (member.rank, ranks, where)]
            said = "\n".join(f"  rank {rank}: new_group({its}) at {line}" for rank, its, line in sorted(sides))
            error = CollectiveMismatchError(
                f"new_group number {name} is not the same on all ranks:\n{said}\nevery rank must make every group, in "
                "the same order, also those that it is not in, unless all pass use_local_synchronization=True"
            )
            member.turns.fail(error)
            raise error
        made.came.add(member.rank)
        if member.rank in ranks and "gloo" in backend:
            if made.came.issuperset(ranks):
                member.look()
                member.give_way()  # ranks continue in the order in which they came
            else:
                member.wait_until(lambda: made.came.issuperset(ranks), f"new_group({ranks})")

    def _join(self, backend: str) -> None:
        self._num_inits += 1
        group = self._made(list(self.member.mesh.ranks), str(self.group_count), backend)
        self.group_count += 1
        self.default_pg = group

    def _made(self, ranks: Sequence[int], name: str, backend: str, tag: str | None = None, about: str = "") -> Group:
        store = PrefixStore(f"{name}/", self.store)
        group = Group(self.member, ranks, name, self._dims.label(about, ranks), backend, store)
        self.pg_map[group] = backend, store
        self.pg_names[group] = name
        self.pg_backend_config[group] = backend
        self.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ranks)}
        self.register()
        tag = f"ptd:{name}" if tag is None else f"user:{tag}"
        if tag.startswith("ptd:"):
            self.tags_to_pg.setdefault("", []).append(group)
        self.tags_to_pg.setdefault(tag, []).append(group)
        self.pg_to_tag[group] = tag
        return group


# --- hooks -----------------------------------------------------------------------------------------------------------
# Programs import `init_process_group` under many names before a run begins. So the functions remain the same objects,
# and during a run they have the code below, in which `_world` is torch's own name for what Groups replaces.


def _init(*args, **kwargs):  # type: ignore
    return _world.init_process_group(*args, **kwargs)  # type: ignore  # noqa: F821


def _split(*args, **kwargs):  # type: ignore
    return _world.split_group(*args, **kwargs)  # type: ignore  # noqa: F821


def _new(*args, **kwargs):  # type: ignore
    return _world.new_group(*args, **kwargs)  # type: ignore  # noqa: F821


def _resolve(name: str) -> Any:
    """The group of this name, also in a thread that a rank has started, which torch's own table does not cover."""
    for group, its_name in c10d._world.pg_names.items():
        if its_name == name:
            return group
    return c10d_C._resolve_process_group(name)


@on_ranks(torch.ops._c10d_functional, "all_gather_into_tensor_out")
def _gather_into(rank: Any, own: Any, x: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    """An operation which torch's C++ code would run without the group's methods. The result is there when `wait_tensor`
    returns."""
    group: Any = c10d_C._resolve_process_group(group_name)
    c10d_C._register_work(out, group.all_gather_single(out, x))
    return out


_gather_into[2].default = _gather_into[2]  # its only overload


class Hooks(Replaced):
    """torch.distributed as simulated ranks need it, for the duration of a run."""

    def __init__(self) -> None:
        from torch.distributed import c10d_logger, device_mesh

        self._is_inside = False  # another run
        own: list[Value] = [
            (c10d_logger, "_get_msg_dict", lambda name, *_, **__: {"func_name": name}),  # torch's asks NCCL
            (c10d, "_store_based_barrier", lambda *args, **kwargs: None),
            (device_mesh, "get_backend", lambda group=None: "threaded"),  # so that each rank's meshes are its own
            (device_mesh, "_resolve_process_group", _resolve),
            *((dist, kind.__name__, kind) for kind in (PrefixStore, TCPStore, FileStore)),
            (c10d, "PrefixStore", PrefixStore),
            (torch.multiprocessing, "spawn", _spawned),
            (torch.multiprocessing, "start_processes", _spawned),
            (torch.UntypedStorage, "resize_", resize),
            *IDENTITY,
            _gather_into,
            *Profiling().attributes,
            *((inspect.unwrap(getattr(c10d, name)), "__code__", hook.__code__) for name, hook in _HOOKS.items()),
        ]
        super().__init__(own)

    def put(self) -> None:
        self._is_inside = isinstance(c10d._world, Groups)
        c10d_C._set_thread_isolation_mode(True)
        super().put()

    def take_back(self) -> None:
        super().take_back()
        c10d_C._set_thread_isolation_mode(self._is_inside)


_HOOKS: dict[str, Callable[..., Any]] = {
    "init_process_group": _init,
    "split_group": _split,
    "_new_process_group_helper": _new,
}


def _spawned(
    fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
) -> SimpleNamespace | None:
    """`torch.multiprocessing.spawn`: every rank has called it, so each runs `fn` as the process with its own number."""
    member = c10d._world.member  # type: ignore[attr-defined]
    if nprocs != member.mesh.size:
        raise MeshError(
            f"spawn(..., nprocs={nprocs}) on {member.mesh.size} simulated ranks: each of them runs the script, and is "
            f"one of the processes, so there must be as many; run it on {nprocs} ranks"
        )
    fn(member.rank, *args)
    # with join=False, the program waits for what is already done
    return None if join else SimpleNamespace(processes=(), join=lambda *_, **__: True)


# --- names in a trace -------------------------------------------------------------------------------------------------


class Dims:
    """The groups that the ranks of one run have made, and their names in the program.

    A group that is an axis of the run's mesh has the axis's name. Any other group is named after its dim if it belongs
    to a DeviceMesh, otherwise after its ranks.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._groups: dict[tuple[str, tuple[int, ...]], str] = {}  # (name, ranks) -> label

    def label(self, about: str, ranks: Sequence[int]) -> str:
        """A group's name in the trace; `about` is its name in the program."""
        key = about, tuple(ranks)
        if key not in self._groups:
            label = label_of(ranks, self._mesh)
            is_unnamed = label.startswith(APART) and about.startswith(DIM)
            self._groups[key] = about.removeprefix(DIM) if is_unnamed else label
        return self._groups[key]

    def named(self) -> tuple[Mesh, Mapping[str, str]] | None:
        """The program's own mesh, and each label's meaning on it; None if it has none or the run's mesh has names."""
        own = mesh_of_dims(self._groups, self._mesh.size) if self._mesh.axis_names == ("world",) else None
        if own is None:
            return None
        labels: dict[str, set[str]] = {}
        for (_, ranks), label in self._groups.items():
            labels.setdefault(label, set()).add(label_of(ranks, own))
        names = {label: found.pop() for label, found in labels.items() if len(found) == 1}
        return own, {label: name for label, name in names.items() if not name.startswith(APART)}
