"""The exercises of lab 16: a loss that weights all tokens equally, and gradients sent during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tplab.exercises.damage import PARAMETER, Untouched
from tplab.exercises.drawn import Timed
from tplab.exercises.verdict import (
    Refused,
    Verdict,
    beside,
    cause,
    check,
    listed,
    on,
    refuse,
    refuse_damage,
    right,
    run_on,
)
from tplab.mesh import Mesh
from tplab.sharding import P
from tplab.trace.overlap import overlap
from tplab.trace.trace import Trace
from tplab.widgets.matrices import Panel

Loss = Callable[[Any, Any], Any]
Replicas = Callable[[Any], Callable[[], Any]]

IGNORED = -100
TARGETS = {
    2: [[1, 0, 2, 1, IGNORED], [2, 0, IGNORED, IGNORED, IGNORED]],
    3: [[1, 0, IGNORED, 2], [IGNORED] * 4, [2, IGNORED, 0, IGNORED]],
    1: [[1, IGNORED, 2, 0]],
}
VOCABULARY = 3


@check("my_loss")
def check_loss(my_loss: Loss) -> Verdict:
    """Check that the mean of `my_loss(logits, targets)` over ranks has the gradients of the mean over counted tokens.

    logits [n, V], targets [n], of this rank; a target of -100 does not count. Runs on 2, 3 and 1 simulated ranks of
    axis "dp"; on three, one rank has no token that counts.
    """
    panels = [_weighed(my_loss, num_ranks) for num_ranks in TARGETS]
    return right(" is right: every counted token has the same weight, on 1, 2 and 3 ranks.", panels[0])


def _weighed(my_loss: Loss, num_ranks: int) -> list[Panel]:
    """Pictures of the tokens' weights; refuses wrong ones."""
    got, want, means, weights, counted, trace = _tried(my_loss, num_ranks)
    ones = np.where(counted, 1.0, 0.0)
    panels = beside("yours", weights, ones, ~np.isclose(weights, ones))
    # An answer may count in float32, where 1/3 is off by 1e-8.
    if not (np.allclose(got, want, rtol=1e-6, atol=1e-9) and np.isclose(*means, rtol=1e-6)):
        if (got[~counted] != 0).any():
            refuse(f" is wrong on {num_ranks} ranks. Targets of {IGNORED} count in it.")
        text = f" is wrong on {num_ranks} ranks. {_hint(my_loss, num_ranks)}"
        refuse(f"{text}\nThe tables show how much every token weighs, one row per rank.", panels)
    logits = got[0].nbytes
    if any(event.bytes >= logits for event in trace.events if event.kind in ("collective", "send")):
        refuse(f": the numbers are right, but {WHOLE_BATCH}")
    return panels


def _tried(my_loss: Loss, num_ranks: int) -> tuple[np.ndarray, np.ndarray, tuple[float, float], Any, Any, Trace]:
    """(gradients, the right ones), (mean loss, the right one), each token's weight, whether it counts, the trace."""
    import torch
    from torch.nn import functional as F

    targets = torch.tensor(TARGETS[num_ranks])
    logits = torch.tensor(np.random.default_rng(0).normal(size=(*targets.shape, VOCABULARY)))

    def program(logits: Any, targets: Any) -> Any:
        own = logits[0].clone().requires_grad_()
        before = Untouched({"logits": own, "targets": targets[0]})
        loss = my_loss(own, targets[0])
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise TypeError(f"it returned {loss!r}; a loss is a tensor of one number")
        refuse_damage(before)
        if not loss.requires_grad:
            raise ValueError(
                "its loss has no graph: it is detached, or made without the logits where no target counts. A rank "
                "without targets needs gradients of 0 too"
            )
        loss.backward()
        return torch.zeros_like(own) if own.grad is None else own.grad, loss.detach()

    out = run_on(Mesh(dp=num_ranks), program, logits, targets, in_specs=P("dp"))
    got = torch.stack([grad for grad, _ in out.per_rank]) / num_ranks
    mean = float(sum(loss for _, loss in out.per_rank)) / num_ranks
    whole = logits.clone().requires_grad_()
    right_mean = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
    (want,) = torch.autograd.grad(right_mean, whole)
    counted = (targets != IGNORED).numpy()
    along = (got * want).sum(-1) / want.square().sum(-1).clamp(min=1e-30)
    means = mean, right_mean.item()
    return got.numpy(), want.numpy(), means, np.where(counted, along.numpy(), 0.0), counted, out.trace


