"""A script that divides experts over ranks: right as it stands, and with one of the faults that others have met."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tplab.torch import same_model

RIGHT = (Path(__file__).parent / "experts.py").read_text(encoding="utf8")
pytestmark = pytest.mark.filterwarnings("ignore")


OF_MICROBATCHES = (
    ("self.balance(scores, best.indices)", "self.router(x).logsumexp(-1).square().mean()"),
    ("    logits, balance = model(x)\n",
     "    number = 32 // world // 4\n"
     "    optimizer.zero_grad()\n"
     "    for x, y, mask in zip(x.chunk(number), y.chunk(number), mask.chunk(number)):\n"
     "        logits, balance = model(x)\n"),
    ("    each =", "        each ="),
    ("    loss =", "        loss ="),
    ("0.1 * balance\n    optimizer.zero_grad()\n", "0.1 * balance / number\n"),
    ("    loss.backward()", "        loss.backward()"),
)  # fmt: skip
"""What makes microbatches in place of one batch, and the router's z-loss in place of the balance."""


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


ACCUMULATES = replaced(RIGHT, *OF_MICROBATCHES)


class Fault(NamedTuple):
    """What is put in place of a text of the script, and what the report must say.

    what    is wrong first
    line    text of the line that it names
    cause   words of the cause that a run with its repair has proven; "" where nothing may be stated as the cause
    ranks   how many run the script
    script  in which the text is replaced
    """

    old: str
    new: str
    what: str
    line: str
    cause: str = ""
    ranks: int = 2
    script: str = RIGHT


OWN = "if p is not model.experts.weight"
FAULTS = {
    "pytorch/pytorch#160285: experts' gradients are not divided": Fault(
        "        p.grad /= world", "            p.grad /= world",
        "gradient", OWN, "divide it by the number of ranks that the other gradients are averaged over", 4,
    ),
    "their gradients are added up with those of other experts": Fault(
        f"        {OWN}:\n            dist.all_reduce(p.grad)", "        dist.all_reduce(p.grad)",
        "gradient", "dist.all_reduce(p.grad)",
    ),
    "NVIDIA/Megatron-LM#5916: each rank takes the norm of its own experts": Fault(
        "    clip(model)\n", "    nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n",
        "norm", "nn.utils.clip_grad_norm_(", "takes the norm of only what it holds",
    ),
    "experts are clipped apart, by each rank's own": Fault(
        "    clip(model)\n",
        "    for are_own in (False, True):\n"
        "        some = [p for p in model.parameters() if (p is model.experts.weight) is are_own]\n"
        "        nn.utils.clip_grad_norm_(some, 0.05)\n",
        "norm", "nn.utils.clip_grad_norm_(", "takes the norm of only what it holds",
    ),
    "half of the experts are missing in the norm": Fault(
        "square += p.grad.square().sum()",
        "square += (p.grad if p is not model.experts.weight else p.grad[: 4 // world**2]).square().sum()",
        "norm", "nn.utils.clip_grads_with_norm_(", "parts are missing",
    ),
    "NVIDIA/Megatron-LM#1622, a neighbour: the norm takes experts for copies": Fault(
        "if rank == 0 or p is model.experts.weight:", "if rank == 0:",
        "norm", "nn.utils.clip_grads_with_norm_(", "of experts.weight, only the part of rank 0 is counted",
    ),
    "the same, with the first rank of each pair": Fault(
        "if rank == 0 or p is model.experts.weight:", "if rank % 2 == 0:",
        "norm", "nn.utils.clip_grads_with_norm_(", "only the squares on ranks 0, 2 are counted", 4,
    ),
    "a broadcast that makes copies equal overwrites the experts": Fault(
        "    if p is not model.experts.weight:\n        dist.broadcast(p.data, 0)\n", "    dist.broadcast(p.data, 0)\n",
        "weights", "dist.broadcast(p.data, 0)", "this broadcast overwrites experts.weight",
    ),
    "each rank draws its own experts from one seed": Fault(
        "torch.randn(count, dim, dim).chunk(world)[rank]", "torch.randn(count // world, dim, dim)",
        "weights", "torch.manual_seed(3)", "each rank begins with the same numbers",
    ),
    "huggingface/transformers#48687: a plain all_gather of the gates": Fault(
        "Gather.apply(gates)", "Gather.apply(gates) if world == 1 else Gather.forward(None, gates)",
        "gradient", "dist.all_gather(parts, x.contiguous())", "passes no gradient back",
    ),
    "a neighbour: gates are gathered, and those of other ranks have no gradient": Fault(
        "Gather.apply(gates)",
        "torch.cat([gates if i == rank else x.detach() for i, x in enumerate(Gather.apply(gates).chunk(world))])",
        "gradient", "x.detach()",
    ),
    "counts are added up in place, and divided by this rank's": Fault(
        "(chosen.numel() * world)", "chosen.numel()",
        "loss", "counts / chosen.numel()", "multiplies by 0.0313, and in the reference by 0.0156",
    ),
    "the balance of each rank's own tokens": Fault(
        "        dist.all_reduce(counts)\n", "        counts = world * counts.float()\n",
        "loss", "counts = world", "the mean of it over ranks is the reference's",
    ),
    "the mask is cut along ep first, and tokens along dp": Fault(
        "is_token.chunk(dp)[d].chunk(ep)[e]", "is_token.chunk(ep)[e].chunk(dp)[d]",
        "loss", "mask = ", "rank 1 has that of rank 2, rank 2 has that of rank 1", 4,
    ),
    "an auxiliary loss that is not divided by the number of microbatches": Fault(
        "0.1 * balance / number", "0.1 * balance",
        "loss", "0.1 * balance", "in each of 4 microbatches (8 in the reference)", script=ACCUMULATES,
    ),
}  # fmt: skip


def report_of(text: str, ranks: int, folder: Path):
    path = folder / "experts.py"
    path.write_text(text, encoding="utf8")
    return same_model(path, ranks=ranks)


@pytest.mark.parametrize("script", [RIGHT, ACCUMULATES], ids=["one batch", "microbatches"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_script_is_right(ranks: int, script: str, tmp_path: Path):
    report = report_of(script, ranks, tmp_path)
    assert (report.exit_code, report.findings) == (0, ()), str(report)


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_seen_and_no_cause_is_guessed(name: str, tmp_path: Path):
    fault = FAULTS[name]
    text = replaced(fault.script, (fault.old, fault.new))
    report = report_of(text, fault.ranks, tmp_path)
    first = report.first
    assert report.exit_code == 1 and first is not None and first.what == fault.what, str(report)
    assert fault.line in text.splitlines()[int(first.where.rpartition(":")[2]) - 1], str(report)
    assert fault.cause in first.cause and bool(first.cause) == bool(first.proof) == bool(fault.cause), str(report)
