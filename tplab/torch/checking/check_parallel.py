"""`check_parallel`: a parallel model compared with the unsharded one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tplab.checking.comparison import each_input, noise_for
from tplab.checking.gaps import is_constant
from tplab.checking.proofs import FACTS, MOST_TRIALS, Check, Trial, each_that_answers, of_reductions
from tplab.checking.report import ParallelReport, Row, perturbed
from tplab.checking.verdict import Rounding, Verdict, judge, label
from tplab.errors import SpecError, TplabError
from tplab.layout import Layout
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.torch.checking.culprit import Culprit, Inside, Search, look_inside
from tplab.torch.checking.masks import mask_rows
from tplab.torch.checking.pieces import nudged
from tplab.torch.checking.recut import modules_like, recuts
from tplab.torch.checking.side import Loss, Side, own_loss, to_numpy
from tplab.torch.ranks.values import dtype_name
from tplab.torch.run import run
from tplab.units import ranks_text


def check_parallel(
    model: Callable[[Any], nn.Module],
    reference: nn.Module | Callable[[], nn.Module],
    *,
    mesh: Mesh,
    inputs: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    reference_loss: Loss | None = None,
    specs: Mapping[str, P | Layout] | None = None,
    in_specs: Sequence[P | None] | P | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    after_backward: Callable[[nn.Module], Any] | None = None,
    perturb: bool = True,
    names: Mapping[str, str] | Callable[[str], str] | None = None,
    on: str | None = None,
) -> ParallelReport:
    """Compare the outputs, the loss and every gradient of a parallel model with those of the unsharded `reference`.

    Call it where you would call `run`. On every rank of the mesh it makes the model and runs it; the reference runs on
    one rank.

    model           makes a rank's model from a copy of the reference: lambda whole: parallelize(whole, plan)
    reference       the whole model; or a function that makes it, for layers that need a mesh: it runs on one of the
                    same axes with one rank
    inputs, kwargs  what both are called with, whole
    loss            of the model's output; without one: its `.loss`, itself if it is a scalar, or a weighted sum of it
    reference_loss  of the reference's output, if it must be different, as for logits that stay sharded
    specs           how parameters are laid out on the mesh, by name: P, or Layout for fused parts. For other
                    parameters, the layout comes from `parallelize`, or from shapes and values
    in_specs        one per input, or one for all: the model gets this rank's piece, as under sequence parallelism
    optimizer       parameters -> an optimizer: the parameters after one step are compared too
    after_backward  called with the model after its backward pass: where gradients are reduced by hand
    perturb         parameters that are all zeros or ones, as biases and norms begin, get other values for the check: a
                    bias of zeros gives the same result however often it is added
    names           the model's name of a parameter -> the reference's, a dict or a function
    on              where the ranks are, as in `run`

    Dropout is off; if the model is in training mode, masks are compared in a separate pass. How much of a difference
    counts as rounding is measured for each tensor: see `tplab.checking.verdict.Rounding`. Neither the reference nor the
    inputs are changed. A cause is stated only where a new run with its repair was right.
    cost    about five passes, up to 30 where something is wrong; every rank's gradients are in memory at once
    """
    if isinstance(model, nn.Module) or not callable(model):
        raise TypeError(
            f"model is {type(model).__name__}; give a function that makes each rank's model of the whole one, as "
            "check_parallel(lambda whole: parallelize(whole, plan), whole, inputs=(ids,), mesh=Mesh(tp=2))"
        )
    alone = Mesh(**dict.fromkeys(mesh.axis_names, 1))
    whole = reference if isinstance(reference, nn.Module) else run(reference, alone).per_rank[0]
    if not isinstance(whole, nn.Module):
        raise TypeError(f"the reference is {type(whole).__name__}; give the whole model, or a function that makes it")
    rename = names if callable(names) else (lambda name: names.get(name, name)) if names else lambda name: name
    split = each_input(in_specs, len(inputs))
    ours = Side(
        model,
        whole,
        mesh,
        inputs,
        kwargs or {},
        in_specs=split,
        rename=rename,
        on=on,
        loss=loss,
        after_backward=after_backward,
    )
    theirs = Side(lambda whole: whole, whole, alone, inputs, kwargs or {}, loss=reference_loss or loss)
    check = _Check(ours, theirs, specs or {})
    check.compare_values()
    if perturb:
        check.perturb()
    check.compare_passes(optimizer)
    check.look_for_the_cause()
    if check.is_training:
        check.rows += mask_rows(check.ours.masks(), check.theirs.masks()[0], mesh)
    return check.report(theirs.order)


class _Check(Check):
    """The two sides, and the results so far."""

    def __init__(self, ours: Side, theirs: Side, specs: Mapping[str, P | Layout]):
        whole = theirs.reference
        self.ours, self.theirs, self.specs, self.rename = ours, theirs, specs, ours.rename
        self.whole = dict(whole.named_parameters(remove_duplicate=False))
        self.is_wrong, self.is_training = set[str](), False
        everything = [x for x in (*ours.inputs, *ours.kwargs.values()) if isinstance(x, Tensor)]
        rounding = Rounding.of(
            [(dtype_name(p.dtype), p.shape) for p in whole.parameters()],
            [(x.shape, x.is_floating_point()) for x in everything],
        )
        super().__init__(ours.mesh, rounding, {}, ours.in_specs)

    # --- before -------------------------------------------------------------------------------------------------------

    def compare_values(self) -> None:
        """Determine how each parameter is laid out on the mesh, and whether its values are the reference's."""
        told = self.ours.parameters()
        first = told[0]
        if unknown := [name for name in self.specs if name not in first.values]:
            near = ", ".join(list(first.values)[:5])
            raise SpecError(f"specs name {unknown[0]!r}, which the model does not have; its parameters are {near}, ...")
        layouts = {self.rename(n): layout for n, layout in first.layouts.items()}
        layouts |= {self.rename(n): s if isinstance(s, Layout) else Layout(s) for n, s in self.specs.items()}
        held = [{self.rename(name): x for name, x in rank.values.items()} for rank in told]
        self.same = {self.rename(name): self.rename(other) for name, other in first.same.items()}
        self.is_training = any(rank.is_training for rank in told)
        found, likely = dict[str, Layout](), set[str]()
        wholes = {name: to_numpy(parameter) for name, parameter in self.whole.items()}
        for name, values in sorted(wholes.items(), key=lambda item: is_constant(item[1])):
            pieces = [rank.get(name) for rank in held]
            if any(piece is None for piece in pieces):
                self._add_value(name, values.shape, Layout(), _absent(pieces))
                continue
            layout = layouts.get(name) or self.layout_of(values, pieces, likely) or Layout()
            verdict = judge(
                pieces, values, layout, self.mesh, Rounding(dtype_name(self.whole[name].dtype)), what="value"
            )
            if not verdict.ok:
                words = f"not the reference's values to begin with: {verdict.words}"
                self._add_value(name, values.shape, layout, verdict._replace(words=words))
            found[name] = layout
            likely |= set(layout.spec.axis_names)  # zeros, which come last, fit two axes of one size
        self.layouts = {name: found[name] for name in self.whole if name in found}
        for name in sorted(set(held[0]) - set(self.whole)):
            words = "the reference has no such parameter; names= says what it is called there"
            self._add_value(name, held[0][name].shape, Layout(), Verdict(False, np.inf, 0.0, words, "missing"))

    def _add_value(self, name: str, shape: Sequence[int], layout: Layout, verdict: Verdict) -> None:
        self.is_wrong.add(name)
        self.rows.append(Row.of("value", name, shape, layout, verdict))

    def perturb(self) -> None:
        """Give constant parameters other values, the same on both sides."""
        done: set[int] = set()
        for name, parameter in self.whole.items():
            if name in self.is_wrong or id(parameter) in done:
                continue
            done.add(id(parameter))
            noise = noise_for(name, to_numpy(parameter))
            if noise is not None:
                self.theirs.changes[name] = Layout(), noise
                self.ours.changes[name] = self.layouts[name], noise
        if self.theirs.changes:
            self.notes.append(perturbed(list(self.theirs.changes)))

    # --- one pass of each, and a step -------------------------------------------------------------------------------

    def compare_passes(self, optimizer: Any) -> None:
        """Add rows for outputs, loss, gradients, and parameters after a step."""
        values = {name: to_numpy(p) + self._noise(name) for name, p in self.whole.items()}
        inputs = {f"input {index}": x for index, x in enumerate(self.theirs.inputs) if isinstance(x, Tensor)}
        self.addends = {name: x for name, x in values.items() if x.ndim == 1} | {
            name: to_numpy(x) for name, x in inputs.items() if x.is_floating_point() and x.dim()
        }
        for name in self.layouts:
            twins = [n for n in self.layouts if n != name and self.whole[n] is self.whole[name]]
            if apart := [n for n in twins if self.same[n] != self.same[name]]:
                self.apart[name] = apart
        self.compare(
            self.theirs,
            self.ours,
            self._again(),
            self._trials,
            has_loss=self.theirs.loss is not None or self.theirs.ask(_brings_a_loss)[0],
            share_copies=False,
            optimizer=optimizer,
            before=values,
        )

    def _again(self) -> Iterator[Side]:
        """Yield the reference with changed rounding: of parameters, of inputs, too, and with sums in another order."""
        for seed in (0, 1):
            side = copy.copy(self.theirs)
            side.changes = dict(side.changes)
            for name, p in side.reference.named_parameters():
                side.changes[name] = Layout(), to_numpy(nudged(p, seed)) - to_numpy(p) + self._noise(name)
            side.parts = max(2, self.mesh.size)
            if seed:
                side.inputs = [nudged(x, seed) for x in side.inputs]
                side.kwargs = {name: nudged(x, seed) for name, x in side.kwargs.items()}
            yield side

    def _trials(self, row: Row, answer: Callable[[Mapping[str, Any]], Any]) -> Iterator[Trial]:
        """Yield trials for a wrong gradient if all outputs are right."""
        order, reductions = self.theirs.order, self.ours.reductions
        found = self.ours.gathers if answer({"gathers": ()}) else []
        for op, shape in dict.fromkeys(found):
            other, how, does = "gather_from", "in the same way", "adds no gradients up"
            if op == "gather_from":
                other, how, does = "all_gather", "in different ways", "adds gradients up"
            words = (
                f"with {other} in place of {op} ({list(shape)}): ranks use what it returns {how}, and {other} {does}"
            )
            yield Trial(words, "the other kind of gather", {"gathers": ()}, "gather")
        yield from of_reductions(reductions, row.words, is_backward=True)
        if row.mistake not in ("partial", "other", "disagree"):
            return
        place = order.index(row.name) if row.name in order else len(order)
        right = {one.name for one in self.rows if one.kind == "gradient" and one.ok}
        modules = [name.rpartition(".")[0] for name in reversed(order[:place]) if name in right]
        near = [name for name in dict.fromkeys(modules) if name and not row.name.startswith(f"{name}.")]
        known = list(dict(self.theirs.reference.named_modules()))
        for count in range(1, min(len(near), MOST_TRIALS // 2) + 1):
            alike = [
                name
                for name in known
                if any(modules_like(f"{name}.") == modules_like(f"{one}.") for one in near[:count])
            ]
            for names in (near[:count], *([alike] if len(alike) > count else [])):
                for axes in (
                    [row.axes] if row.axes else [(name,) for name in self.mesh.axis_names if self.mesh.shape[name] > 1]
                ):
                    listed = " and ".join(names[:3]) + ", .." * (len(names) > 3)
                    words = f"with copy_to(x, {label(axes)}), Megatron's f, at the input of {listed}"
                    yield Trial(words, "copy_to at the inputs of modules", {"entrance": (names, axes)})

    def _noise(self, name: str) -> Any:
        return self.theirs.changes[name][1] if name in self.theirs.changes else 0.0

    # --- the cause ----------------------------------------------------------------------------------------------------

    def look_for_the_cause(self) -> None:
        """If outputs are wrong, find the innermost module whose output is wrong, and the repair with which a new run is
        right."""
        if self.first_wrong is None:
            return
        (reference,), told = self.theirs.ask(look_inside), self.ours.ask(look_inside)
        again = list(each_that_answers(self._again(), lambda side: side.ask(look_inside)))
        search = Search(reference, told, again, self)
        culprit = search.culprit()
        if culprit.row is not None:
            index = next(index for index, one in enumerate(self.rows) if one.kind in ("output", "loss"))
            self.rows.insert(index, culprit.row)
        first = self.first_wrong
        row_sum = next((rank.row_sum for rank in told if rank.row_sum), 0)
        if row_sum and not reference.row_sum:
            self.enter(first, f"rows of attention weights inside of it add up to {row_sum}", "softmax")
        if first.mistake in FACTS:
            return
        trials = self._forward_trials(culprit, first, reference, told)
        unknown = self.prove(first, trials, lambda trial: self._makes_right(trial, culprit, search))
        if not unknown or self._cut_again(search):
            return
        given = search.judged(told, "inputs", culprit.name)
        is_given = culprit.is_given or (culprit.row is not None and not (given and given[1].ok))
        self.enter(first, unknown if is_given else f"what goes in is right; {unknown}")

    def _forward_trials(
        self, culprit: Culprit, first: Row, reference: Inside, told: Sequence[Inside]
    ) -> Iterator[Trial]:
        """Yield trials for a wrong output."""
        addend = culprit.addend if culprit.row else self.added.get(first.name)
        kind = "given" if culprit.is_given else "exit"
        yield from self.additions(first, addend, culprit.name, kind)
        yield from of_reductions(told[0].reductions.get(culprit.inside, ()), first.words)
        yield from self.scores(reference.scores, [rank.scores for rank in told])

    def _makes_right(self, trial: Trial, culprit: Culprit, search: Search) -> str:
        """Return what is right with a trial: all outputs, or the one that was first wrong."""
        try:
            told = self.ours.ask(look_inside, trial.at)
        except TplabError:
            return ""
        own = "inputs" if culprit.is_given else "outputs"
        for kind, name, words in ("outputs", "", "all outputs are right"), (own, culprit.name, "it is right"):
            found = search.judged(told, kind, name)
            if found is not None and found[1].ok and not (name and trial.at.keys() & {"exit", "given"}):
                return words
        return ""

    def _cut_again(self, search: Search) -> bool:
        """Return whether outputs are right once a fused weight, cut in one piece, is cut part by part."""
        if self.is_wrong or self.split:
            return False
        whole = {name: to_numpy(self.whole[name]) + self._noise(name) for name in self.layouts}
        for cuts, trial in recuts(whole, self.layouts, self.mesh):
            if not self._makes_right(trial, Culprit(""), search):
                continue
            for index, one in enumerate(self.rows):
                if one.kind == "gradient" and (count := cuts.get(modules_like(one.name))):
                    words = (
                        f"cut in one piece, and it holds {count} parts side by side: all is right with each cut alone"
                    )
                    self.rows[index] = replace(one, ok=False, words=words, mistake="fused")
            return True
        return False


def _brings_a_loss(model: nn.Module, inputs: list[Any], kwargs: dict[str, Any], _: Any) -> bool:
    with torch.no_grad():
        return own_loss(model(*inputs, **kwargs)) is not None


def _absent(pieces: Sequence[Any]) -> Verdict:
    ranks = [rank for rank, piece in enumerate(pieces) if piece is None]
    where = "" if len(ranks) == len(pieces) else f" on {ranks_text(ranks)}"
    words = (
        f"the model has no such parameter{where}: it is neither counted nor trained there; names= says if it is called "
        "otherwise"
    )
    return Verdict(False, float("inf"), 0.0, words, "missing")