WHOLE_BATCH = """\
the logits of a rank are sent to others, and every rank computes the loss of the whole batch.
What is the least that ranks must tell each other, so that all of them divide by the same number?"""


def _hint(my_loss: Loss, num_ranks: int) -> str:
    """A hint that explains the tokens' weights on every number of ranks, worded for `num_ranks`."""
    _, _, (mean, right_mean), weights, counted, _ = _tried(my_loss, num_ranks)
    if not np.isfinite(mean):
        return "A rank without a counted token has a loss of nan: the mean of no numbers is 0/0.\nDivide the sum."
    if np.allclose(weights, counted, rtol=0, atol=1e-6):
        return (
            f"The gradients are right, but the mean of the ranks' losses is {mean:.3f}, and not {right_mean:.3f}.\n"
            "What do you add up over the ranks besides the counts?"
        )
    one = weights[counted][0]
    otherwise = "The tokens do not all have the same weight."
    if np.allclose(weights, one * counted, rtol=0, atol=1e-6):
        otherwise = f"Every token weighs {one:.3g} times what it should. Which number must every rank divide by?"
    tried = (_tried(my_loss, ranks) for ranks in (num_ranks, *TARGETS))
    return cause(((weights, _known(counted)) for *_, weights, counted, _ in tried), otherwise, slack=1e-6)


def _known(counted: np.ndarray) -> dict[str, np.ndarray]:
    """The tokens' weights that each known mistake gives."""
    num_ranks, here, total = len(counted), counted.sum(1), counted.sum()
    known = {
        "Each rank takes the mean of its own tokens.\nSo tokens weigh more on a rank that counts few of them. How many "
        "tokens must every rank divide by?": (total / num_ranks / np.maximum(here, 1))[:, None],
        f"Every token weighs 1/{num_ranks} of what it should.\nThe gradients are averaged over the ranks afterwards: "
        "which number of tokens per rank belongs to that?": 1 / num_ranks,
        "This is the sum of the losses. What must it be divided by?": total / num_ranks,
        "The tokens that are ignored are counted in the denominator.": total / counted.size,
        "No gradient reaches the logits: is the loss made anew, from a number?": 0,
    }
    return {text: np.where(counted, weight, 0.0) for text, weight in known.items()}


# --- gradients sent during the backward pass --------------------------------------------------------------------------

WIDTH, LAYERS, ROWS = 5, 4, 3
LARGE_WIDTH, LARGE_LAYERS = 4096, 8
ENOUGH = 0.8
"""The fraction of the communication that must be hidden, on eight ranks of a modelled H100 node."""


@check("my_replicas", not_with=("data_parallel", "DistributedDataParallel"))
def check_replicas(my_replicas: Replicas) -> Verdict:
    """Check that `my_replicas(model)` -> finish makes `.grad` the mean over axis "dp", while the backward pass runs.

    It is called once, before the first step, and `finish()` after each backward pass, also when gradients are added up
    over several of them. Runs three backward passes on 2, 3 and 1 ranks, and one on the shapes of a large model.
    """
    for num_ranks in (2, 3, 1):
        _average(my_replicas, num_ranks)
    (few, sent, races), (many, sent_later, _) = (_left_over(my_replicas, steps) for steps in (3, 9))
    if races:
        but(
            "a tensor is written while its all_reduce is under way. On a cluster, either the old numbers are sent or "
            "the new ones.\nLeave it alone until `wait`, or send a copy of it."
        )
    if many > few:
        but(
            f"after 3 steps it keeps {few:,} bytes, and after 9 steps {many:,}.\nWhat has arrived should be forgotten: "
            "is there a list that only grows?"
        )
    if sent_later > 3 * sent:
        but(
            f"3 steps send {sent:,} bytes, and 9 steps {sent_later:,}.\nEvery step should send the same: are hooks "
            "registered again in each step?"
        )
    with on(Mesh(dp=8)):
        trace = traced(my_replicas)
    needed = 2 * 7 / 8 * LARGE_LAYERS * LARGE_WIDTH**2 * 2  # of eight ranks in bfloat16
    events = trace.select(rank=0, kind="collective").events
    if (sent := sum(event.bytes for event in events if event.op != "broadcast")) > 1.01 * needed:
        text = f"rank 0 of 8 sends {sent / 1e6:,.0f} MB, where {needed / 1e6:,.0f} would do."
        but(f"{text}\nOne all_reduce per gradient is enough.", trace)
    hidden = _share_hidden(trace)
    if hidden < ENOUGH:
        below = "Below is one step on a modelled H100 node."
        if _leaves_early(trace) and hidden > 0.05:
            why = (
                f"{below} Which gradients leave later than they could, or are waited for\nwhile other layers have yet "
                "to compute theirs?"
            )
        elif _leaves_early(trace):
            why = (
                "Gradients leave while the backward pass runs, but the rank waits until each one has arrived.\n"
                "start(all_reduce, ...) begins to send. When is the mean needed?"
            )
        else:
            why = f"{below} When is the gradient of the last layer complete, and when does it leave?"
        but(f"{hidden:.0%} of the communication is hidden.\n{why}", trace)
    text = " is right: the means, on 1, 2 and 3 ranks, step after step.\nMost of the communication is hidden."
    return Timed(True, f"{text} Below is one step on a modelled H100 node.", trace)


