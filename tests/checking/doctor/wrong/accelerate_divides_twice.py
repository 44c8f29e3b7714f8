"""accelerate with gradient accumulation; accelerator.backward divides by the microbatches, and so does the script."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_dataloader(batch_size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 9, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > x[:, 1]).long()), batch_size=batch_size)


def training_function(args):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    model = nn.Sequential(nn.Linear(9, 18), nn.Tanh(), nn.Linear(18, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, get_dataloader(args.batch_size))

    model.train()
    updates = 0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            loss = loss / args.gradient_accumulation_steps
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            updates += 1
            accelerator.print(f"update {updates}")
        if updates == args.max_updates:
            break
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--max_updates", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
