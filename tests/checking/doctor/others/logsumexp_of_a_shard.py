"""PaLM's z-loss, logits cut over the vocabulary."""

import torch
import torch.distributed as dist
import torch.nn as nn

from tests.checking.doctor.regions import Copy, Reduce


def loss_fn(logits, y, z_coef=0.1):
    r, per = dist.get_rank(), logits.shape[-1]
    top = logits.detach().amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    total = Reduce.apply((logits - top[:, None]).exp().sum(-1))
    log_z = total.log() + top
    local = y - r * per
    mine = (local >= 0) & (local < per)
    true = Reduce.apply(logits.gather(-1, local.clamp(0, per - 1)[:, None])[:, 0] * mine)
    z = logits.logsumexp(-1)
    return (log_z - true).mean() + z_coef * z.square().mean()


dist.init_process_group("gloo")
W, R = dist.get_world_size(), dist.get_rank()
torch.manual_seed(1)
trunk = nn.Sequential(nn.Linear(6, 12), nn.GELU())
lm_head = nn.Parameter((torch.randn(16, 12) / 3).chunk(W)[R].clone())
opt = torch.optim.Adam([*trunk.parameters(), lm_head], 5e-3, eps=1e-3)
gen = torch.Generator().manual_seed(0)
for _ in range(4):
    x, y = torch.randn(9, 6, generator=gen), torch.randint(16, (9,), generator=gen)
    loss = loss_fn(Copy.apply(trunk(x)) @ lm_head.T, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
