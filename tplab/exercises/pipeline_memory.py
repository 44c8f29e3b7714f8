"""The exercises of lab 13: a model with a matrix hidden from the pipeline, and the bytes along a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tplab.exercises.verdict import Case, Verdict, check, compare, on, refuse, right, run_on
from tplab.mesh import Mesh
from tplab.pipeline.partition import TiedSpec, layer_names, ties
from tplab.schedules import Action, Schedule, gpipe, interleaved_1f1b, looped_bfs, measured_costs, one_f_one_b
from tplab.units import counted
from tplab.widgets.matrices import Panel

# --- the bug: a hidden matrix ----------------------------------------------------------------------------------------

VOCABULARY, SEQUENCE, MICROBATCHES, BLOCKS = 65, 16, 4, 4


@check("my_layers")
def check_layers(model: Callable[[], Sequence[Any]]) -> Verdict:
    """Check that `model()` is a list of layers, ids [B, T] -> logits [B, T, vocabulary], that a pipeline of any length
    trains in the same way as one rank does, whose head is the embedding's matrix, and which has a norm before it."""
    from torch import nn

    if (layers := model()) is None:
        refuse(": it returned None; is a `return` missing?")
    layers = list(layers)
    last = layers[-1]
    looks_up = isinstance(last, TiedSpec) and getattr(last.cls, "forward", None) is nn.Embedding.forward
    if looks_up and last.forward is None:
        refuse(": the last layer is an nn.Embedding, which looks up rows. Its `forward=` says what to call instead.")
    (hidden,), (whole,) = _run(_hidden, 1, model), _run(_gradients, 1, model)
    found: dict[str, np.ndarray] = {}
    for ranks in (2, 4):
        found = {key: grad for grads in _run(_gradients, ranks, model) for key, grad in grads.items()}
        for key, want in whole.items():
            if not np.allclose(found[key], want, rtol=1e-4, atol=1e-7):
                place, _, parameter = key.partition(".")
                why = f"{hidden[0].upper()}{hidden[1:]}." if hidden else "Do all ranks begin with the same values?"
                text = f": on {ranks} ranks the gradient of layer {place}'s {parameter} differs from that of one rank."
                refuse(f"{text}\n{why}", _panels(ranks, found[key], want))
    if hidden:
        refuse(f": {hidden}.")
    if not any({0, len(layers) - 1} <= set(places) for places in ties(layers).values()):
        refuse(
            ": every rank trains what it has, but the head and the embedding are now two matrices.\n"
            "Which spec says that two layers share one matrix, whichever ranks they are on?"
        )
    if (rows := whole.get("0.weight")) is not None and len(rows) == VOCABULARY:
        absent = np.setdiff1d(np.arange(VOCABULARY), _batch()[0].numpy())
        if len(absent) and not np.any(rows[absent]):
            refuse(
                ": the matrix gets a gradient only from the embedding: rows of tokens that are not in the batch get "
                "none, and the head gives one to every row.\nWhat cuts the head off from it, such as `detach()`?"
            )
    between = {key.partition(".")[0] for key, grad in whole.items() if grad.ndim > 1} - {"0", f"{len(layers) - 1}"}
    other = _run(_another_head, 1, model)[0]
    if not other and len(between) < BLOCKS:
        other = f"{len(between)} layers between the two ends have matrices.\nThere were {BLOCKS} blocks."
    if other:
        refuse(f": every gradient equals that of one rank, but this is another model: {other}")
    text = " is right: on 2 and 4 ranks every gradient equals that of one rank, including the tied one."
    return right(text, _panels(4, found["0.weight"], whole["0.weight"]) if "0.weight" in found else [])


def _run(program: Callable[..., Any], ranks: int, model: Callable[[], Sequence[Any]]) -> list[Any]:
    return list(run_on(Mesh(pp=ranks), program, model, ranks).per_rank)


def _batch() -> tuple[Any, Any]:
    import torch

    ids = torch.randint(0, VOCABULARY, (MICROBATCHES, SEQUENCE), generator=torch.Generator().manual_seed(0))
    ids[0, :8] = torch.arange(8)  # the rows of the embedding's gradient that a picture shows
    return ids, ids.roll(-1, 1)


