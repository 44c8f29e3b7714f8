"""Label smoothing in a vocabulary-parallel cross entropy, after Megatron's."""

import torch
import torch.distributed as dist
import torch.nn as nn

from tests.checking.doctor.regions import Copy, Reduce


def parallel_cross_entropy(logits, target, vocab, smoothing=0.1):
    tp, r = dist.get_world_size(), dist.get_rank()
    per = vocab // tp
    m = logits.detach().amax(-1)
    dist.all_reduce(m, op=dist.ReduceOp.MAX)
    z = logits - m[..., None]
    lse = Reduce.apply(z.exp().sum(-1)).log()
    t = target - r * per
    hit = (t >= 0) & (t < per)
    chosen = Reduce.apply(torch.where(hit, z.gather(-1, t.clamp(0, per - 1)[..., None])[..., 0], 0.0))
    nll = lse - chosen
    uniform = lse - z.mean(-1)
    return ((1 - smoothing) * nll + smoothing * uniform).mean()


def main():
    dist.init_process_group("gloo")
    tp, r = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(2)
    body = nn.Sequential(nn.Embedding(20, 10), nn.Linear(10, 10), nn.GELU())
    out = nn.Parameter((torch.randn(20, 10) / 3).chunk(tp)[r].clone())
    opt = torch.optim.SGD([*body.parameters(), out], lr=0.4, momentum=0.5)
    gen = torch.Generator().manual_seed(3)
    for _ in range(4):
        ids = torch.randint(20, (4, 6), generator=gen)
        h = Copy.apply(body(ids[:, :-1]))
        loss = parallel_cross_entropy(h @ out.T, ids[:, 1:], 20)
        opt.zero_grad()
        loss.backward()
        opt.step()


if __name__ == "__main__":
    main()
