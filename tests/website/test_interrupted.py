"""A build of the site that was interrupted does not break the next one."""

from pathlib import Path

import pytest

from website.__main__ import built


@pytest.mark.parametrize("lost", ["the index", "half of it", "a page and the index"])
def test_the_build_after_an_interrupted_one_is_whole(tmp_path: Path, lost: str, capsys: pytest.CaptureFixture[str]):
    pages, out, doctrees = tmp_path / "pages", tmp_path / "out", tmp_path / "doctrees"
    pages.mkdir()
    (pages / "conf.py").write_text('project = "a site"\n')
    (pages / "index.rst").write_text("A site\n======\n\n.. toctree::\n\n   one\n   two\n")
    for name in ("one", "two"):
        (pages / f"{name}.rst").write_text(f"Page {name}\n========\n\nWords.\n")
    assert built(pages, out, doctrees, pages) == 0
    assert built(pages, out, doctrees, pages) == 0

    (pages / "one.rst").write_text("Page one\n========\n\nOther words.\n")
    index = out / "searchindex.js"
    if lost == "half of it":
        index.write_text(index.read_text()[:100])
        (tmp_path / "doctrees-unfinished").touch()  # as an interrupted build leaves it
    else:
        index.unlink()
    if lost.startswith("a page"):
        (out / "two.html").unlink()
    assert built(pages, out, doctrees, pages) == 0, capsys.readouterr().err
    assert "Other words" in (out / "one.html").read_text()
    assert "page" in index.read_text()
    assert (out / "two.html").exists()
    assert not (tmp_path / "doctrees-unfinished").exists()
