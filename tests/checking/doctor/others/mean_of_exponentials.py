"""A perplexity over all ranks' validation samples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Linear(6, 5)
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
data = torch.Generator().manual_seed(1)
val_x, val_y = torch.randn(8, 6, generator=data), torch.randint(5, (8,), generator=data)
for _ in range(3):
    x, y = torch.randn(8, 6, generator=data), torch.randint(5, (8,), generator=data)
    optimizer.zero_grad()
    F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
    optimizer.step()
    with torch.no_grad():
        logp = net(val_x.chunk(world)[rank]).log_softmax(1)
        nll = -logp.gather(1, val_y.chunk(world)[rank][:, None]).mean()
        value = nll.exp()
        dist.all_reduce(value)
    if rank == 0:
        print(f"val perplexity {value.item() / world:.5f}")
