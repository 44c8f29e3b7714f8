"""The exercise of lab 22: accumulate gradients over several batches, and send them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tplab.exercises.check import Verdict, not_started, raised, untouched
from tplab.mesh import Mesh

if TYPE_CHECKING:
    from torch import Tensor

Accumulate = Callable[[Any, Callable[[Any, Any], Any], Sequence[Any]], Any]
NAME = "accumulate"
WIDTH, BATCHES = 6, 3


def check_accumulate(accumulate: Accumulate) -> Verdict:
    """Whether `accumulate(net, loss_of, batches)` leaves the gradients of the mean loss over the batches of all ranks
    in `net`, a DistributedDataParallel, and sends them only once.

    loss_of(net, batch) is the loss of one batch. Runs on 1, 2 and 3 simulated ranks.
    """
    if not_started(accumulate):
        return untouched(NAME)
    for num_ranks in (2, 3, 1):
        verdict = _checked(accumulate, num_ranks)
        if verdict is not None:
            return verdict
    return Verdict(
        True, f"{NAME} is right: the gradients of the mean loss over {BATCHES} batches, sent once; on 1, 2 and 3 ranks."
    )


def _checked(accumulate: Accumulate, num_ranks: int) -> Verdict | None:
    """What is wrong with it on this many ranks; None if nothing is."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from tplab.torch import run

    def model() -> nn.Module:
        generator = torch.Generator().manual_seed(0)
        layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        return layer

    def batches(rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1 + rank)
        return [torch.randn(4, WIDTH, generator=generator, dtype=torch.float64) for _ in range(BATCHES)]

    def loss_of(net: Any, batch: Tensor) -> Tensor:
        return net(batch).pow(2).mean()

    def program() -> list[Tensor | None]:
        import torch.distributed as dist

        whole, graphs, given = model(), Graphs(), batches(dist.get_rank())
        net = DistributedDataParallel(whole)

        def watched(net: Any, batch: Tensor) -> Tensor:
            if len(batch) > len(given[0]):
                raise ValueError(
                    f"it asks for the loss of {len(batch)} rows at once, and a part has {len(given[0])}. The batch is "
                    "cut into parts because it does not fit in memory"
                )
            return graphs.watch(loss_of(net, batch))

        accumulate(net, watched, given)
        grads = [parameter.grad for parameter in whole.parameters()]
        if graphs.most > 1 and None not in grads:
            raise ValueError(
                f"the activations of {graphs.most} parts are in memory at the same time, because their backward passes "
                "come later. The batch is cut into parts because it does not fit in memory"
            )
        return grads

    try:
        out = run(program, Mesh(dp=num_ranks), distributed=True, cluster="h100")
    except Exception as error:
        return Verdict(False, raised(error, accumulate, NAME, Mesh(dp=num_ranks)))
    expected = _expected(model(), [loss_of, *(batches(rank) for rank in range(num_ranks))])
    on = f"on {num_ranks} rank{'s' * (num_ranks > 1)}"
    if any(grad is None for grads in out.per_rank for grad in grads):
        return Verdict(False, f"{NAME}: some parameters have no gradient. Call loss.backward() for each batch.")

    def ratio(grads: Sequence[Any], factor: float) -> bool:
        return all(torch.allclose(got, factor * want, rtol=1e-9) for got, want in zip(grads, expected, strict=True))

    if not all(ratio(grads, 1.0) for grads in out.per_rank):
        if all(ratio(grads, BATCHES) for grads in out.per_rank):
            return Verdict(
                False,
                f"{NAME}: the gradients are {BATCHES} times as large as they should be {on}. Each backward() adds to "
                "what is there: divide each loss by the number of batches.",
            )
        first = out.per_rank[0]
        alike = all(torch.equal(a, b) for grads in out.per_rank for a, b in zip(grads, first, strict=True))
        if not alike:
            return Verdict(
                False,
                f"{NAME}: the ranks end with different gradients {on}, so their models would drift apart. The last "
                "batch must be outside of no_sync(): its backward pass sends what was added up.",
            )
        return Verdict(False, f"{NAME}: the gradients are not those of the mean loss over all batches {on}.")
    size = sum(want.numel() * 8 for want in expected)
    sent = sum(event.bytes for event in out.trace.select(rank=0, kind="collective", op="all_reduce").events)
    once = 2 * (num_ranks - 1) * size / num_ranks
    if sent > 1.5 * once:
        return Verdict(
            False,
            f"{NAME}: the gradients are right, but rank 0 sends {sent:,} bytes of them {on}, where {once:,.0f} are "
            "enough. Every backward pass sends, unless forward and backward run inside `with net.no_sync():`.",
        )
    return None


class Graphs:
    """Counts the losses whose backward pass has not run yet: the activations of each are still in memory.

    most   the most of them at the same time
    """

    def __init__(self) -> None:
        self._waiting: set[int] = set()
        self.most = self._made = 0

    def watch(self, loss: Tensor) -> Tensor:
        """The loss; its backward pass is noted."""
        if not loss.requires_grad:
            return loss
        self._made += 1
        number = self._made
        self._waiting.add(number)
        self.most = max(self.most, len(self._waiting))
        seen = loss * 1.0
        seen.register_hook(lambda _: self._waiting.discard(number))
        return seen


def _expected(model: Any, given: Sequence[Any]) -> list[Any]:
    """The gradients of the mean loss, on one device."""
    loss_of, *ranks = given
    losses = [loss_of(model, batch) for batches in ranks for batch in batches]
    mean: Any = sum(losses) / len(losses)
    mean.backward()
    return [parameter.grad for parameter in model.parameters()]
