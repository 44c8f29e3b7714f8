"""A scene keeps what is drawn on it; many boxes at once are what each of them would be."""

from __future__ import annotations

import numpy as np

from tplab.widgets.paper.palette import HUES, PAPER, SOFT
from tplab.widgets.paper.scene import Scene

PLACES = np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 1.0, 2.0, 3.0]])
FILLS, SPANS = [SOFT, HUES[1], SOFT], np.array([[0.0, 1.0], [0.5, 2.0], [1.0, 3.0]])
CURVES = [(0.0, 0.0, 5.0, 5.0, 10.0, 0.0), (0.0, 1.0, 5.0, 5.0, 10.0, 0.0), (0.0, 0.0, 5.0, 5.0, 10.0, 0.0)]


def test_many_boxes_at_once_are_what_each_of_them_would_be():
    at_once, each = Scene(20, 20), Scene(20, 20)
    for sheet in (at_once, each):
        with sheet.about([("", "before")]):
            sheet.line([(0, 0), (1, 1)], HUES[0])
    at_once.boxes(PLACES, FILLS, SPANS, [7, 8, 9], CURVES, edge=PAPER, radius=2)
    for place, fill, span, key, curve in zip(PLACES.tolist(), FILLS, SPANS.tolist(), (7, 8, 9), CURVES):
        with each.during(*span), each.along(curve), each.about((), key=key):
            each.box(*place, fill=fill, edge=PAPER, radius=2)
    with at_once.during(2, 5), at_once.about([("", "all of them")], key=3):
        at_once.boxes(PLACES, FILLS)
    with each.during(2, 5), each.about([("", "all of them")], key=3):
        for place, fill in zip(PLACES.tolist(), FILLS):
            each.box(*place, fill=fill)
    one, other = ([part._replace(look=tuple(sorted(part.look))) for part in sheet.parts] for sheet in (at_once, each))
    assert one == other and len(one) == 7
    assert at_once.marks == each.marks
    assert [mark.key for mark in at_once.marks] == [-1, 7, 8, 9, 3] and at_once.marks[4].rows == (("", "all of them"),)
    assert list(at_once.paths.found) == list(each.paths.found)
