"""What Python and torch.distributed have once per process, but every rank of a distributed program needs for itself."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from threading import current_thread
from types import ModuleType
from typing import Any

import numpy as np
from torch.distributed import distributed_c10d as c10d

from tplab.mesh import Mesh
from tplab.torch.distributed.cuda import CudaOnCpu, advice
from tplab.torch.distributed.groups import Dims, Groups, Hooks
from tplab.torch.distributed.replaced import Replaced
from tplab.torch.distributed.settings import Met, Settings
from tplab.torch.distributed.store import Shared
from tplab.torch.distributed.threads import Threads
from tplab.torch.private import SLOTS, PythonRandom, Slot, c10d_C, python_random
from tplab.torch.ranks.process_state import RUN_ID
from tplab.torch.ranks.program import has_compiled_parts, is_program
from tplab.torch.ranks.simulated import SimulatedRank


class Process:
    """What one rank, or the notebook, keeps of its process while it does not have the turn.

    values    of the slots that it has met, in their order; the first of them are environment variables
    modules   the user's modules that it has imported
    """

    def __init__(self, values: list[Any]):
        self.values, self.environ = values, values[0]
        self.modules: dict[str, ModuleType] = {}


class _NumPys:
    """NumPy's default generator, as an attribute."""

    generator = property(
        lambda self: np.random.get_bit_generator(),  # type: ignore[attr-defined]
        lambda self, generator: np.random.set_bit_generator(generator),  # type: ignore[attr-defined]
    )


_numpys = _NumPys()
_OF_EACH = [
    Slot("os", "environ._data"),  # the dict with the variables
    Slot("sys", "argv"),
    Slot(__name__, "_numpys.generator"),
    Slot(python_random.__module__, "python_random.state"),
]
"""What a rank does not begin with as the notebook has it."""


class Processes:
    """The processes that the ranks of one run appear to be; in between, the notebook's own.

    mesh          the ranks
    is_joined     whether programs find torch.distributed initialised
    argv          the sys.argv of programs; None: the notebook's
    is_fresh      whether each rank imports the user's modules again, even those that the notebook has imported
    per_node      how many ranks share a node, for LOCAL_RANK
    num_gpus      how many GPUs programs find if cuda is mapped to the CPU; None: one for each rank of the node
    prints_live   whether ranks' output appears at once, not rank by rank at the end
    """

    def __init__(
        self,
        mesh: Mesh,
        seed: int,
        *,
        is_joined: bool = True,
        argv: Sequence[str] | None = None,
        is_fresh: bool = False,
        per_node: int | None = None,
        num_gpus: int | None = None,
        prints_live: bool = False,
    ):
        self.prints_live = prints_live
        self.mesh, self.seed, self.is_joined, self.is_fresh = mesh, seed, is_joined, is_fresh
        self.per_node = per_node or mesh.size
        self._num_gpus = num_gpus or self.per_node
        self._argv = argv
        self.folders = list(dict.fromkeys([*sys.path[:1], os.getcwd()])) if is_fresh else [os.getcwd()]
        own = Slot(c10d.__name__, "_world", lambda *_: None), Slot("builtins", "print")
        self._slots = [*_OF_EACH, *own, Slot("logging", "root.manager.disable"), *SLOTS]  # not imported so far
        self._met: list[Met] = []
        self._changes: list[Replaced] = [Hooks(), Settings(self._met), Threads(self._beside)]  # of torch and of Python
        self._cuda: CudaOnCpu | None = None
        self._finder = _Finder(self)
        self._shared = Shared()
        self._dims = Dims(mesh)
        self.named_mesh = self._dims.named
        self._kernel: Process | None = None
        self.active: Process | None = None
        self.ranks: list[Process] = []

    # --- cuda ----------------------------------------------------------------------------------------------------

    def map_cuda(self) -> None:
        """From the beginning of the run, map every mention of cuda in the program to the CPU."""
        self._cuda = CudaOnCpu(self._num_gpus)
        self._changes.append(self._cuda)

    @property
    def mapped(self) -> str | None:
        """What was mapped, as a sentence; None if nothing was."""
        return None if self._cuda is None else self._cuda.sentence()

    def advice(self, error: BaseException) -> str | None:
        """Advice for a program in which a rank has raised `error`."""
        return advice(error, is_mapped=self._cuda is not None)

    # --- swapping ------------------------------------------------------------------------------------------------

    def take(self) -> Process:
        """The process's current state, to restore later."""
        active, values = self.active, self._values()
        if active is None:
            active = self._kernel = self._notebook(values)
            if not self.ranks:  # this runs again after the run has let another one continue for a while
                self.ranks = [self._rank(rank, active) for rank in self.mesh.ranks]
        active.values = values
        return active

    def put(self, process: Process) -> None:
        assert self._kernel is not None
        is_notebook, before = process is self._kernel, self.active
        if before is not None:
            for name in before.modules:
                before.modules[name] = sys.modules.pop(name, None)  # type: ignore[assignment]
        if is_notebook and before is not None:
            self._leave()
        elif not is_notebook and before is None:
            self._enter()
        sys.modules.update({name: module for name, module in process.modules.items() if module is not None})
        values, notebooks = process.values, self._kernel.values
        for home, _, begin in self._met[len(values) :]:
            values.append(begin(home, notebooks[len(values)] if len(values) < len(notebooks) else None))
        for (home, name, _), value in zip(self._met, values, strict=True):
            setattr(home, name, value)
        self.active = None if is_notebook else process

    def _values(self) -> list[Any]:
        """The values of all slots whose home has been imported."""
        for slot in [slot for slot in self._slots if slot.module in sys.modules]:
            *path, name = slot.path.split(".")
            home = reduce(lambda home, inner: getattr(home, inner, None), path, sys.modules[slot.module])
            if hasattr(home, name):
                self._met.append((home, name, slot.begin))
                self._slots.remove(slot)
        return [getattr(home, name) for home, name, _ in self._met]

    def _enter(self) -> None:
        """Switch from the notebook to the ranks."""
        assert self._kernel is not None
        for change in self._changes:
            change.put()
        sys.meta_path.insert(0, self._finder)
        for name in self._kernel.modules:
            if name != "__main__":  # there always is one
                sys.modules.pop(name, None)

    def _leave(self) -> None:
        """Switch from the ranks to the notebook."""
        assert self._kernel is not None
        for change in reversed(self._changes):
            change.take_back()
        if self._finder in sys.meta_path:  # Ctrl-C may have interrupted an earlier call
            sys.meta_path.remove(self._finder)
        notebooks = self._kernel.environ
        for process in self.ranks:  # Python reports each change to C, where changes of all ranks remain
            for key in process.environ.keys() | notebooks.keys():
                if process.environ.get(key) != notebooks.get(key):
                    os.putenv(key, notebooks[key]) if key in notebooks else os.unsetenv(key)

    # --- initial states ------------------------------------------------------------------------------------------

    def _notebook(self, values: list[Any]) -> Process:
        process = Process(values)
        if self.is_fresh:
            process.modules = {
                name: module for name, module in list(sys.modules.items())
                if name == "__main__" or _is_users(getattr(module, "__spec__", None), self.folders)
            }  # fmt: skip
        return process

    def _rank(self, rank: int, kernel: Process) -> Process:
        environ, argv = dict(kernel.environ), list(sys.argv if self._argv is None else self._argv)
        for name, value in self._variables(rank).items():
            environ[os.environ.encodekey(name)] = os.environ.encodevalue(value)  # type: ignore[attr-defined]
        seeds = np.random.SeedSequence(self.seed, spawn_key=(rank, 1))
        pythons = PythonRandom(random.Random(int(seeds.generate_state(1, np.uint64)[0]))).get()
        return Process([environ, argv, np.random.MT19937(seeds), pythons])

    def _variables(self, rank: int) -> Mapping[str, str]:
        """The environment variables that torchrun sets."""
        size, local = self.mesh.size, self.per_node
        node = rank // local
        return {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local), "GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(-(-size // local)),
            "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(size), "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": RUN_ID,
        }  # fmt: skip

    @contextmanager
    def inside(self, member: SimulatedRank) -> Iterator[None]:
        """A context around the program of one rank, in its thread."""
        process = self.ranks[member.rank]
        vars(current_thread())["_daemonic"] = False  # threads that it starts are no daemons either, by default
        groups: Any = Groups(member, self._shared, self.is_joined, self._dims)
        c10d._world = groups
        try:
            with nullcontext() if self._cuda is None else self._cuda.mode():
                yield
            member.await_threads()
            for group in list(groups.pg_map):
                while group.unfinished:  # started but never waited for: it must still end
                    group.unfinished[0].wait()
        finally:
            c10d_C._unregister_all_process_groups()
            process.values[len(_OF_EACH)] = None  # frees the groups

    @contextmanager
    def _beside(self, member: SimulatedRank) -> Iterator[None]:
        """A context around a thread that the program of a rank has started, in that thread."""
        groups: Any = c10d._world
        for seat in (member, member.home):
            seat.begins = groups.register
        groups.register()
        try:
            with nullcontext() if self._cuda is None else self._cuda.mode():
                yield
        finally:
            c10d_C._unregister_all_process_groups()


