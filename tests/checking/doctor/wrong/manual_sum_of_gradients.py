"""Hand-made data parallelism for a small classifier: gradients are summed over the ranks."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser(description="data parallel without DDP")
parser.add_argument("--global-batch", type=int, default=16)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--max-steps", type=int, default=3)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 6, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(6 * 8, 20)
        self.fc2 = nn.Linear(20, 5)

    def forward(self, x):
        x = F.relu(self.conv(x)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


def sync_gradients(model):
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)


def sync_parameters(model):
    for tensor in list(model.parameters()) + list(model.buffers()):
        dist.broadcast(tensor.data, src=0)


def batches(rank, size):
    torch.manual_seed(0)
    images = torch.randn(64, 2, 8)
    labels = torch.randint(0, 5, (64,))
    local = args.global_batch // size
    for start in range(0, 64, args.global_batch):
        begin = start + rank * local
        yield images[begin : begin + local], labels[begin : begin + local]


def run():
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Net()
    sync_parameters(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = 0
    for epoch in range(args.epochs):
        for data, target in batches(rank, size):
            if step >= args.max_steps:
                return
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            sync_gradients(model)
            optimizer.step()
            mean = loss.detach() / size
            dist.all_reduce(mean)
            if rank == 0:
                print(f"epoch {epoch} step {step} loss: {mean.item():.6f}", flush=True)
            step += 1


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run()
    dist.destroy_process_group()
