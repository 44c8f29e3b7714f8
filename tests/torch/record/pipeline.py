"""A script without tplab: messages by torch's own pipeline schedule, and by each way to send."""
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
stage = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
device = torch.device("cpu")
schedule = Schedule1F1B(PipelineStage(stage, rank, 2, device), 4, loss_fn=lambda y, t: (y - t).square().mean())
x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
losses = []
if rank == 0:
    schedule.step(x)
else:
    schedule.step(target=torch.zeros(8, 6), losses=losses)

other = 1 - rank
y = torch.full((3,), float(rank))
if rank == 0:
    dist.send(y, 1, tag=7)
else:
    dist.recv(y, 0, tag=7)
z = torch.empty(2)
works = [dist.isend(torch.ones(2) * rank, other), dist.irecv(z, other)]
for work in works:
    work.wait()
w = torch.empty(5)
sends = [dist.P2POp(dist.isend, torch.arange(5.0), other), dist.P2POp(dist.irecv, w, other)]
for work in dist.batch_isend_irecv(sends):
    work.wait()
if rank == 1:
    dist.send(torch.ones(4), 0)
else:
    u = torch.empty(4)
    assert dist.recv(u) == 1

RESULT = [*losses, y, z, w, *(parameter.grad for parameter in stage.parameters())]
dist.destroy_process_group()
