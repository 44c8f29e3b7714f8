"""Which line of the program an event or an error belongs to: in files, in notebook cells, in a kernel that counts them
and in one that does not."""

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils import _pytree as pytree

from tplab import Mesh
from tplab.errors import CollectiveMismatchError, DeadlockError, RankError
from tplab.exercises.megatron_block import check_down
from tplab.torch import all_reduce, axis_index, copy_to, ring_all_reduce, ring_shift, run, start
from tplab.trace.trace import Trace

TWO = Mesh(tp=2)


def places(trace: Trace, kind: str) -> set[str]:
    return {event.where for event in trace.events if event.kind == kind}


def here(program: Callable, offset: int) -> str:
    return f"test_where.py:{program.__code__.co_firstlineno + offset}"


def test_the_programs_own_line_whatever_calls_lie_between():
    def program() -> None:
        x = torch.ones(4, requires_grad=True)
        y = ring_all_reduce(x, "tp")
        y.sum().backward()

    messages = run(program, TWO).trace.select(kind="send")
    assert places(messages, "send") == {here(program, 2), here(program, 3)}


def test_a_collective_belongs_to_its_start_and_a_wait_too():
    def program() -> None:
        flight = start(
            all_reduce,
            torch.ones(2),
            "tp",
        )
        flight.wait()

    trace = run(program, TWO).trace
    assert places(trace, "collective") == places(trace, "wait")
    (place,) = places(trace, "collective")
    assert place in {here(program, 1), here(program, 2)}


def test_a_backward_pass_that_somebody_else_runs_is_named():
    """A check calls backward on what the program returned: no line of the program is left on the stack."""

    def program(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return all_reduce((copy_to(x, "tp") if axis_index("tp") == 0 else x) @ w, "tp") + bias

    assert "rank 0 waits in all_reduce(x, 'tp', 'sum') at a step of the backward pass for rank 1" in str(
        check_down(program)
    )


def test_a_library_in_between_is_not_the_program():
    def program() -> None:
        pytree.tree_map(lambda x: ring_shift(x, "tp"), [torch.ones(1), torch.ones(2)])
        sorted([2, 1], key=lambda k: all_reduce(torch.tensor(k), "tp").item())

    trace = run(program, TWO).trace
    assert places(trace, "send") == {here(program, 1)}
    assert places(trace, "collective") == {here(program, 2)}


def test_a_project_beside_tplab_is_a_program(tmp_path):
    """A folder whose name begins as that of the package does."""
    import tplab

    name = tplab.__file__.replace("__init__.py", "").rstrip("/\\") + "_of_mine/ring.py"
    names: dict = {"ring_shift": ring_shift, "torch": torch}
    exec(compile("def program():\n    ring_shift(torch.ones(1), 'tp')", name, "exec"), names)
    assert places(run(names["program"], TWO).trace, "send") == {"ring.py:2"}


def test_code_without_a_file():
    names: dict = {"ring_shift": ring_shift, "torch": torch}
    exec("def program():\n    ring_shift(torch.ones(1), 'tp')", names)
    assert places(run(names["program"], TWO).trace, "send") == {"<string>:2"}


# --- cells ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator:
    """A real IPython, as a kernel has it."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    from ipykernel.compiler import XCachingCompiler
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    displayhook, excepthook = sys.displayhook, sys.excepthook
    shell = InteractiveShell.instance(config=config)
    shell.compile = XCachingCompiler()  # a kernel's cells are files; those of IPython 7 itself are not
    yield shell
    InteractiveShell.clear_instance()
    sys.displayhook, sys.excepthook = displayhook, excepthook


def run_cell(shell, text: str, counted: bool = True):
    """What a cell gives, or raises."""
    result = shell.run_cell(text, store_history=counted, silent=False)
    result.raise_error()
    return result.result


SETUP = "import torch\nfrom tplab import Mesh\nfrom tplab.torch import *"
PROGRAM = """\
def program():
    x = torch.ones(2)

    return ring_shift(x, "tp")
"""
WHERE = "{e.where for e in run(program, Mesh(tp=2)).trace.events}"


def test_a_line_in_a_notebook_is_that_of_its_cell(shell):
    run_cell(shell, SETUP)
    run_cell(shell, PROGRAM)
    assert run_cell(shell, WHERE) == {"cell 2, line 4"}
    assert run_cell(
        shell, "# a cell\nf = lambda: all_reduce(torch.ones(1), 'tp')\n" + WHERE.replace("program", "f")
    ) == {"cell 4, line 2"}


def test_a_cell_that_is_run_again_has_its_new_number(shell):
    run_cell(shell, SETUP)
    run_cell(shell, PROGRAM)
    assert run_cell(shell, WHERE) == {"cell 2, line 4"}
    run_cell(shell, PROGRAM)
    assert run_cell(shell, WHERE) == {"cell 4, line 4"}
    run_cell(shell, PROGRAM.replace("    x =", "\n    x ="))
    assert run_cell(shell, WHERE) == {"cell 6, line 5"}


def test_a_cell_that_is_not_counted_has_no_number(shell):
    """As nbval runs them: every cell would be "cell 1"."""
    run_cell(shell, SETUP, counted=False)
    run_cell(shell, PROGRAM, counted=False)
    assert run_cell(shell, WHERE, counted=False) == {"line 4 of the cell"}
    run_cell(shell, "other = 1")
    assert run_cell(shell, WHERE) == {"line 4 of the cell"}
    run_cell(shell, PROGRAM)
    assert run_cell(shell, WHERE) == {"cell 3, line 4"}


def test_cells_with_magics(shell):
    run_cell(shell, SETUP)
    run_cell(shell, "%config InteractiveShell.xmode\n" + PROGRAM)
    assert run_cell(shell, WHERE) == {"cell 2, line 5"}
    run_cell(shell, PROGRAM, counted=False)
    assert run_cell(shell, WHERE, counted=False) == {"line 4 of the cell"}


def test_errors_name_the_cell(shell):
    run_cell(shell, SETUP)
    run_cell(
        shell,
        "def lost():\n    if axis_index('tp'):\n        raise ValueError('no')\n    all_reduce(torch.ones(1), 'tp')",
    )
    with pytest.raises(RankError, match=r"rank 1 raised ValueError at cell 2, line 3: no"):
        run_cell(shell, "run(lost, Mesh(tp=2))")
    run_cell(shell, "def early():\n    if axis_index('tp'):\n        all_reduce(torch.ones(1), 'tp')")
    with pytest.raises(DeadlockError, match=r"rank 1 waits in all_reduce\(x, 'tp', 'sum'\) at cell 4, line 3"):
        run_cell(shell, "run(early, Mesh(tp=2))")
    run_cell(shell, "def unlike():\n    all_reduce(torch.ones(1 + axis_index('tp')), 'tp')")
    with pytest.raises(CollectiveMismatchError, match=r"at cell 6, line 2\n"):
        run_cell(shell, "run(unlike, Mesh(tp=2))")


def test_files_keep_their_names_inside_a_notebook(shell):
    def program() -> None:
        ring_shift(torch.ones(1), "tp")

    shell.user_ns["program"] = program
    run_cell(shell, SETUP)
    assert run_cell(shell, WHERE) == {here(program, 1)}
    assert axis_index is not None
