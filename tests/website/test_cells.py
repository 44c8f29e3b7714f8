"""Cells of a lab's page: which of them run there, and that they show what the notebook shows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

from labs.source import build
from website import lite, pyodide
from website.making import needing

LEFT_OUT = "A browser has no torch, so this import is left out here.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python")
    lite.write_tplab(folder / "tplab.whl")
    zipfile.ZipFile(folder / "tplab.whl").extractall(folder)
    shutil.copy(pyodide.HERE / pyodide.CELLS, folder)
    return folder


def like_a_browser(folder: Path, cells: list[tuple[int, str]]) -> list[list[dict]]:
    """What each of these cells says, by its number."""
    command = [sys.executable, "-B", str(Path(__file__).with_name("cells_like_a_browser.py")), str(folder)]
    done = subprocess.run(command, input=json.dumps(cells), capture_output=True, text=True, cwd=folder, env={})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def part(said: list[dict], name: str) -> list:
    return [one[name] for one in said if name in one]


@pytest.mark.parametrize(
    "lab, many",
    [
        ("10_pipeline_schedules", 22),
        ("14_cut_a_pipeline", 11),
        ("21_balance", 10),
        ("27_will_it_fit", 12),
        ("28_which_layout", 17),
    ],
)
def test_cells_show_on_the_page_what_they_show_in_the_notebook(folder: Path, lab: str, many: int):
    cells = [
        cell for cell in nbformat.read(build.LABS / f"{lab}.ipynb", as_version=4).cells if cell.cell_type == "code"
    ]
    numbers = [number for number, runs in enumerate(lite.on_the_page([cell.source for cell in cells]), 1) if runs]
    assert len(numbers) == many
    for number, said in zip(
        numbers, like_a_browser(folder, [(number, cells[number - 1].source) for number in numbers])
    ):
        outputs = cells[number - 1].outputs
        printed = "".join(output.text for output in outputs if output.output_type == "stream")
        assert "".join(part(said, "text")).removeprefix(LEFT_OUT) == printed
        shown = [output.data["text/plain"] for output in outputs if "data" in output]
        assert [data["text/plain"] for data in part(said, "shown")] == shown
        assert part(said, "error") == [] and part(said, "done") == [True]
        kinds = {"application/vnd.jupyter.widget-view+json", "image/png"}
        pictures = sum("image/png" in output.get("data", {}) for output in outputs)
        assert sum(bool(kinds & data.keys()) for data in part(said, "shown")) == pictures


def test_what_needs_a_framework_says_so_and_an_error_has_its_own_words_first(folder: Path):
    first, torch, own, after = like_a_browser(
        folder,
        [
            (1, "import torch, tplab.torch as tt\nfrom tplab.schedules import gpipe\nprint(gpipe(2, 3).num_ranks)"),
            (4, "from tplab.sequence import AttentionMask\ndef f():\n    import torch\nf()"),
            (7, "x = 1\ngpipe(0, 3)"),
            (2, "x"),
        ],
    )
    assert "".join(part(first, "text")) == f"{LEFT_OUT}2\n" and first[-1] == {"done": True}
    assert part(torch, "error") == ["This cell needs torch, which a browser does not have. Run it on Colab or Binder."]
    (error,), (where,) = part(own, "error"), part(own, "where")
    assert error.startswith("ScheduleError: ") and "ranks" in error and "Cell In[7], line 2" in where
    assert part(after, "shown") == [{"text/plain": "1"}] and own[-1] == {"done": False}


def test_a_cell_needs_what_cells_that_need_it_have_made():
    cells = [
        "import torch\nimport numpy as np", "x = np.ones(2)", "y = torch.ones(2)", "def f(): return y", "f(); z = 1",
        "print(x)", "z", "[torch for torch in x]",
    ]  # fmt: skip
    assert needing(cells, lambda module: module == "torch") == [False, False, True, True, True, False, True, False]
