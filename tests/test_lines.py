"""Lines in cells, in a kernel whose IPython does not know which file came from which cell (before 8, as on Colab)."""

import linecache
from types import SimpleNamespace

import IPython
import pytest
from ipykernel.compiler import get_file_name

from tplab.lines import line_text, notebook_cells

CELLS = ["", "import tplab", "def f():\n    return 1", "", "def f():\n    return 1", "%time f()"]


@pytest.fixture
def old_shell(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    shell = SimpleNamespace(
        compile=SimpleNamespace(),
        history_manager=SimpleNamespace(input_hist_raw=list(CELLS)),
        user_ns={"In": list(CELLS)},
    )
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    return shell


def test_a_line_is_that_of_the_latest_cell_of_this_text(old_shell: SimpleNamespace):
    assert line_text(get_file_name(CELLS[1]), 1) == "cell 1, line 1"
    assert line_text(get_file_name(CELLS[2]), 2) == "cell 4, line 2"
    assert line_text(get_file_name(CELLS[5]), 1) == "cell 5, line 1"
    old_shell.history_manager.input_hist_raw.append(CELLS[1])
    assert line_text(get_file_name(CELLS[1]), 1) == "cell 6, line 1"


def test_a_cell_that_is_not_counted_has_no_number(old_shell: SimpleNamespace):
    assert line_text(get_file_name("not counted"), 3) == "line 3 of the cell"


def test_files_are_no_cells(old_shell: SimpleNamespace):
    assert line_text("/somewhere/program.py", 3) == "program.py:3"
    assert line_text(linecache.__file__, 3) == "linecache.py:3"


def test_other_processes_are_told_the_cells(old_shell: SimpleNamespace):
    assert notebook_cells()[get_file_name(CELLS[2])] == 4


def test_without_ipython_there_are_no_cells(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    assert notebook_cells() == {}
    assert line_text(get_file_name(CELLS[1]), 1).endswith(".py:1")
