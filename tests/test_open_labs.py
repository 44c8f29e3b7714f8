"""`make lab` opens copies of the labs: up to date as long as nobody has changed them, and never overwritten."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
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


def test_links_from_the_copies_lead_to_the_docs(tmp_path: Path):
    """JupyterLab serves the whole repository, and opens the first lab in it. A link to ../docs/ leads nowhere else."""
    shutil.copytree(ROOT / "labs" / "jupyter", tmp_path / "labs" / "jupyter")
    (tmp_path / "labs" / "images").mkdir()
    shutil.copyfile(ROOT / "labs" / "open_labs.py", tmp_path / "labs" / "open_labs.py")
    (tmp_path / "labs" / FIRST).write_text(notebook("1"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "choosing.md").write_text("# Which layout?")
    runtime = tmp_path / "runtime"
    folders = {f"JUPYTER_{name}_DIR": str(tmp_path / name.lower()) for name in ("RUNTIME", "CONFIG", "DATA")}
    options = ["--no-browser", "--allow-root", "--port=0", "--IdentityProvider.token="]
    command = [sys.executable, str(tmp_path / "labs" / "open_labs.py"), *options]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, env={**os.environ, **folders}, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 90
        while not (opens := list(runtime.glob("jpserver-file-to-run-*.html"))):
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        (address,) = re.findall(r'url=([^"]+)"', opens[0].read_text())
        url, _, opened = address.partition("/lab/tree/")
        assert opened == f"my_labs/{FIRST}"
        with urllib.request.urlopen(f"{url}/api/contents/docs/choosing.md?type=file", timeout=30) as answer:
            assert json.load(answer)["content"] == "# Which layout?"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
