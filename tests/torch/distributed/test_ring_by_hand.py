"""Ring attention as people write it on torch.distributed: batch_isend_irecv inside an autograd.Function, and training.

So do picotron, ring-flash-attention and long-context-attention, whose scripts run unmodified too (flash_attn has to be
replaced by something for the CPU).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tplab import Mesh
from tplab.torch import run

WORDS, WIDTH, HEADS, SEQUENCE, STEPS = 16, 8, 2, 24, 20


def passed_on(*tensors: Tensor) -> tuple[list[Tensor], list[Any]]:
    """What the rank before this one sends, once the works are done."""
    rank, size = dist.get_rank(), dist.get_world_size()
    arriving = [torch.empty(x.shape, dtype=x.dtype) for x in tensors]  # contiguous, as gloo wants it
    ops = [dist.P2POp(dist.isend, x.contiguous(), (rank + 1) % size) for x in tensors]
    ops += [dist.P2POp(dist.irecv, x, (rank - 1) % size) for x in arriving]
    return arriving, dist.batch_isend_irecv(ops)


def scores_of(q: Tensor, k: Tensor, is_first: bool) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores + torch.full(scores.shape[-2:], -torch.inf).triu(1) if is_first else scores


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.kept, out, lse = (q, k, v), torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf)
        for step in range(dist.get_world_size()):
            coming, works = passed_on(k, v)
            if step <= dist.get_rank():
                scores = scores_of(q, k, step == 0)
                both = torch.logaddexp(lse, scores.logsumexp(-1))
                out = out * (lse - both).exp()[..., None] + (scores - both[..., None]).exp() @ v
                lse = both
            for work in works:
                work.wait()
            k, v = coming
        ctx.save_for_backward(*ctx.kept, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for step in range(dist.get_world_size()):
            if step <= dist.get_rank():
                p = (scores_of(q, k, step == 0) - lse[..., None]).exp()
                ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
                dq, dk, dv = dq + ds @ k, dk + ds.mT @ q, dv + p.mT @ dout
            (k, v, dk, dv), works = passed_on(k, v, dk, dv)
            for work in works:
                work.wait()
        return dq, dk, dv


class Model(nn.Module):
    def __init__(self, is_ring: bool) -> None:
        super().__init__()
        self.is_ring = is_ring
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(places)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = Ring.apply(q, k, v) if self.is_ring else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x + y.transpose(1, 2).flatten(2))  # type: ignore[union-attr]


def train(is_ring: bool) -> list[float]:
    """The loss of each step, averaged over ranks that have equally many tokens."""
    dist.init_process_group("gloo")
    rank, size, losses = dist.get_rank(), dist.get_world_size(), []
    torch.manual_seed(0)
    model = Model(is_ring).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = torch.arange(SEQUENCE).chunk(size)[rank]
    for _ in range(STEPS):
        text = (torch.randint(0, WORDS, (2, 1)) + torch.arange(SEQUENCE + 1)) % WORDS
        loss = F.cross_entropy(model(text[:, mine], mine).flatten(0, 1), text[:, mine + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad.div_(size)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean / size))
    return losses


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_ring_written_by_hand_trains_the_model_of_one_rank(num_ranks: int):
    (alone,) = run(lambda: train(False), Mesh(cp=1), distributed=True).per_rank
    found = run(lambda: train(True), Mesh(cp=num_ranks), distributed=True)
    for losses in found.per_rank:
        torch.testing.assert_close(losses, alone, rtol=1e-10, atol=0)
    assert losses[-1] < losses[0]
    pair = 2 * 2 * (SEQUENCE // num_ranks) * WIDTH * 8  # k and v of a rank
    assert found.trace.bytes_sent(0, op="send") == STEPS * num_ranks * 3 * pair  # forward one pair, backward two
