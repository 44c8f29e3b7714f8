"""torch's context parallelism, on the CPU in place of GPUs: compared with one device, and what its rings send."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def test_bfloat16_is_as_exact_as_on_one_device():
    """torch's rings add up in float32, so what they lose is what the CPU's kernel loses, or one rounding. The kernel's
    dv is off by more than one: one device and a ring may be 0.06 apart, where torch's own tests allow 0.02."""
    num_ranks, shape = 2, (1, 4, 512, 32)
    q, k, v = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3))

    def results(attention: Any, dtype: torch.dtype, is_ring: bool = False) -> list[Tensor]:
        xs = [x.bfloat16().to(dtype) for x in (q, k, v)]
        return [x.double() for x in (attention(*xs) if is_ring else differentiated(*xs))]

    def differentiated(*xs: Tensor) -> list[Tensor]:
        for x in xs:
            x.requires_grad_()
        out = F.scaled_dot_product_attention(xs[0], xs[1], xs[2], is_causal=True)
        out.sum().backward()
        return [out.detach(), *(x.grad for x in xs if x.grad is not None)]

    def on_ranks(*xs: Tensor) -> list[Tensor]:
        return run(lambda: ring(*xs), Mesh(cp=num_ranks), distributed=True, device="cpu").per_rank[0]

    def ring(*xs: Tensor) -> list[Tensor]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import _attention as home
        from torch.distributed.tensor.experimental import context_parallel

        dist.init_process_group("nccl")
        mesh, mine = init_device_mesh("cuda", (num_ranks,)), [x.clone() for x in xs]
        with context_parallel(mesh, buffers=mine, buffer_seq_dims=[2] * 3):
            found = differentiated(*mine)
            for x in mine:
                x.requires_grad_(False)
        with torch.no_grad():
            return list(home.context_parallel_unshard(mesh, found, [2] * 4))

    want = results(None, torch.float64)
    alone, rings = results(None, torch.bfloat16), results(on_ranks, torch.bfloat16, is_ring=True)
    for name, right, one, two in zip(("o", "dq", "dk", "dv"), want, alone, rings, strict=True):
        off, largest = [float((x - right).abs().max()) for x in (one, two)], float(right.abs().max())
        assert off[1] <= max(off[0], 2**-8 * largest), name


def test_each_rank_chooses_its_own_kernels():
    """sdpa_kernel is a choice for the whole process, and each rank seems to be one. Kernels that only GPUs have become
    the CPU's flash attention."""

    def program() -> list[tuple[bool, bool]]:
        dist.init_process_group("nccl")
        q, found = torch.rand(1, 1, 4, 8, device="cuda"), []
        for kernel in [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION][:: 1 - 2 * dist.get_rank()]:
            with sdpa_kernel(kernel):
                dist.barrier()  # the other rank chooses meanwhile
                F.scaled_dot_product_attention(q, q, q)
                found.append((uses.math_sdp_enabled(), uses.flash_sdp_enabled()))
        return [*found, (uses.math_sdp_enabled(), uses.flash_sdp_enabled())]

    uses, mesh = torch.backends.cuda, Mesh(dp=2)
    math, flash, both = (True, False), (False, True), (True, True)
    found = run(program, mesh, distributed=True, device="cpu").per_rank
    assert found == [[math, flash, both], [flash, math, both]]
    assert (uses.math_sdp_enabled(), uses.flash_sdp_enabled(), uses.mem_efficient_sdp_enabled()) == (True, True, True)


