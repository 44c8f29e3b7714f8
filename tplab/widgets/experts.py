"""`experts(trace)`: shows which rows go to which experts, what each expert computes, and which ranks wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tplab.trace.trace import Trace
from tplab.widgets.mixture import drawing, words
from tplab.widgets.mixture.reading import Layer, layers_of
from tplab.widgets.paper.played import Played
from tplab.widgets.paper.still import still

TITLE = "Experts on ranks"


class Experts(Played):
    """The card of `experts`. `step` is the position of the playhead: each layer has one step for each exchange of its
    dispatch, one for its experts, and one for each exchange of its combine. `layers` was read from the trace."""

    def __init__(self, layers: list[Layer], about: str, unit: str, step: float = 0):
        self.layers, self.about, self.sentence = layers, about, words.sentence(layers, unit)
        self.drawn = drawing.draw(layers, unit)
        self.drawn.narrow, self.drawn.label = drawing.draw(layers, unit, drawing.NARROW), self.sentence
        says = [("before the first step", "each rank has its own tokens, and the router has chosen their experts")]
        for number, layer in enumerate(layers, 1):
            name = f"layer {number} of {len(layers)}" if len(layers) > 1 else ""
            says += [words.says(layer, step, unit, name) for step in range(1, layer.num_steps + 1)]
        self.says = says
        super().__init__([self.drawn], drawing.LEGEND, TITLE, about, says, self.num_steps, step)

    @property
    def num_steps(self) -> int:
        return sum(layer.num_steps for layer in self.layers)

    def picture(self) -> bytes:
        """The picture at `step`. Before the first step, which shows little, it is that of the first layer's end."""
        step = self.step or self.layers[0].num_steps
        return still(TITLE, self.sentence, [self.drawn], step, about=self.about, legend=drawing.LEGEND)


def experts(
    trace: Trace, choices: Any | Sequence[Any] | None = None, *, experts: int | None = None, step: float = 0
) -> Experts:
    """Show an executed layer of experts: the rows sent between each pair of ranks and back, what each expert computed,
    and how long each rank sent, computed and waited.

        def program(x):
            y, routed = tt.MixtureOfExperts(64, 128, Routing(8, 2), "ep")(x)
            return y, routed.choices

        out = tt.run(program, Mesh(ep=4), x, in_specs=P("ep"), out_specs=P("ep"), cluster="h100")
        experts(out.trace, out.value[1])

    trace     of a run with a cluster. It shows all layers of rank 0, and of the ranks that share its experts, in
              sequence. Their backward passes send the same rows again, and are not shown
    choices   the router's choices [tokens of these ranks, k], or one such table for each layer: the picture then shows
              the tokens of each expert. Required if messages have more than 64 numbers, whose values a trace drops
    experts   the number of experts, if it does not follow from the trace, as in programs that compute differently from
              tplab's layers. Expert e is on rank e // (E / R) of R
    step      where the playhead starts
    Raises TraceError if there is no such layer, or if experts are cut over ranks, and ShapeError if the choices do not
    match the rows that were sent.
    """
    layers = layers_of(trace, choices, experts)
    about = f"{trace.clock} time{f' on {trace.place}' if trace.cluster else ''}"
    return Experts(layers, about, trace.unit, step)
