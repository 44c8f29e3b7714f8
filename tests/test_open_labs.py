"""`make lab` opens copies of the labs: up to date as long as nobody has changed them, and never overwritten."""

import json
import subprocess
from pathlib import Path

import pytest

from labs.open_labs import FIRST, ROOT, copy_labs


@pytest.fixture
def labs(tmp_path: Path) -> Path:
    (tmp_path / "labs" / "images").mkdir(parents=True)
    (tmp_path / "labs" / "00_first.ipynb").write_text("first")
    (tmp_path / "labs" / "01_second.ipynb").write_text("second")
    (tmp_path / "labs" / "images" / "00_first.png").write_bytes(b"picture")
    return tmp_path / "labs"


@pytest.fixture
def mine(labs: Path) -> Path:
    """The copies, just made."""
    assert copy_labs(labs, labs.parent / "my_labs") == []
    return labs.parent / "my_labs"


def test_labs_and_pictures_are_copied(mine: Path):
    assert (mine / "00_first.ipynb").read_text() == "first"
    assert (mine / "01_second.ipynb").read_text() == "second"
    assert (mine / "images" / "00_first.png").read_bytes() == b"picture"


def test_a_changed_copy_stays_and_is_not_mentioned_while_the_lab_is_the_same(labs: Path, mine: Path):
    (mine / "00_first.ipynb").write_text("mine")
    assert copy_labs(labs, mine) == []
    assert (mine / "00_first.ipynb").read_text() == "mine"


def test_a_changed_copy_stays_where_the_lab_is_newer_and_is_named(labs: Path, mine: Path):
    (mine / "00_first.ipynb").write_text("mine")
    (labs / "00_first.ipynb").write_text("newer")
    for _ in range(2):
        assert copy_labs(labs, mine) == ["00_first.ipynb"]
        assert (mine / "00_first.ipynb").read_text() == "mine"


def test_an_untouched_copy_follows_its_lab(labs: Path, mine: Path):
    (labs / "01_second.ipynb").write_text("newer")
    (labs / "images" / "00_first.png").write_bytes(b"newer picture")
    assert copy_labs(labs, mine) == []
    assert (mine / "01_second.ipynb").read_text() == "newer"
    assert (mine / "images" / "00_first.png").read_bytes() == b"newer picture"


def notebook(source: str, **metadata: str) -> str:
    cell = {"cell_type": "code", "source": [source], "outputs": [], "execution_count": None, "metadata": {}}
    return json.dumps({"cells": [cell], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


def test_a_copy_that_was_only_looked_at_or_run_follows_its_lab_and_keeps_its_outputs_until_then(tmp_path: Path):
    """JupyterLab completes metadata and saves by itself."""
    labs, mine = tmp_path / "labs", tmp_path / "my_labs"
    (labs / "images").mkdir(parents=True)
    lab, copy = labs / "00_first.ipynb", mine / "00_first.ipynb"
    lab.write_text(notebook("1 + 1"))
    copy_labs(labs, mine)
    run = notebook("1 + 1", language="python").replace('"outputs": []', '"outputs": [{"output_type": "stream"}]')
    copy.write_text(run)
    assert copy_labs(labs, mine) == []
    assert copy.read_text() == run
    lab.write_text(notebook("1 + 2"))
    assert copy_labs(labs, mine) == []
    assert copy.read_text() == lab.read_text()
    copy.write_text(notebook("1 + 3"))
    assert copy_labs(labs, mine) == []
    lab.write_text(notebook("1 + 4"))
    assert copy_labs(labs, mine) == ["00_first.ipynb"]
    assert copy.read_text() == notebook("1 + 3")


def test_a_copy_that_was_renamed_makes_room_for_the_newer_lab(labs: Path, mine: Path):
    (mine / "00_first.ipynb").rename(mine / "my_first.ipynb")
    (labs / "00_first.ipynb").write_text("newer")
    assert copy_labs(labs, mine) == []
    assert (mine / "00_first.ipynb").read_text() == "newer"
    assert (mine / "my_first.ipynb").read_text() == "first"


def test_git_does_not_see_the_copies():
    done = subprocess.run(["git", "check-ignore", "--quiet", f"my_labs/{FIRST}"], cwd=ROOT)
    assert done.returncode == 0
    assert (ROOT / "labs" / FIRST).exists()
