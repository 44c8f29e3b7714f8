"""The loss curve draws while a model trains, and not more often than twice a second."""

import io

from PIL import Image

from tplab.training.progress import Progress
from tplab.widgets import LossCurve


def test_it_draws_as_steps_come():
    curve = LossCurve(4, about="a GPT", beside=("one device", [3.0, 2.5, 2.2, 2.0]), sentence="Both fall alike.")
    assert repr(curve) == "Both fall alike."
    drawn = [curve.content["drawing"]]
    curve.observe(lambda change: drawn.append(change["new"]["drawing"]), "content")
    for step, loss in enumerate([3.0, 2.5, 2.2, 2.0], 1):
        curve(Progress(step, 4, loss, 2.1 if step == 4 else None, 1.0, None if step == 1 else 7.2))
    assert len(drawn) == 3  # at once, then at the end
    assert drawn[0] != drawn[1] != drawn[2]
    assert curve.losses == {1: 3.0, 2: 2.5, 3: 2.2, 4: 2.0}
    assert curve.held_out == {4: 2.1}
    assert curve.content["about"] == "a GPT · step 4 of 4, about 7 s left"


def test_what_it_says_under_the_pointer_has_a_limit():
    """However long the run: no more places than a pointer can tell apart, the first and the last step among them."""
    curve = LossCurve(5000)
    curve.losses = {step: 1 / step for step in range(1, 5001)}
    curve.draw()
    (panel,) = curve.content["panels"]
    assert len(panel["stops"]) == 240
    assert [panel["stops"][place][1] for place in (0, -1)] == ["step 1", "step 5000"]


def test_the_picture_is_that_of_the_last_step():
    curve = LossCurve(2)
    before = curve._repr_mimebundle_()[0]["image/png"]
    for step in (1, 2):
        curve(Progress(step, 2, 3.0 - step, None, 1.0, None))
    after = curve._repr_mimebundle_()[0]["image/png"]
    assert before != after
    assert Image.open(io.BytesIO(curve.picture())).width == 940
