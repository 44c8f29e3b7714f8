"""`%%ranks tp=4`: a cell of a notebook, run on every rank. `%load_ext tplab` brings it."""

from __future__ import annotations

import shlex
from functools import partial
from typing import TYPE_CHECKING, Any

from tplab.mesh import Mesh

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_USAGE = "%%ranks tp=4 [dp=2 ...] [--cluster h100] [--clock measured] [--seed 0] [--device cpu] [--into name]"


def load(shell: InteractiveShell) -> None:
    """Called by `%load_ext tplab`."""
    shell.register_magic_function(partial(ranks, shell), "cell", "ranks")  # type: ignore[call-overload]


def ranks(shell: InteractiveShell, line: str, cell: str) -> Any:
    """Run the cell on every rank of a mesh, as a program for torch.distributed: `%%ranks tp=4`.

    Each rank has its own copy of the notebook's variables, imports the notebook's own modules anew, and finds
    torch.distributed initialised. What is printed says whose it is. The cell's value is a `Result`: its trace, and in
    `.per_rank` the variables that each rank's cell has made. `--into out` keeps it under that name.
    """
    axes, options = _parsed(line)
    into = options.pop("into", None)
    if "seed" in options:
        options["seed"] = int(options["seed"])
    from tplab.torch.scripts import run_cell

    code = compile(shell.transform_cell(cell), shell.compile.cache(cell), "exec")
    out = run_cell(code, shell.user_ns, Mesh(**axes), **options)
    if into is not None:
        shell.user_ns[into] = out
    return out


def _parsed(line: str) -> tuple[dict[str, int], dict[str, Any]]:
    """The axes of the mesh, and the options. Raises ValueError."""
    axes: dict[str, int] = {}
    options: dict[str, Any] = {}
    words = iter(shlex.split(line))
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if name not in ("cluster", "clock", "seed", "device", "into"):
                raise ValueError(f"%%ranks has no option --{name}; write {_USAGE}")
            options[name] = value if equals else next(words, None)
            continue
        name, equals, size = word.partition("=")
        if not equals or not size.isdecimal():
            raise ValueError(f"%%ranks: {word!r} is no axis; write {_USAGE}")
        axes[name] = int(size)
    return axes, options
