"""PPO: advantages whitened over all ranks."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def whiten(adv):
    world = dist.get_world_size()
    mean = adv.mean()
    dist.all_reduce(mean)
    mean /= world
    var = adv.var(unbiased=False)
    dist.all_reduce(var)
    var /= world
    return (adv - mean) * torch.rsqrt(var + 1e-8)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, obs, act):
        return self.net(obs).log_softmax(-1).gather(-1, act[:, None]).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    policy = DDP(Policy())
    opt = torch.optim.Adam(policy.parameters(), lr=3e-3, eps=1e-5)
    gen = torch.Generator().manual_seed(31)
    for _ in range(4):
        obs, act = torch.randn(16, 6, generator=gen), torch.randint(4, (16,), generator=gen)
        adv = torch.randn(16, generator=gen) + 2 * torch.arange(16).div(8, rounding_mode="floor")
        n = 16 // world
        obs, act, adv = (t[rank * n : (rank + 1) * n] for t in (obs, act, adv))
        logp = policy(obs, act)
        ratio = torch.exp(logp - logp.detach())
        a = whiten(adv)
        loss = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


main()