def but(text: str, trace: Trace | None = None) -> None:
    """End the check: the gradients are right, but this is not."""
    text = f": the gradients are right, but {text}"
    raise Refused(Timed(False, text, trace) if trace else Verdict(False, text))


def _share_hidden(trace: Trace) -> float:
    """The hidden fraction of the communication, without broadcasts: rank 0's first weights are not part of a step."""
    whole, first = overlap(trace), overlap(trace.select(kind="collective", op="broadcast"))
    sent = whole.communication.sum() - first.communication.sum()
    return float(whole.hidden.sum() / sent) if sent > 0 else 1.0


def _leaves_early(trace: Trace) -> bool:
    """Whether something is sent before the last product of the backward pass."""
    sent = trace.select(rank=0, kind="collective").column("start")
    return len(sent) > 0 and sent.min() < trace.select(rank=0, kind="compute", op="mm").column("start").max()


def _average(my_replicas: Replicas, num_ranks: int) -> None:
    """Refuse gradients that are not the means, on this many ranks."""
    import torch

    random = np.random.default_rng(1)
    xs = torch.tensor(random.normal(size=(num_ranks, 3, ROWS, WIDTH)))
    model = _out_of_order(_layers(WIDTH, LAYERS, bias=True, dtype=torch.float64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.tensor(random.normal(size=tuple(parameter.shape))))

    def program(model: Any, xs: Any) -> list[list[Any]]:
        before = Untouched(dict(model.named_parameters()), instead=PARAMETER)
        finish, found = my_replicas(model), []
        if not callable(finish):
            raise TypeError(f"it returned {finish!r}; return the function that is called after the backward pass")
        for step, x in enumerate(xs[0]):
            if step < 2:  # the third backward pass adds to the gradients of the second
                model.zero_grad()
            model(x).square().mean().backward()
            finish()
            if any(p.grad is None for p in model.parameters()):
                raise TypeError("it leaves no gradient: p.grad is None")
            found.append([p.grad.clone() for p in model.parameters()])
        refuse_damage(before)
        return found

    per_rank = run_on(Mesh(dp=num_ranks), program, model, xs, in_specs=(P(), P("dp"))).per_rank
    means = [_gradients(model, [x[step] for x in xs]) for step in range(3)]
    for step in range(3):
        own = [_gradients(model, [x[step]]) for x in xs]
        got, want = [found[step] for found in per_rank], means[step]
        begin = f" is wrong on {num_ranks} ranks"
        if step == 2:
            if all(_alike(mine, want) for mine in got) and num_ranks > 1:
                refuse(
                    f"{begin} when gradients are added up over two backward passes: what the first\nhas left in p.grad "
                    "is lost. A hook of `register_hook` sees the new gradient alone. One of\n"
                    "`register_post_accumulate_grad_hook` comes after p.grad has been added to."
                )
            want = [a + b for a, b in zip(means[1], want)]
        if all(_alike(mine, want) for mine in got):
            continue
        begin += f", in step {step + 1}"
        if step == 2:
            refuse(f"{begin}, which adds to the gradients of step 2: p.grad is not the sum of the two means.")
        if all(_alike(mine, alone) for mine, alone in zip(got, own)):
            refuse(f"{begin}: every rank keeps its own gradients. Where does the mean get back into p.grad?")
        if all(_alike(mine, [num_ranks * grad for grad in want]) for mine in got):
            refuse(f"{begin}: the gradients are added up. They must be averaged.")
        if all(_alike(mine, [a + b for a, b in zip(alone, want)]) for mine, alone in zip(got, own)):
            refuse(f"{begin}: the mean is added to the rank's own gradient. It must take its place.")
        if step:
            refuse(f"{begin}: step 1 was right. What is left over from it when the second backward pass begins?")
        if all(any(_alike([a], [b]) for b in want) for mine in got for a in mine):
            refuse(
                f"{begin}: p.grad has the mean of another parameter's gradients. Which parameter does a flight belong "
                "to?\nA model may use its layers in another order than it lists their parameters."
            )
        names = [name for name, _ in model.named_parameters()]
        off = [name for place, name in enumerate(names) if not all(_alike([x[place]], [want[place]]) for x in got)]
        which = f" of {listed(off)}" if len(off) < len(names) else ""
        refuse(f"{begin}: the gradients{which} are not the means over the ranks.")


def _layers(width: int, count: int, bias: bool = False, **options: Any) -> Any:
    from torch import nn
    from torch.nn.utils import skip_init

    return nn.Sequential(*[skip_init(nn.Linear, width, width, bias=bias, **options) for _ in range(count)])


def _out_of_order(layers: Any) -> Any:
    """The same layers, which run in a different order than they are listed in."""
    from torch import nn

    class OutOfOrder(nn.Sequential):
        def forward(self, input: Any) -> Any:
            return self[3](self[1](self[2](self[0](input))))

    return OutOfOrder(*layers)


def _gradients(model: Any, xs: Sequence[Any]) -> list[Any]:
    """The gradients of the mean over these batches, on one device."""
    import torch

    loss = torch.stack([model(x).square().mean() for x in xs]).mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _alike(got: Sequence[Any], want: Sequence[Any]) -> bool:
    return all(a.shape == b.shape and np.allclose(a.numpy(force=True), b.numpy(force=True)) for a, b in zip(got, want))


def _left_over(my_replicas: Replicas, steps: int) -> tuple[int, int, bool]:
    """The most bytes that one of two ranks allocates in this many steps and still keeps, gradients included; the bytes
    that all ranks send; and whether a tensor is written between the start of its collective and the wait."""
    import torch

    from tplab.torch import LiveBytes

    class Live(LiveBytes):
        def __init__(self) -> None:
            super().__init__()
            self.writes, self.races = list[int](), False

        def ended(self, func: Any, args: Any, kwargs: Any, *more: Any) -> None:
            super().ended(func, args, kwargs, *more)
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info and argument.alias_info.is_write:
                    written = args[place] if place < len(args) else kwargs.get(argument.name)
                    tensors = written if isinstance(written, list | tuple) else [written]
                    self.writes += [one.data_ptr() for one in tensors if isinstance(one, torch.Tensor)]

        def begins(self) -> int:
            return len(self.writes)

        def met(self, call: Any, x: Any, y: Any, note: Any) -> None:
            super().met(call, x, y, note)
            self.races |= note is not None and x.data_ptr() in self.writes[note:]

    def program() -> tuple[int, bool]:
        model, x = _layers(WIDTH, LAYERS, dtype=torch.float64), torch.ones(ROWS, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        finish = my_replicas(model)
        with Live() as live:
            for _ in range(steps):
                model.zero_grad()
                model(x).square().mean().backward()
                finish()
            return live.now(), live.races

    out = run_on(Mesh(dp=2), program)
    kept, races = zip(*out.per_rank)
    return max(kept), out.trace.bytes_sent(), any(races)


def traced(my_replicas: Replicas) -> Trace:
    """One step at a real size, on meta tensors, which have a shape but no numbers."""
    import torch

    from tplab.torch import run

    def program(model: Any, x: Any) -> None:
        finish = my_replicas(model)
        model(x).mean().backward()
        finish()

    size = {"dtype": torch.bfloat16, "device": "meta"}
    model, x = _layers(LARGE_WIDTH, LARGE_LAYERS, **size), torch.empty(8192, LARGE_WIDTH, **size)
    return run(program, Mesh(dp=8), model, x, cluster="h100").trace
