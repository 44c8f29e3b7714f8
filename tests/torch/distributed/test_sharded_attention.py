"""scaled_dot_product_attention of DTensors on the CPU in place of GPUs: FSDP2, tensor and sequence parallelism at once,
compared with one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tplab import Mesh
from tplab.torch import run
from tplab.torch.distributed.attention import BACKWARD, FORWARD

WIDTH, HEADS, WORDS, BATCH, LENGTH, STEPS = 8, 4, 16, 4, 6, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        ]
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(WORDS, WIDTH), Block()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embedding(tokens))))


PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "block.norm1": SequenceParallel(),
    "block.attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    **{f"block.attention.{name}": ColwiseParallel(use_local_output=False) for name in ("query", "key", "value")},
    "block.attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "block.norm2": SequenceParallel(),
    "block.up": ColwiseParallel(input_layouts=Shard(1)),
    "block.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_fsdp_and_tensor_and_sequence_parallelism_at_once():
    """Losses and parameters are those of one device up to float32's rounding: sums are added up in another order."""
    torch.manual_seed(0)
    whole = Model()
    tokens = torch.randint(WORDS, (STEPS, BATCH, LENGTH))

    def program(mine: nn.Module, tokens: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        model: Any = fully_shard(parallelize_module(mine.cuda(), mesh["tp"], PLAN), mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses = []
        for batch in tokens.cuda():
            losses.append(step(model, optimizer, batch.chunk(2)[mesh["dp"].get_local_rank()]))
            dist.all_reduce(losses[-1], dist.ReduceOp.AVG, mesh["dp"].get_group())
        return losses, {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}

    out = run(program, Mesh(dp=2, tp=2), copy.deepcopy(whole), tokens, distributed=True, device="cpu")
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    losses = [step(whole, optimizer, batch) for batch in tokens]
    for mine, parameters in out.per_rank:
        torch.testing.assert_close(mine, losses, rtol=1e-5, atol=1e-6)
        assert parameters.keys() == dict(whole.named_parameters()).keys()
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    assert out.mapped is not None


def attention(lies: Any, mask: Tensor | None, is_causal: bool, heads: int = 4) -> tuple[list[Tensor], Any]:
    """[output, gradients of q, k, v], put together, and how the output lay."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    given = [torch.rand(4, heads, 6, 2, requires_grad=True) for _ in range(3)]
    mine: Any = [distribute_tensor(x.detach(), mesh, [lies]).requires_grad_() for x in given]
    theirs = None if mask is None else distribute_tensor(mask, mesh, [Replicate()])
    out: Any = F.scaled_dot_product_attention(*mine, attn_mask=theirs, is_causal=is_causal)
    out.square().sum().backward()
    wanted = F.scaled_dot_product_attention(*given, attn_mask=mask, is_causal=is_causal)
    wanted.square().sum().backward()
    for x, y in zip([out, *(x.grad for x in mine)], [wanted, *(x.grad for x in given)], strict=True):
        torch.testing.assert_close(x.full_tensor(), y)
    return out.placements


@pytest.mark.parametrize("lies", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("mask", ["none", "causal", "all", "per head"])
def test_how_the_tensors_may_lie(lies: Any, mask: str):
    shape = {"all": (6, 6), "per head": (1, 4, 6, 6)}.get(mask)
    given = None if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(1))
    out = run(lambda: attention(lies, given, mask == "causal"), Mesh(tp=2), distributed=True, device="cpu")
    # DTensor does not cut a mask, so one that differs between heads needs all of them
    assert out.per_rank == [(Replicate() if mask == "per head" and lies == Shard(1) else lies,)] * 2


def test_heads_that_ranks_cannot_share_equally():
    out = run(lambda: attention(Shard(1), None, True, heads=3), Mesh(tp=2), distributed=True, device="cpu")
    assert out.per_rank == [(Shard(1),)] * 2


def test_torch_has_its_own_rules_afterwards():
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    run(lambda: attention(Shard(1), None, True), Mesh(tp=2), distributed=True, device="cpu")
    assert FORWARD not in propagator.op_strategy_funcs and BACKWARD not in propagator.op_to_schema_info
