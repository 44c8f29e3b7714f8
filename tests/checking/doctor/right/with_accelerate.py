"""accelerate: prepared model, optimizer, loader and schedule, accumulation, clipping, gathered metrics."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(accelerator, batch_size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 + 20, 5, generator=generator)
    y = x[:, :4].argmax(1)
    train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=batch_size, drop_last=True)
    return train, DataLoader(TensorDataset(x[64:], y[64:]), batch_size=batch_size)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--per_device_batch_size", type=int, default=4)
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--max_updates", type=int, default=2)
    args = parser.parse_args()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
    )
    set_seed(42)
    model = nn.Sequential(nn.Linear(5, 24), nn.GELU(), nn.Linear(24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train, test = get_dataloaders(accelerator, args.per_device_batch_size)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    updates, running = 0, []
    for x, y in train:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            running.append(accelerator.gather(loss.detach()).mean().item())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            updates += 1
            accelerator.print(f"update {updates} loss {sum(running) / len(running):.5f}")
            running = []
        if updates == args.max_updates:
            break
    model.eval()
    correct = total = 0
    for x, y in test:
        with torch.no_grad():
            predicted, truth = accelerator.gather_for_metrics((model(x).argmax(1), y))
        correct, total = correct + (predicted == truth).sum().item(), total + len(truth)
    accelerator.print(f"accuracy {correct / total:.5f} of {total}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
