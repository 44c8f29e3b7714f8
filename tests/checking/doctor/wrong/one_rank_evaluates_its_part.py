"""DDP classifier; rank 0 prints the accuracy of its own part of the test set as if it were that of the whole."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)


def dataset(num, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 12, generator=gen)
    return TensorDataset(x, x[:, :4].argmax(1))


def train_one_epoch(model, loader, optimizer, limit):
    model.train()
    for i, (x, y) in enumerate(loader):
        if i == limit:
            break
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    correct = count = 0
    test_loss = 0.0
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            test_loss += F.cross_entropy(out, y, reduction="sum").item()
            correct += (out.argmax(1) == y).sum().item()
            count += len(y)
    return test_loss / count, correct / count


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = DDP(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    train_set, test_set = dataset(128, 0), dataset(64, 1)
    train_loader = DataLoader(train_set, args.batch_size, sampler=DistributedSampler(train_set, shuffle=False))
    test_loader = DataLoader(test_set, 16, sampler=DistributedSampler(test_set, shuffle=False))
    train_one_epoch(model, train_loader, optimizer, limit=3)
    loss, accuracy = test(model, test_loader)
    if dist.get_rank() == 0:
        print(f"test loss: {loss:.6f} accuracy: {accuracy:.4f}")
    dist.destroy_process_group()
