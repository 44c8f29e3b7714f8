"""A side of the comparison: a model on its mesh, run once per question, and the answers of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tplab.checking.proofs import Reduction
from tplab.checking.recording import Drawn
from tplab.errors import SpecError, TplabError
from tplab.layout import Layout, take
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.torch.checking.masks import MaskWatch
from tplab.torch.checking.sums import OtherSums
from tplab.torch.checking.trying import Tried
from tplab.torch.models.huggingface import known_layouts
from tplab.torch.ranks.rank import this_rank
from tplab.torch.run import run

Loss = Callable[[Any], Tensor]
Question = Callable[[nn.Module, list[Any], dict[str, Any], Tried], Any]


class Parameters(NamedTuple):
    """The parameters of a rank's model, by name.

    values    as float64 arrays
    layouts   those that its layers know
    same      the first name of the same parameter, for those that are tied
    """

    values: dict[str, np.ndarray]
    layouts: dict[str, Layout]
    same: dict[str, str]
    is_training: bool


class Side:
    """One of the two models, the parallel one or the reference, with its inputs on its mesh.

    build      makes a rank's model from the rank's copy of the reference
    rename     the model's name of a parameter -> the reference's
    in_specs   a P for each input: a rank's model gets the piece
    on         where the ranks are, as in `run`
    loss       of the output; without one it is the output's own, or its weighted sum. after_backward: of the model
    changes    name -> layout and array: what is added to parameters before the model runs (in the reference's names)
    parts      if more than 1, matmuls add up their products in this many parts
    """

    def __init__(
        self, build: Callable[[nn.Module], nn.Module], reference: nn.Module, mesh: Mesh, inputs: Sequence[Any],
        kwargs: Mapping[str, Any], *, in_specs: Sequence[P] | None = None,
        rename: Callable[[str], str] = lambda name: name, on: str | None = None, loss: Loss | None = None,
        after_backward: Callable[[nn.Module], Any] | None = None,
    ):  # fmt: skip
        self.build, self.reference, self.mesh, self.inputs, self.kwargs = build, reference, mesh, inputs, kwargs
        self.in_specs, self.rename, self.on = in_specs or [P()] * len(inputs), rename, on
        self.loss, self.after_backward = loss, after_backward
        self.order, self.reductions, self.gathers = list[str](), list[Reduction](), list[tuple[str, tuple[int, ...]]]()
        self.changes: dict[str, tuple[Layout, np.ndarray]] = {}
        self.parts = 1

    def parameters(self) -> list[Parameters]:
        """Return the parameters of each rank's model, before anything is changed."""

        def look(model: nn.Module) -> Parameters:
            first: dict[int, str] = {}
            named = dict(model.named_parameters(remove_duplicate=False))
            same = {name: first.setdefault(id(p), name) for name, p in named.items()}
            values = {name: to_numpy(p) for name, p in named.items()}
            return Parameters(values, known_layouts(model), same, model.training)

        return self._ask(lambda model, *_: look(model))

    def outputs(self, at: Mapping[str, Any] | None = None) -> list[dict[str, np.ndarray]]:
        """Return the floating-point outputs of each rank, without dropout; with the changes of a trial."""

        @torch.no_grad()
        def forward(model: nn.Module, inputs: list[Any], kwargs: Any, tried: Tried) -> dict[str, np.ndarray]:
            return {name: to_numpy(x) for name, x in floats_in(model(*inputs, **kwargs)).items()}

        return self.ask(forward, at)

    def answer(
        self,
        weights: Mapping[str, Any],
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        at: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]] | None:
        """Return the `Answer` of each rank: one forward and backward pass, and a step of the optimizer. Afterwards,
        `order` has the parameters in the order in which their gradients arrive, `reductions` the all_reduces that the
        program calls, and `gathers` those that a trial has found. None if a trial fails.

        weights   of the outputs if there is no loss: an array for each rank
        at        the changes of a trial
        """

        def pass_through(model: nn.Module, inputs: list[Any], kwargs: Any, tried: Tried) -> tuple[Any, ...]:
            named, order = self._named(model), list[str]()
            output = model(*inputs, **kwargs)
            outputs = floats_in(output)
            own = self.loss or own_loss(output)
            told: dict[str, Any] = {"output": {n: to_numpy(x) for n, x in outputs.items()}, "loss": {}}
            if own is not None:
                value = own(output)
                told["loss"]["loss"] = to_numpy(value)
                told["output"] = {n: x for n, x in told["output"].items() if x.ndim or n not in ("loss", "output")}
            else:
                here = {name: torch.as_tensor(of[this_rank().rank]) for name, of in weights.items()}
                value = torch.stack([(outputs[name] * w.to(outputs[name])).sum() for name, w in here.items()]).sum()
            for name, parameter in named.items():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
            tried.before_backward(value)
            value.backward()
            if self.after_backward is not None:
                self.after_backward(model)
            told["gradient"] = {n: None if p.grad is None else to_numpy(p.grad) for n, p in named.items()}
            leaves = {f"input {number}": x for number, x in enumerate(inputs) if isinstance(x, Tensor)}
            told["input"] = {
                n: None if x.grad is None else to_numpy(x.grad) for n, x in leaves.items() if x.requires_grad
            }
            if optimizer is not None:
                optimizer(model.parameters()).step()
                told["parameter"] = {name: to_numpy(p) for name, p in named.items()}
            return told, order, tried.found, tried.gathers

        try:
            found = self.ask(pass_through, at)
        except TplabError:
            if at:  # not all ranks run the operations that the trial changes
                return None
            raise
        _, self.order, self.reductions, _ = found[0]
        self.gathers = [gather for _, _, _, gathers in found for gather in gathers]
        return [told for told, *_ in found]

    def masks(self) -> list[list[Drawn]]:
        """Return the dropout masks of one forward pass of each rank, in the mode in which the model was built."""

        def forward(model: nn.Module, inputs: list[Any], kwargs: Any) -> list[Drawn]:
            with torch.no_grad(), MaskWatch(model) as watch:
                model(*inputs, **kwargs)
            return watch.seen

        return self._ask(forward)

    def ask(self, question: Question, at: Mapping[str, Any] | None = None) -> list[Any]:
        """Return the result of `question(model, inputs, kwargs, tried)` on each rank, without dropout."""
        return self._ask(question, at or {})

    def _ask(self, question: Callable[..., Any], at: Mapping[str, Any] | None = None) -> list[Any]:
        """Return the same; in the mode in which the model was built, and without `tried`, if `at` is None."""

        def program(reference: nn.Module, inputs: list[Any], kwargs: dict[str, Any]) -> Any:
            rank = this_rank()
            with torch.enable_grad():
                model = self.build(reference)
                if not isinstance(model, nn.Module):
                    raise SpecError(
                        f"the function that makes a rank's model returned {type(model).__name__}; return the module"
                    )
                named = self._named(model)
                for name, (layout, noise) in self.changes.items():
                    piece = torch.from_numpy(_piece(noise, layout))
                    with torch.no_grad():
                        named[name][tuple(map(slice, piece.shape))] += piece.to(named[name])
                here = [
                    _leaf(take(x, Layout(spec), rank.mesh, rank.rank) if spec.axis_names else x)
                    for x, spec in zip(inputs, self.in_specs, strict=True)
                ]
                if at is None:
                    return question(model, here, kwargs)
                model.eval()
                with torch.no_grad():
                    for name, (layout, whole) in at.get("parameters", {}).items():
                        named[name].copy_(torch.from_numpy(_piece(whole, layout)))
                    name, axes = at.get("once", ("", ()))
                    if name and rank.mesh.index(rank.rank, axes):
                        named[name].zero_()
                with Tried(model, at) as tried, OtherSums(self.parts) if self.parts > 1 else nullcontext():
                    return question(model, here, kwargs, tried)

        return run(program, self.mesh, self.reference, list(self.inputs), dict(self.kwargs), on=self.on).per_rank

    def _named(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return {self.rename(name): p for name, p in model.named_parameters(remove_duplicate=False)}


def own_loss(output: Any) -> Loss | None:
    """Return the loss that an output contains, or is."""
    if isinstance(getattr(output, "loss", None), Tensor):
        return lambda output: output.loss
    return (lambda output: output) if isinstance(output, Tensor) and output.dim() == 0 else None


def to_numpy(x: Tensor) -> np.ndarray:
    """Return the tensor as a float64 array, which loses nothing."""
    return x.detach().to("cpu", torch.float64, copy=True).numpy()


def floats_in(output: Any, name: str = "output") -> dict[str, Tensor]:
    """Return the floating-point tensors of an output, by name: the key in a dict or dataclass, the index in a tuple."""
    if isinstance(output, Tensor):
        return {name: output} if output.is_floating_point() else {}
    if isinstance(output, Mapping):
        pairs = [(str(key), value) for key, value in output.items()]
    elif isinstance(output, tuple | list):
        pairs = [(f"{name}[{index}]", value) for index, value in enumerate(output)]
    else:
        return {}
    return {key: x for path, value in pairs for key, x in floats_in(value, path).items()}


def _piece(whole: np.ndarray, layout: Layout) -> np.ndarray:
    return np.ascontiguousarray(take(whole, layout, this_rank().mesh, this_rank().rank))


def _leaf(x: Any) -> Any:
    """Return a copy of an input that requires a gradient; anything but a floating-point tensor is returned
    unchanged."""
    return x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
