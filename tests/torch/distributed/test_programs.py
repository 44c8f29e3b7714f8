"""Programs for torch.distributed as people write them, on simulated ranks: their gradients are the unsharded ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab import Mesh
from tplab.torch import device_mesh, run

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4)).double()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x) - y) ** 2).mean()


def mine(x: Tensor) -> Tensor:
    """This rank's part of the batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    model = mlp()
    loss_of(model, X, Y).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def whole(model: nn.Module) -> list[Tensor]:
    """The gradients, put together where they are DTensors."""
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]  # type: ignore[operator, misc]


def ddp(**options) -> list[Tensor]:
    model = nn.parallel.DistributedDataParallel(mlp(), **options)
    loss_of(model, mine(X), mine(Y)).backward()
    return whole(model)


def ddp_of_small_buckets() -> list[Tensor]:
    return ddp(bucket_cap_mb=1e-4, gradient_as_bucket_view=True, static_graph=True)


def ddp_that_accumulates() -> list[Tensor]:
    model = nn.parallel.DistributedDataParallel(mlp())
    first, second = mine(X).chunk(2), mine(Y).chunk(2)
    with model.no_sync():
        (loss_of(model, first[0], second[0]) / 2).backward()
    (loss_of(model, first[1], second[1]) / 2).backward()
    return whole(model)


def ddp_with_a_hook() -> list[Tensor]:
    def halve_and_sum(state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    model = nn.parallel.DistributedDataParallel(mlp())
    model.register_comm_hook(None, halve_and_sum)
    loss_of(model, mine(X), mine(Y)).backward()
    return whole(model)


def fsdp(reshard: bool = True) -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=device_mesh(), reshard_after_forward=reshard)
    fully_shard(model, mesh=device_mesh(), reshard_after_forward=reshard)
    loss_of(model, mine(X), mine(Y)).backward()
    return whole(model)


def fsdp_that_keeps_parameters() -> list[Tensor]:
    return fsdp(reshard=False)


def fsdp_1() -> list[Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = FSDP(mlp(), use_orig_params=True, device_id=torch.device("cpu"))
    loss_of(model, mine(X), mine(Y)).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def tensor_parallel() -> list[Tensor]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = mlp()
    parallelize_module(model, device_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    loss_of(model, X, Y).backward()
    return whole(model)


def zero_optimizer() -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(mlp())
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    loss_of(model, mine(X), mine(Y)).backward()
    optimizer.step()
    return [p - q.detach() for p, q in zip(before, model.parameters(), strict=True)]


PROGRAMS = [ddp, ddp_of_small_buckets, ddp_that_accumulates, ddp_with_a_hook, fsdp, fsdp_that_keeps_parameters, fsdp_1,
            tensor_parallel, zero_optimizer]  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_each_rank_of_fsdp_1_gathers_the_optimizers_state(expected):
    """torch notes in a class what it is timing, and each rank is a process of its own there."""

    def program() -> list[Tensor]:
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        model = FSDP(mlp(), use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss_of(model, mine(X), mine(Y)).backward()
        optimizer.step()
        state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        return [state[name]["momentum_buffer"] for name, _ in mlp().named_parameters()]

    for momenta in run(program, Mesh(dp=2), distributed=True).per_rank:
        for got, want in zip(momenta, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_are_those_of_one_device(program, num_ranks: int, expected):
    out = run(program, Mesh(dp=num_ranks), distributed=True, cluster="h100")
    for grads in out.per_rank:
        for got, want in zip(grads, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    assert not dist.is_initialized()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_torchs_own_pipeline(expected):
    def pipeline() -> list[Tensor]:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rank = dist.get_rank()
        part = (mlp()[:2], mlp()[2:])[rank]
        example = X[:2] if rank == 0 else torch.zeros(2, 12, dtype=torch.float64)
        stage = PipelineStage(part, rank, 2, torch.device("cpu"), input_args=(example,))
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, target: ((y - target) ** 2).mean())
        schedule.step(X) if rank == 0 else schedule.step(target=Y)
        return [p.grad for p in part.parameters() if p.grad is not None]

    out = run(pipeline, Mesh(pp=2), distributed=True)
    for got, want in zip([g for grads in out.per_rank for g in grads], expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
