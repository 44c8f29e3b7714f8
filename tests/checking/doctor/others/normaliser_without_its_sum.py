"""Distillation into a student whose output layer is cut over the vocabulary."""

import torch
import torch.distributed as dist
import torch.nn as nn

from tests.checking.doctor.regions import Copy, Reduce


class SumBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


def log_softmax(logits):
    top = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    z = logits - top
    return z - Reduce.apply(z.exp().sum(-1, keepdim=True)).log()


def distill(student_logits, teacher_logits, temperature=2.0):
    s = log_softmax(student_logits / temperature)
    t = log_softmax(teacher_logits / temperature)
    kl = Reduce.apply((t.exp() * (t - s)).sum(-1))
    return temperature**2 * kl.mean()


dist.init_process_group("gloo")
tp, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
teacher_trunk = nn.Linear(5, 16).requires_grad_(False)
teacher_head = torch.randn(14, 16).chunk(tp)[rank]
student_trunk = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
student_head = nn.Parameter((torch.randn(14, 8) / 2).chunk(tp)[rank].clone())
optimizer = torch.optim.SGD([*student_trunk.parameters(), student_head], lr=0.1, momentum=0.9)
gen = torch.Generator().manual_seed(6)
for _ in range(4):
    x = torch.randn(10, 5, generator=gen)
    with torch.no_grad():
        teacher = torch.tanh(teacher_trunk(x)) @ teacher_head.T
    student = Copy.apply(student_trunk(x)) @ student_head.T
    loss = distill(student, teacher)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