def flex(balancer: str, documents: bool) -> tuple[list[Tensor], list[Tensor]]:
    """As in torch's tests of context parallelism: [out, lse, dq, dk, dv] of one device, and of the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention as home
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancers
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    dist.init_process_group("nccl")
    ranks, size, cuda = dist.get_world_size(), 512, torch.device("cuda")
    document = torch.arange(size, device="cuda") // (128 if documents else size)
    mask = create_block_mask(
        lambda b, h, i, j: (i >= j) & (document[i] == document[j]), B=1, H=1, Q_LEN=size, KV_LEN=size, device="cuda"
    )
    torch.manual_seed(0)
    whole = [torch.rand(1, 2, size, 8, device="cuda") for _ in range(3)]
    balance = {
        "none": lambda: None,
        "head and tail": lambda: balancers._HeadTailLoadBalancer(size, ranks, cuda),
        "head and tail of documents": lambda: balancers._PerDocumentHeadTailLoadBalancer([[128] * 4], ranks, cuda),
        "blocks": lambda: balancers._PTRRLoadBalancer(mask, ranks),
    }[balancer]()
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))

    class Attention(torch.nn.Module):
        compiled: Any = staticmethod(cast(Any, torch.compile(flex_attention)))

        def forward(self, *args: Any, **about: Any) -> Any:
            return self.compiled(*args, **about)

    def results(attention: Any, mask: Any, *qkv: Tensor) -> list[Tensor]:
        for x in qkv:
            x.requires_grad_()
        out, about = attention(*qkv, block_mask=mask, return_aux=AuxRequest(lse=True))
        out.square().sum().backward()
        return [out.detach(), about.lse.detach(), *(x.grad for x in qkv if x.grad is not None)]

    *mine, my_mask = home._context_parallel_shard(mesh, [*whole, mask], [2] * 4, load_balancer=balance)
    alone = results(Attention(), mask, *(x.clone() for x in whole))
    plan = home._ContextParallel(seq_dim=2, attention_type=home._ContextParallel.AttentionType.FLEX)
    shared = results(parallelize_module(Attention(), mesh, plan), my_mask, *(cast(Tensor, x).clone() for x in mine))
    with torch.no_grad():
        return alone, list(home.context_parallel_unshard(mesh, shared, [2] * 5, load_balancer=balance))


@pytest.mark.parametrize(
    ("balancer", "documents"),
    [("none", True), ("head and tail", False), ("head and tail of documents", True), ("blocks", True)],
)
def test_flex_attention_over_a_sequence_that_ranks_share(balancer: str, documents: bool):
    """With its backward pass, which torch has on GPUs only."""
    found = run(lambda: flex(balancer, documents), Mesh(cp=2), distributed=True, device="cpu")
    for alone, shared in found.per_rank:
        assert len(alone) == len(shared) == 5
        for want, got in zip(alone, shared, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
    one = 2 * 256 * 8 * 4  # q, k or v of a rank
    assert found.trace.bytes_sent(0, op="reduce_scatter") == 2 * one  # the gradients of k and v
    assert found.trace.bytes_sent(0, op="all_gather") == 2 * one + 4 * one + one // 8  # k and v; four results, and lse


@pytest.mark.parametrize("cluster", ["h100", "laptop"])
def test_flex_attention_is_one_kernel_on_the_clock_of_a_gpu(cluster: str):
    """It computes the blocks that its mask keeps: of four documents of 128 tokens, one block each."""
    how: dict[str, Any] = {"distributed": True, "device": "cpu", "count_memory": True}
    found = run(lambda: flex("none", True), Mesh(cp=2), cluster=cluster, **how)
    assert "flex_attention" in found.memory[0].ops
    for alone, shared in found.per_rank:
        for want, got in zip(alone, shared, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
    flops = [(e.op, e.flops) for e in found.trace.select(rank=0, kind="compute").events if "flex_att" in e.op]
    work = 2 * 512 * 128 * 8  # alone; each rank has half of the queries
    expected = [("flex_attention", 4 * work), ("flex_attention_backward", 10 * work)]
    expected += [(op, num // 2) for op, num in expected]
    assert flops == (expected if cluster == "h100" else [])
    products = [e.flops for e in found.trace.select(rank=0, kind="compute").events if e.op == "bmm"]
    assert sum(products) == (0 if cluster == "h100" else 14 * 2 * 512 * 512 * 8 * 3 // 2)  # all blocks


IMPORTED_LATE = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tplab import Mesh
from tplab.torch import run

def imports_dtensor():
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)

def program():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))
    x = torch.arange(512.0).sin().view(2, 2, 16, 8).cuda()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        return float(F.scaled_dot_product_attention(x, x, x, is_causal=True).sum())

run(imports_dtensor, Mesh(world=2), distributed=True)
x = torch.arange(512.0).sin().view(2, 2, 16, 8)
whole = float(F.scaled_dot_product_attention(x, x, x, is_causal=True).sum())
parts = run(program, Mesh(world=2), distributed=True, device="cpu").per_rank
assert abs(sum(parts) - whole) < 1e-3, (parts, whole)
"""


def test_a_run_without_cuda_that_imports_dtensor_comes_first():
    """To change DTensor for the CPU, the second run imports torch's context parallelism, and has to change that too."""
    done = subprocess.run([sys.executable, "-c", IMPORTED_LATE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
