"""The exercises of lab 13: a model with a matrix that hides from the pipeline, and the bytes along a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tplab.exercises.verdict import Verdict, cause, check, on, refuse, right, run_on
from tplab.mesh import Mesh
from tplab.pipeline.layer_spec import TiedSpec, layer_names, ties
from tplab.schedules import Action, Schedule, gpipe, interleaved_1f1b, looped_bfs, measured_costs, one_f_one_b
from tplab.widgets.matrices import Panel

# --- the bug: a matrix that hides ------------------------------------------------------------------------------------

VOCABULARY, SEQUENCE, MICROBATCHES = 65, 16, 4


@check("my_layers")
def check_layers(model: Callable[[], Sequence[Any]]) -> Verdict:
    """Whether `model()` is a list of layers, ids [B, T] -> logits [B, T, vocabulary], that a pipeline of any length
    trains in the same way as one rank does, whose head is the embedding's matrix, and which has a norm before it."""
    layers = list(model())
    if isinstance(last := layers[-1], TiedSpec) and last.forward is None and last.cls is getattr(layers[0], "cls", 0):
        refuse(": the last layer looks up rows, as the first one does. Its `forward=` says what to call instead.")
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
    if not _run(_is_normed, 1, model)[0]:
        refuse(
            ": every gradient equals that of one rank, but this is another model: nothing normalises what the head "
            "gets.\nWhere has the norm gone that was between the last block and the head?"
        )
    if any(grad.shape == (VOCABULARY,) for grad in whole.values()):
        refuse(
            ": every gradient equals that of one rank, but this is another model: its head has a bias of "
            f"{VOCABULARY} numbers.\nThe head had the embedding's matrix and nothing else: bias=False."
        )
    text = " is right: on 2 and 4 ranks every gradient equals that of one rank, including the tied one."
    return right(text, _panels(4, found["0.weight"], whole["0.weight"]) if "0.weight" in found else [])


def _run(program: Callable[..., Any], ranks: int, model: Callable[[], Sequence[Any]]) -> list[Any]:
    return list(run_on(Mesh(pp=ranks), program, model, ranks).per_rank)


def _batch() -> tuple[Any, Any]:
    import torch

    ids = torch.randint(0, VOCABULARY, (MICROBATCHES, SEQUENCE), generator=torch.Generator().manual_seed(0))
    ids[0, :8] = torch.arange(8)  # the rows of the embedding's gradient that a picture shows
    return ids, ids.roll(-1, 1)


def _cross_entropy(logits: Any, targets: Any) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _gradients(model: Callable[[], Sequence[Any]], ranks: int) -> dict[str, np.ndarray]:
    """The gradients of this rank's parameters: "layer.name" -> gradient."""
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
    """What a layer uses that is not its own parameter, or shares with another layer without declaring it, in words; ""
    if there is no such thing."""
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


def _is_normed(model: Callable[[], Sequence[Any]], ranks: int) -> bool:
    """Whether the head gets what a new norm returns, of mean square 1 in every token, or has a norm of its own: then
    twice the input gives the same logits. Within 5 %, for a norm's epsilon."""
    import torch

    from tplab.torch import stages_of

    *before, head = stages_of(list(model()), one_f_one_b(ranks, 1))[0].children()
    with torch.no_grad():
        x, _ = _batch()
        for layer in before:
            x = layer(x)
        squares = x.square().mean(-1)
        return torch.allclose(squares, torch.ones_like(squares), rtol=0.05) or torch.allclose(
            head(2 * x), head(x), rtol=0.05, atol=1e-3
        )


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
    """Whether `most_bytes(row, stage_bytes)` is the most that the rank with this row of actions keeps at once, compared
    with ranks that train a model of unequal stages. stage_bytes[s] is what stage s keeps for one microbatch."""
    panels: list[Panel] = []
    for schedule in SCHEDULES:
        stage_bytes, held = _held(schedule)
        where = f"with {schedule.name} on {schedule.num_ranks} rank{'s' * (schedule.num_ranks > 1)}"
        with on(where):
            lent = list(stage_bytes)
            given = [most_bytes(row, lent) for row in schedule.by_rank()]
            if lent != stage_bytes:
                refuse(": it changes its argument stage_bytes, which its caller may still need.")
            found = np.array(given, float)
        if found.shape != held.shape or not np.isfinite(found).all():
            refuse(f", {where}: return one number of bytes per row. It returned {given}.")
        shown = [Panel("yours, bytes by rank", found, found != held), Panel("what each rank held", held)]
        if (found != held).any():
            rank = int(np.flatnonzero(found != held)[0])
            text = f": {where}, rank {rank} held {held[rank]:,.0f} bytes, and yours are {found[rank]:,.0f}."
            otherwise = f"The stages keep {', '.join(f'{size:,}' for size in stage_bytes)} bytes per microbatch."
            refuse(f"{text}\n{cause(_tried(most_bytes), otherwise)}", shown)
        panels = panels or shown
    listed = ", ".join(f"{schedule.name} on {schedule.num_ranks}" for schedule in SCHEDULES)
    return right(f" is right to the byte: {listed}.\nThe picture shows the first of them.", panels)


def _tried(most_bytes: MostBytes) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """For each schedule, the learner's numbers, and those of known mistakes."""
    for schedule in SCHEDULES:
        stage_bytes, _ = _held(schedule)
        yield [most_bytes(row, [*stage_bytes]) for row in schedule.by_rank()], _known(schedule, stage_bytes)


def _known(schedule: Schedule, stage_bytes: Sequence[int]) -> dict[str, Any]:
    """What wrong numbers look like."""
    rows = schedule.by_rank()
    forwards = [[action for action in row if action.kind == "F"] for row in rows]
    counts = np.array([_most(row, [1] * schedule.num_stages) for row in rows])
    stages = [sorted({action.stage for action in row}) for row in rows]
    return {
        "This is the sum over all forwards. A backward lets go of what its forward has kept.":
            [sum(stage_bytes[action.stage] for action in row) for row in forwards],
        "These are microbatches. How many bytes does each of them take?": counts,
        "This is what is left at the end of the row. When is it at its largest?": 0,
        "This adds up what each stage keeps at its own largest moment. Do they all come at the same time?":
            [sum(_most([a for a in row if a.stage == stage], stage_bytes) for stage in own)
             for row, own in zip(rows, stages)],
        "This is the most after a backward. Look after each forward as well.":
            [_most(row, stage_bytes, after="B") for row in rows],
        "Every microbatch has been counted with the bytes of the rank's largest stage.":
            counts * [max(stage_bytes[stage] for stage in own) for own in stages],
        "Every microbatch has been counted with the bytes of the rank's first stage.":
            counts * [stage_bytes[own[0]] for own in stages],
    }  # fmt: skip


def _most(row: Sequence[Action], stage_bytes: Sequence[int], after: str = "FB") -> int:
    """The most that the row keeps after an action of these kinds."""
    kept = most = 0
    for action in row:
        kept += stage_bytes[action.stage] * (1 if action.kind == "F" else -1)
        most = max(most, kept) if action.kind in after else most
    return most


def _held(schedule: Schedule) -> tuple[list[int], np.ndarray]:
    """What each stage of a small model keeps for one microbatch, and the most that each rank keeps, both measured."""
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
