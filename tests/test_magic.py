"""`%%ranks`: a notebook's cell on every rank."""

from __future__ import annotations

import pytest
import torch

from tplab import Mesh
from tplab.torch import Result

IPython = pytest.importorskip("IPython")


@pytest.fixture
def shell(monkeypatch):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell(colors="nocolor")
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    shell.run_line_magic("load_ext", "tplab")
    yield shell
    if shell.history_manager is not None:
        shell.history_manager.end_session()


def run(shell, line: str, cell: str):
    return shell.run_cell_magic("ranks", line, cell)


def test_a_cell_runs_on_every_rank_with_the_notebooks_variables(shell, capsys):
    shell.user_ns["x"] = torch.ones(3)
    cell = "import torch.distributed as dist\nx = x * dist.get_rank()\ndist.all_reduce(x)\nprint(x[0].item())\n"
    out = run(shell, "tp=4 --cluster h100 --into out", cell)
    assert isinstance(out, Result) and out is shell.user_ns["out"] and out.mesh == Mesh(tp=4)
    assert [rank["x"].tolist() for rank in out.per_rank] == [[6.0] * 3] * 4
    assert shell.user_ns["x"].tolist() == [1.0] * 3  # the notebook's is as it was
    assert capsys.readouterr().out.splitlines() == [f"[rank {rank}] 6.0" for rank in range(4)]
    assert out.trace.select(kind="collective", axis="tp").events[0].op == "all_reduce"


def test_functions_and_modules_are_each_ranks_own(shell, tmp_path, monkeypatch):
    (tmp_path / "counter_of_a_rank.py").write_text("COUNT = 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    shell.run_cell("import counter_of_a_rank")
    cell = (
        "import counter_of_a_rank\nimport torch, torch.distributed as dist\n"
        "def add():\n    counter_of_a_rank.COUNT += 1 + dist.get_rank()\n"
        "add()\ndist.barrier()\nadd()\ncount = counter_of_a_rank.COUNT\n"
    )
    assert [rank["count"] for rank in run(shell, "dp=3", cell).per_rank] == [2, 4, 6]
    assert shell.user_ns["counter_of_a_rank"].COUNT == 0


def test_commas_and_a_comment_are_allowed(shell):
    assert run(shell, "dp=2, tp=2  # as in the paper", "1").mesh == Mesh(dp=2, tp=2)


LINES = """

%%ranks  tp={2}
import torch.distributed as dist

dist.barrier(); raise ValueError("here")
"""


def test_a_line_is_named_as_the_notebook_counts_it(shell, capsys):
    shell.run_cell("import torch", store_history=True)
    shell.run_cell(LINES, store_history=True)
    said = capsys.readouterr().out
    assert "ValueError: here" in said
    assert "cell 2, line 6" in said  # two empty lines and the magic's own are counted
    assert 'raise ValueError("here")' in said  # the traceback shows the line


def test_a_cell_that_is_not_counted_has_lines_too(shell, capsys):
    shell.run_cell(LINES, store_history=False)
    assert "line 4 of the cell" in capsys.readouterr().out


def test_a_trace_names_lines_as_the_notebook_counts_them(shell):
    shell.run_cell("%%ranks tp=2 --into out\nimport torch, torch.distributed as dist\ndist.all_reduce(torch.ones(3))",
                   store_history=True)  # fmt: skip
    (event, *_) = shell.user_ns["out"].trace.select(kind="collective").events
    assert event.where == "cell 1, line 3"


@pytest.mark.parametrize(
    "line, said",
    [
        ("tp", "'tp' is not an axis"),
        ("tp=four", "'tp=four' is not an axis"),
        ("tp=2 tp=4", "two axes named 'tp'"),
        ("", "needs the axes of a mesh, such as tp=4"),
        ("tp=4 --fast", "no option --fast"),
        ("tp=4 --cluster", "--cluster needs a value"),
        ("tp=4 --into --seed 1", "--into needs a value"),
        ("tp=4 --seed x", "--seed is 'x'; give a whole number"),
        ("tp=4 --into 3x", "'3x' is not a name that a variable can have"),
    ],
)
def test_a_line_that_makes_no_sense(shell, line, said):
    with pytest.raises(ValueError, match=said):
        run(shell, line, "1")


def test_the_doctor_of_a_cell(shell):
    cell = (
        "import torch, torch.distributed as dist\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "x = torch.randn(8, 4).chunk(dist.get_world_size())[dist.get_rank()]\n"
        "model(x).pow(2).mean().backward()\n"
        "for p in model.parameters():\n    dist.all_reduce(p.grad)\noptimizer.step()\n"
    )
    report = run(shell, "dp=2 --doctor --into report", cell)
    assert shell.user_ns["report"] is report and (report.verdict, report.first.factor) == (
        "different",
        pytest.approx(2),
    )
    with pytest.raises(ValueError, match="--doctor has no use for --cluster"):
        run(shell, "dp=2 --doctor --cluster h100", cell)
