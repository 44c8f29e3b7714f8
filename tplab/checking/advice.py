"""Which wrong gradient comes first, what follows from it, and what to do, judging by the order of the backward pass.

A backward pass goes from the loss to the inputs. If the gradient of an activation is wrong, all later gradients are
wrong too; if only a parameter's own gradient is wrong, no other is affected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tplab.checking.report import Row

OUTPUT = "put reduce_from (Megatron's g) after the divided work"
TENSOR = "put copy_to (Megatron's f) where the tensor enters the divided work"
OWN_CAUSE = ("fused", "tied")  # mistakes of one parameter, whatever else is wrong


def in_backward_order(rows: Sequence[Row], order: Sequence[str]) -> list[Row]:
    """The same rows, with the gradients in the order in which they arrive; those that are not in `order` come last."""
    place = {name: index for index, name in enumerate(order)}
    gradients = iter(sorted(_gradients(rows), key=lambda row: place.get(row.name, len(order))))
    return [next(gradients) if row.kind == "gradient" else row for row in rows]


def advised(rows: Sequence[Row], cut: Collection[str], split: Collection[str]) -> list[Row]:
    """The same rows, in backward order; those that lack a sum now say what to do about it.

    cut     the axes that any parameter is cut along
    split   the axes that any input is cut along
    """
    gradients = list(_gradients(rows))
    found = []
    for row in rows:
        words = _way_out(row, gradients, set(cut), set(split))
        found.append(replace(row, words=f"{row.words}; {words}") if words else row)
    return found


def _way_out(row: Row, gradients: Sequence[Row], cut: set[str], split: set[str]) -> str:
    axes = set(row.axes)
    if row.ok or not axes:
        return ""
    over = row.axes[0] if len(row.axes) == 1 else tuple(row.axes)
    has_other_data = axes <= split if split else not axes & cut
    if row.mistake == "mean":
        words = f"ranks have different data along {over!r}"
        return f"{words}: average every gradient along it after the backward pass" if row.kind == "gradient" else words
    if row.mistake == "scaled":
        words = f"if ranks have different data along {over!r}, average the gradients or the loss along it"
        return words if has_other_data and not axes & cut and row.kind == "gradient" else ""
    if row.kind != "gradient":
        return OUTPUT
    if row.name.startswith("input "):
        return TENSOR
    if has_other_data and not axes & cut:
        return f"ranks have different data along {over!r}: add up every gradient along it after the backward pass"
    if has_other_data or _is_right_behind(row, gradients):
        return (
            "each rank uses the parameter for its own part of the work: wrap the parameter, "
            f"copy_to(parameter, {over!r}), or all_reduce its gradient after the backward pass"
        )
    return TENSOR


def _is_right_behind(row: Row, gradients: Sequence[Row]) -> bool:
    """Whether the next gradient in the backward pass, of another module, is right: then the tensor's is right too."""
    module = row.name.rpartition(".")[0]
    behind = (
        other
        for other in gradients[gradients.index(row) + 1 :]
        if _tells(other) and not (module and other.name.rpartition(".")[0] == module)
    )
    nearest = next(behind, None)
    return nearest is not None and nearest.ok


def folded(rows: Sequence[Row]) -> list[Row]:
    """The same rows; those that may be wrong because of another row name it in `follows`."""
    activation = next((row for row in rows if not row.ok and row.kind == "activation"), None)
    value = next((row for row in rows if not row.ok and row.kind == "value"), None)
    output = next((row for row in rows if not row.ok and row.kind in ("output", "loss")), None)
    fused = next((row for row in rows if not row.ok and row.mistake == "fused"), None)
    forward = None if output is None else fused or activation or value or output
    leader: Row | None = None
    leads: dict[str, str] = {}
    found = []
    for row in rows:
        follows = ""
        if row.kind in ("output", "loss") and forward is not None:
            follows = forward.title
        elif row.kind == "activation" and fused is not None:
            follows = fused.title
        elif row.kind == "gradient" and row.mistake not in OWN_CAUSE and _tells(row):
            leader = None if row.ok else forward or leader or row
            follows = leader.title if leader else ""
        elif row.kind == "parameter":
            follows = forward.title if forward else leads.get(row.name, "")
        if row.kind == "gradient" and not row.ok:
            leads[row.name] = follows or row.title
        found.append(replace(row, follows="" if row.ok or follows == row.title else follows))
    return found


def where_it_begins(rows: Sequence[Row]) -> str:
    """A note on where gradients begin to be wrong; "" if an output is wrong, or only one parameter's gradient is."""
    if any(not row.ok and row.kind in ("value", "output", "loss", "activation") for row in rows):
        return ""
    order = [row for row in _gradients(rows) if _tells(row)]
    first = next((index for index, row in enumerate(order) if not row.ok and row.mistake != "tied"), 0)
    if first == 0 or order[first].mistake in ("scaled", "missing", "gather") or _is_right_behind(order[first], order):
        return ""
    return (
        "all outputs are right; in the order of the backward pass, gradients are right up to "
        f"{order[first - 1].name} and wrong from {order[first].name} on: look at what is between the two"
    )


def _gradients(rows: Sequence[Row]) -> Iterator[Row]:
    return (row for row in rows if row.kind == "gradient")


def _tells(row: Row) -> bool:
    """Whether a gradient is evidence about the ones before and after it. One that is zero in both models is not."""
    return not (row.ok and row.words.startswith(("zero", "no gradient")))
