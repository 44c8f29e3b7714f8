"""Cells of a page, run by IPython in the page's worker. Their outputs go to the page as messages.

Pyodide runs this file, which is part of the site. Tests run it in ordinary Python.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import comm
from comm.base_comm import BaseComm
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from tplab.widgets.paper.card import Card

Tell = Callable[[str, list[bytes]], None]
"""Sends the page a message: JSON, and its buffers."""

FRAMEWORKS = ("torch", "jax", "transformers", "tplab.torch", "tplab.jax")
"""Packages that a browser does not have."""

PAUSE = 0.05  # seconds between two pieces of what a cell prints


class Cells:
    """The cells of a page, which share a namespace. `tell` receives their outputs, in order:

    {"text"}                    what was printed
    {"shown": {MIME type: ..}}  what was displayed; a widget has its comm's id
    {"error", "where"}          an error in one line, and the traceback
    {"comm", "type", "data"}    a message of a widget, as in Jupyter's protocol
    {"done": whether it ran}    the cell is over
    """

    def __init__(self, tell: Tell):
        def say(message: dict[str, Any], buffers: list[bytes] | None = None) -> None:
            self.out.flush()
            tell(json.dumps(message), buffers or [])

        class PageComm(BaseComm):
            def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
                packed = [bytes(one) for one in buffers or []]
                say({"comm": self.comm_id, "type": msg_type, "data": data or {}}, packed)

        class Shown(DisplayPublisher):
            def publish(self, data, metadata=None, **keys):
                say({"shown": data})

        class Result(DisplayHook):
            def write_output_prompt(self):
                pass

            def write_format_data(self, format_dict, md_dict=None):
                say({"shown": format_dict})

            def finish_displayhook(self):
                pass

        class Shell(InteractiveShell):
            displayhook_class = Type(Result)
            display_pub_class = Type(Shown)

            def _showtraceback(self, etype, evalue, stb):
                say({"error": in_words(etype, evalue), "where": "\n".join(stb)})

        self.out = Out(tell)
        comm.create_comm = PageComm
        Card._picture = ""  # type: ignore[assignment]  # the page draws the widget itself
        config = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}})
        self.shell, self.say = Shell.instance(config=config), say

    def run(self, number: int, source: str) -> None:
        """Run a cell, which messages name by this number. Imports of frameworks are left out, with a note."""
        before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = self.out
        try:
            source, missing = without_frameworks(source)
            if missing:
                self.say({"text": f"A browser has no {' and no '.join(missing)}, so this import is left out here.\n"})
            self.shell.execution_count = number
            done = self.shell.run_cell(source, store_history=True)
        finally:
            sys.stdout, sys.stderr = before
        self.say({"done": bool(done.success)})

    def hear(self, comm_id: str, data: str) -> None:
        """Pass a message of the page's widget on to its comm."""
        if one := comm.get_comm_manager().get_comm(comm_id):
            one.handle_msg({"content": {"comm_id": comm_id, "data": json.loads(data)}, "buffers": []})


class Out(io.TextIOBase):
    """Standard output, sent in pieces, so that the page shows it while the cell is still running."""

    def __init__(self, tell: Tell):
        self._tell, self._waiting, self._told = tell, "", 0.0

    def write(self, text: str) -> int:
        self._waiting += text
        if time.monotonic() - self._told > PAUSE:
            self.flush()
        return len(text)

    def flush(self) -> None:
        if self._waiting:
            text, self._waiting, self._told = self._waiting, "", time.monotonic()
            self._tell(json.dumps({"text": text}), [])


def in_words(kind: type[BaseException], error: BaseException) -> str:
    """The text of an error: its own, or that a browser cannot import a framework."""
    name = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if is_framework(name):
        return f"This cell needs {name.partition('.')[0]}, which a browser does not have. Run it on Colab or Binder."
    return f"{kind.__name__}: {error}"


def is_framework(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in FRAMEWORKS)


def without_frameworks(source: str) -> tuple[str, list[str]]:
    """(A cell without the imports that fail here because a framework is missing, with the same line numbers; the
    frameworks that were left out)."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # IPython reports it, or it is a magic
        return source, []
    lines, missing = source.splitlines(), []
    for one in statements:
        if isinstance(one, ast.Import | ast.ImportFrom) and (name := _missing(one)):
            missing.append(name)
            for place in range(one.lineno - 1, one.end_lineno or one.lineno):
                lines[place] = ""
    return "\n".join(lines), [*dict.fromkeys(missing)]


def _missing(one: ast.Import | ast.ImportFrom) -> str:
    for name in [one.module or ""] if isinstance(one, ast.ImportFrom) else [alias.name for alias in one.names]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if is_framework(error.name or ""):
                return str(error.name).removeprefix("tplab.")
        except Exception:  # the import itself will report it
            return ""
    return ""
