"""Labs 10, 12 and 13 give the same advice on schedules, word for word; its figures are in `tests.labs.schedules`."""

import pytest

from labs.source import build
from tests.labs.schedules import PARAGRAPH


@pytest.mark.parametrize("lab", ["10_pipeline_schedules", "12_pipeline_in_jax", "13_pipeline_memory"])
def test_the_paragraph_is_there(lab: str):
    text = "\n".join(cell.source for cell in build.read_source(lab).cells if cell.cell_type == "markdown")
    assert PARAGRAPH in text
