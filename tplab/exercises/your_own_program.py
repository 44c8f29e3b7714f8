"""The exercise of lab 24: accumulate gradients over several batches, and send them once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tplab.exercises.damage import Graphs, Untouched
from tplab.exercises.same_model import STEPPED
from tplab.exercises.verdict import Verdict, beside, check, differs, hint, listed, refuse, right, run_on
from tplab.mesh import Mesh
from tplab.units import counted
from tplab.widgets.matrices import Panel

if TYPE_CHECKING:
    from torch import Tensor, nn

Accumulate = Callable[[Any, Callable[[Any, Any], Any], Sequence[Any]], Any]
WIDTH, ROWS = 6, 4
SIZES = ((2, 3), (3, 4), (2, 2), (1, 2))
"""(number of ranks, parts of each rank's batch)."""


@check("accumulate")
def check_accumulate(accumulate: Accumulate) -> Verdict:
    """Check that `accumulate(net, loss_of, batches)` leaves the gradients of the mean loss over the batches of all
    ranks in `net`, a DistributedDataParallel, and sends them only once.

    loss_of(net, batch) is the loss of one batch. Runs on 1, 2 and 3 simulated ranks. `net` begins without gradients.
    """
    panels = [_look(accumulate, *counts) for counts in SIZES]
    text = "The gradients are those of the mean loss over all parts of all ranks, and they are sent once."
    tried = ", ".join(f"{num_parts} parts on {counted(num_ranks, 'rank')}" for num_ranks, num_parts in SIZES)
    return right(f" is right.\n{text} Tried: {tried}.", panels[0])


def _look(accumulate: Accumulate, num_ranks: int, num_parts: int) -> list[Panel]:
    """A picture of the gradient; refuses mistakes on this many ranks with this many parts each."""
    num_bytes, per_rank = _accumulated(accumulate, num_ranks, num_parts)
    want = _expected(num_ranks, range(num_parts))
    on = f"on {counted(num_ranks, 'rank')} with {num_parts} parts each"
    found = [grads for grads, _ in per_rank]
    if any(grad is None for grads in found for grad in grads):
        refuse(": some parameters have no gradient. Call loss.backward() for each part.")
    got, best, title = found[-1][0].numpy(force=True), want[0].numpy(), f"your gradient, rank {num_ranks - 1}"
    if wrong := _wrong_gradient(found, want, (num_ranks, num_parts)):
        refuse(f": {wrong.format(on=on)}", beside(title, got, best, differs(got, best)))
    if damage := next((damage for _, damage in per_rank if damage), ""):
        refuse(f": the gradients are right, but {damage}")
    size = sum(grad.numel() * 8 for grad in want)
    # DDP broadcasts the model when it is constructed.
    made, _ = _accumulated(lambda net, loss_of, batches: None, num_ranks, num_parts)
    sent = max(after - before for after, before in zip(num_bytes, made))
    once = 2 * (num_ranks - 1) * size // num_ranks
    if sent > 1.2 * once:
        way = "Once is enough, with an all_reduce, which DDP does by itself in the last backward pass."
        if sent > (num_parts - 0.5) * once:
            way = "Every backward pass sends, unless forward and backward run inside `with net.no_sync():`."
        refuse(f": the gradients are right, but a rank sends {sent:,} bytes {on}, where {once:,} are enough.\n{way}")
    return beside(title, got, best)


def _wrong_gradient(per_rank: Sequence[Sequence[Tensor]], want: Sequence[Tensor], counts: tuple[int, int]) -> str:
    """The fault in the gradients for these counts (ranks, parts), in words; "" if there is none."""
    import torch

    def is_multiple(factor: float) -> bool:
        pairs = [(got, factor * right) for grads in per_rank for got, right in zip(grads, want, strict=True)]
        return all(torch.allclose(got.double(), right, rtol=1e-5) for got, right in pairs)

    if is_multiple(1):
        return ""
    if not all(bool(grad.isfinite().all()) for grads in per_rank for grad in grads):
        return "the gradients are not finite numbers {on}."
    first = per_rank[0]
    if not all(torch.equal(a, b) for grads in per_rank for a, b in zip(grads, first, strict=True)):
        return (
            "the ranks end with different gradients {on}, so their models would drift apart.\nDDP sends what was added "
            "up if the last batch has both its forward and its backward pass outside of no_sync()."
        )
    factor = float(first[0].flatten()[0].double() / want[0].flatten()[0])
    if is_multiple(factor):
        known = {
            "DDP takes the mean over the ranks: what divides by their number a second time?": 1 / counts[0],
            "This is their sum over the ranks, and not their mean.": counts[0],
            "Each backward() adds to what is there: divide each loss by the number of parts.": counts[1],
        }
        known = {text: by for text, by in known.items() if by != 1}
        why = hint(factor, known, "What is each loss divided by, and does anything scale the gradients later?", 1e-5)
        return f"the gradients are {factor:.4g} times as large as they should be {{on}}.\n{why}"
    alone = torch.stack([_expected(counts[0], [place])[0].flatten() for place in range(counts[1])], 1)
    got = first[0].double().flatten()
    weights = torch.linalg.lstsq(alone, got).solution
    if not torch.allclose(alone @ weights, got, rtol=1e-5):
        return "the gradients are not those of the mean loss over all parts {on}."
    times = listed(f"{weight + 0:.3g}" for weight in (weights * counts[1]).round(decimals=6).tolist())
    return f"the gradients are not right {{on}}.\nEach part should count once. Instead, they count {times} times."


def _accumulated(
    accumulate: Accumulate, num_ranks: int, num_parts: int
) -> tuple[list[int], list[tuple[list[Any], str]]]:
    """The bytes that each rank sent, and its (gradients, damage)."""
    from torch.nn.parallel import DistributedDataParallel

    def program() -> tuple[list[Any], str]:
        import torch.distributed as dist

        whole, given, graphs = _model(), _batches(dist.get_rank(), num_parts), Graphs()
        own, rows = list(given), []
        net = DistributedDataParallel(whole)

        def watched(net: Any, batch: Tensor) -> Tensor:
            rows.append(len(batch))
            if len(batch) > ROWS:
                raise ValueError(
                    f"it asks for the loss of {len(batch)} rows at once, and a part has {ROWS}. The batch is cut into "
                    "parts because it does not fit in memory"
                )
            with graphs.watch():
                loss = _loss_of(net, batch)
            if graphs.alive > 1:
                raise ValueError(
                    f"the activations of {graphs.alive} parts are in memory at the same time: the backward pass of the "
                    "one before has not run yet, or it has kept its graph. The batch is cut into parts because it does "
                    "not fit in memory"
                )
            return loss

        before = Untouched({f"batches[{i}]": one for i, one in enumerate(own)})
        weight, added = whole.weight.detach().clone(), _added_to(net)
        accumulate(net, watched, given)
        grads = [None if one.grad is None else one.grad.detach().clone() for one in whole.parameters()]
        damage = before.damage() or _left_behind(net, graphs)
        if extra := [name for name, many in _added_to(net).items() if many != added.get(name, 0)]:
            damage = damage or f"it leaves {extra[0]}, which stays for all later steps."
        if not whole.weight.equal(weight):
            damage = STEPPED
        if len(given) != len(own):
            damage = damage or "it changes the list `batches`, which its caller may still need."
        if sum(rows) > ROWS * len(own):
            damage = (
                f"rank {dist.get_rank()} computes the loss of {sum(rows)} rows, and its own parts have "
                f"{ROWS * len(own)}. Each rank computes each of its own parts once, and nothing else."
            )
        return grads, damage

    out = run_on(Mesh(dp=num_ranks), program, distributed=True, cluster="h100")
    return [out.trace.bytes_sent(rank=rank) for rank in range(num_ranks)], out.per_rank


def _added_to(net: Any) -> dict[str, int]:
    """The number of hooks on a model and its parameters, and of public attributes of its modules, by name."""
    found = Counter[str]()
    for module in net.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                found["a hook on `net`"] += len(value or ())
            elif not name.startswith("_"):
                found[f"`net.{name}`"] += 1
    for parameter in net.parameters():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found["a hook on a parameter"] += len(getattr(parameter, name) or ())
    return found


def _left_behind(net: Any, graphs: Graphs) -> str:
    """What has changed in `net`, and why that is bad; "" if nothing has."""
    if not net.require_backward_grad_sync:
        return (
            "`net.require_backward_grad_sync` is False afterwards, so DDP would not send the gradients of the next "
            "step. `with net.no_sync():` puts it back."
        )
    if not net.training:
        return "it leaves `net` in eval mode. Call net.train(), or leave the mode as it is."
    if frozen := [name for name, one in net.module.named_parameters() if not one.requires_grad]:
        return f"it leaves {frozen[0]} without requires_grad, so the next step would not train it."
    if graphs.alive:
        return "a graph is still in memory afterwards, with its activations. Call backward() without retain_graph."
    return ""


def _model() -> nn.Linear:
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def _batches(rank: int, num_parts: int) -> list[Tensor]:
    import torch

    generator = torch.Generator().manual_seed(1 + rank)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(num_parts)]


def _loss_of(net: Any, batch: Tensor) -> Tensor:
    return net(batch).pow(2).mean()


def _expected(num_ranks: int, places: Sequence[int]) -> list[Tensor]:
    """The gradients of the mean loss over these parts of each rank, on one device."""
    model = _model()
    given = [_batches(rank, max(places) + 1) for rank in range(num_ranks)]
    parts = [parts[place] for parts in given for place in places]
    mean: Any = sum(_loss_of(model, part) for part in parts) / len(parts)
    mean.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
