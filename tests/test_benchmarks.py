"""`make bench`: ratios of two commits, and the table in docs/figures.md. No row is measured here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import ROOT, names
from benchmarks.against import checkout, compare, is_fine, ratio, ratios
from benchmarks.figures import BEGIN, END, written
from benchmarks.table import Row


def row(measured: str, what: str = "a ring step", reach: str = "<= 80 us", ok: bool = True) -> Row:
    return Row(what, reach, measured, ok)


@pytest.mark.parametrize(
    "measured, figure",
    [("141 us; beside it 2 ms", 141), ("1.16 (1 ms / 2 ms)", 1.16), ("1,071 ms", 1071), ("100%", 100),
     ("failed (exit status 1): no", None), ("", None)],
)  # fmt: skip
def test_the_figure_of_a_row(measured: str, figure: float | None):
    assert row(measured).figure == figure


def test_ratios():
    assert ratio(row("100 us"), row("120 us")) == 1.2 and not is_fine(row("100 us"), row("120 us"))
    assert is_fine(row("100 us"), row("105 us")) and is_fine(row("not there"), row("7 us"))
    more = ">= 90%"
    assert ratio(row("100%", reach=more), row("50%", reach=more)) == 2  # less is worse here
    assert not is_fine(row("7 us"), row("failed (exit status 1)"))
    table = ratios([(row("100 us"), row("120 us"))])
    assert [cell.strip() for cell in table.splitlines()[-1].split("|")][1:-1] == [
        "a ring step", "100 us", "120 us", "1.20", "NO",
    ]  # fmt: skip


def test_two_sides_take_turns_and_the_best_of_each_counts():
    before, now = Path("before"), Path("now")
    took = {before: iter([5, 3, 4]), now: iter([9, 8, 7])}
    order: list[Path] = []

    def measure(name: str, side: Path) -> list[Row]:
        order.append(side)
        new = [row("1 s", "only now")] if side == now else []
        return [row(f"{next(took[side])} us", name), *new]

    pairs = compare(["hops"], before, now, measure, rounds=3)
    assert order == [before, now, now, before, before, now]
    assert [(old.measured, new.measured) for old, new in pairs] == [("3 us", "7 us"), ("not there", "1 s")]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits of a file, and benchmarks that only the second has."""

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet")
    for text in ("old", "new"):
        (tmp_path / "tplab.py").write_text(text)
        git("add", ".")
        git("commit", "--quiet", "--message", text)
        git("tag", text)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "row.py").write_text("the same on both")
    return tmp_path


def test_another_commit_has_its_files_and_these_benchmarks(repository: Path):
    there = checkout("old", repository)
    for _ in range(2):
        assert (there / "tplab.py").read_text() == "old" and (repository / "tplab.py").read_text() == "new"
        assert (there / "benchmarks" / "row.py").read_text() == "the same on both"
        assert there.parent == repository / "build" / "against"
        (there / "benchmarks" / "row.py").write_text("from the last time")
        there = checkout("old", repository)
    with pytest.raises(ValueError, match="git knows no commit 'nowhere'"):
        checkout("nowhere", repository)


PAGE = (
    f"# Figures\n\nprose\n\n{BEGIN}Measured on a.\n\n| what | measured | aim |\n|---|---|---|\n"
    f"| x | 1 s | 2 s |\n| y | 3 s | 2 s |\n{END}\nmore\n"
)


def test_the_table_is_written_and_the_prose_kept():
    rows = [row("4 s", "y", "<= 2 s", ok=False), row("5 s", "z", "<= 9 s")]
    whole = written(PAGE, rows, "Measured on b.", is_whole=True)
    assert whole.startswith("# Figures\n\nprose\n") and whole.endswith(f"{END}\nmore\n")
    assert "Measured on b.\n\n" in whole and "| x |" not in whole and "Measured on a" not in whole
    assert "| y | **4 s** | <= 2 s |\n| z | 5 s | <= 9 s |\n" in whole
    assert written(whole, rows, "Measured on b.", is_whole=True) == whole


def test_some_rows_take_their_places():
    text = written(PAGE, [row("4 s", "y", "<= 2 s", ok=False)], "Measured on b.", is_whole=False)
    assert "Measured on a.\nMeasured on b. These rows: y.\n" in text
    assert "| x | 1 s | 2 s |\n| y | **4 s** | <= 2 s |\n" in text


def test_a_page_without_a_place_for_the_table():
    with pytest.raises(ValueError, match="needs one line <!-- figures -->"):
        written("# Figures\n", [], "", is_whole=True)


def test_the_page_has_a_place_and_the_rows_have_names():
    page = (ROOT / "docs" / "figures.md").read_text(encoding="utf8")
    assert written(page, [row("1 us")], "Measured now.", is_whole=True) != page
    assert {"torch_hops", "train", "mlp_torch"} <= set(names())
