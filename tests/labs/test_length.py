"""A lab is read in an hour: it has one idea, and no more words and headings than that takes."""

import re

import pytest

from labs.source import build
from tests.labs.prose import sentences

WORDS, HEADINGS = 1590, 12
"""At most: about the 1,600 words to aim at, without formulas, badges and code; and headings below the title."""


@pytest.mark.parametrize("lab", build.names())
def test_a_lab_is_short(lab: str):
    words = [word for sentence in sentences(lab) for word in sentence.split() if re.search(r"\w", word)]
    text = [cell.source for cell in build.read_source(lab).cells if cell.cell_type == "markdown"]
    headings = re.findall(r"^## ", "\n".join(text), re.MULTILINE)
    assert len(words) <= WORDS and len(headings) <= HEADINGS
