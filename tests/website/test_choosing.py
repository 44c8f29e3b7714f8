"""docs/choosing.md: its table is what the search finds."""

from website import choosing


def test_the_page_is_what_the_code_writes():
    assert choosing.PAGE.read_text(encoding="utf8") == choosing.page(), "run python -m website.choosing"
