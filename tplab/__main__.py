"""`tplab`, or `python -m tplab`: lists the commands; `tplab doctor ...` runs `python -m tplab.doctor ...`."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Sequence

from tplab import __version__
from tplab.errors import near
from tplab.parser import Parser, ended

COMMANDS = {
    "python -m tplab.torchrun --nproc-per-node 8 train.py": "run a script for torchrun, unchanged, on simulated ranks",
    "python -m tplab.doctor --nproc-per-node 4 train.py": "say whether it trains the model that one rank trains",
    "torchrun --nproc-per-node 8 -m tplab.record train.py": "run it on real ranks, and record what each of them sends",
    "python -m tplab.merge tplab_trace --html run.html": "make one trace, and a page, of what real ranks recorded",
    "python -m tplab.forecast llama3-70b --gpus 256 --batch 1024": "which layout is fastest? why not the others?",
    "torchrun --nproc-per-node 8 -m tplab.measure --out mine.json": "measure your own cluster, for --cluster mine.json",
}

_ABOUT = "List the commands of tplab, or run one: python -m tplab doctor ... is python -m tplab.doctor ..."


def main(arguments: Sequence[str] | None = None) -> None:
    """List the commands, or run one. If torchrun must start it, say so and exit with code 2."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {command:<{width}}   {what}" for command, what in COMMANDS.items())
    listed += "\n\nIn Python: from tplab.torch import run, or from tplab.jax import run"
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        "python -m tplab", _ABOUT, usage="%(prog)s [-h] [--version] [doctor ...]", epilog=listed, formatter_class=form
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments).command
    if not given:
        print(f"tplab {__version__}. Its commands; each has --help:\n\n{listed}")
        return
    modules = {match[1]: match[0] for command in COMMANDS if (match := re.search(r"-m tplab\.(\w+)", command))}
    name = given[0].removeprefix("tplab.")
    if name in modules:
        how = next(command for command in COMMANDS if modules[name] in command)
        if not how.startswith("python"):
            parser.refuse(f"{given[0]} runs on ranks that torchrun starts: {how}")
        sys.argv[1:] = given[1:]
        runpy.run_module(f"tplab.{name}", run_name="__main__", alter_sys=True)
    parser.refuse(f"there is no command {given[0]!r}{near(name, modules)}")


def command() -> None:
    """The entry point of the command `tplab`."""
    ended(main)


if __name__ == "__main__":
    command()
