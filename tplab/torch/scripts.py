"""Runs a script that was written for torchrun, or a notebook's cell, on simulated ranks."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch

from tplab.cost.cluster import Cluster
from tplab.errors import TplabError
from tplab.mesh import Mesh
from tplab.torch.distributed.process import Processes
from tplab.torch.ranks.rank import this_rank
from tplab.torch.run import Result, run
from tplab.torch.watching.live_bytes import LiveBytes

Around = Callable[[], AbstractContextManager[Any]]


def num_gpus() -> int:
    """The number of GPUs of this machine."""
    return torch.cuda.device_count()


def launch(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    ranks: int | None = None,
    mesh: Mesh | None = None,
    module: bool = False,
    num_nodes: int = 1,
    cluster: str | Cluster | None = None,
    clock: str | None = None,
    seed: int = 0,
    keep_values: int = 1000,
    device: str | torch.device | None = None,
    count_memory: bool = False,
    print_live: bool = False,
    types: bool = False,
) -> Result:
    """Run a script on simulated ranks as torchrun would on processes: `launch("train.py", ["--lr", "0.1"], ranks=8)`.

    script       a Python file, unchanged. Each rank runs it as `__main__`, imports its own copy of the modules beside
                 it, and has its own RANK, WORLD_SIZE and the like, sys.argv and random numbers
    args         the script's own arguments
    ranks        the number of ranks; or give `mesh`, whose axes then name the groups in the trace
    module       whether `script` is the name of a module, as in `python -m`
    num_nodes    the number of nodes; it decides LOCAL_RANK
    count_memory whether to count the bytes of each rank's tensors, for `.peaks` of the result; this slows down the run
    print_live   whether each line that a rank prints, also to stderr, appears at once. Otherwise ranks' output appears
                 at the end, rank by rank
    cluster, clock, seed, keep_values, device, types: as for `tplab.torch.run`, but the script runs only once for types.
    For more than 16 ranks it then runs on the smallest mesh of the same axes, with 2 ranks along each: types depend on
    axes, not on their sizes. The whole result is that of the small mesh

    Returns a `Result`: `.trace`, and in `.per_rank` the top-level variables of each rank's script.
    Raises RankError (a rank raised, or exited with a code other than 0), CollectiveMismatchError, DeadlockError.
    """
    mesh = _mesh(ranks, mesh)
    return Script(script, args, module=module).run(
        mesh,
        num_nodes=num_nodes,
        cluster=cluster,
        clock=clock,
        seed=seed,
        keep_values=keep_values,
        device=device,
        count_memory=count_memory,
        print_live=print_live,
        types=types,
    )


class Script:
    """A Python file or module that ranks run as torchrun's processes would. The parameters are `launch`'s."""

    def __init__(self, script: str | Path, args: Sequence[str] = (), *, module: bool = False):
        self._script, self._args, self._is_module = str(script), [*args], module
        self._folder = os.getcwd() if module else str(Path(script).resolve().parent)

    def run(
        self,
        mesh: Mesh,
        *,
        num_nodes: int = 1,
        num_gpus: int | None = None,
        seed: int = 0,
        count_memory: bool = False,
        print_live: bool = False,
        around: Around = nullcontext,
        **options: Any,
    ) -> Result:
        """Run it on every rank of `mesh`. around: makes a context for each rank's run. num_gpus: how many GPUs programs
        find if cuda means the CPU; None: one for each rank. options: as for `run`."""
        peaks = [0] * mesh.size

        @contextmanager
        def counted() -> Iterator[None]:
            with around(), LiveBytes() as live:
                try:
                    yield
                finally:
                    peaks[this_rank().rank] = live.peak

        is_typed_small = options.get("types") and mesh.size > _MOST_TYPED
        asked, mesh = mesh, _smallest(mesh) if is_typed_small else mesh
        local = _per_node(mesh.size, 1 if is_typed_small else num_nodes)
        sys.path.insert(0, self._folder)
        try:
            spec = _found(self._script) if self._is_module else None
            path = Path(spec.origin) if spec is not None and spec.origin else Path(self._script)
            code = compile(path.read_bytes(), str(path.resolve()), "exec")
            processes = Processes(
                mesh,
                seed,
                is_joined=False,
                argv=[str(path) if self._is_module else self._script, *self._args],
                is_fresh=True,
                per_node=local,
                num_gpus=num_gpus,
                prints_live=print_live,
            )
            names = {"__file__": str(path), "__spec__": spec, "__package__": spec.parent if spec else None}
            program = _Program(path.stem, code, processes, lambda: names, counted if count_memory else around)
            out = run(program, mesh, on="simulated", seed=seed, distributed=processes, **options)
            out.peaks = peaks if count_memory else None
            if is_typed_small:
                out.types.note = f"{_assumed(asked, mesh)}; {out.types.note}"
            return out
        except TplabError as error:
            if is_typed_small:
                error.add_note(f"{_assumed(asked, mesh)}. If the script has sizes of its own, give those of {mesh}")
            raise
        finally:
            sys.path.remove(self._folder)


_MOST_TYPED = 16
"""The most ranks that a script runs on for types."""


def _smallest(mesh: Mesh) -> Mesh:
    """The smallest mesh of the same axes, on which types are the same."""
    return Mesh(**{name: min(size, 2) for name, size in mesh.shape.items()})


def _assumed(asked: Mesh, small: Mesh) -> str:
    return (
        f"typed on {small} instead of {asked}, assuming that the script takes all sizes from its groups of ranks, and "
        "that no rank is of a kind which only the larger mesh has, such as a stage in the middle of a pipeline"
    )


class Cell(NamedTuple):
    """A notebook's cell, and the notebook's variables."""

    code: CodeType
    variables: Mapping[str, Any]


def run_cell(
    code: CodeType,
    variables: Mapping[str, Any],
    mesh: Mesh,
    *,
    seed: int = 0,
    num_gpus: int | None = None,
    around: Around = nullcontext,
    **options: Any,
) -> Result:
    """Run a notebook's cell on every rank of `mesh`; each begins with a copy of the notebook's `variables`."""
    processes = Processes(mesh, seed, is_fresh=True, num_gpus=num_gpus)
    program = _Program("cell", code, processes, lambda: dict(variables), around)
    return run(program, mesh, on="simulated", seed=seed, distributed=processes, **options)


class _Program:
    """Code that each rank runs as its `__main__`.

    names   the module's names before the code runs, made separately for each rank
    around  a context for the code, which may end it without an error
    """

    def __init__(
        self, name: str, code: CodeType, processes: Processes, names: Callable[[], dict[str, Any]], around: Around
    ):
        self.__name__, self._code, self._processes, self._names = name, code, processes, names
        self._around = around

    def __call__(self) -> dict[str, Any]:
        """Run the code. Returns its variables."""
        main = ModuleType("__main__")
        vars(main).update(self._names(), __name__="__main__")
        before = dict(vars(main))
        assert self._processes.active is not None
        self._processes.active.modules["__main__"] = sys.modules["__main__"] = main
        try:
            with self._around():
                exec(self._code, vars(main))
        except SystemExit as end:
            if end.code not in (None, 0):
                if isinstance(end.code, int):
                    end.args = (f"exit code {end.code}",)
                raise
        made = {name: value for name, value in vars(main).items() if before.get(name, main) is not value}
        return {name: value for name, value in made.items() if _is_result(name, value)}


def _is_result(name: str, value: Any) -> bool:
    return not name.startswith("_") and not isinstance(value, ModuleType | type) and not callable(value)


def _mesh(ranks: int | None, mesh: Mesh | None) -> Mesh:
    """The mesh to run on. Raises ValueError if both or neither are given."""
    if (ranks is None) == (mesh is None):
        raise ValueError("give either ranks=8 or mesh=Mesh(dp=2, tp=4)")
    return mesh if mesh is not None else Mesh(world=ranks)  # type: ignore[arg-type]


def _per_node(size: int, num_nodes: int) -> int:
    """The number of ranks per node. Raises ValueError if nodes would differ."""
    if num_nodes < 1 or size % num_nodes:
        raise ValueError(f"{num_nodes} nodes cannot share {size} ranks equally; torchrun starts equally many on each")
    return size // num_nodes


def _found(name: str) -> ModuleSpec:
    """The module that `python -m name` would run. Raises ModuleNotFoundError."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:  # a package that would contain it
        if not name.startswith(f"{error.name}."):
            raise
        spec = None
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"there is no module {name!r} to run, neither in this folder nor installed")
    return spec
