"""A GPT on tplab's own layers over data, pipeline and tensor parallelism, states divided as ZeRO 0 to 3 say."""

import argparse
from functools import partial

import torch

from tplab.models.gpt import GPTConfig, gpt_state
from tplab.schedules import one_f_one_b
from tplab.torch import (
    average_gradients,
    axis_index,
    axis_size,
    gpt_layers,
    shard_gradients,
    shard_optimizer,
    shard_parameters,
    split_batch,
    stages_of,
    train_batch,
    vocab_parallel_cross_entropy,
)
from tplab.torch.training.gpt_stages import load_whole


def optimizer_of(stages, zero):
    """SGD with momentum over what this rank holds."""
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    if zero in (1, 2):
        return (shard_optimizer, shard_gradients)[zero - 1](sgd, stages.parameters(), "dp")
    if zero == 3:
        for module in stages.values():
            shard_parameters(module, "dp")
    return sgd(stages.parameters())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    config = GPTConfig(vocab_size=24, width=16, num_heads=2, num_layers=2, context=8)
    schedule = one_f_one_b(ranks=axis_size("pp"), microbatches=args.microbatches)
    stages = stages_of(gpt_layers(config, sequence_parallel=args.sequence_parallel, data_axis="dp"), schedule)
    load_whole(stages, config, gpt_state(config, 0))
    optimizer = optimizer_of(stages, args.zero)

    def loss_fn(logits, targets):
        return vocab_parallel_cross_entropy(logits, targets, "tp", config.vocab_size)

    for step in range(args.steps):
        tokens = torch.randint(0, 24, (args.batch, 9), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(axis_size("dp"))[axis_index("dp")]
        batches = split_batch(mine[:, :-1], mine[:, 1:], args.microbatches)
        loss = train_batch(schedule, stages, batches, loss_fn, data_axis="dp", average=False)
        if args.zero == 0:
            average_gradients(stages, "dp")
        optimizer.step()
        optimizer.zero_grad()
        if axis_index("dp") == axis_index("pp") == axis_index("tp") == 0:
            print(f"step {step} loss {float(loss):.5f}")


if __name__ == "__main__":
    main()
