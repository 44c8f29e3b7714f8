"""`check_parallel`: somebody's parallel model, held against the unsharded one, inside a rank's program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tplab.checking.report import ParallelReport
from tplab.checking.verdict import judge
from tplab.layout import Layout, layout_of
from tplab.sharding import P
from tplab.torch.checking.answer import InSpecs, Loss, local_inputs
from tplab.torch.checking.culprit import first_wrong_module
from tplab.torch.checking.evidence import Evidence, Names
from tplab.torch.checking.masks import MaskWatch, mask_rows
from tplab.torch.checking.recut import better_cuts, modules_like
from tplab.torch.checking.witness import (
    as_numpy,
    floats_in,
    is_judge,
    left_as_it_was,
    pieces_of,
    shape_of,
    tell,
)  # fmt: skip


def check_parallel(
    model: nn.Module, reference: nn.Module, *inputs: Any, loss: Loss | None = None, reference_loss: Loss | None = None,
    specs: Mapping[str, P | Layout] | None = None, in_specs: InSpecs = None,
    names: Names | None = None, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    after_backward: Callable[[nn.Module], Any] | None = None, perturb: bool = True, **named_inputs: Any,
) -> ParallelReport:  # fmt: skip
    """Hold the outputs, the loss and every gradient of a parallel model against the unsharded `reference`.

    Called inside a rank's program, by all ranks of the mesh; each gets the report. The model is this rank's, the
    reference the whole one, with the same values; the inputs are whole.

    loss            of the model's output; without: its `.loss`, itself if it is a scalar, or a weighted sum of it
    reference_loss  of the reference's output, where it must be another, as for logits that stay sharded
    specs           how parameters lie on the mesh, by name: P, or Layout for fused parts. Of what is not named
                    `parallelize` knows it, or it is worked out from shapes and values
    in_specs        one an input, or one for all: the model gets this rank's piece, as under sequence parallelism
    names           the model's name of a parameter -> the reference's, a dict or a function
    optimizer       parameters -> an optimizer: the parameters after one step are compared too
    after_backward  called with the model after its backward pass: where gradients are reduced by hand
    perturb         parameters that are all zeros or ones, as biases and norms begin, get other values for the check: a
                    bias of zeros may be added as often as one likes

    Without dropout; if the model is in training mode, masks are compared in a pass of their own. A difference is called
    rounding up to what dtype and sizes explain (see `tplab.checking.verdict`), and for shorter types than float64 up to
    what the reference is off its own answer in float64. Afterwards both models are as they were.
    cost    four passes or so; every parameter, gradient and output is gathered, one at a time
    """
    if {id(p) for p in model.parameters()} & {id(p) for p in reference.parameters()}:
        raise ValueError(
            "model and reference share parameters, and so cannot be held against each other; give run(...) the model "
            "and a copy.deepcopy(model) of it, one to shard and one to stay whole"
        )
    if isinstance(in_specs, P):
        in_specs = (in_specs,) * len(inputs)
    check = _Check(model, reference, specs or {}, names)
    is_training = model.training
    with left_as_it_was(model, reference), torch.enable_grad():
        model.eval()
        reference.eval()
        check.compare_values()
        if perturb:
            check.perturb()
        check.run(inputs, named_inputs, in_specs, loss, reference_loss or loss, after_backward)
        check.compare_gradients()
        check.look_inside(inputs, named_inputs, in_specs)
        if optimizer is not None:
            check.compare_step(optimizer)
    if is_training:
        with left_as_it_was(model):
            check.compare_masks(inputs, named_inputs, in_specs)
    told = tell(check.report().to_json() if is_judge() else None)
    return ParallelReport.from_json(told[0])


class _Check(Evidence):
    """The evidence, and where it leads."""

    def look_inside(self, inputs: Sequence[Any], named: Mapping[str, Any], in_specs: InSpecs) -> None:
        """Where outputs are wrong, find the innermost module whose output is, and try whether a fused weight is cut in
        one piece; where only gradients are, the first of them."""
        if not tell(any(not row.ok and row.kind in ("output", "loss") for row in self.rows))[0]:
            self._look_behind()
            return
        local = local_inputs(inputs, in_specs)
        row = first_wrong_module(self.model, self.reference, local, inputs, named, self.rounding)
        if row is not None:
            place = next((place for place, one in enumerate(self.rows) if one.kind == "gradient"), len(self.rows))
            self.rows.insert(place, row)
        if self.is_wrong or self.has_pieces:
            return
        mine = {name: self.mine[self.name_of[name]] for name in self.layouts}
        cuts = better_cuts(mine, self.whole, self.layouts, lambda: self._is_right(local, named))
        for pattern, count in (cuts or {}).items():
            words = f"cut in one piece, and it holds {count} parts side by side: with each cut by itself all is right"
            for place, one in enumerate(self.rows):
                if one.kind == "gradient" and modules_like(one.name) == pattern:
                    self.rows[place] = replace(one, ok=False, words=words, mistake="fused")

    def _is_right(self, local: Sequence[Any], named: Mapping[str, Any]) -> bool:
        """Whether the model's outputs are the reference's, on all ranks."""
        outputs = floats_in(self.model(*local, **named))
        wrong = False
        wanted = tell({n: shape_of(x) for n, x in self.answer.outputs.items()} if is_judge() else {})[0]
        for name, shape in wanted.items():
            shapes = tell(shape_of(outputs.get(name)))
            pieces = pieces_of(outputs.get(name), shapes)
            if is_judge():
                whole = as_numpy(self.answer.outputs[name])
                assert whole is not None
                layout = layout_of(whole, pieces, shapes, self.mesh, 100 * self.rounding.tolerance) or Layout()
                wrong |= not judge(pieces, whole, layout, self.mesh, self.rounding, what="output").ok and bool(shape)
        return not tell(wrong)[0]

    def _look_behind(self) -> None:
        """Note where, in the order of the backward pass, gradients begin to be wrong."""
        if not is_judge():
            return
        rows = {row.name: row for row in self.rows if row.kind == "gradient"}
        order = [rows[name] for name in self.answer.order if name in rows]
        first = next((place for place, row in enumerate(order) if not row.ok and row.mistake != "tied"), 0)
        if first > 0 and order[first].mistake not in ("scaled", "missing"):
            self.notes.append(
                "all outputs are right; in the order of the backward pass gradients are right down to "
                f"{order[first - 1].name} and wrong from {order[first].name} on: look at what stands between the two"
            )

    def compare_masks(self, inputs: Sequence[Any], named: Mapping[str, Any], in_specs: InSpecs) -> None:
        """One forward pass with dropout, whose masks are compared."""
        with torch.no_grad(), MaskWatch(self.model) as watch:
            self.model(*local_inputs(inputs, in_specs), **named)
        per_rank = tell(watch.seen)
        self.rows += mask_rows([[tuple(one) for one in seen] for seen in per_rank], self.mesh) if is_judge() else []

    def report(self) -> ParallelReport:
        return ParallelReport(self.rows, mesh=str(self.mesh), notes=self.notes)
