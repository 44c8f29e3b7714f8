"""Lines in cells, in a kernel whose IPython does not know which file came from which cell (before 8, as on Colab)."""

import linecache
from types import SimpleNamespace

import IPython
import pytest
from ipykernel.compiler import get_file_name

from tplab.lines import line_text, notebook_cells


class OldShell:
    """What IPython 7 remembers of the cells that it runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.compile = SimpleNamespace()
        self.user_ns = {"In": [""]}
        self._monkeypatch = monkeypatch

    def transform_cell(self, raw: str) -> str:
        return raw

    def run_cell(self, raw: str, transformed: str | None = None, counted: bool = True) -> str:
        """The file as which the cell is compiled."""
        text = raw if transformed is None else transformed
        if counted:
            self.user_ns["In"].append(text.rstrip("\n"))
        file = get_file_name(raw)
        lines = [line + "\n" for line in text.splitlines()]
        self._monkeypatch.setitem(linecache.cache, file, (len(text), 0.0, lines, file))
        return file


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> OldShell:
    shell = OldShell(monkeypatch)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    return shell


def test_a_line_is_that_of_the_latest_cell_of_this_text(shell: OldShell):
    first, second = shell.run_cell("import tplab"), shell.run_cell("def f():\n    return 1")
    assert line_text(first, 1) == "cell 1, line 1"
    assert line_text(second, 2) == "cell 2, line 2"
    shell.run_cell("f()")
    assert shell.run_cell("def f():\n    return 1") == second
    assert line_text(second, 2) == "cell 4, line 2"
    assert line_text(first, 1) == "cell 1, line 1"


@pytest.mark.parametrize("end", ["\n", "\n\n", "\n    \n"])
def test_a_cell_may_end_with_an_empty_line(shell: OldShell, end: str):
    shell.run_cell("import tplab")
    assert line_text(shell.run_cell("def f():\n    return 1" + end), 2) == "cell 2, line 2"


def test_a_cell_with_a_magic_has_its_number(shell: OldShell):
    shell.run_cell("import tplab")
    file = shell.run_cell("%time f()\n", "get_ipython().run_line_magic('time', 'f()')\n")
    assert line_text(file, 1) == "cell 2, line 1"


def test_a_cell_that_is_not_counted_has_no_number(shell: OldShell):
    shell.run_cell("import tplab")
    assert line_text(shell.run_cell("f()", counted=False), 3) == "line 3 of the cell"


def test_files_are_no_cells(shell: OldShell):
    assert line_text("/somewhere/program.py", 3) == "program.py:3"
    assert line_text(linecache.__file__, 3) == "linecache.py:3"


def test_other_processes_are_told_the_cells(shell: OldShell):
    first = shell.run_cell("import tplab")
    shell.run_cell("f()", counted=False)
    third = shell.run_cell("def f():\n    return 1\n")
    assert notebook_cells() == {first: 1, third: 2}


def test_without_ipython_there_are_no_cells(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    assert notebook_cells() == {}
    assert line_text(get_file_name("f()"), 1).endswith(".py:1")
