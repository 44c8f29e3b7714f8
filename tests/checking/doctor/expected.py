"""What is wrong with each script of `wrong`, by which factor, at which line; and how it is repaired.

A row is a claim about a script, not about the doctor: `test_scripts` compares it with the ranks' own gradients,
weights and printed numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.checking.doctor.seen import Seen


@dataclass(frozen=True)
class Wrong:
    """A script that does not train on `ranks` ranks what it trains on one.

    what     what is wrong first, in the order of a training step; where it may be told in several ways, all of them
    factor   what it is to what it should be, where that is one number; otherwise in words
    lines    the line at fault, which a report names; then others that have to do with it: the text of each
    cause    words, one of which says what was done
    thread   where it was met, or a like case of it; empty for what is met all the time
    seen     the wrong quantity in a run; of the reference it gives the right one, unless `wanted` does
    holds    for a factor in words: what is true of the run and the reference if the words are
    repair   texts of the script and what has to be there instead; then all is right
    """

    script: str
    ranks: int
    what: tuple[str, ...]
    factor: float | str
    lines: tuple[str, ...]
    cause: tuple[str, ...]
    thread: str
    seen: Callable[[Seen], Tensor]
    repair: tuple[tuple[str, str], ...]
    wanted: Callable[[Seen], Tensor] | None = None
    holds: Callable[[Seen, Seen], bool] | None = None
    args: str = ""
    reference_args: str = ""
    mesh: str = ""


def gradient(index: int, rank: int = 0) -> Callable[[Seen], Tensor]:
    """The gradient of a parameter at the first step."""
    return lambda run: run.gradient(index, rank)


def joined(index: int, dim: int = 0) -> Callable[[Seen], Tensor]:
    """The gradient of a parameter that is sharded over the ranks, put together."""
    return lambda run: torch.cat([run.gradient(index, rank) for rank in range(len(run.steps))], dim)


def updated(index: int, rank: int = 0) -> Callable[[Seen], Tensor]:
    """What the first step added to a parameter: for DTensors, whose gradients may be partial until then."""
    return lambda run: run.steps[rank][0].after[index] - run.steps[rank][0].before[index]


def logged(label: str, number: int = 0) -> Callable[[Seen], Tensor]:
    """The number printed after a label."""
    return lambda run: run.logged(label, number)


def summed(index: int, of_reference: int | None = None) -> Callable[[Seen, Seen], bool]:
    """Whether the ranks' gradients of a parameter are parts whose sum is right."""

    def holds(run: Seen, reference: Seen) -> bool:
        total = sum(run.gradient(index, rank) for rank in range(len(run.steps)))
        return close(total, reference.gradient(index if of_reference is None else of_reference))  # type: ignore[arg-type]

    return holds


def close(a: Tensor, b: Tensor, tolerance: float = 2e-4) -> bool:
    """Equal within float32 that went through a few sums in another order, or that was printed with six digits."""
    return bool((a.double() - b.double()).norm() <= tolerance * b.double().norm().clamp(min=1e-6))


