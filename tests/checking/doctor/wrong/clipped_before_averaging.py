"""Hand-made data parallelism that clips each rank's own gradient, and only then averages."""

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)


class Policy(nn.Module):
    def __init__(self, obs=6, actions=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, 20), nn.ReLU(), nn.Linear(20, actions))

    def log_prob(self, obs, action):
        return torch.log_softmax(self.net(obs), dim=1).gather(1, action[:, None]).squeeze(1)


def rollouts(iteration, count):
    """The same games on each machine; the caller takes its share."""
    g = torch.Generator().manual_seed(iteration)
    obs = torch.randn(count, 6, generator=g)
    action = torch.randint(0, 4, (count,), generator=g)
    reward = obs.gather(1, action[:, None]).squeeze(1) * 5
    return obs, action, reward


def update(policy, optimizer, obs, action, reward, max_norm):
    loss = -(policy.log_prob(obs, action) * reward).mean()
    optimizer.zero_grad()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    for p in policy.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
    return grad_norm


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--games", type=int, default=24)
    parser.add_argument("--max-norm", type=float, default=0.5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(4)
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    for iteration in range(args.iterations):
        obs, action, reward = rollouts(iteration, args.games)
        share = slice(dist.get_rank(), None, dist.get_world_size())
        norm = update(policy, optimizer, obs[share], action[share], reward[share], args.max_norm)
        if dist.get_rank() == 0:
            print(f"iteration {iteration} | norm {norm:.6f}")
    dist.destroy_process_group()
