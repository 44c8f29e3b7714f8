"""The exercise of lab 13: a model with a matrix that hides from the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tplab.exercises.check import Verdict, not_started, raised, untouched
from tplab.mesh import Mesh
from tplab.pipeline.layer_spec import layer_names, ties
from tplab.schedules import one_f_one_b
from tplab.widgets.matrices import Panel

WORDS, SEQUENCE, MICROBATCHES = 65, 16, 4


def check_layers(model: Callable[[], Sequence[Any]]) -> Verdict:
    """Whether `model()` is a list of layers, ids [B, T] -> logits [B, T, words], that a pipeline of any length trains
    as one rank does, and whose head is the matrix of the embedding."""
    name = "my_layers"
    if not_started(model):
        return untouched(name)
    ranks = 1
    try:
        (hidden,) = _run(_hidden, 1, model)
        (right,) = _run(_gradients, 1, model)
        for ranks in (2, 4):
            found: dict[str, np.ndarray] = {}
            for grads in _run(_gradients, ranks, model):
                found |= grads
            for key in right:
                if not np.allclose(found[key], right[key], rtol=1e-4, atol=1e-7):
                    return _differs(name, ranks, key, found[key], right[key], hidden)
    except Exception as error:
        return Verdict(False, raised(error, model, name, Mesh(pp=ranks)))
    if hidden:
        return Verdict(False, f"{name}: {hidden}.")
    layers = list(model())
    if not any({0, len(layers) - 1} <= set(places) for places in ties(layers).values()):
        return Verdict(
            False,
            f"{name}: every rank trains what it has, but the head and the embedding are now two matrices.\n"
            "Which spec says that two layers share one matrix, whichever ranks they are on?",
        )
    text = f"{name} is right: on 2 and 4 ranks every gradient equals that of one rank, including the tied one."
    return Verdict(True, text, _panels(4, found["0.weight"], right["0.weight"]) if "0.weight" in found else [])


def _run(program: Callable[..., Any], ranks: int, model: Callable[[], Sequence[Any]]) -> list[Any]:
    from tplab.torch import run

    return list(run(program, Mesh(pp=ranks), model, ranks).per_rank)


def _batch() -> tuple[Any, Any]:
    import torch

    ids = torch.randint(0, WORDS, (MICROBATCHES, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return ids, ids.roll(-1, 1)


def _cross_entropy(logits: Any, targets: Any) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _gradients(model: Callable[[], Sequence[Any]], ranks: int) -> dict[str, np.ndarray]:
    """Of this rank's parameters: "layer.name" -> gradient."""
    from tplab.torch import split_batch, stages_of, train_batch

    schedule = one_f_one_b(ranks, MICROBATCHES)
    stages = stages_of(list(model()), schedule, "uniform")
    train_batch(schedule, stages, split_batch(*_batch(), MICROBATCHES), _cross_entropy)
    return {
        f"{stages.partition.bounds[number] + place}.{key}": parameter.grad.numpy()
        for number, stage in stages.items()
        for place, layer in enumerate(stage.children())
        for key, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


def _hidden(model: Callable[[], Sequence[Any]], ranks: int) -> str:
    """What a layer computes with that is no parameter of its own, or shares with another layer without saying so, in
    words; "" where there is nothing of the kind."""
    from tplab.torch import stages_of

    layers = list(model())
    x, _ = _batch()
    home: dict[Any, int] = {}
    tied = {place for places in ties(layers).values() for place in places}
    for place, layer in enumerate(stages_of(layers, one_f_one_b(ranks, 1))[0].children()):
        for parameter in layer.parameters():
            first = home.setdefault(parameter, place)
            if first != place and not {first, place} <= tied:
                return (
                    f"layers {first} and {place} share one tensor {list(parameter.shape)}, but only on a rank that has "
                    "both of them: two ranks have a copy each, and nothing adds up the gradients of the two"
                )
        x = layer(x)
        own = set(layer.parameters())
        shapes = [list(leaf.shape) for leaf in _leaves(x) if leaf not in own]
        if shapes:
            return (
                f"layer {place}, {layer_names(layers)[place]}, computes with a tensor {shapes[0]} that is not one of "
                "its parameters: the pipeline neither counts nor trains it"
            )
        x = x.detach()
    return ""


def _leaves(x: Any) -> list[Any]:
    """The tensors that a gradient of x would be added to."""
    todo, met, found = [x.grad_fn], set(), []
    while todo:
        node = todo.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [following for following, _ in node.next_functions]
    return found


def _differs(name: str, ranks: int, key: str, got: np.ndarray, want: np.ndarray, hidden: str) -> Verdict:
    place, _, parameter = key.partition(".")
    why = f"{hidden[0].upper()}{hidden[1:]}." if hidden else "Do all ranks begin with the same values?"
    text = f"{name}: on {ranks} ranks the gradient of layer {place}'s {parameter} differs from that of one rank."
    return Verdict(False, f"{text}\n{why}", _panels(ranks, got, want))


def _panels(ranks: int, got: np.ndarray, want: np.ndarray) -> list[Panel]:
    return [Panel(f"gradient, {ranks} ranks", got), Panel("gradient, one rank", want)]
