"""Experts on ranks, with a shared expert beside them (DeepSeek)."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from tests.checking.doctor.regions import Copy, Reduce


class MLP(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.a, self.b = nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x):
        return self.b(F.silu(self.a(x)))


class MoE(nn.Module):
    def __init__(self, d, experts):
        super().__init__()
        n, r = experts // dist.get_world_size(), dist.get_rank()
        everything = [MLP(d, 6) for _ in range(experts)]
        self.local = nn.ModuleDict({str(i): everything[i] for i in range(r * n, (r + 1) * n)})
        self.shared = MLP(d, 8)
        self.gate = nn.Linear(d, experts, bias=False)

    def forward(self, x):
        probs, index = self.gate(x).softmax(-1).topk(2, -1)
        xe, pe = Copy.apply(x), Copy.apply(probs)
        out = torch.zeros_like(x)
        for i, expert in self.local.items():
            w = (pe * (index == int(i))).sum(-1, keepdim=True)
            out = out + w * expert(xe)
        return Reduce.apply(out + self.shared(x))


dist.init_process_group("gloo")
torch.manual_seed(0)
inp, moe, head = nn.Linear(5, 8), MoE(8, 4), nn.Linear(8, 3)
params = [p for m in (inp, moe, head) for p in m.parameters()]
opt = torch.optim.SGD(params, lr=0.3)
gen = torch.Generator().manual_seed(2)
for _ in range(4):
    x, y = torch.randn(14, 5, generator=gen), torch.randint(3, (14,), generator=gen)
    h = inp(x)
    loss = F.cross_entropy(head(h + moe(h)), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
