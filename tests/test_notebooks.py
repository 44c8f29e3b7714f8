"""The labs as files: each notebook is its text pair, run once from top to bottom, and reads well without a kernel.

What the cells compute is compared by nbval (`make labs-test`).
"""

import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import nbformat
import pytest

from labs.conftest import Listener
from labs.source import build

LABS = Path(build.LABS)
each_lab = pytest.mark.parametrize("name", build.names())


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(LABS / f"{name}.ipynb", as_version=4)


def code_cells(name: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


def test_every_notebook_has_a_text_pair_and_the_reverse():
    assert sorted(path.stem for path in LABS.glob("*.ipynb")) == build.names()
    assert build.names()


@each_lab
def test_notebook_is_its_text_pair(name: str):
    made, there = build.read_source(name), read(name)
    assert [(cell.cell_type, cell.id, cell.source, cell.metadata) for cell in there.cells] == [
        (cell.cell_type, cell.id, cell.source, cell.metadata) for cell in made.cells
    ], "run `make labs`"
    assert there.metadata == made.metadata


@each_lab
def test_no_line_of_code_is_cut_off_in_jupyterlab(name: str):
    for cell in code_cells(name):
        assert max(map(len, cell.source.splitlines())) <= 88, cell.source


@each_lab
def test_ran_once_from_top_to_bottom(name: str):
    assert [cell.execution_count for cell in code_cells(name)] == list(range(1, len(code_cells(name)) + 1))


@each_lab
def test_outputs_read_well_without_a_kernel(name: str):
    for cell in code_cells(name):
        assert "nbval-skip" not in cell.metadata.get("tags", [])
        for output in cell.outputs:
            assert output.get("name") != "stderr"
            assert output.output_type != "error" or "raises-exception" in cell.metadata.get("tags", [])
            assert build.WIDGET_VIEW not in output.get("data", {})
            if "image/png" in output.get("data", {}):
                assert output.data.get("text/plain"), "a picture goes with a sentence"
                assert output.metadata.get("image/png", {}).get("alt") == output.data["text/plain"]
    assert (LABS / f"{name}.ipynb").stat().st_size < 1_500_000


@each_lab
def test_outputs_hold_nothing_of_the_machine(name: str):
    for cell in code_cells(name):
        for output in cell.outputs:
            data = output.get("data", {})
            text = "".join([output.get("text", ""), *(data[kind] for kind in data if kind.startswith("text/"))])
            assert not re.search(r"0x[0-9a-f]{6,}|/(tmp|home|root|Users)/|site-packages", text), text


@each_lab
def test_opens_with_title_badges_and_setup(name: str):
    book = read(name)
    assert book.cells[0].cell_type == "markdown"
    assert book.cells[0].source.startswith("# ")
    assert build.badges(name) in book.cells[0].source, f"the first cell needs this line:\n{build.badges(name)}"
    first = next(cell for cell in book.cells if cell.cell_type == "code")
    assert first.source == build.setup_cell(), f"the first code cell must be:\n{build.setup_cell()}"


@each_lab
def test_ends_with_when_to_shut_the_kernel_down(name: str):
    assert read(name).cells[-1].source == build.closing_line(), f"the last cell must be:\n{build.closing_line()}"


@pytest.mark.parametrize("code", [0, 1])
def test_a_failed_setup_on_colab_says_what_to_do(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pip").write_text(f"#!/bin/sh\necho $* >> {tmp_path}/calls\nexit {code}\n")
    (tmp_path / "pip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    exec(build.setup_cell(), {})  # elsewhere it does nothing
    assert not (tmp_path / "calls").exists()
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    with pytest.raises(RuntimeError, match="restart the runtime") if code else nullcontext():
        exec(build.setup_cell(), {})
    assert (tmp_path / "calls").read_text() == f"install -q git+{build.repository()}\n"


@each_lab
def test_begins_with_a_picture_of_what_ran(name: str):
    book = read(name)
    assert f"](images/{name}.png)" in book.cells[0].source
    assert (LABS / "images" / f"{name}.png").read_bytes() == build.opening_picture(book), "run `make labs`"


@each_lab
def test_text_between_cells_is_short(name: str):
    for cell in read(name).cells:
        if cell.cell_type == "markdown":
            apart = r"^#+ |^\|.*?$|^\*\*Sources\.\*\*.*?\n\n|\]\([^)]*\)|<details>.*?</details>|</?\w+>|\$\$.*?\$\$"
            prose = re.sub(apart, " ", cell.source, flags=re.DOTALL | re.MULTILINE)
            assert len(prose.split()) < 150, cell.source


@each_lab
def test_links_lead_somewhere(name: str):
    text = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    relative = [one for one in targets if "://" not in one and not one.startswith(("#", "attachment:", "data:"))]
    assert [one for one in relative if not (LABS / one.split("#")[0]).exists()] == []


def test_a_cell_that_writes_to_stderr_is_not_built():
    noisy = nbformat.v4.new_output("stream", name="stderr", text="careful")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=[noisy])])
    with pytest.raises(RuntimeError, match="cell 0 writes to stderr"):
        build.clean(book)


@pytest.mark.parametrize("pictures", [[], ["AA==", "AA=="]])
def test_a_lab_has_one_opening_picture(pictures: list[str]):
    outputs = [nbformat.v4.new_output("display_data", data={"image/png": png}) for png in pictures]
    cell = nbformat.v4.new_code_cell("1", outputs=outputs, metadata={"tags": [build.OPENING_PICTURE]})
    with pytest.raises(RuntimeError, match=f"must show one picture; there are {len(pictures)}"):
        build.opening_picture(nbformat.v4.new_notebook(cells=[cell]))


def test_views_of_a_kernel_that_is_gone_are_left_out():
    shown = nbformat.v4.new_output(
        "display_data", data={build.WIDGET_VIEW: {"model_id": "a"}, "image/png": "", "text/plain": "a ring"}
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=[shown])])
    build.clean(book)
    assert book.cells[0].outputs[0].data == {"image/png": "", "text/plain": "a ring"}


def test_nbval_counts_cells_as_jupyter_does():
    """Else what widgets say of lines has no number, and the site would depend on who ran the labs."""

    class Kernel:
        def execute(self, code: str, store_history: bool = True) -> bool:
            return store_history

    kernel = Kernel()
    lab = SimpleNamespace(path=LABS / f"{build.names()[0]}.ipynb", kernel=SimpleNamespace(kc=kernel))
    lab.get_kernel_message = None
    Listener(lab)  # type: ignore[arg-type]
    assert kernel.execute("1", store_history=False)


def test_what_is_printed_at_one_go_is_one_output():
    def printed(text: str, name: str = "stdout") -> nbformat.NotebookNode:
        return nbformat.v4.new_output("stream", text=text, name=name)

    outputs = [printed("a\n"), printed("b\n"), nbformat.v4.new_output("display_data"), printed("c\n")]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=outputs)])
    build.clean(book)
    assert [output.get("text") for output in book.cells[0].outputs] == ["a\nb\n", None, "c\n"]
