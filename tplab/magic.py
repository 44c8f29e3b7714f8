"""`%%ranks tp=4`: runs a notebook cell on every rank. `%load_ext tplab` adds it."""

from __future__ import annotations

import shlex
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from tplab.mesh import Mesh

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_USAGE = (
    "%%ranks tp=4 [dp=2 ...] [--cluster h100] [--clock measured] [--seed 0] [--device cpu] [--into name] [--doctor]"
)


def load(shell: InteractiveShell) -> None:
    """Called by `%load_ext tplab`."""
    shell.register_magic_function(partial(ranks, shell), "cell", "ranks")  # type: ignore[call-overload]


def ranks(shell: InteractiveShell, line: str, cell: str) -> Any:
    """Run the cell on every rank of a mesh, as a program for torch.distributed: `%%ranks tp=4`.

    Each rank has its own copy of the notebook's variables and imports the notebook's own modules afresh;
    torch.distributed is already initialized. Every printed line says which rank printed it. The cell's value is a
    `Result`: it has the trace and, in `.per_rank`, the variables that the cell made on each rank. `--into out` stores
    it in `out`.

    With `--doctor` the cell's value is the report of `tplab.torch.same_model`: whether the cell trains the same model
    on the ranks as on one. The cell must build what it trains, because it runs more than once.
    """
    axes, options = _parsed(line)
    into, is_doctor = options.pop("into", None), options.pop("doctor", False)
    code = _compiled(shell, line, cell)
    if is_doctor:
        from tplab.torch.checking.same_model import same_model
        from tplab.torch.scripts import Cell

        out: Any = same_model(Cell(code, shell.user_ns), mesh=Mesh(**axes), **options)
    else:
        from tplab.torch.scripts import run_cell

        out = run_cell(code, shell.user_ns, Mesh(**axes), **options)
    if into is not None:
        shell.user_ns[into] = out
    return out


def _compiled(shell: InteractiveShell, line: str, cell: str) -> CodeType:
    """Compile the cell, with lines counted from the top of the notebook's cell, including `%%ranks`. Its source is
    cached as written, so that tracebacks show it and `tplab.lines` knows its number."""
    history = shell.history_manager
    kept = history.input_hist_raw if history else [""]
    number, written = len(kept) - 1, kept[-1]
    if not (written.lstrip().startswith("%%ranks") and written.rstrip().endswith(cell.rstrip())):
        number, written = len(kept), f"%%ranks {line}\n{cell}"  # some tools run cells uncounted
    above = written[: written.rindex(cell.rstrip())].count("\n")
    name = shell.compile.cache(written, number)
    return compile("\n" * above + shell.transform_cell(cell), name, "exec")


def _parsed(line: str) -> tuple[dict[str, int], dict[str, Any]]:
    """The axes of the mesh, and the options. Commas are allowed: `tp=4, dp=2`. Raises ValueError."""
    axes: dict[str, int] = {}
    options: dict[str, Any] = {}
    words = iter(shlex.split(line.replace(",", " "), comments=True))
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if word == "--doctor":
                options["doctor"] = True
                continue
            if name not in ("cluster", "clock", "seed", "device", "into"):
                raise ValueError(f"%%ranks has no option --{name}; usage: {_USAGE}")
            options[name] = _option(name, value if equals else next(words, ""))
            continue
        name, equals, size = word.partition("=")
        if not equals or not size.isdecimal():
            raise ValueError(f"%%ranks: {word!r} is not an axis, such as tp=4; usage: {_USAGE}")
        if name in axes:
            raise ValueError(f"%%ranks: there are two axes named {name!r}; give each a name of its own")
        axes[name] = int(size)
    if options.get("doctor") and (unused := {"cluster", "clock"} & set(options)):
        raise ValueError(f"%%ranks: --doctor has no use for --{unused.pop()}; leave it out")
    if not axes:
        raise ValueError(f"%%ranks needs the axes of a mesh, such as tp=4; usage: {_USAGE}")
    return axes, options


def _option(name: str, value: str) -> str | int:
    """The value of an option. Raises ValueError if it is missing, or is not allowed."""
    if not value or value.startswith("--"):
        raise ValueError(f"%%ranks: --{name} needs a value; usage: {_USAGE}")
    if name == "seed":
        if not value.isdecimal():
            raise ValueError(f"%%ranks: --seed is {value!r}; give a whole number, 0 or more")
        return int(value)
    if name == "into" and not value.isidentifier():
        raise ValueError(f"%%ranks: --into {value!r} is not a name that a variable can have")
    return value
