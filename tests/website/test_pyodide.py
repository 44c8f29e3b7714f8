"""What a page's worker runs: tplab's own sources from a zip, where there are no widgets, threads, processes or files.

Pyodide itself is in tests/browser/test_lab_page_browser.py. NumPy for it cannot be had here, so its part is played by
this machine's NumPy with 32-bit numbers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from tplab.schedules import RULES
from tplab.widgets import layout_lab, pipeline_lab
from tplab.widgets.layouts.workbench import Workbench
from tplab.widgets.schedule.workbench import AUTO
from tplab.widgets.schedule.workbench import Workbench as Pipelines
from website import policy, pyodide
from website.compiled import downloaded

FIRST = dict(pipeline_lab().settings)
UNEQUAL = {
    "forward": 2.0, "weight_grad": 0.75, "transfer": 0.5, "compare": "zb_v", "overlap": 0.75,
    "stage_costs": "1, 1, 1, 2"
}  # fmt: skip
LARGE = {"ranks": 8, "microbatches": 32, "memory_limit": 6.0}
CSV = "0F0,0F1,,,,0B0,0B1\n,1F0,1B0,1F1,1B1,,\n"
BY_HAND = [
    {"move": [0, 4, 3]}, {"move": [0, 1, 9]}, {"paste": CSV}, {"move": [0, 3, 2]}, {"undo": True}, {"paste": "0F0"},
    {"export": "csv"}, {"export": "svg", "colour": "stage"}, {"export": "perfetto"}, {"reset": True},
]  # fmt: skip


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tplab")
    zipfile.ZipFile(BytesIO(pyodide.sources())).extractall(folder)
    return folder


def like_a_browser(folder: Path, questions: list[dict], first: dict = FIRST, room: str = "schedule") -> dict:
    command = [sys.executable, "-B", "-W", "error", str(Path(__file__).with_name("like_a_browser.py")), str(folder)]
    asked = json.dumps({"first": first, "room": room, "questions": questions})
    done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=folder, env={})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_rules_answer_as_the_widget_does(unpacked: Path):
    settings = [{**FIRST, "rule": rule, **more} for rule in (*RULES, AUTO) for more in ({}, UNEQUAL)]
    settings += [{**FIRST, "rule": rule, **LARGE} for rule in ("one_f_one_b", "chimera", "v_half", AUTO)]
    settings += [{**FIRST, "rule": rule, "task": "same-memory"} for rule in ("one_f_one_b", "zb_v")]
    settings += [{**FIRST, "rule": "dualpipe", "ranks": 3}]  # which does not fit
    questions = [{"settings": one, "message": {"settings": True}} for one in settings]
    found = like_a_browser(unpacked, questions)["answers"]
    lab, notices = pipeline_lab(), []
    for one, (said, board) in zip(settings, found, strict=True):
        lab.settings = one
        notices.append(lab.notice)
        traits = {name: getattr(lab, name) for name in ("settings", "notice", "is_stale", "num_edits", "verdict")}
        assert said == {"traits": traits, "answer": {"answered": True}}
        assert not board or base64.b64decode(board) == lab.board
    assert "" in notices and "dualpipe needs an even number of ranks" in notices[-1]
    assert [place for place, (_, board) in enumerate(found) if not board] == [len(found) - 1]  # what is shown stays


def test_what_is_done_by_hand_is_the_same(unpacked: Path):
    lab, sent = pipeline_lab(), []
    lab.send = sent.append  # type: ignore[method-assign]
    expected, questions = [], []
    for message in BY_HAND:
        questions.append({"settings": dict(lab.settings), "message": message})
        lab._on_message(lab, message, [])
        expected.append(({"notice": lab.notice, "num_edits": lab.num_edits, "settings": lab.settings}, lab.board))
    found = like_a_browser(unpacked, questions)["answers"]
    board = ""
    for (traits, shown), (said, changed) in zip(expected, found, strict=True):
        board = changed or board
        assert traits.items() <= said["traits"].items()
        assert base64.b64decode(board) == shown
    assert [said["answer"] for said, _ in found] == sent
    assert [said["num_edits"] for said, _ in expected] == [1, 1, 2, 3, 2, 2, 2, 2, 2, 0]


def test_a_question_that_changes_no_schedule_leaves_what_the_page_has():
    questions = [{"settings": FIRST, "message": message} for message in ({"export": "csv"}, {})]
    questions.append({"settings": {**FIRST, "task": "same-memory"}, "message": {}})
    bench = Pipelines(FIRST)
    assert [bench.reply(json.dumps(question))[1] for question in questions] == [b"", b"", b""]


def test_the_layout_lab_answers_as_in_a_kernel(unpacked: Path):
    first = dict(layout_lab(gpus=16, batch=64, sequence=4096).settings)
    settings = [{**first, **more} for more in (
        {}, {"gpus": 32}, {"model": "mixtral-8x7b"}, {"cluster": "h100"}, {"stack": "fsdp"},
        {"model": "llama3-405b", "gpus": 512, "batch": 1024},
        {"model": "layers=6, hidden=384, heads=6, kv_heads=6, head_dim=64, ffn=1536, vocab=1000, experts=4, "
         "experts_per_token=2"}, {"gpus": 67},
    )]  # fmt: skip
    questions = [{"settings": one, "message": {"settings": True}} for one in settings[:-1]]
    questions += [{"settings": settings[1], "message": {"choose": 40}}, {"settings": settings[-1], "message": {}}]
    found = like_a_browser(unpacked, questions, first, "layouts")["answers"]
    bench = Workbench(first)
    for question, (said, board) in zip(questions, found, strict=True):
        bench.ask(question["settings"])
        answer = bench.answer(question["message"])
        assert said == {"traits": bench.traits(), "answer": answer}
        assert not board or base64.b64decode(board) == bench.board()
    assert "no plan trains this model on 67 GPUs" in found[-1][0]["traits"]["notice"]
    assert [place for place, (_, board) in enumerate(found) if not board] == [len(found) - 1]


def test_the_zip_has_what_is_read_and_no_more_than_that(unpacked: Path):
    found = like_a_browser(unpacked, [])
    assert found["index"] == "int32"
    read = found["read"] + like_a_browser(unpacked, [], dict(layout_lab().settings), "layouts")["read"]
    names = {Path(file).relative_to(unpacked).as_posix() for file in read} | {"tplab/__init__.py"}
    names |= {file.as_posix() for file in pyodide.data_files()}
    assert names == set(zipfile.ZipFile(BytesIO(pyodide.sources())).namelist())
    assert pyodide.sources() == pyodide.sources()  # the same files are the same bytes, which browsers keep


def test_an_index_is_as_long_as_an_address():
    """int64 is no safe index where addresses have 32 bits: `take(..., out=)` and others refuse it there."""
    found = set()
    for file in pyodide.needed(*pyodide.STARTS_WITH):
        text = (pyodide.ROOT / file).read_text(encoding="utf8")
        found |= {file.as_posix() for _ in re.findall(r"\bint64\b", text)}
    sizes = {  # of memory, which may be larger than addresses, times in whole nanoseconds, and what is only sent
        "tplab/schedules/as_trace.py", "tplab/trace/columns.py", "tplab/trace/critical_path.py",
        "tplab/trace/memory.py", "tplab/trace/perfetto.py", "tplab/trace/recorder.py", "tplab/trace/trace.py",
        "tplab/widgets/paper/scene.py", "tplab/widgets/paper/wire.py",
    }  # fmt: skip
    assert found <= sizes


def test_the_site_serves_all_but_numpy(tmp_path: Path):
    pyodide.write(tmp_path, numpy_from_cdn=True)
    folder = tmp_path / pyodide.FOLDER
    files = {path.name for path in folder.iterdir()}
    assert files == {*pyodide.CORE, "worker.js", "cells.py", "cards", "tplab.zip", "pyodide-lock.json", "about.json"}
    about = json.loads((folder / "about.json").read_text(encoding="utf8"))
    packages = json.loads((folder / "pyodide-lock.json").read_text(encoding="utf8"))["packages"]
    assert set(packages) == {"numpy"} and re.fullmatch(r"[0-9a-f]{64}", packages["numpy"]["sha256"])
    assert packages["numpy"]["depends"] == []
    assert about["numpyFrom"] == f"https://cdn.jsdelivr.net/pyodide/v{pyodide.version()}/full/"
    assert 10e6 < about["bytes"] < 15e6


def test_numpy_is_in_the_site_where_it_can_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cdn, wheel = tmp_path / "cdn", b"NumPy, compiled"
    package = tmp_path / "package"
    shutil.copytree(pyodide.installed(), package)
    lock = json.loads((package / "pyodide-lock.json").read_text(encoding="utf8"))
    numpy = lock["packages"]["numpy"]
    numpy["sha256"] = hashlib.sha256(wheel).hexdigest()
    (package / "pyodide-lock.json").write_text(json.dumps(lock), encoding="utf8")
    cdn.mkdir()
    (cdn / numpy["file_name"]).write_bytes(wheel)
    monkeypatch.setattr(pyodide, "installed", lambda: package)
    monkeypatch.setattr(pyodide, "numpy_from", lambda: f"{cdn.as_uri()}/")
    monkeypatch.setattr(pyodide, "CACHE", tmp_path / "cache")
    site = tmp_path / "site"
    pyodide.write(site)
    assert (site / pyodide.FOLDER / numpy["file_name"]).read_bytes() == wheel
    about = json.loads((site / pyodide.FOLDER / "about.json").read_text(encoding="utf8"))
    assert about["numpyFrom"] == "" and pyodide.has_numpy(site)
    assert "://" not in policy.policy(has_lab=True, has_numpy=True)
    pyodide.write(site, numpy_from_cdn=True)
    assert not pyodide.has_numpy(site)


def test_another_file_than_the_listed_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "numpy.whl").write_bytes(b"something else")
    with pytest.raises(RuntimeError, match="not the file that Pyodide lists"):
        downloaded((tmp_path / "numpy.whl").as_uri(), "0" * 64, tmp_path / "cache")
    assert downloaded((tmp_path / "absent.whl").as_uri(), "0" * 64, tmp_path / "cache") is None
    assert "cannot be downloaded here" in capsys.readouterr().err
