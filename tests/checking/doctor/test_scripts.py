"""The scripts that judge the doctor: each is as wrong as `expected` says, and right once it is repaired."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.checking.doctor import expected, seen
from tests.checking.doctor.expected import WRONG, Wrong, close
from tests.checking.doctor.proven import proven_of_each, source_of
from tests.checking.doctor.right import RIGHT, Right
from tests.checking.doctor.seen import Seen, see
from tplab import Mesh
from tplab.commands import mesh_from

FOLDER, GOOD = Path(__file__).parent / "wrong", Path(__file__).parent / "right"
pytestmark = pytest.mark.filterwarnings("ignore")


def text_of(row: Wrong) -> str:
    return (FOLDER / f"{row.script}.py").read_text()


def repaired(row: Wrong, folder: Path) -> Path:
    """The script with its mistake mended."""
    text = text_of(row)
    for old, new in row.repair:
        assert text.count(old) == 1, f"{row.script} has {text.count(old)} x {old!r}"
        text = text.replace(old, new)
    path = folder / f"{row.script}_repaired.py"
    path.write_text(text)
    return path


def both(script: Path, row: Wrong | Right) -> tuple[Seen, Seen]:
    """The script on its ranks, and on one."""
    mesh = mesh_from(row.mesh) if row.mesh else Mesh(world=row.ranks)
    alone = Mesh(**dict.fromkeys(mesh.axis_names, 1))
    return see(script, mesh, row.args), see(script, alone, f"{row.args} {row.reference_args}")


def wanted(row: Wrong, reference: Seen) -> torch.Tensor:
    return (row.wanted or row.seen)(reference)


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def texts_of_wrong(row: Wrong) -> Iterator[str]:
    yield from (text_of(row), claims()[row.script], claims()[""])
    yield from map(source_of, (seen, both, repaired, wanted))


@cache
def claims() -> dict[str, str]:
    """The text of each script's row in `expected`; and under "", that of all else there."""
    text = source_of(expected)
    assigned = (one for one in ast.parse(text).body if isinstance(one, ast.Assign))
    (table,) = (one for one in assigned if ast.unparse(one.targets[0]) == "WRONG")
    assert isinstance(table.value, ast.Tuple)
    rows = [ast.get_source_segment(text, node) or "" for node in table.value.elts]
    rest = text.replace(ast.get_source_segment(text, table.value) or "", "")
    return {"": rest} | {row.script: segment for row, segment in zip(WRONG, rows, strict=True)}


@proven_of_each(WRONG, lambda row: row.script, texts_of_wrong)
def test_wrong_as_claimed(row: Wrong):
    run, reference = both(FOLDER / f"{row.script}.py", row)
    found, right = row.seen(run), wanted(row, reference)
    assert not close(found, right, 1e-3 if row.script != "positions_start_at_zero" else 1e-4)
    if isinstance(row.factor, str):
        assert row.holds is None or row.holds(run, reference)
    else:
        assert close(found, row.factor * right)


@proven_of_each(WRONG, lambda row: row.script, texts_of_wrong)
def test_right_when_repaired(row: Wrong):
    run, reference = both(repaired(row, Path.cwd()), row)
    assert close(row.seen(run), wanted(row, reference))


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row.script)
def test_lines_are_there(row: Wrong):
    text = text_of(row)
    for line in row.lines:
        assert line in text
    assert 30 <= text.count("\n") <= 200


PRINTED = re.compile(r"(?:loss|loss_d|loss_g|norm|grad_norm|eval|accuracy)'?:? '?(\d+\.\d+)")


def numbers(run: Seen) -> torch.Tensor:
    return torch.tensor([float(number) for number in PRINTED.findall(run.printed)])


def texts_of_right(row: Right) -> Iterator[str]:
    yield from ((GOOD / f"{row.script}.py").read_text(), repr(row), (GOOD / "gpt.py").read_text(), PRINTED.pattern)
    yield from map(source_of, (seen, both, numbers))


@proven_of_each(RIGHT, str, texts_of_right)
def test_right_as_claimed(row: Right):
    run, reference = both(GOOD / f"{row.script}.py", row)
    found, wanted = numbers(run), numbers(reference)
    assert len(found) == len(wanted) >= 2
    if row.tolerance is not None:
        torch.testing.assert_close(found, wanted, rtol=row.tolerance, atol=2e-5)  # they have five digits


def test_each_right_script_has_its_row():
    assert {row.script for row in RIGHT} | {"gpt"} == {path.stem for path in GOOD.glob("*.py")}
    assert len(RIGHT) == len({str(row) for row in RIGHT}) >= 40


def test_each_script_has_its_row():
    assert sorted(row.script for row in WRONG) == sorted(path.stem for path in FOLDER.glob("*.py"))
