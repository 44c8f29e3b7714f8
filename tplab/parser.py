"""The argument parser of every command, and how a command exits."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import NoReturn

from tplab import __version__


class Parser(argparse.ArgumentParser):
    """argparse's parser, with `--version` and one-line error messages."""

    def __init__(self, prog: str, description: str, **more: object):
        super().__init__(prog=prog, description=description, **more)  # type: ignore[arg-type]  # as argparse takes them
        self.add_argument("--version", action="version", version=f"tplab {__version__}")

    @property
    def name(self) -> str:
        """ "tplab.forecast" of "python -m tplab.forecast"."""
        return self.prog.rpartition(" ")[2]

    def error(self, message: str) -> NoReturn:
        """End the command with exit code 2 and one line: what is wrong, and where the flags are listed."""
        unknown, flags = message.removeprefix("unrecognized arguments: "), list(self._option_string_actions)
        if unknown != message and unknown.startswith("-"):
            unknown, _, _ = unknown.partition(" ")  # what follows may be its value, or what it displaced
            message = f"unrecognized argument: {unknown}"
            if meant := get_close_matches(unknown.partition("=")[0], flags, 1, 0.75):
                message += f"; did you mean {meant[0]}?"
        message = re.sub(r"^argument (\S+): invalid int value: (.*)", r"\1 is \2; give a whole number", message)
        self.refuse(f"{message} (--help lists the flags)")

    def refuse(self, why: object) -> NoReturn:
        """End the command with exit code 2 and this sentence."""
        self.exit(2, f"{self.name}: {why}\n")


def ended(main: Callable[[], int | None]) -> NoReturn:
    """Run a command, then exit the process. If its output pipe is closed, as by `| head`, the exit code is that of a
    process ended by SIGPIPE."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        code = 128 + 13
    sys.exit(code)
