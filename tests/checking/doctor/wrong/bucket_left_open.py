"""A data parallelism of one's own: hooks fill flat buckets, and each is sent when it is full. The last one never is."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class Buckets:
    """Averages gradients over ranks while the backward pass goes on."""

    def __init__(self, module, bucket_bytes=8000):
        self.bucket_bytes, self.waiting, self.sent = bucket_bytes, [], []
        for p in module.parameters():
            dist.broadcast(p.data, 0)
            p.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, p):
        self.waiting.append(p)
        if sum(q.numel() * q.element_size() for q in self.waiting) >= self.bucket_bytes:
            self._send()

    def _send(self):
        gradients = [p.grad for p in self.waiting]
        flat = _flatten_dense_tensors(gradients) / dist.get_world_size()
        self.sent.append((dist.all_reduce(flat, async_op=True), flat, gradients))
        self.waiting = []

    def finish(self):
        for work, flat, gradients in self.sent:
            work.wait()
            for gradient, mean in zip(gradients, _unflatten_dense_tensors(flat, gradients)):
                gradient.copy_(mean)
        self.waiting, self.sent = [], []


parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 5)]
model = nn.Sequential(*layers)
buckets = Buckets(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
generator = torch.Generator().manual_seed(3)
x, y = torch.randn(64, 12, generator=generator), torch.randint(0, 5, (64,), generator=generator)
data = torch.utils.data.TensorDataset(x, y)
sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
for inputs, targets in torch.utils.data.DataLoader(data, args.batch_size, sampler=sampler):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    buckets.finish()
    optimizer.step()
    dist.all_reduce(shown := loss.detach().clone(), op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"loss {shown.item():.5f}")
