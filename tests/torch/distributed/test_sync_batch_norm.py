"""torch.nn.SyncBatchNorm in programs that say cuda, compared with BatchNorm over all ranks' samples."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tplab import Mesh
from tplab.torch import run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without GPUs")

SIZES = (3, 5, 2, 6)
"""Samples of each rank: a mean over ranks of means is not the mean."""
X = torch.randn(sum(SIZES), 4, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1
X[:3] += 5


def net(momentum: float | None, affine: bool) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(5, momentum=momentum, affine=affine)
    return nn.Sequential(nn.Conv2d(4, 5, 2), norm, nn.ReLU(), nn.Flatten(), nn.Linear(10, 3)).double()


def states(model: nn.Module) -> dict[str, Tensor]:
    grads = {f"d {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**grads, **dict(model.named_buffers())}


@pytest.mark.parametrize(("momentum", "affine"), [(0.1, True), (None, False)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_it_is_batch_norm_over_the_samples_of_all_ranks(num_ranks: int, momentum: float | None, affine: bool):
    parts = X[: sum(SIZES[:num_ranks])].split(SIZES[:num_ranks])

    def main():
        rank = int(os.environ["RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(net(momentum, affine)).cuda()
        ddp = DistributedDataParallel(model, device_ids=[rank])
        x = parts[rank].cuda().requires_grad_()
        for _ in range(2):
            (ddp(x).square().sum() * num_ranks).backward()
        found = states(model), x.grad
        return *found, model.eval()(x)

    ranks = run(main, Mesh(world=num_ranks), distributed=True, device="cpu").per_rank
    reference, x = net(momentum, affine), torch.cat(parts).requires_grad_()
    for _ in range(2):
        reference(x).square().sum().backward()
    for state, _, _ in ranks:
        torch.testing.assert_close(state, states(reference))
    torch.testing.assert_close(torch.cat([dx for _, dx, _ in ranks]) / num_ranks, x.grad)
    torch.testing.assert_close(torch.cat([y for _, _, y in ranks]), reference.eval()(x))


def test_a_rank_without_samples_takes_part():
    def main():
        dist.init_process_group("nccl")
        norm = nn.SyncBatchNorm(3, device="cuda")
        x = torch.arange(12.0, device="cuda").view(4, 3)[: 4 if dist.get_rank() == 0 else 0].requires_grad_()
        norm(x).square().sum().backward()
        return x.grad, norm.running_mean, norm.running_var

    (dx, *of_4), (nothing, *of_none) = run(main, Mesh(world=2), distributed=True, device="cpu").per_rank
    norm, x = nn.BatchNorm1d(3), torch.arange(12.0).view(4, 3).requires_grad_()
    norm(x).square().sum().backward()
    torch.testing.assert_close([dx, *of_4], [x.grad, norm.running_mean, norm.running_var])
    assert nothing is None and all(torch.equal(a, b) for a, b in zip(of_none, of_4, strict=True))


def test_sums_of_16_bit_samples_are_kept_in_float32():
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1)).bfloat16() + 100

    def main():
        dist.init_process_group("nccl")
        norm = nn.SyncBatchNorm(3, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return norm(x.chunk(2)[dist.get_rank()].cuda()), norm.running_var

    (y, var), (z, _) = run(main, Mesh(world=2), distributed=True, device="cpu").per_rank
    norm = nn.BatchNorm1d(3)
    torch.testing.assert_close(torch.cat([y, z]), norm(x.float()).bfloat16())
    torch.testing.assert_close(var, norm.running_var)


def test_it_sends_what_it_sends_on_gpus():
    """Means, deviations and a count in the forward pass; two sums in the backward pass."""

    def main():
        dist.init_process_group("nccl")
        norm = nn.SyncBatchNorm(3, device="cuda")
        norm(torch.randn(4, 3, device="cuda", requires_grad=True)).square().sum().backward()

    trace = run(main, Mesh(world=2), distributed=True, device="cpu").trace
    sent = {event.op: event.bytes for event in trace.events if event.rank == 0 and event.kind == "collective"}
    assert sent == {"all_gather": 7 * 4, "all_reduce": 6 * 4}
