"""A script without tplab: DistributedDataParallel, and collectives of every kind."""
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4)).double()
model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=1e-4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
for _ in range(4):
    optimizer.zero_grad()
    with model.no_sync():
        model(x[:4]).square().mean().backward()
    time.sleep(0.02 * rank)  # the others wait for this rank
    model(x[4:]).square().mean().backward()
    optimizer.step()

total = torch.arange(5.0) + rank
work = dist.all_reduce(total, async_op=True)
product = x @ x.T
work.wait()
several = [torch.full((3,), rank + 1.0), torch.full((4,), rank + 2.0)]
dist.all_reduce_coalesced(several)
pieces = [torch.empty(3) for _ in range(world)]
dist.all_gather(pieces, torch.full((3,), float(rank)))
sent = torch.arange(float(2 * world + 1))
splits = [[1, 2 * world] if world == 2 else [], [2 * world, 1] if world == 2 else []]
taken = [splits[other][rank] for other in range(world)]
received = torch.empty(sum(taken))
dist.all_to_all_single(received, sent, taken, splits[rank])
summed = torch.empty(3)
dist.reduce_scatter(summed, [torch.full((3,), float(place)) for place in range(world)])
dist.reduce(total, 1, op=dist.ReduceOp.MAX)
dist.broadcast(total, 1)
gathered = [torch.empty(2) for _ in range(world)] if rank == 0 else None
dist.gather(torch.full((2,), float(rank)), gathered)
dealt = torch.empty(2)
dist.scatter(dealt, [torch.full((2,), float(place)) for place in range(world)] if rank == 0 else None)
said = [None] * world
dist.all_gather_object(said, {"rank": rank})
pair = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(total, group=pair)
dist.barrier()

ERRORS = []
for wrong in (
    lambda: dist.all_gather(pieces[1:], total),
    lambda: dist.broadcast(total, world),
    lambda: dist.scatter(total, [total] * 3, src=rank),
    lambda: dist.all_reduce("x"),  # type: ignore[arg-type]
):
    try:
        wrong()
    except Exception as error:
        ERRORS.append(f"{type(error)} {error}")
dist.barrier()

RESULT = [*model.parameters(), total, *several, *pieces, received, summed, dealt, product]
dist.destroy_process_group()
