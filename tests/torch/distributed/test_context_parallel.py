"""torch's context parallelism, on the CPU in place of GPUs: compared with one device, and what its rings send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tplab import Mesh
from tplab.errors import RankError
from tplab.torch import run

SHAPE = B, H, S, D = 2, 3, 24, 8


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(SHAPE, requires_grad=True) for _ in range(3)]


def program(is_balanced: bool, is_causal: bool = True, rotation: str = "allgather") -> list[Tensor]:
    """As in torch's documentation: [out, dq, dk, dv], put together again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention as home
    from torch.distributed.tensor.experimental import context_parallel

    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    home._cp_options.enable_load_balance = is_balanced
    home.set_rotate_method(rotation)
    q, k, v = (x.detach().cuda() for x in inputs())
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        for x in (q, k, v):
            x.requires_grad_()
        try:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            out.square().sum().backward()
            mine: list[Any] = [out.detach(), q.grad, k.grad, v.grad]
        finally:
            for x in (q, k, v):
                x.requires_grad_(False)
    with torch.no_grad():
        return list(home.context_parallel_unshard(mesh, mine, [2] * 4))


@pytest.mark.parametrize(
    "num_ranks, is_balanced, is_causal, rotation",
    [
        (2, True, True, "allgather"),
        (2, False, True, "alltoall"),
        (3, False, False, "allgather"),
        (4, True, True, "alltoall"),
        (4, False, True, "allgather"),
    ],
)
def test_attention_over_a_sequence_that_ranks_share(num_ranks: int, is_balanced: bool, is_causal: bool, rotation: str):
    """Output and gradients are those of one device up to float32's rounding: they are added up in another order."""
    q, k, v = inputs()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    out.square().sum().backward()
    mesh = Mesh(cp=num_ranks)
    found = run(lambda: program(is_balanced, is_causal, rotation), mesh, distributed=True, device="cpu")
    for rank in mesh.ranks:
        for got, want in zip(found.per_rank[rank], [out, q.grad, k.grad, v.grad], strict=True):
            torch.testing.assert_close(got, want, rtol=2e-6, atol=3e-6)
    pair = 2 * B * H * (S // num_ranks) * D * 4  # a rank's part of k and v, or of their gradients
    rings = 2 * (num_ranks - 1) * pair  # k and v go round forward and backward, by either rotation
    back = num_ranks * pair  # and so do their gradients, and home
    last = 4 * (num_ranks - 1) * pair // 2  # what puts the four results together
    assert found.trace.bytes_sent(0) == rings + back + last
    assert found.mapped is not None


@pytest.mark.filterwarnings("ignore:the .type, exc, tb. signature:DeprecationWarning")  # torch 2.11, on Python 3.12
def test_ranks_and_the_notebook_have_their_own_attention():
    before = F.scaled_dot_product_attention
    run(lambda: program(True), Mesh(cp=2), distributed=True, device="cpu")
    assert F.scaled_dot_product_attention is before
    from torch.distributed.tensor.experimental import _attention as home

    assert home._cp_options.enable_load_balance is True and home._cp_options.rotate_method.name == "ALL_GATHER"
    with pytest.raises(RankError, match="Load balancing requires `is_causal=True`"):
        run(lambda: program(True, is_causal=False), Mesh(cp=2), distributed=True, device="cpu")
    assert F.scaled_dot_product_attention is before
