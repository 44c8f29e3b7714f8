"""Running a script that was written for torchrun on simulated ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from tplab.cost.cluster import Cluster
from tplab.errors import RankError
from tplab.mesh import Mesh
from tplab.torch.distributed.process import Processes
from tplab.torch.run import Result, run


def launch(
    script: str | Path, args: Sequence[str] = (), *, ranks: int | None = None, mesh: Mesh | None = None,
    num_nodes: int = 1, cluster: str | Cluster | None = None, clock: str | None = None, seed: int = 0,
    keep_values: int = 1000, device: str | torch.device | None = None,
) -> Result:  # fmt: skip
    """Run a script on simulated ranks as torchrun would on processes: `launch("train.py", ["--lr", "0.1"], ranks=8)`.

    script      a file of Python, unchanged. Each rank runs it as `__main__`, imports its own copy of the modules beside
                it, and has RANK, WORLD_SIZE and the like, sys.argv and random numbers of its own
    args        what follows the script on the command line
    ranks       how many; or `mesh`, whose axes then have their names in the trace
    num_nodes   on how many nodes the ranks are, for LOCAL_RANK
    cluster, clock, seed, keep_values, device: as of `tplab.torch.run`

    Returns a `Result`: `.trace`, and in `.per_rank` the variables that each rank's script has made at its top level.
    Raises RankError (a rank raised, or ended with another exit code than 0), CollectiveMismatchError, DeadlockError.
    """
    mesh = mesh_of(ranks, mesh)
    path = Path(script)
    source = path.read_bytes()
    code = compile(source, str(path.resolve()), "exec")
    processes = Processes(
        mesh, seed, is_joined=False, argv=[str(script), *args], is_fresh=True, per_node=per_node(mesh.size, num_nodes)
    )

    def program() -> dict[str, Any]:
        return run_as_main(code, processes, str(path))

    program.__name__ = path.stem
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        return run(
            program, mesh, on="simulated", cluster=cluster, clock=clock, seed=seed, keep_values=keep_values,
            device=device, distributed=processes,
        )  # fmt: skip
    finally:
        sys.path.remove(folder)


def mesh_of(ranks: int | None, mesh: Mesh | None) -> Mesh:
    """The mesh to run on. Raises ValueError where both or neither are given."""
    if (ranks is None) == (mesh is None):
        raise ValueError("give either ranks=8 or mesh=Mesh(dp=2, tp=4)")
    return mesh if mesh is not None else Mesh(world=ranks)  # type: ignore[arg-type]


def per_node(size: int, num_nodes: int) -> int:
    """How many ranks share a node. Raises ValueError where nodes would differ."""
    if num_nodes < 1 or size % num_nodes:
        raise ValueError(f"{size} ranks cannot be shared equally by {num_nodes} nodes; torchrun starts as many on each")
    return size // num_nodes


def run_as_main(code: CodeType, processes: Processes, file: str) -> dict[str, Any]:
    """Execute a script as the `__main__` of the rank that runs; the variables that it has made."""
    main = ModuleType("__main__")
    main.__file__ = file
    assert processes.active is not None
    processes.active.modules["__main__"] = sys.modules["__main__"] = main
    try:
        exec(code, vars(main))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RankError(f"the script ended with exit code {end.code}", -1) from None
    return {name: value for name, value in vars(main).items() if _is_result(name, value)}


def _is_result(name: str, value: Any) -> bool:
    return not name.startswith("_") and not isinstance(value, ModuleType | type) and not callable(value)
