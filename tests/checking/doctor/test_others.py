"""Scripts that were written by somebody who had not read the doctor, wrong as they are and right once repaired."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tplab.torch import same_model

FOLDER = Path(__file__).parent / "others"
pytestmark = pytest.mark.filterwarnings("ignore")


class Other(NamedTuple):
    """What a report of a script must say.

    what    is wrong first
    line    text of the line that it names
    cause   words of the cause that a run with its repair has proven; "" where nothing may be stated as the cause
    repair  texts of the script, one after the other, and what has to be there instead; then all is right
    """

    script: str
    ranks: int
    what: tuple[str, ...]
    line: str
    cause: str
    repair: tuple[tuple[str, str], ...]


OTHERS = (
    Other(
        "lora_sequence_parallel", 2, ("gradient",), "self.lora_a(x)", "not added up over ranks",
        (("    loss.backward()\n", "    loss.backward()\n    dist.all_reduce(model.lora_a.weight.grad)\n"),),
    ),
    Other(
        "tied_over_stages", 2, ("gradient",), "optimizer.step()", "several stages hold embed.weight",
        (("    optimizer.step()\n",
          "    if world > 1:\n        dist.all_reduce(model.embed.weight.grad)\n    optimizer.step()\n"),),
    ),
    Other(
        "fsdp_divides_again", 2, ("loss", "gradient"), "/ valid", "gradients are averaged over ranks once more",
        (("    loss.backward()\n", "    (loss * world).backward()\n"),),
    ),
    Other(
        "prefix_of_pretrained", 2, ("weights",), "strict=False", "",
        (("model.load_state_dict(pretrained, strict=False)",
          'getattr(model, "module", model).load_state_dict(pretrained)'),),
    ),
    Other(
        "prefix_of_decay", 2, ("optimizer",), "torch.optim.AdamW(", "the weight decay is not what it is on one rank",
        (("groups(model.named_parameters())", "groups(net.named_parameters())"),),
    ),
    Other(
        "balance_loss_of_each_rank", 2, ("loss",), "torch.bincount(", "the mean of it over ranks is the reference's",
        (("minlength=len(self.w)) / len(x)\n",
          "minlength=len(self.w)) / len(x)\n        dist.all_reduce(share)\n        share /= world\n"),),
    ),
    Other(
        "tokens_counted_twice", 4, ("loss", "gradient"), "/ count", "divided by a number that is too large",
        (("dist.all_reduce(count)", 'dist.all_reduce(count, group=mesh.get_group("dp"))'),),
    ),
    Other(
        "wait_comes_too_late", 2, ("gradient",), "async_op=True", "does not wait for it",
        (("    work.wait()\n", ""), ("async_op=True)\n", "async_op=True)\n    work.wait()\n")),
    ),
    Other(
        "gradients_over_the_other_axis", 4, ("gradient",), "dist.all_reduce(p.grad, group=group)",
        "its group is not that of the ranks", (('group = mesh.get_group("tp")\n', 'group = mesh.get_group("dp")\n'),),
    ),
    Other(
        "masters_before_broadcast", 2, ("parameters",), "p.copy_(master)", "the script itself writes it",
        (("model = DistributedDataParallel(net)\n", ""),
         ("nn.Linear(16, 3))\n", "nn.Linear(16, 3))\nmodel = DistributedDataParallel(net)\n")),
    ),
    Other(
        "sum_that_sums_backward", 2, ("gradient",), "functional.all_reduce(h)", "a sum over ranks twice",
        (("dist.nn.functional.all_reduce(h)", "Sum.apply(h)"),),
    ),
    Other(
        "count_of_each_microbatch", 2, ("gradient",), 'reduction="sum") * world', "only how much it counts is not",
        (("    optimizer.zero_grad()\n",
          "    total = sum((t != -100).sum() for t in ys)\n    dist.all_reduce(total)\n    optimizer.zero_grad()\n"),
         ("        total = (y != -100).sum()\n        dist.all_reduce(total)\n", ""),
         ("        loss = loss / accum\n", "")),
    ),
    Other(
        "head_without_its_init", 2, ("weights",), "torch.manual_seed(0)", "",
        (("if first:\n    nn.init.normal_(embed.weight", "nn.init.normal_(embed.weight"),),
    ),
    Other(
        "norms_added_up", 2, ("norm",), "norm = mine.grad.norm()", "are added up: add up their squares",
        (("mine.grad.norm()\n    dist.all_reduce(norm)\n",
          "mine.grad.pow(2).sum()\n    dist.all_reduce(norm)\n    norm = norm.sqrt()\n"),),
    ),
    Other(
        "one_mask_for_all_shards", 2, ("dropout",), "F.dropout(h, 0.5)", "",
        (("torch.manual_seed(7)", "torch.manual_seed(7 + rank)"),),
    ),
    Other(
        "alpha_over_local_rank", 2, ("loss",), "* scale", "multiplies by 4, and in the reference by 2",
        (("alpha / self.a.shape[0]", "alpha / r"),),
    ),
    Other(
        "gates_of_others_detached", 2, ("gradient",), "dist.all_gather(parts, own.detach()", "passes no gradient back",
        (("        parts = [torch.empty_like(own) for _ in range(world)]\n"
          "        dist.all_gather(parts, own.detach().contiguous())\n        parts[rank] = own\n",
          "        parts = dist.nn.functional.all_gather(own)\n"),
         ("import torch.distributed as dist\n", "import torch.distributed as dist\nimport torch.distributed.nn\n")),
    ),
    Other(
        "z_loss_of_each_rank", 2, ("loss",), "0.1 * z.mean()", "counts in full in each of 2 ranks",
        (("z.mean()", "z.sum() / len(x)"),),
    ),
    Other(
        "codebook_of_rank_0", 2, ("buffers",), "count, total = chosen.sum(0)", "the sum of it over ranks",
        (("chosen.T @ z\n",
          "chosen.T @ z\n                dist.all_reduce(count)\n                dist.all_reduce(total)\n"),),
    ),
    Other(
        "dice_of_each_rank", 2, ("loss",), "(p * y).sum()", "the sum of it over ranks",
        (("    loss = 1 - ", "    both, all_of_them = Reduce.apply(both), Reduce.apply(all_of_them)\n    loss = 1 - "),
         ("        p.grad /= world\n", "")),
    ),
    Other(
        "amax_of_a_shard", 2, ("loss",), "w.detach().abs().max()", "the maximum of it over ranks",
        (("    q = (w", "    dist.all_reduce(amax, dist.ReduceOp.MAX)\n    q = (w"),),
    ),
    Other(
        "decay_of_every_rank", 2, ("gradient",), "p.grad += 0.1 * p", "counts once for each rank",
        (("            p.grad += 0.1 * p\n            dist.all_reduce(p.grad)\n",
          "            dist.all_reduce(p.grad)\n            p.grad += 0.1 * p\n"),),
    ),
    Other(
        "update_clipped_by_shard", 2, ("parameters",), "update.square().mean()", "depends on the whole tensor",
        (("                size = update.square().mean()\n",
          "                size = update.square().mean()\n                dist.all_reduce(size)\n"
          "                size /= world\n"),),
    ),
    Other(
        "moments_factored_by_shard", 2, ("parameters",), "p.grad.square().mean(1)", "depends on the whole tensor",
        (("                size = rows.mean()\n",
          "                size = rows.mean()\n                for z in (columns if p is model.up else rows, size):\n"
          "                    dist.all_reduce(z)\n                    z /= world\n"),),
    ),
    Other(
        "orthogonal_by_shard", 2, ("parameters",), "optimizer.step()", "depends on the whole tensor",
        (("up.chunk(world)[rank].clone()", "up.clone()"), ("down.chunk(world, 1)[rank].clone()", "down.clone()"),
         ("Reduce.apply((Copy.apply(x) @ self.up.T).tanh() @ self.down.T)", "(x @ self.up.T).tanh() @ self.down.T"),
         ("F.cross_entropy(model(x), y).backward()",
          "(F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank]) / world).backward()\n"
          "    for p in model.parameters():\n        dist.all_reduce(p.grad)")),
    ),
    Other(
        "capacity_of_local_tokens", 2, ("loss",), "before < capacity", "compares with 4, and in the reference with 8",
        (("        capacity = len(x) // 4\n",
          "        count = chosen.sum(0)\n        counts = [torch.zeros_like(count) for _ in range(world)]\n"
          "        dist.all_gather(counts, count)\n        before += sum(counts[:rank], torch.zeros_like(count))\n"
          "        capacity = len(x) * world // 4\n"),),
    ),
    Other(
        "documents_begin_anew", 2, ("loss",), "(ids == END).cumsum(1)", "on rank 1, it is 0, 1, 1, 2",
        (("        document = (ids == END).cumsum(1)\n",
          "        wholes = [torch.empty_like(ids) for _ in range(world)]\n"
          "        dist.all_gather(wholes, ids.contiguous())\n"
          "        document = (torch.cat(wholes, 1) == END).cumsum(1).chunk(world, 1)[rank].contiguous()\n"),),
    ),
    Other(
        "the_other_head_of_keys", 4, ("loss",), "model(ids)", "ranks 0, 1 and ranks 2, 3 need the same",
        (("rank % parts", "rank * parts // world"),),
    ),
    Other(
        "labels_begin_anew", 2, ("loss",), "F.cross_entropy(10 * a @ all_b.T", "go on from the rank's first sample",
        (("    first = 0\n", "    first = rank * len(a)\n"),),
    ),
    Other(
        "negatives_of_one_rank", 2, ("loss",), "10 * a @ all_b.T", "with its own alone",
        (("    all_a, all_b, first = a, b, 0\n",
          "    all_a, all_b = (torch.cat(dist.nn.functional.all_gather(z)) for z in (a, b))\n"
          "    first = rank * len(a)\n"),),
    ),
    Other(
        "scale_of_each_rank", 2, ("gradient",), "p.grad.mul_(scale)", "different numbers at this line (256, 64)",
        (("    scale = 2.0", "    t = torch.tensor(biggest)\n    dist.all_reduce(t, op=dist.ReduceOp.MAX)\n"
          "    biggest = t.item()\n    scale = 2.0"),),
    ),
    Other(
        "noise_of_one_seed", 2, ("samples",), "noise = torch.randn(", "draw the same random numbers here",
        (("torch.randn(x0.shape, generator=noise_gen)",
          "torch.randn((8, 1, 5, 5), generator=noise_gen)[rank * per :][:per]"),
         ("torch.randint(T, (len(x0),), generator=noise_gen)",
          "torch.randint(T, (8,), generator=noise_gen)[rank * per :][:per]")),
    ),
    Other(
        "smoothing_of_a_shard", 2, ("gradient",), "z.mean(-1)", "the mean of it over ranks is the reference's",
        (("z.mean(-1)", "Reduce.apply(z.sum(-1)) / vocab"),),
    ),
    Other(
        "logsumexp_of_a_shard", 2, ("loss",), "logits.logsumexp(-1)", "the logsumexp of it over ranks",
        (("    z = logits.logsumexp(-1)\n", "    z = log_z\n"),),
    ),
    Other(
        "centre_over_local_batch", 2, ("buffers",), "/ len(teacher)", "by 0.25, and in the reference by 0.125",
        (("/ len(teacher)", "/ (len(teacher) * dist.get_world_size())"),),
    ),
    Other(
        "columns_of_a_shard", 2, ("optimizer",), "sq.mean(1), sq.mean(0)", "depends on the whole tensor",
        (("                if not state:\n", "                dist.all_reduce(col)\n"
          "                col = col / dist.get_world_size()\n                if not state:\n"),
         ('                scale = state["row"].mean()\n',
          '                scale = state["row"].mean()\n                dist.all_reduce(scale)\n'
          "                scale = scale / dist.get_world_size()\n")),
    ),
    Other(
        "observations_of_each_rank", 2, ("loss",), "x.sum(0), x.square().sum(0)", "",
        (("        self.total += total\n",
          "        for t in (total, square, count):\n            dist.all_reduce(t)\n        self.total += total\n"),),
    ),
    Other(
        "normaliser_without_its_sum", 2, ("gradient",), "z - Reduce.apply(", "the parts of all ranks are not added up",
        (("z - Reduce.apply(", "z - SumBoth.apply("),),
    ),
    Other(
        "shared_expert_before_the_sum", 2, ("loss",), "out + self.shared(x)", "it is the right value plus what",
        (("Reduce.apply(out + self.shared(x))", "Reduce.apply(out) + self.shared(x)"),),
    ),
    Other(
        "mean_of_variances", 2, ("gradient",), "adv.var(", "on rank 0, it is 0.723 times the reference's",
        (("adv.var(unbiased=False)", "(adv - mean).square().mean()"),),
    ),
    Other(
        "count_of_one_rank", 2, ("buffers",), "var * n / (n - 1)", "multiplies by 16 and 0.0667, and in the",
        (("        with torch.no_grad():\n",
          "        n = n * dist.get_world_size()\n        with torch.no_grad():\n"),),
    ),
    Other(
        "second_head_of_each_part", 2, ("samples",), "y2 = F.pad(y1", "labels are shifted after the sequence is cut",
        (("F.pad(y1[:, 1:], (0, 1), value=-100)",
          "F.pad(ids[:, 2:], (0, 1), value=-100).chunk(world, 1)[rank]"),),
    ),
    Other(
        "gate_and_up_in_one_cut", 2, ("loss",), ".chunk(2, -1)", "cut into other parts than what follows needs",
        (("gate_up.chunk(world)[rank].clone()", "torch.cat([w.chunk(world)[rank] for w in gate_up.chunk(2)])"),),
    ),
    Other(
        "one_branch_not_copied", 2, ("gradient",), "F.linear(first, self.b)", "the parts of all ranks are not added up",
        (("copy = Copy.apply(h)", "h = copy = Copy.apply(h)"),),
    ),
    Other(
        "spread_of_each_rank", 2, ("loss",), "mean = h.mean(0)", "and likewise at",
        (("h.mean(0)\n", "dist.nn.functional.all_reduce(h.mean(0)) / world\n"),
         ("(h - mean).square().mean(0)", "dist.nn.functional.all_reduce((h - mean).square().mean(0)) / world")),
    ),
    Other(
        "labels_in_another_order", 2, ("loss",), "F.cross_entropy(", "not in the order in which ranks hold samples",
        (("batch[:, 1:].chunk(world, 1)[rank]", "mine(batch[:, 1:])"),),
    ),
    Other(
        "decay_of_flat_shards", 2, ("optimizer",), "torch.optim.AdamW(", "the weight decay is not what it is on one",
        (("if p.ndim < 2 and (world > 1 or len(shapes[name]) < 2)", "if len(shapes[name]) < 2"),),
    ),
    Other(
        "orders_of_their_own", 2, ("samples",), "in DataLoader(", "each rank takes its part of an order of its own",
        (("7 + rank", "7"),),
    ),
    Other(
        "state_begins_anew", 2, ("loss",), "0.8 * state + z", "on rank 1, it is all zeros",
        (("first(x.chunk(world, 1)[rank])", "first(x)"),
         ("torch.stack(states, 1)", "torch.stack(states, 1).chunk(world, 1)[rank]")),
    ),
    Other(
        "convolution_without_its_halo", 2, ("loss",), "F.pad(h, (2, 0))", "on rank 1, it is 0, 0, ",
        (("first(x.chunk(world, 1)[rank])", "first(x)"),
         ("conv(F.pad(h, (2, 0))).transpose(1, 2)", "conv(F.pad(h, (2, 0))).transpose(1, 2).chunk(world, 1)[rank]")),
    ),
    Other(
        "padding_in_the_softmax", 2, ("loss",), "scores.exp().sum(1)", "it is 1 more than the reference's in 6 of 24",
        (("scores.exp().sum(1)", "(scores.exp() * (own < 7)).sum(1)"),),
    ),
    Other(
        "mean_of_exponentials", 2, ("evaluation",), "nll = -logp", "the mean of it over ranks is the reference's",
        (("        value = nll.exp()\n        dist.all_reduce(value)\n",
          "        dist.all_reduce(nll)\n        value = (nll / world).exp() * world\n"),),
    ),
    Other(
        "search_by_own_loss", 2, ("parameters",), "(net(x) - y).square()", "the mean of it over ranks",
        (("before, lr = loss.item(), 8.0",
          "loss = loss.detach().clone()\n        dist.all_reduce(loss)\n        before, lr = loss.item() / world, 8.0"),
         ("after = loss_of(x, y)",
          "after = loss_of(x, y)\n            dist.all_reduce(after)\n            after /= world")),
    ),
    Other(
        "values_of_sparse_gradients", 2, ("gradient",), "dist.all_reduce(x)", "16 of the 80 elements of a gradient",
        (("sparse=True", "sparse=False"),),
    ),
    Other(
        "bound_of_a_shard", 2, ("loss",), "scores.topk(", "computed tensors that go into this line are right",
        (("    return scores.topk(4 // world, -1)",
          "    parts = [torch.empty_like(scores) for _ in range(world)]\n"
          "    dist.all_gather(parts, scores.contiguous())\n    return torch.cat(parts, -1).topk(4, -1)"),),
    ),
)  # fmt: skip


def repaired(row: Other) -> str:
    text = (FOLDER / f"{row.script}.py").read_text()
    for old, new in row.repair:
        assert text.count(old) == 1, f"{row.script} has {text.count(old)} x {old!r}"
        text = text.replace(old, new)
    return text


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_each_script_has_its_row():
    assert sorted(row.script for row in OTHERS) == sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.script)
def test_what_is_wrong_is_named_and_no_cause_is_guessed(row: Other):
    report = same_model(FOLDER / f"{row.script}.py", ranks=row.ranks)
    first = report.first
    assert report.exit_code == 1 and first is not None and first.what in row.what, str(report)
    assert report.verdict == ("logs differ" if first.what == "evaluation" else "different"), str(report)
    text = (FOLDER / f"{row.script}.py").read_text().splitlines()
    assert row.line in text[int(first.where.rpartition(":")[2]) - 1], str(report)
    assert row.cause in first.cause and bool(first.cause) == bool(first.proof) == bool(row.cause), str(report)


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.script)
def test_what_is_repaired_is_the_same_model(row: Other, tmp_path: Path):
    path = tmp_path / f"{row.script}.py"
    path.write_text(repaired(row))
    report = same_model(path, ranks=row.ranks)
    assert (report.exit_code, report.findings) == (0, ()), str(report)


def test_a_part_of_what_was_detached_has_its_gradient(tmp_path: Path):
    """Rows are gathered one half after the other."""
    text, path = (FOLDER / "gates_of_others_detached.py").read_text(), tmp_path / "halves.py"
    gather = "dist.all_gather(parts, own.detach().contiguous())"
    assert gather in text
    halves = "for h in (0, 4):\n            dist.all_gather([x[h : h + 4] for x in parts], own.detach()[h : h + 4])"
    path.write_text(text.replace(gather, halves))
    first = same_model(path, ranks=2).first
    assert first is not None and first.proof and "passes no gradient back" in first.cause, str(first)