def cross_entropy(logits: Any, targets: Any) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _gradients(model: Callable[[], Sequence[Any]], ranks: int) -> dict[str, np.ndarray]:
    """The gradients of this rank's parameters: "layer.name" -> gradient."""
    from tplab.torch import split_batch, stages_of, train_batch

    schedule = one_f_one_b(ranks, MICROBATCHES)
    stages = stages_of(list(model()), schedule, "uniform")
    train_batch(schedule, stages, split_batch(*_batch(), MICROBATCHES), cross_entropy)
    return {
        f"{stages.partition.bounds[number] + place}.{key}": parameter.grad.numpy()
        for number, stage in stages.items()
        for place, layer in enumerate(stage.children())
        for key, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


def _hidden(model: Callable[[], Sequence[Any]], ranks: int) -> str:
    """In words, a tensor that a layer uses but that is not its parameter, or that it shares with another layer without
    declaring it; "" if there is none."""
    from tplab.torch import stages_of

    layers = list(model())
    for place, spec in enumerate(layers):
        if isinstance(spec, TiedSpec) and spec.build() is spec.build():
            refuse(
                f": the spec of layer {place} gives one and the same layer each time it is built.\n"
                "Every rank builds its own, so a spec says how to make a new one: TiedSpec(key, nn.Embedding, ...)."
            )
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


def _another_head(model: Callable[[], Sequence[Any]], ranks: int) -> str:
    """In words, how the part after the blocks differs from the lab's; "" if it does not.

    The head must receive the output of a new norm, with mean square 1 in each token, or have its own norm: then twice
    the input gives the same logits, within 5 % for the epsilon. Logits must be the product with the head's matrix.
    """
    import torch

    from tplab.torch import stages_of

    *before, head = stages_of(list(model()), one_f_one_b(ranks, 1))[0].children()
    with torch.no_grad():
        x, _ = _batch()
        for layer in before:
            x = layer(x)
        logits, squares = head(x), x.square().mean(-1)
        normed = torch.allclose(squares, torch.ones_like(squares), rtol=0.05)
        if not normed and not torch.allclose(head(2 * x), logits, rtol=0.05, atol=1e-3):
            return (
                "nothing normalises what the head gets.\n"
                "Where has the norm gone that was between the last block and the head?"
            )
        own, x = list(head.parameters()), torch.nn.functional.layer_norm(x, x.shape[-1:])
        if any(weight.shape == (VOCABULARY,) for weight in own):
            text = f"its head has a bias of {VOCABULARY} numbers.\n"
            return f"{text}The head had the embedding's matrix and nothing else: bias=False."
        for product in [x @ weight.T for weight in own if weight.shape == (VOCABULARY, x.shape[-1])]:
            times = float((head(x) * product).sum() / product.square().sum())
            if abs(times - 1) > 0.05 and torch.allclose(head(x), times * product, rtol=1e-3, atol=1e-4):
                return f"its logits are {times:.3g} times the product with the matrix of the embedding."
    return ""


def _leaves(x: Any) -> list[Any]:
    """The leaves of x's graph, which its backward pass would give gradients."""
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


def _panels(ranks: int, got: np.ndarray, want: np.ndarray) -> list[Panel]:
    return [Panel(f"gradient, {ranks} ranks", got), Panel("gradient, one rank", want)]


# --- the exercise: bytes along a row ---------------------------------------------------------------------------------

SCHEDULES = (
    interleaved_1f1b(2, 4, virtual_stages=2),
    one_f_one_b(3, 5),
    gpipe(2, 3),
    looped_bfs(3, 4, virtual_stages=2),
    one_f_one_b(1, 2),
)
WIDTH = 4
MostBytes = Callable[[Sequence[Action], Sequence[int]], Any]


@check("most_bytes")
def check_most_bytes(most_bytes: MostBytes) -> Verdict:
    """Check that `most_bytes(row, stage_bytes)` is the most bytes that the rank with this row of actions keeps at once,
    as measured for a model of unequal stages. Stage s keeps stage_bytes[s] for one microbatch."""

    def cases() -> Iterator[Case]:
        for schedule in SCHEDULES:
            stage_bytes, held = _held(schedule)
            where = f"with {schedule.name} on {counted(schedule.num_ranks, 'rank')}"
            with on(where):
                lent = list(stage_bytes)
                given = [most_bytes(row, lent) for row in schedule.by_rank()]
                if lent != stage_bytes:
                    refuse(": it changes its argument stage_bytes, which its caller may still need.")
                found = np.array(given, float)
            if found.shape != held.shape or not np.isfinite(found).all():
                refuse(f", {where}: return one number of bytes per row. It returned {given}.")
            rank, sizes = int(np.argmax(found != held)), ", ".join(f"{size:,}" for size in stage_bytes)
            text = f": {where}, rank {rank} held {held[rank]:,.0f} bytes, and yours are {found[rank]:,.0f}."
            otherwise = f"The stages keep {sizes} bytes per microbatch."
            yield Case(found, held, _guesses(schedule, stage_bytes), text, otherwise=otherwise)

    first, *_ = compare(cases())
    listed = ", ".join(f"{schedule.name} on {schedule.num_ranks}" for schedule in SCHEDULES)
    panels = [Panel("yours, bytes by rank", first.got), Panel("what each rank held", first.want)]
    return right(f" is right to the byte: {listed}.\nThe picture shows the first of them.", panels)


def _guesses(schedule: Schedule, stage_bytes: Sequence[int]) -> dict[str, Any]:
    """hint -> the bytes by rank that this known mistake gives"""
    rows = schedule.by_rank()
    stages = [sorted({action.stage for action in row}) for row in rows]
    own = [[stage_bytes[stage] for stage in held] for held in stages]
    counts = np.array([_most(row, [1] * schedule.num_stages) for row in rows])
    forwards = [[action.kind for action in row].index("B") for row in rows]  # before the first backward
    same = {
        "the bytes of the rank's largest stage": [max(sizes) for sizes in own],
        "the bytes of the rank's first stage": [sizes[0] for sizes in own],
        "the bytes of stage 0": stage_bytes[0],
        "the bytes of the largest stage of all": max(stage_bytes),
        "the average of the rank's stages": [sum(sizes) / len(sizes) for sizes in own],
        "the bytes of all the rank's stages together": [sum(sizes) for sizes in own],
    }
    return {
        "This is the sum over all forwards. A backward lets go of what its forward has kept.":
            [sum(stage_bytes[action.stage] for action in row if action.kind == "F") for row in rows],
        "These are microbatches. How many bytes does each of them take?": counts,
        "This is what is left at the end of the row. When is it at its largest?": counts * 0,
        "This is what is kept before the first backward. Look at the whole row.":
            [_most(row[:most], stage_bytes) for row, most in zip(rows, forwards)],
        "This adds up what each stage keeps at its own largest moment. Do they all come at the same time?":
            [sum(_most([a for a in row if a.stage == stage], stage_bytes) for stage in held)
             for row, held in zip(rows, stages)],
        "This is the most after a backward. Look after each forward as well.":
            [_most(row, stage_bytes, after="B") for row in rows],
        "`action.stage` counts the stages of all ranks, and so does the index of `stage_bytes`.":
            [_most(row, dict(zip(held, stage_bytes))) for row, held in zip(rows, stages)],
        **{f"Every microbatch has been counted with {what}.": counts * size for what, size in same.items()},
    }  # fmt: skip


def _most(row: Sequence[Action], stage_bytes: Sequence[int] | Mapping[int, int], after: str = "FB") -> int:
    """The most bytes that the row keeps after an action of these kinds."""
    kept = most = 0
    for action in row:
        kept += stage_bytes[action.stage] * (1 if action.kind == "F" else -1)
        most = max(most, kept) if action.kind in after else most
    return most


def _held(schedule: Schedule) -> tuple[list[int], np.ndarray]:
    """The bytes that each stage of a small model keeps for one microbatch, and the most per rank, both measured."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from tplab.torch import split_batch, stages_of, train_batch

    hidden = range(7, 1, -1)  # so that the first stage of a rank keeps the most
    layers = [nn.Sequential(nn.Linear(WIDTH, n), nn.Tanh(), nn.Linear(n, WIDTH)) for n in hidden]

    def program() -> None:
        stages, x = stages_of(layers, schedule, "uniform"), torch.ones(schedule.num_microbatches, WIDTH)
        train_batch(schedule, stages, split_batch(x, x, schedule.num_microbatches), F.mse_loss)

    trace = run_on(Mesh(pp=schedule.num_ranks), program).trace
    sizes = measured_costs(schedule, trace).activation
    return [int(size) for size in np.broadcast_to(sizes, schedule.num_stages)], trace.peak_bytes.astype(float)
