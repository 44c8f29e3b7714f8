"""Parts that all commands share: the import path, a mesh given as text, and the files of a trace."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tplab.mesh import Mesh
from tplab.trace import Trace, to_perfetto

_FLAGS = {
    "trace": ("run.json", "write the trace as JSON"),
    "perfetto": ("run.perfetto.json", "write a trace that ui.perfetto.dev opens"),
    "html": ("run.html", "write a page that plays the run in any browser"),
}


def leave_working_directory_out() -> None:
    """Remove the working directory, which `python -m` adds, from sys.path. Call this before torch is imported: a file
    there may have the same name as a module that torch imports."""
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags --trace, --perfetto and --html."""
    for name, (example, text) in _FLAGS.items():
        parser.add_argument(f"--{name}", metavar=example, help=text)


def check_files(given: argparse.Namespace) -> None:
    """Raise OSError if the folder of a file to be written does not exist."""
    for flag in _FLAGS:
        path = Path(getattr(given, flag) or "name")
        if path.is_dir():
            raise IsADirectoryError(f"--{flag} {path} is a folder; give the name of a file in it")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"--{flag} {path}: there is no folder {path.parent}; create it first")


def write_files(trace: Trace, given: argparse.Namespace) -> None:
    """Write the requested files, and say what to do with them."""
    if given.trace:
        Path(given.trace).write_text(trace.to_json(), encoding="utf8")
        print(f"\n{given.trace} is the trace; read its text with tplab.Trace.from_json")
    if given.perfetto:
        to_perfetto(trace, given.perfetto)
        print(f"\nopen {given.perfetto} at ui.perfetto.dev")
    if given.html:
        from tplab.widgets import to_html

        to_html(trace, given.html, timeline_first=True)
        print(f"\nopen {given.html} in a browser to play the run")


def mesh_from(text: str) -> Mesh:
    """The mesh of "dp=2,tp=4". Raises ValueError."""
    axes: dict[str, int] = {}
    for axis in text.split(","):
        name, equals, size = axis.partition("=")
        if not equals:
            raise ValueError(f"--mesh {text}: write each axis as name=size, as in dp=2,tp=4")
        if name.strip() in axes:
            raise ValueError(f"--mesh {text} has two axes named {name.strip()!r}; give each a name of its own")
        axes[name.strip()] = whole(size, f"the size of {name.strip()!r} in --mesh")
    return Mesh(**axes)


def mesh_of(per_node: str | None, mesh: str | None, num_nodes: int = 1) -> Mesh:
    """The mesh that --nproc-per-node, --mesh and --nnodes describe; by default it has one rank. Raises ValueError."""
    if mesh is None:
        return Mesh(world=num_nodes * (1 if per_node is None else ranks_per_node(per_node)))
    found = mesh_from(mesh)
    if per_node is None:
        if found.size % num_nodes:
            raise ValueError(
                f"--mesh {mesh} has {found.size} ranks, which {num_nodes} nodes cannot share equally; change "
                "--mesh or --nnodes"
            )
    elif found.size != (number := ranks_per_node(per_node)) * num_nodes:
        raise ValueError(
            f"--mesh {mesh} has {found.size} ranks, but --nproc-per-node {number} on {num_nodes} "
            f"node{'s' * (num_nodes > 1)} makes {number * num_nodes}; leave --nproc-per-node out, or make them agree"
        )
    return found


def behind(script: str, args: Sequence[str]) -> str:
    """What to say of a flag for the number of ranks that is among the script's own arguments; "" if there is none."""
    flags = [arg for arg in args if arg.partition("=")[0] in ("--nproc-per-node", "--nproc_per_node", "--mesh")]
    return f"{flags[0]} comes after {script}, so it is an argument of the script" if flags else ""


def ranks_per_node(text: str) -> int:
    """The value of --nproc-per-node. As with torchrun, "gpu" and "cpu" count this machine's GPUs or CPU cores; "auto"
    counts its GPUs or, if it has none, its CPU cores. The count is printed. Raises ValueError."""
    if text not in ("auto", "cpu", "gpu"):
        return whole(text, "--nproc-per-node", ", or gpu, cpu or auto: as many as this machine has")
    gpus = 0
    if text != "cpu":
        from tplab.torch.scripts import num_gpus

        gpus = num_gpus()
    if text == "gpu" and not gpus:
        raise ValueError(
            "--nproc-per-node is 'gpu', and this machine has none; give a number: simulated ranks need none"
        )
    found, kind = (gpus, "GPU") if gpus else (os.cpu_count() or 1, "CPU core")
    print(f"--nproc-per-node {text}: {found}, because this machine has {found} {kind}{'s' * (found > 1)}")
    return found


def whole(text: str, what: str, why: str = "") -> int:
    """A number of ranks, nodes or the like. Raises ValueError for anything but 1, 2, 3 ..."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{what} is {text!r}; give a whole number, 1 or more{why}")
    return int(text)
