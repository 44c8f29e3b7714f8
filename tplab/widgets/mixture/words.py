"""The texts of `experts` about a layer, step by step."""

from __future__ import annotations

from tplab.units import bytes_text, counted, time_text
from tplab.widgets.mixture.reading import Layer


def says(layer: Layer, step: int, unit: str, name: str = "") -> tuple[str, str]:
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


def sentence(layers: list[Layer], unit: str) -> str:
    """A sentence about the whole picture; of several layers, about the first."""
    layer = layers[0]
    loads = layer.loads.sum(0)
    more = f", the first of {len(layers)} layers" if len(layers) > 1 else ""
    return (
        f"{len(loads)} experts on {len(layer.ranks)} ranks{more}: of {loads.sum()} choices, {loads.max()} are of "
        f"expert {loads.argmax()} and {loads.min()} of expert {loads.argmin()}; {_computing(layer, unit)}."
    )