_READS_THE_WORLD = {
    "torch.distributed.nn.functional",
    "torch.distributed.optim.zero_redundancy_optimizer",
    "torch.distributed.fsdp.sharded_grad_scaler",
}
"""torch modules with functions that have the default group at the time of import as a default argument."""


class _Worldless(SourceFileLoader):
    """Loads such a module as if before init_process_group. It exists once for all ranks and runs, so it must not keep
    the group of the rank that happens to import it; no group means the caller's default group."""

    def exec_module(self, module: ModuleType) -> None:
        world, c10d._world = c10d._world, c10d._World()
        try:
            super().exec_module(module)
        finally:
            c10d._world = world


class _Finder:
    """Notes which of the user's modules a rank imports. The modules are found as usual."""

    def __init__(self, processes: Processes):
        self._processes = processes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if name in _READS_THE_WORLD and spec is not None and spec.origin is not None:
            spec.loader = _Worldless(name, spec.origin)
            return spec
        if not _is_users(spec, self._processes.folders):
            return None
        active = self._processes.active
        if active is not None:
            active.modules.setdefault(name, None)  # type: ignore[arg-type]  # it exists once it was executed
        return spec


def _is_users(spec: ModuleSpec | None, folders: Sequence[str]) -> bool:
    """Whether a module is the user's: Python source that is not installed. Outside the program's `folders`, a package
    with compiled parts counts as installed wherever it is."""
    if spec is None:
        return False
    if spec.origin is None:  # a folder without __init__.py
        where = list(spec.submodule_search_locations or ())
        return bool(where) and all(is_program(os.path.join(folder, "")) for folder in where)
    if not (spec.has_location and spec.origin.endswith(".py") and is_program(spec.origin)):
        return False
    is_beside = any(spec.origin.startswith(os.path.join(folder, "")) for folder in folders)
    return is_beside or not has_compiled_parts(spec.origin, spec.name.partition(".")[0])
