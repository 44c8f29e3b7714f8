"""DINO: a student, a teacher that follows it, and the centre of the teacher's outputs."""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class DINOLoss(nn.Module):
    def __init__(self, dim, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("center", torch.zeros(1, dim))

    def forward(self, student, teacher):
        t = F.softmax((teacher - self.center) / 0.07, -1).detach()
        loss = -(t * F.log_softmax(student / 0.1, -1)).sum(-1).mean()
        self.update_center(teacher)
        return loss

    @torch.no_grad()
    def update_center(self, teacher):
        batch_center = teacher.sum(0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / len(teacher)
        self.center = self.center * self.momentum + batch_center * (1 - self.momentum)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(10, 12), nn.GELU(), nn.Linear(12, 6))
    teacher = copy.deepcopy(student).requires_grad_(False)
    ddp = nn.parallel.DistributedDataParallel(student)
    loss_fn = DINOLoss(6)
    opt = torch.optim.AdamW(ddp.parameters(), lr=5e-3, eps=1e-4)
    gen = torch.Generator().manual_seed(1)
    for _ in range(4):
        views = torch.randn(2, 8, 10, generator=gen)
        a, b = (v.chunk(world)[rank] for v in views)
        loss = loss_fn(ddp(a), teacher(b))
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for q, k in zip(student.parameters(), teacher.parameters()):
                k.mul_(0.9).add_(q, alpha=0.1)


if __name__ == "__main__":
    main()