WRONG = (
    # -------------------------------------------------------------- the loss, or its average, once too often or seldom
    Wrong(
        "ddp_loss_over_world",
        4,
        ("loss", "gradient"),
        0.25,
        ("loss = loss / world_size  # average over ranks", "loss.backward()"),
        ("average", "divid", "mean"),
        "Megatron-LM #673",
        gradient(0),
        (
            ("        loss = loss / world_size  # average over ranks\n", ""),
            ("dist.all_reduce(total)", "dist.all_reduce(total, op=dist.ReduceOp.AVG)"),
        ),
        reference_args="--batch-size 16",
    ),
    Wrong(
        "manual_sum_of_gradients",
        4,
        ("gradient",),
        4.0,
        ("dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)",),
        ("sum", "average", "divid"),
        "Megatron-LM #1124",
        gradient(0),
        ((("op=dist.ReduceOp.SUM)"), "op=dist.ReduceOp.AVG)"),),
    ),
    Wrong(
        "fsdp_loss_all_reduced",
        2,
        ("loss", "gradient"),
        2.0,
        (
            'return all_reduce(loss, "sum", dist.group.WORLD).clone()',
            "loss = GlobalLoss.apply(loss)",
            "loss.backward()",
        ),
        ("sum", "average"),
        "torchtitan #3280",
        lambda run: torch.stack([run.logged("loss"), run.gradients()[0].double()]),
        (
            ('return all_reduce(loss, "sum", dist.group.WORLD)', 'return all_reduce(loss, "avg", dist.group.WORLD)'),
            ("        return grad\n", "        return grad\n"),
        ),
    ),
    Wrong(
        "tokens_normalised_twice",
        4,
        ("loss", "gradient"),
        0.25,
        ("loss = loss / num_tokens", "loss.backward()"),
        ("tokens", "average", "divid"),
        "transformers PR #35207",
        gradient(0),
        (("loss = loss / num_tokens", "loss = loss / num_tokens * world"),),
        reference_args="--micro-batch 16",
    ),
    Wrong(
        "accumulation_not_divided",
        2,
        ("gradient", "loss"),
        2.0,
        ("loss.backward()",),
        ("accumul", "microbatch"),
        "transformers PR #48167",
        gradient(0),
        (("            loss.backward()\n", "            (loss / accumulate).backward()\n"),),
        reference_args="--gradient_accumulation_steps 1 --batch_size 16",
    ),
    Wrong(
        "accelerate_divides_twice",
        2,
        ("loss", "gradient"),
        0.25,
        ("loss = loss / args.gradient_accumulation_steps", "accelerator.backward(loss)"),
        ("accumul", "microbatch", "divid"),
        "transformers PR #35207",
        gradient(0),
        (("            loss = loss / args.gradient_accumulation_steps\n", ""),),
        reference_args="--gradient_accumulation_steps 1 --batch_size 32",
    ),
    Wrong(
        "trainer_loss_over_all_tokens",
        2,
        ("loss", "gradient"),
        0.5,
        ("loss = (each * weights).sum() / num_items_in_batch", "trainer.train()"),
        ("average", "tokens", "divid", "num_items"),
        "transformers PR #35207",
        gradient(0),
        (("/ num_items_in_batch\n", "/ num_items_in_batch * self.accelerator.num_processes\n"),),
        reference_args="--per_device_train_batch_size 8",
    ),
    Wrong(
        "pipeline_scaled_twice",
        2,
        ("loss", "gradient"),
        0.25,
        ("return F.mse_loss(output, target) / args.microbatches", "schedule.step(target=target, losses=losses)"),
        ("microbatch", "accumul", "divid"),
        "torchtitan #1733",
        gradient(0),
        (
            ("F.mse_loss(output, target) / args.microbatches", "F.mse_loss(output, target)"),
            ("torch.stack(losses).sum()", "torch.stack(losses).mean()"),
        ),
        reference_args="--microbatches 1",
    ),
    Wrong(
        "dtensor_mean_of_local_batch",
        2,
        ("gradient", "loss"),
        2.0,
        ("loss = (output.to_local() - y).square().mean()", "loss.backward()"),
        ("mean", "sum", "average"),
        "torchtitan #3280",
        updated(0),
        (("        loss.backward()\n", "        (loss / world_size).backward()\n"),),
    ),
    Wrong(
        "context_parallel_loss_scaled",
        2,
        ("gradient", "loss"),
        2.0,
        ("loss = loss_sum / (args.batch * args.seq_len) * cp_size", "dist.all_reduce(p.grad)", "loss.backward()"),
        ("sum", "average", "scale", "context"),
        "Megatron-LM #673",
        gradient(0),
        (
            ("(args.batch * args.seq_len) * cp_size", "(args.batch * args.seq_len)"),
            ("mean = loss.detach() / cp_size", "mean = loss.detach().clone()"),
        ),
    ),
    # --------------------------------------------------------------------------------- means of unequally many tokens
    Wrong(
        "mean_of_rank_means",
        4,
        ("loss", "gradient"),
        "mean of means",
        (
            "loss = nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=-100)",
            "loss.backward()",
        ),
        ("tokens", "targets", "unequal", "mean"),
        "transformers PR #35207",
        gradient(0),
        (
            (
                "        loss.backward()\n",
                "        count = (labels[:, 1:] != -100).sum()\n        total = count.clone()\n"
                "        dist.all_reduce(total)\n        loss = loss * count / total * dist.get_world_size()\n"
                "        loss.backward()\n",
            ),
        ),
        reference_args="--per-device-batch-size 8",
    ),
    Wrong(
        "mean_of_microbatch_means",
        2,
        ("gradient", "loss"),
        "mean of means",
        (
            "loss = F.cross_entropy(model(micro_ids).flatten(0, 1), micro_tags.flatten(), ignore_index=-1)",
            "loss = loss * (share / total * world_size) / args.accum  # ranks weighted by their tokens",
            "loss.backward()",
        ),
        ("tokens", "targets", "unequal", "mean"),
        "transformers PR #35207",
        gradient(0),
        (("(share / total * world_size) / args.accum", "((micro_tags >= 0).sum() / total * world_size)"),),
        reference_args="--accum 1",
    ),
    Wrong(
        "evaluation_mean_of_means",
        2,
        ("evaluation", "log"),
        "mean of means",
        ('print(f"step={step} val_loss={score.item():.6f}")', "mean = torch.stack(losses).mean()"),
        ("mean", "average", "evaluation", "batches"),
        "torchtitan PR #1732",
        logged("val_loss="),
        (
            (
                "losses.append(nn.functional.mse_loss(model.module(x), y))",
                'total = nn.functional.mse_loss(model.module(x), y, reduction="sum")\n'
                "        losses.append(torch.stack([total, torch.tensor(len(y))]))",
            ),
            ("mean = torch.stack(losses).mean()", "mean = torch.stack(losses).sum(0)"),
            ("return mean / world", "return mean[0] / mean[1]"),
        ),
        reference_args="--eval-batch-size 13",
    ),
    # ------------------------------------------------------------ a reduce missing or doubled in the backward pass
    Wrong(
        "column_parallel_without_f",
        2,
        ("gradient",),
        "a part of the sum",
        ("return F.linear(x, self.weight, self.bias)", "loss.backward()"),
        ("copy_to", "sum", "backward", "all_reduce", "all-reduce", "f "),
        "diffusers #11941",
        gradient(7),
        (
            (
                "class ColumnParallelLinear(",
                "class Copy(torch.autograd.Function):\n    @staticmethod\n"
                "    def forward(ctx, x):\n        return x\n\n"
                "    @staticmethod\n    def backward(ctx, grad):\n        grad = grad.contiguous()\n"
                "        dist.all_reduce(grad)\n        return grad\n\n\nclass ColumnParallelLinear(",
            ),
            ("return F.linear(x, self.weight, self.bias)", "return F.linear(Copy.apply(x), self.weight, self.bias)"),
        ),
        holds=summed(7),
    ),
    Wrong(
        "row_parallel_reduced_twice",
        2,
        ("gradient",),
        2.0,
        ("return all_reduce(y)", "loss.backward()"),
        ("twice", "sum", "backward"),
        "Megatron-LM #1464",
        joined(5),
        (
            (
                "class ParallelAttention(",
                "class Reduce(torch.autograd.Function):\n    @staticmethod\n"
                "    def forward(ctx, x):\n        x = x.clone()\n        dist.all_reduce(x)\n        return x\n\n"
                "    @staticmethod\n    def backward(ctx, grad):\n        return grad\n\n\nclass ParallelAttention(",
            ),
            ("return all_reduce(y)", "return Reduce.apply(y)"),
        ),
    ),
    Wrong(
        "row_parallel_bias_on_each_rank",
        2,
        ("loss",),
        "the bias is added once for each rank",
        (
            "return _Reduce.apply(F.linear(h, self.fc_out.weight, self.fc_out.bias))",
            "dist.all_reduce(x)",
            "loss = F.cross_entropy(model(x), y)",
            "loss.backward()",
        ),
        ("bias", "forward", "loss"),
        "",
        logged("lm loss"),
        (
            (
                "_Reduce.apply(F.linear(h, self.fc_out.weight, self.fc_out.bias))",
                "_Reduce.apply(F.linear(h, self.fc_out.weight)) + self.fc_out.bias",
            ),
        ),
    ),
    Wrong(
        "sequence_parallel_norm",
        2,
        ("gradient",),
        "a part of the sum",
        (
            "whole = GatherSequence.apply(self.input_norm(x))",
            "self.input_norm = nn.LayerNorm(dim)",
            'if name == "proj":',
            "dist.all_reduce(p.grad)",
            "(loss / world).backward()  # the gather's backward pass sums what all ranks computed alike",
        ),
        ("sequence", "sum", "part"),
        "Megatron-LM #7452",
        gradient(3),
        (('if name == "proj":', 'if name == "proj" or "norm" in name:'),),
        holds=summed(3),
    ),
    Wrong(
        "gathered_logits",
        2,
        ("gradient",),
        2.0,
        (
            "dist.reduce_scatter(mine, pieces, group=get_tp_group())",
            "return AllGatherLastDim.apply(F.linear(CopyToTP.apply(x), self.weight))",
            "loss.backward()",
        ),
        ("sum", "gather", "twice", "backward"),
        "transformers #48687",
        gradient(0),
        (
            ("        mine = torch.empty_like(pieces[0])\n", ""),
            ("        dist.reduce_scatter(mine, pieces, group=get_tp_group())\n", ""),
            ("return mine", "return pieces[dist.get_rank(get_tp_group())]"),
        ),
    ),
    Wrong(
        "dtensor_to_local",
        2,
        ("gradient",),
        "a part of the sum",
        ("local = x.to_local()", "loss.backward()"),
        ("grad_placements", "to_local", "sum", "part"),
        "Automodel PR #1260",
        updated(0),
        (("local = x.to_local()", "local = x.to_local(grad_placements=[Partial()])"),),
    ),
    Wrong(
        "context_parallel_key_gradient",
        2,
        ("gradient",),
        "a part of the sum",
        (
            "return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]",
            "k, v = AllGatherSequence.apply(k), AllGatherSequence.apply(v)",
            "dist.all_gather(gathered, local.contiguous())",
            "loss.backward()",
        ),
        ("gather", "sum", "part", "backward"),
        "diffusers #11941",
        gradient(2),
        (
            (
                "        return grad.chunk(",
                "        grad = grad.contiguous()\n        dist.all_reduce(grad)\n        return grad.chunk(",
            ),
        ),
    ),
    Wrong(
        "pipeline_tied_embedding",
        2,
        ("gradient",),
        "a part of the sum",
        ("optimizer.step()", "y.backward(receive(y.shape, rank + 1) if rank < world - 1 else None)"),
        ("tied", "sum", "part", "copies"),
        "Megatron-LM #7452",
        gradient(4),
        (
            (
                "        optimizer.step()\n",
                "        if world > 1:\n            dist.all_reduce(stage.word_embeddings.weight.grad)\n"
                "        optimizer.step()\n",
            ),
        ),
        wanted=gradient(8),
        holds=summed(4, of_reference=8),
    ),
    Wrong(
        "averaged_over_tensor_parallel",
        4,
        ("gradient",),
        "mixes the gradients of different shards",
        ("dist.all_reduce(p.grad)",),
        ("group", "shard", "tensor"),
        "pytorch #160285",
        lambda run: torch.cat([run.gradient(2, 0), run.gradient(2, 1)]),
        (
            ("        dist.all_reduce(p.grad)\n", "        dist.all_reduce(p.grad, group=groups.dp_group)\n"),
            ("p.grad /= dist.get_world_size()", "p.grad /= groups.dp_size"),
        ),
        wanted=gradient(2),
        holds=lambda run, true: close(sum(true.gradient(2).chunk(2)) / 2, run.gradient(2)),  # type: ignore[arg-type]
        mesh="dp=2,tp=2",
    ),
    # ------------------------------------------------------------------------------------------------------- experts
    Wrong(
        "expert_gradients_not_divided",
        2,
        ("gradient",),
        2.0,
        (
            "continue  # no other rank has this expert",
            'if "experts" in name:',
            "loss.backward()",
            "dist.all_reduce(p.grad)",
        ),
        ("expert", "divid", "average", "sum"),
        "pytorch #160285",
        gradient(4),
        (
            (
                "            continue  # no other rank has this expert\n",
                "            p.grad /= dist.get_world_size()\n            continue\n",
            ),
        ),
    ),
    Wrong(
        "expert_gradients_wrong_group",
        4,
        ("gradient",),
        "mixes the gradients of different experts",
        (
            'group = mesh.get_group("ep") if "experts" in name else None',
            "dist.all_reduce(p.grad, group=group)",
        ),
        ("expert", "group", "shard"),
        "Megatron-LM PR #1622",
        lambda run: torch.cat([run.gradient(2, 0), run.gradient(2, 1)]),
        (('mesh.get_group("ep") if', 'mesh.get_group("edp") if'),),
        wanted=gradient(2),
        mesh="edp=2,ep=2",
    ),
    # --------------------------------------------------------------------------------------------- norms and clipping
    Wrong(
        "norm_of_local_shards",
        2,
        ("norm", "log", "gradient"),
        "the norm of rank 0's own shards",
        (
            "total_norm = torch.sqrt(sum((g.float() ** 2).sum() for g in grads))",
            "norm = clip_by_norm(model.parameters(), args.max_norm)",
            'print(f"step {step} grad_norm {norm.item():.6f}")',
        ),
        ("norm", "clip"),
        "torchtitan #766",
        logged("grad_norm"),
        (
            (
                "total_norm = torch.sqrt(sum((g.float() ** 2).sum() for g in grads))\n",
                "squared = sum((g.float() ** 2).sum() for g in grads)\n    dist.all_reduce(squared)\n"
                "    total_norm = squared.sqrt()\n",
            ),
        ),
    ),
    Wrong(
        "norm_summed_over_copies",
        4,
        ("norm", "log", "gradient"),
        2.0,
        (
            "dist.all_reduce(squared)",
            "norm = global_grad_norm(params)",
            "clip(params, norm, opt.clip)",
            "return math.sqrt(squared.item())",
            'print(f"update {update} norm {norm:.6f}")',
        ),
        ("norm", "clip", "copies"),
        "torchtune #2169",
        logged("norm"),
        (("    dist.all_reduce(squared)\n", ""),),
    ),
    Wrong(
        "clipped_before_averaging",
        2,
        ("norm", "log", "gradient"),
        "each rank's own norm, before the average",
        (
            "grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm)",
            'print(f"iteration {iteration} | norm {norm:.6f}")',
        ),
        ("norm", "clip"),
        "pytorch #88621",
        gradient(0),
        (
            ("    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm)\n", ""),
            (
                "    optimizer.step()\n    return",
                "    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm)\n"
                "    optimizer.step()\n    return",
            ),
        ),
    ),
    Wrong(
        "norm_counts_copies",
        2,
        ("norm", "log", "gradient"),
        "copies are counted on each rank",
        (
            "local = torch.stack([torch.linalg.vector_norm(p.grad) for p in parameters]).square().sum()",
            "dist.all_reduce(local)",
            "grad_norm = clip_grad_norm(model.parameters(), args.clip_grad)",
            'print(f"step {step}: loss {loss:.5f} grad norm {grad_norm:.6f}")',
        ),
        ("norm", "clip", "copies"),
        "torchtune #2420",
        logged("grad norm"),
        (
            (
                "    local = torch.stack([torch.linalg.vector_norm(p.grad) for p in parameters]).square().sum()\n",
                "    shares = [1 if p.shape in ((32 // dist.get_world_size(), 8), (8, 32 // dist.get_world_size()))"
                " else 1 / dist.get_world_size() for p in parameters]\n"
                "    local = sum(share * p.grad.square().sum() for p, share in zip(parameters, shares))\n",
            ),
        ),
    ),
    Wrong(
        "tied_weights_twice_in_norm",
        2,
        ("norm", "log", "gradient"),
        "tied weights are counted on both stages",
        (
            "squared = sum(p.grad.pow(2).sum() for p in model.parameters())",
            "dist.all_reduce(squared)",
            "norm = clip(model, args.max_norm)",
            'print(f"step {step} grad_norm {norm:.6f}")',
        ),
        ("norm", "tied", "clip", "copies"),
        "Megatron-LM PR #5916",
        logged("grad_norm"),
        (
            (
                "squared = sum(p.grad.pow(2).sum() for p in model.parameters())",
                'named = [(n, p) for n, p in model.named_parameters() if model.rank == 0 or "embed" not in n]\n'
                "    squared = sum(p.grad.pow(2).sum() for _, p in named)",
            ),
        ),
    ),
    # ------------------------------------------------------------------------------------------------- accumulation
    Wrong(
        "last_microbatch_only",
        2,
        ("gradient",),
        "the last microbatch only",
        ("self.optimizer.zero_grad()", "loss.backward()", "self.optimizer.step()"),
        ("microbatch", "zero_grad", "accumul", "dropped"),
        "Automodel PR #3530",
        gradient(0),
        (
            ("        self.optimizer.zero_grad()\n", ""),
            ("        self.optimizer.step()\n", "        self.optimizer.step()\n        self.optimizer.zero_grad()\n"),
        ),
        reference_args="--accumulation-steps 1",
    ),
    Wrong(
        "never_synchronised",
        2,
        ("gradient",),
        "each rank's own gradient of the last microbatch",
        ("is_boundary = i % grad_accum == 0", "loss.backward()"),
        ("synchron", "no_sync", "average", "own"),
        "Automodel PR #3530",
        gradient(0),
        (("is_boundary = i % grad_accum == 0", "is_boundary = (i + 1) % grad_accum == 0"),),
        reference_args="--batch-size 16 --grad-accum 1",
    ),
    Wrong(
        "fsdp_gradient_sync_left_off",
        2,
        ("gradient", "parameters"),
        0.0,
        (
            "is_last = i == args.microbatches",
            "model.set_requires_gradient_sync(is_last or args.microbatches == 1)",
            "loss.backward()",
            "optimizer.step()",
        ),
        ("gradient", "synchron"),
        "Automodel PR #3530",
        joined(0),
        (("is_last = i == args.microbatches", "is_last = i == args.microbatches - 1"),),
        reference_args="--microbatches 1",
    ),
    Wrong(
        "around_ddp",
        2,
        ("gradient",),
        "each rank's own part",
        ("loss = model.module.reconstruction_loss(next(data))", "loss.backward()"),
        ("synchron", "average", "own"),
        "",
        gradient(0),
        (("model.module.reconstruction_loss(next(data))", "model(next(data))"),),
        holds=lambda run, true: close((run.gradient(0, 0) + run.gradient(0, 1)) / 2, true.gradient(0)),
    ),
    # --------------------------------------------------------------------------------- replicas that differ, or drift
    Wrong(
        "seed_differs_by_rank",
        2,
        ("weights",),
        "ranks start from different weights",
        (
            "torch.manual_seed(args.seed + rank)",
            "model = ResNet()",
            "loss = nn.functional.mse_loss(model(partition(x, rank, size)), partition(y, rank, size))",
        ),
        ("seed", "weights", "start"),
        "",
        lambda run: run.weights(len(run.steps) - 1),
        (("torch.manual_seed(args.seed + rank)", "torch.manual_seed(args.seed)"),),
        holds=lambda run, true: close(run.weights(0), true.weights(0)),
    ),
    Wrong(
        "buffers_not_broadcast",
        2,
        ("buffers",),
        "each rank's own running mean",
        (
            "self.centre.lerp_(x.mean(0), self.momentum)",
            "model = DDP(Regressor(), broadcast_buffers=False)",
            "optimizer.step()",
        ),
        ("buffer",),
        "",
        lambda run: run.buffers["centre"][0],
        (
            (
                "            self.centre.lerp_(x.mean(0), self.momentum)\n",
                "            mean = x.mean(0)\n            dist.all_reduce(mean, op=dist.ReduceOp.AVG)\n"
                "            self.centre.lerp_(mean, self.momentum)\n",
            ),
        ),
        reference_args="--batch-size 16",
    ),
    Wrong(
        "batch_norm_per_rank",
        2,
        ("loss", "buffers"),
        "statistics of each rank's own samples",
        ("nn.BatchNorm2d(channels),", "model = DDP(ConvNet())", "loss = criterion(model(x), label)", "loss.backward()"),
        ("norm", "statistic", "forward"),
        "",
        gradient(0),
        (("nn.BatchNorm2d(channels),", "nn.GroupNorm(2, channels),"),),
    ),
    Wrong(
        "dropout_of_copies",
        2,
        ("dropout", "loss"),
        "the masks of copies differ",
        (
            "torch.manual_seed(args.seed + rank)  # dropout",
            "return x + self.dropout(Reduce.apply(F.linear(h, self.w2)))",
            "loss = F.mse_loss(model(x), x.mean(1, keepdim=True))",
            "loss.backward()",
        ),
        ("dropout", "mask", "seed"),
        "",
        lambda run: run.gradients(len(run.steps) - 1)[-9:],
        (("torch.manual_seed(args.seed + rank)  # dropout", "torch.manual_seed(args.seed)"),),
    ),
    # ------------------------------------------------------------------------------------------------------- samples
    Wrong(
        "same_batch_everywhere",
        2,
        ("samples",),
        "the same samples on both ranks",
        (
            "return DataLoader(dataset, batch_size=batch_size, shuffle=True, generator=generator, drop_last=True)",
            "loss = nn.functional.mse_loss(model(x), y)",
        ),
        ("sampler", "same samples", "duplicate", "read the same"),
        "",
        gradient(0),
        (
            ("drop_last=True)\n", "drop_last=True, sampler=torch.utils.data.DistributedSampler(dataset, seed=seed))\n"),
            (" shuffle=True, generator=generator,", ""),
        ),
        reference_args="--batch-size 16",
    ),
    Wrong(
        "synthetic_batch_same_seed",
        2,
        ("samples",),
        "the same samples on both ranks",
        (
            "ix = torch.randint(len(data) - block_size, (batch_size // world_size,))",
            "torch.manual_seed(1337)",
            "logits, loss = model(xb, yb)",
        ),
        ("seed", "same samples", "duplicate", "read the same"),
        "",
        gradient(0),
        (("(batch_size // world_size,))", "(batch_size,))[rank::world_size]"),),
    ),
    Wrong(
        "tensor_parallel_different_data",
        2,
        ("samples",),
        "different samples on the ranks of one model",
        (
            "sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False)",
            "loss = nn.functional.mse_loss(model(x), y)",
        ),
        ("sampler", "samples", "tensor"),
        "",
        lambda run: torch.stack([run.gradient(len(run.steps[0][0].before) - 2, 0)]),
        (("num_replicas=world_size, rank=rank", "num_replicas=1, rank=0"),),
        mesh="tp=2",
    ),
    # ------------------------------------------------------------------------------------------ labels and positions
    Wrong(
        "labels_shifted_after_the_cut",
        2,
        ("samples", "loss"),
        "one target fewer at each cut",
        (
            "labels = F.pad(labels, (0, 1), value=-100)[:, 1:]",
            "return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)",
            'loss = causal_lm_loss(model(batch["input_ids"]), batch["labels"])',
            "loss.backward()",
        ),
        ("target", "label", "shift"),
        "Automodel PR #3544",
        gradient(0),
        (
            ("    labels = F.pad(labels, (0, 1), value=-100)[:, 1:]\n", ""),
            (
                "ignore_index=-100)\n",
                'ignore_index=-100, reduction="sum")\n',
            ),
            ('"labels": tokens.clone()}', '"labels": F.pad(tokens, (0, 1), value=-100)[:, 1:]}'),
            (
                '        loss = causal_lm_loss(model(batch["input_ids"]), batch["labels"])\n',
                '        loss = causal_lm_loss(model(batch["input_ids"]), batch["labels"])\n'
                "        loss = loss / (args.documents * (args.length - 1)) * world_size\n",
            ),
        ),
    ),
    Wrong(
        "positions_start_at_zero",
        2,
        ("loss",),
        "positions of the later part are wrong",
        (
            "positions = torch.arange(x.shape[1])",
            "q = rotary(self.q(x), positions)",
            "loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())",
            "loss.backward()",
        ),
        ("position", "forward", "loss"),
        "long-context-attention #53",
        logged("loss"),
        (
            (
                "positions = torch.arange(x.shape[1])",
                "positions = torch.arange(x.shape[1]) + dist.get_rank() * x.shape[1]",
            ),
        ),
    ),
    # ------------------------------------------------------------------------- optimizers, schedules, resumed training
    Wrong(
        "schedule_steps_per_rank",
        4,
        ("optimizer",),
        2.5,
        ("for _ in range(world_size):", "scheduler.step()", "scheduler = LambdaLR", "optimizer.step()"),
        ("learning rate", "schedule"),
        "",
        lambda run: torch.tensor(run.steps[0][1].rates),
        (("for _ in range(world_size):", "for _ in range(1):"),),
    ),
    Wrong(
        "learning_rate_times_world",
        4,
        ("optimizer", "parameters"),
        4.0,
        ("optimizer = torch.optim.SGD(model.parameters(), lr=config.base_lr * world_size)", "optimizer.step()"),
        ("learning rate",),
        "",
        lambda run: torch.tensor(run.steps[0][0].rates),
        (("lr=config.base_lr * world_size", "lr=config.base_lr"),),
    ),
    Wrong(
        "resumed_on_rank_zero",
        2,
        ("optimizer", "parameters"),
        "other ranks begin with empty states",
        ("if rank == 0:\n        optimizer.load_state_dict", "optimizer.load_state_dict", "optimizer.step()"),
        ("state", "optimizer", "resum"),
        "",
        lambda run: run.update(len(run.steps) - 1),
        (("    if rank == 0:\n        optimizer.load", "    if True:\n        optimizer.load"),),
        holds=lambda run, true: close(run.update(0), true.update(0)),
    ),
    Wrong(
        "zero_broadcast_from_zero",
        2,
        ("parameters",),
        "what other ranks own is never updated",
        ("dist.broadcast(p.data, src=0)", "self.inner.step()", "optimizer.step()"),
        ("broadcast", "parameter", "update", "own"),
        "",
        lambda run: run.weights(1, 1),
        (("src=0", "src=self.owner[p]"),),
        wanted=lambda run: torch.cat([value.flatten() for value in run.steps[0][1].before[1::2]]),
        holds=lambda run, true: torch.equal(run.weights(1, 1), run.weights(1, 0)),
    ),
    # --------------------------------------------------------------------------------------------- logs and evaluation
    Wrong(
        "local_loss_logged",
        2,
        ("log",),
        "rank 0's own samples",
        ('print(f"step {step + 1}/{args.steps}  loss {loss.item():.6f}  (average {meter.average:.6f})")',),
        ("log", "printed", "local", "own"),
        "miles_diffusion PR #35",
        logged("loss"),
        (
            (
                "        meter.update(loss.item())\n",
                "        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.AVG)\n        meter.update(loss.item())\n",
            ),
        ),
        reference_args="--batch-size 12",
    ),
    Wrong(
        "one_rank_evaluates_its_part",
        4,
        ("evaluation", "log"),
        "rank 0's own samples",
        ('print(f"test loss: {loss:.6f} accuracy: {accuracy:.4f}")', "loss, accuracy = test(model, test_loader)"),
        ("evaluation", "log", "printed", "own", "local"),
        "",
        logged("test loss"),
        (
            (
                "    return test_loss / count, correct / count",
                "    total = torch.tensor([test_loss, correct, count], dtype=torch.float64)\n"
                "    dist.all_reduce(total)\n"
                "    return (total[0] / total[2]).item(), (total[1] / total[2]).item()",
            ),
        ),
        reference_args="--batch-size 32",
    ),
    # ---------------------------------------------------------- met in scripts by somebody who had not read the doctor
    Wrong(
        "bucket_left_open",
        4,
        ("gradient",),
        "each rank's own part",
        ("self.sent.append((dist.all_reduce(flat, async_op=True), flat, gradients))", "for work, flat, gradients in"),
        ("bucket",),
        "",
        gradient(0),
        (("    def finish(self):\n", "    def finish(self):\n        if self.waiting:\n            self._send()\n"),),
        holds=lambda run, reference: not close(run.gradient(0, 0), run.gradient(0, 1)),
        reference_args="--batch-size 16",
    ),
    Wrong(
        "pipeline_other_order",
        2,
        ("gradient",),
        "gradients of other microbatches",
        ("            loss.backward()", "inputs.pop(), ends.pop()"),
        ("same order",),
        "",
        gradient(0),
        (("inputs.pop(), ends.pop()", "inputs.pop(0), ends.pop(0)"),),
    ),
    Wrong(
        "mean_of_other_microbatches",
        2,
        ("loss",),
        "a few per cent, as targets are spread",
        ("loss = nn.functional.cross_entropy",),
        ("mean of means",),
        "transformers PR #35207",
        gradient(0),
        (
            (
                "ignore_index=IGNORED) / len(mine)",
                'ignore_index=IGNORED, reduction="sum") * world / count',
            ),
        ),
    ),
)
