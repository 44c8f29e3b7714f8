"""`experts(trace)`: shows which rows go to which experts, what each expert computes, and which ranks wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tplab.trace.trace import Trace
from tplab.units import bytes_text, counted, time_text
from tplab.widgets.mixture import drawing
from tplab.widgets.mixture.reading import Layer, layers_of
from tplab.widgets.paper.card import Played
from tplab.widgets.paper.still import still

TITLE = "Experts on ranks"


class Experts(Played):
    """The card of `experts`. `step` is the position of the playhead: each layer has one step for each exchange of its
    dispatch, one for its experts, and one for each exchange of its combine. `layers` was read from the trace."""

    def __init__(self, layers: list[Layer], about: str, unit: str, step: float = 0):
        self.layers, self.about, self.sentence = layers, about, sentence_of(layers, unit)
        self.drawn = drawing.draw(layers, unit)
        self.drawn.narrow, self.drawn.label = drawing.draw(layers, unit, drawing.NARROW), self.sentence
        says = [("before the first step", "each rank has its own tokens, and the router has chosen their experts")]
        for number, layer in enumerate(layers, 1):
            name = f"layer {number} of {len(layers)}" if len(layers) > 1 else ""
            says += [says_of(layer, step, unit, name) for step in range(1, layer.num_steps + 1)]
        self.says, self.num_steps = says, len(says) - 1
        super().__init__([self.drawn], drawing.LEGEND, TITLE, about, says, self.num_steps, step)

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


def says_of(layer: Layer, step: int, unit: str, name: str = "") -> tuple[str, str]:
    """The line below the picture during a step, counted from 1: its name, and what happens."""
    count, head = len(layer.levels), f"{name}: " * bool(name)
    if step == count + 1:
        several = not layer.levels[-1].is_gather and (layer.of_ranks > layer.levels[-1].pairs.sum(0)).any()
        each = "; a row for several experts of its rank is computed by each of them" if several else ""
        return f"{head}experts compute", _computing(layer, unit) + each
    is_back = step > count
    level = layer.levels[2 * count + 1 - step if is_back else step - 1]
    sent = sum(event.bytes for event in (level.back if is_back else level.there))
    pairs = level.pairs.T if is_back else level.pairs
    leave = int(pairs.sum() - pairs.trace())
    what = "slots" if level.is_padded else "rows"
    along = f", along {level.axis}" if count > 1 else ""
    if is_back and level.is_gather:
        return (
            f"{head}combine{along}",
            f"each rank gets the sum of what all ranks computed: {bytes_text(sent)} in total",
        )
    text = f"{leave} of {pairs.sum()} {what} go to another rank, {bytes_text(sent)} of {what}; "
    copies = 0 if is_back or level.is_padded or step == 1 else pairs.sum() - layer.levels[step - 2].pairs.sum()
    if copies > 0:
        text += f"{copies} {'is a copy' if copies == 1 else 'are copies'} for more than one rank; "
    got = pairs.sum(0)
    most = f"rank {layer.ranks[got.argmax()]} then has the most, {got.max()}"
    most = f"each rank then has {got[0]}" if got.min() == got.max() else most
    return f"{head}{'combine' if is_back else 'dispatch'}{along}", text + most


def _computing(layer: Layer, unit: str) -> str:
    rows, waits = layer.of_ranks, [spent.waits for spent in layer.spent]
    most, least, longest = rows.argmax(), rows.argmin(), waits.index(max(waits))
    if rows[most] == rows[least]:
        text = f"each rank computes {rows[most]} rows"
    else:
        text = f"rank {layer.ranks[most]} computes {rows[most]} rows, and rank {layer.ranks[least]} only {rows[least]}"
    idle = int((layer.loads.sum(0) == 0).sum())
    text += f"; {idle} of {layer.loads.shape[1]} experts {'has' if idle == 1 else 'have'} none" if idle else ""
    lost = sum(layer.dropped)
    text += f"; {counted(lost, 'choice')} found no room" if lost else ""
    if waits[longest] <= 0.01 * layer.spent[longest].computing:
        why = ", since so few rows take nearly the same time on every rank"
        if min(layer.flops) == max(layer.flops):
            why = ", since each rank computes all its slots, also empty ones"
        return f"{text}; no rank waits for long{why * bool(rows[most] > 1.05 * rows[least])}"
    return f"{text}; rank {layer.ranks[longest]} waits for {time_text(waits[longest], unit)}"


def sentence_of(layers: list[Layer], unit: str) -> str:
    """A sentence about the whole picture; of several layers, about the first."""
    layer = layers[0]
    loads = layer.loads.sum(0)
    more = f", the first of {len(layers)} layers" if len(layers) > 1 else ""
    return (
        f"{len(loads)} experts on {len(layer.ranks)} ranks{more}: of {loads.sum()} choices, {loads.max()} are of "
        f"expert {loads.argmax()} and {loads.min()} of expert {loads.argmin()}; {_computing(layer, unit)}."
    )
