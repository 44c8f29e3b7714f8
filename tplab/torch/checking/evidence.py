"""Evidence: what each rank has of outputs, loss, gradients and parameters, held against the reference's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from tplab.checking.report import Row, perturbed
from tplab.checking.verdict import Rounding, Verdict, judge, slack_of_step
from tplab.errors import SpecError
from tplab.layout import Layout, layout_of, take
from tplab.sharding import P
from tplab.torch.checking.answer import (
    Answer,
    InSpecs,
    Loss,
    dtype_of,
    exactly,
    leaf,
    local_inputs,
    own_loss,
    rounding_of,
    total,
    weights_for,
)  # fmt: skip
from tplab.torch.checking.witness import (
    as_doubles,
    as_numpy,
    floats_in,
    from_told,
    is_judge,
    pieces_of,
    shape_of,
    tell,
    to_told,
)  # fmt: skip
from tplab.torch.models.huggingface import known_layouts
from tplab.torch.ranks.rank import this_rank

Names = Mapping[str, str] | Callable[[str], str]


class Evidence:
    """What is known of the parameters of a model, and the rows so far, which only the judge has."""

    def __init__(self, model: nn.Module, reference: nn.Module, specs: Mapping[str, P | Layout], names: Names | None):
        self.model, self.reference, self.specs = model, reference, specs
        self.mesh = this_rank().mesh
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.mine = dict(model.named_parameters(remove_duplicate=False))
        self.whole = dict(reference.named_parameters(remove_duplicate=False))
        rename = names if callable(names) else (lambda name: names.get(name, name)) if names else lambda name: name
        self.name_of = {rename(name): name for name in self.mine}  # reference's -> model's
        self.layouts: dict[str, Layout] = {}  # by the reference's names
        self.is_wrong: set[str] = set()
        self.rounding = Rounding("float64")
        self.exact: Answer | None = None
        self.has_gradients, self.largest_gradient = False, 0.0

    # --- before -------------------------------------------------------------------------------------------------------

    def compare_values(self) -> None:
        """Find out how each parameter lies on the mesh, and whether its values are the reference's."""
        known = {**known_layouts(self.model), **{n: _layout(spec) for n, spec in self.specs.items()}}
        if unknown := [name for name in self.specs if name not in self.mine]:
            near = ", ".join(list(self.mine)[:5])
            raise SpecError(f"specs name {unknown[0]!r}, which the model does not have; its parameters are {near}, ...")
        shapes = self._shapes(lambda name: self.mine.get(self.name_of.get(name, "")))
        for name, parameter in self.whole.items():
            own = self.name_of.get(name)
            if any(told[name] is None for told in shapes):
                self._add("value", name, parameter, Layout(), _absent(shapes, name))
                self.is_wrong.add(name)
                continue
            pieces = pieces_of(self.mine[own], [told[name] for told in shapes])  # type: ignore[index]
            layout, verdict = known.get(own or ""), None
            if is_judge():
                values = as_numpy(parameter)
                assert values is not None
                layout = layout or layout_of(values, pieces, [told[name] for told in shapes], self.mesh, 1e-6)
                verdict = judge(
                    pieces, values, layout or Layout(), self.mesh, Rounding(dtype_of(parameter)), what="value"
                )
                if not verdict.ok:
                    verdict = verdict._replace(words=f"not the reference's values to begin with: {verdict.words}")
                    self._add("value", name, parameter, layout or Layout(), verdict)
            told = tell([to_told(layout), bool(verdict and verdict.ok)])[0]
            self.layouts[name] = from_told(told[0]) or Layout()
            if not told[1]:
                self.is_wrong.add(name)
        spare = sorted(set(self.name_of) - set(self.whole))
        for name in spare:
            words = "the reference has no such parameter; names= says what it is called there"
            self._add("value", name, self.mine[self.name_of[name]], Layout(),
                      Verdict(False, np.inf, 0.0, words, "missing"))  # fmt: skip

    @torch.no_grad()
    def perturb(self) -> None:
        """Give parameters that are constant other values, the same in both."""
        done: set[int] = set()
        changed = []
        for name, parameter in self.whole.items():
            if name in self.is_wrong or id(parameter) in done or parameter.numel() < 2:
                continue
            if not bool((parameter == parameter.flatten()[0]).all()):
                continue
            done.add(id(parameter))
            changed.append(name)
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            noise = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            piece = take(noise, self.layouts[name], self.mesh, this_rank().rank)
            mine = self.mine[self.name_of[name]]
            mine[tuple(map(slice, piece.shape))] += piece.to(mine)
            parameter += noise.to(parameter)
        if changed:
            self.notes.append(perturbed(changed))

    # --- outputs and loss ---------------------------------------------------------------------------------------------

    def run(
        self, inputs: Sequence[Any], named: Mapping[str, Any], in_specs: InSpecs, loss: Loss | None,
        reference_loss: Loss | None, after_backward: Callable[[nn.Module], Any] | None,
    ) -> None:  # fmt: skip
        """One forward and backward pass of each; compare outputs and loss."""
        self.rounding = rounding_of(self.reference, [*inputs, *named.values()])
        self.has_pieces = any(spec is not None and spec.axis_names for spec in in_specs or ())
        if is_judge():
            self.answer = Answer(self.reference, inputs, named)
            if self.rounding.dtype != "float64":
                self.exact = exactly(self.reference, inputs, named)
        self.inputs = [leaf(x) for x in local_inputs(inputs, in_specs)]
        output = self.model(*self.inputs, **named)
        outputs = floats_in(output)
        weights = self._compare_outputs(outputs)
        loss = loss or own_loss(output)
        if not loss and not weights:
            self.notes.append("gradients are not compared: no output has the shape of a piece of the reference's")
            return
        value = loss(output) if loss else total(outputs[name] * w for name, w in weights.items())
        if is_judge():
            for answer in (self.answer, self.exact):
                if answer is not None:
                    answer.finish(reference_loss)
        self._compare_loss(value if loss else None)
        value.backward()
        self.has_gradients = True
        if after_backward is not None:
            after_backward(self.model)

    def _compare_outputs(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rows of the outputs; and weights for each, with which they make a loss."""
        wanted = self.answer.outputs if is_judge() else {}
        told = tell(
            {
                "shapes": {n: shape_of(x) for n, x in outputs.items()},
                "wanted": {n: shape_of(x) for n, x in wanted.items()},
            }
        )
        weights = {}
        for name, shape in told[0]["wanted"].items():
            shapes = [rank["shapes"].get(name) for rank in told]
            pieces = pieces_of(outputs.get(name), shapes)
            layout = None
            if is_judge():
                whole = as_numpy(wanted[name])
                assert whole is not None
                layout = layout_of(whole, pieces, shapes, self.mesh, 100 * self.rounding.tolerance)
                exact = None if self.exact is None else as_numpy(self.exact.outputs.get(name))
                verdict = judge(pieces, whole, layout or Layout(), self.mesh, self.rounding, what="output", exact=exact)
                if not (name == "loss" and not shape):  # the loss has a row of its own
                    self._add("output", name, wanted[name], layout or Layout(), verdict)
            layout = from_told(tell(to_told(layout))[0])
            if name in outputs and layout is not None:
                mine = take(weights_for(name, shape), layout, self.mesh, this_rank().rank).to(outputs[name])
                weights[name] = torch.zeros_like(outputs[name])
                weights[name][tuple(map(slice, mine.shape))] = mine
        return weights

    def _compare_loss(self, value: Tensor | None) -> None:
        shapes = tell(shape_of(value))
        pieces = pieces_of(value, shapes)
        if not is_judge() or value is None:
            return
        exact = None if self.exact is None else as_numpy(self.exact.loss)
        verdict = judge(
            pieces, as_numpy(self.answer.loss), Layout(), self.mesh, self.rounding, what="loss", exact=exact
        )
        if self.has_pieces and verdict.mistake == "partial":
            verdict = verdict._replace(
                ok=True, words="each rank's part of it, as it has its part of the inputs", mistake=""
            )
        self._add("loss", "loss", value, Layout(), verdict)

    # --- gradients and parameters -------------------------------------------------------------------------------------

    def compare_gradients(self) -> None:
        """Rows of every parameter's gradient, and of the inputs'."""
        if not self.has_gradients:
            return
        answer = self.answer.gradients if is_judge() else {}
        exact = self.exact.gradients if self.exact is not None else {}
        largest = max((float(g.abs().max()) for g in answer.values() if g is not None and g.numel()), default=0.0)
        self.largest_gradient = largest
        shapes = self._shapes(lambda name: getattr(self.mine.get(self.name_of.get(name, "")), "grad", None))
        pieces = {}
        for name in self.layouts:
            gradient = self.mine[self.name_of[name]].grad
            pieces[name] = pieces_of(gradient, [told[name] for told in shapes])
        for name in pieces if is_judge() else ():
            verdict = judge(
                pieces[name], as_numpy(answer[name]), self.layouts[name], self.mesh, self.rounding, what="gradient",
                largest=largest, exact=as_numpy(exact.get(name)),
            )  # fmt: skip
            if not verdict.ok:
                verdict = self._tied(name, pieces, verdict)
            self._add("gradient", name, self.whole[name], self.layouts[name], verdict)
        self._compare_input_gradients(largest)

    def _compare_input_gradients(self, largest: float) -> None:
        for number, x in enumerate(self.inputs):
            if not isinstance(x, Tensor) or not x.requires_grad:
                continue
            shapes = tell(shape_of(x.grad))
            pieces = pieces_of(x.grad, shapes)
            if is_judge():
                whole, exact = self.answer.inputs[number].grad, None
                if self.exact is not None:
                    exact = as_numpy(self.exact.inputs[number].grad)
                values = as_numpy(whole)
                within = 100 * self.rounding.tolerance
                layout = None if values is None else layout_of(values, pieces, shapes, self.mesh, within)
                verdict = judge(pieces, values, layout or Layout(), self.mesh, self.rounding, what="gradient",
                                largest=largest, exact=exact)  # fmt: skip
                self._add("gradient", f"input {number}", self.answer.inputs[number], layout or Layout(), verdict)

    def _tied(self, name: str, pieces: Mapping[str, list[Any]], verdict: Verdict) -> Verdict:
        """Whether a wrong gradient is that of one use alone, of a weight that the reference uses twice."""
        others = [n for n in pieces if n != name and self.whole[n] is self.whole[name]]
        apart = [n for n in others if self.mine[self.name_of[n]] is not self.mine[self.name_of[name]]]
        if not apart:
            return verdict
        words = f"one weight with {apart[0]} in the reference ('tied'), and two in the model"
        parts = [
            [np.asarray(piece) for piece in pieces[n]] for n in (name, *apart) if None not in map(_shape, pieces[n])
        ]
        if len(parts) == len(apart) + 1 and len({part[0].shape for part in parts}) == 1:
            both = [np.sum(rank, axis=0) for rank in zip(*parts)]
            want = as_numpy(self.answer.gradients[name])
            if judge(both, want, self.layouts[name], self.mesh, self.rounding).ok:
                words += ": this is the gradient of one use, and those of both add up to the reference's"
        return verdict._replace(words=words, mistake="tied")

    def compare_step(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        """One step of the optimizer on each; compare the parameters."""
        if not self.has_gradients:
            return
        before = {name: as_doubles(p).clone().numpy() for name, p in self.whole.items()} if is_judge() else {}
        gradients = {name: as_numpy(g) for name, g in self.answer.gradients.items()} if is_judge() else {}
        optimizer(self.model.parameters()).step()
        if is_judge():
            optimizer(self.reference.parameters()).step()
        shapes = self._shapes(lambda name: self.mine.get(self.name_of.get(name, "")))
        for name, layout in self.layouts.items():
            pieces = pieces_of(self.mine[self.name_of[name]], [told[name] for told in shapes])
            if not is_judge():
                continue
            whole = as_numpy(self.whole[name])
            assert whole is not None
            slack = slack_of_step(before[name], whole, gradients[name], self.rounding, self.largest_gradient)
            for rank, piece in enumerate(pieces):
                want, free = take(whole, layout, self.mesh, rank), take(slack, layout, self.mesh, rank)
                if piece is not None and piece.shape == want.shape:
                    pieces[rank] = np.where(np.abs(piece - want) <= free, want, piece)
            verdict = judge(pieces, whole, layout, self.mesh, self.rounding, what="parameter")
            self._add("parameter", name, self.whole[name], layout, verdict)

    def _add(self, kind: str, name: str, whole: Tensor, layout: Layout, verdict: Verdict) -> None:
        if is_judge():
            self.rows.append(Row.of(kind, name, whole.shape, layout, verdict))

    def _shapes(self, tensor: Callable[[str], Tensor | None]) -> list[dict[str, list[int] | None]]:
        """Each rank's shape of something of every parameter of the reference."""
        return tell({name: shape_of(tensor(name)) for name in self.whole})


def _layout(spec: P | Layout) -> Layout:
    return spec if isinstance(spec, Layout) else Layout(spec)


def _absent(shapes: Sequence[Mapping[str, Any]], name: str) -> Verdict:
    ranks = [str(rank) for rank, told in enumerate(shapes) if told[name] is None]
    where = "" if len(ranks) == len(shapes) else f" on ranks {', '.join(ranks)}"
    words = (
        f"the model has no such parameter{where}: it is neither counted nor trained there; names= says if it is called "
        "otherwise"
    )
    return Verdict(False, float("inf"), 0.0, words, "missing")


def _shape(piece: np.ndarray | None) -> tuple[int, ...] | None:
    return None if piece is None else piece.shape
