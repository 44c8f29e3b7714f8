"""Attention under the clock of a GPU: `scaled_dot_product_attention` takes the kernel that a GPU takes, on the devices
"meta" and "cpu"; what it keeps, counts and computes; and where nothing changes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tplab import Mesh
from tplab.cost import find
from tplab.errors import RankError
from tplab.torch import Result, run

ONE = Mesh(tp=1)
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
ON_CPU = FLASH + "_for_cpu"
B, H, N, D = 2, 4, 32, 16
MASK = torch.ones(N, N, dtype=torch.bool).tril()


def attention(
    dtype: torch.dtype = torch.bfloat16,
    groups: int = H,
    head: int = D,
    backend: SDPBackend | None = None,
    mask: Tensor | None = None,
    **how: Any,
) -> Callable[[Tensor], list[Any]]:
    """A program that computes the gradients of attention of q to fewer heads of keys and values."""

    def program(x: Tensor) -> list[Any]:
        torch.manual_seed(0)
        sizes = (B, H, N, head), (B, groups, N, head), (B, groups, N, head)
        leaves = [torch.randn(size, device=x.device).to(dtype).requires_grad_() for size in sizes]
        added = None if mask is None else mask.to(x.device, mask.dtype if mask.dtype == torch.bool else dtype)
        with sdpa_kernel([backend] if backend is not None else [*SDPBackend.__members__.values()][1:]):
            out = F.scaled_dot_product_attention(*leaves, attn_mask=added, **how)
        out.float().square().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    return program


def ran(program: Callable[[Tensor], Any], device: str = "meta", cluster: str | None = "h100", **options: Any) -> Result:
    return run(program, ONE, torch.empty(0, device=device), cluster=cluster, device=device, **options)


def ops(out: Result) -> dict[str, tuple[int, str]]:
    """What it computed: op -> FLOPs, phase."""
    return {event.op: (event.flops, event.phase) for event in out.trace.select(kind="compute").events}


def fused(out: Result) -> list[str]:
    found = ops(out)
    assert not found.keys() & {"bmm", "baddbmm", "_safe_softmax", "_softmax", "_softmax_backward_data", "bernoulli_"}
    return [op for op in found if "attention" in op]


@pytest.mark.parametrize("cluster", ["h100", "h100-measured", "a100", "b200"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_has_a_kernel_for_16_bits_and_one_for_32(dtype: torch.dtype, cluster: str):
    kernel = EFFICIENT if dtype is torch.float32 else FLASH
    out = ran(attention(dtype), cluster=cluster)
    assert fused(out) == [kernel, f"{kernel}_backward"]
    assert ops(out)[kernel] == (4 * B * H * N * N * D, "forward")  # two products
    assert ops(out)[f"{kernel}_backward"] == (10 * B * H * N * N * D, "backward")  # five
    assert [x.dtype for x in out.per_rank[0]] == [dtype] * 4


HOWS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "mask": {"mask": MASK},
    "mask that is added": {"mask": torch.zeros(N, N, dtype=torch.bfloat16)},
    "mask of each sequence": {"mask": MASK.expand(B, 1, N, N)},
    "grouped": {"groups": 2, "enable_gqa": True},
    "grouped, causal": {"groups": 1, "enable_gqa": True, "is_causal": True},
    "grouped, with a mask": {"groups": 2, "enable_gqa": True, "mask": MASK},
    "dropout": {"dropout_p": 0.3},
    "dropout, causal": {"dropout_p": 0.3, "is_causal": True},
    "scaled": {"scale": 0.3},
    "heads of 20": {"head": 20},
    "wide heads": {"head": 512},
}


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", HOWS)
def test_whatever_is_asked_one_kernel_computes_it(how: str, dtype: torch.dtype, device: str):
    about = HOWS[how]
    out = ran(attention(dtype, **about), device)
    forward, backward = fused(out)
    assert backward == f"{forward}_backward"
    if device == "meta":
        takes_flash = dtype is torch.bfloat16 and "mask" not in how and how != "wide heads"
        assert forward == (FLASH if takes_flash else EFFICIENT)
    width = -(-about.get("head", D) // 8) * 8 if forward == FLASH else about.get("head", D)
    pairs = N * (N + 1) // 2 if "causal" in how else N * N
    assert ops(out)[forward][0] == 4 * B * H * pairs * width
    assert ops(out)[backward][0] == 10 * B * H * pairs * width
    sizes = [tuple(x.shape) for x in out.per_rank[0]]
    head, groups = about.get("head", D), about.get("groups", H)
    assert sizes == [(B, H, N, head)] * 2 + [(B, groups, N, head)] * 2


@pytest.mark.parametrize("how", HOWS)
def test_on_the_cpu_values_are_those_of_any_other_run(how: str):
    program = attention(torch.float32, **HOWS[how])
    here, plain = ran(program, "cpu").per_rank[0], ran(program, "cpu", cluster=None).per_rank[0]
    assert torch.equal(here[0], plain[0])  # the same numbers are dropped
    torch.testing.assert_close(here, plain, rtol=1e-4, atol=1e-5)


def test_a_mask_that_is_trained_has_its_gradient():
    bias, numbers = torch.randn(H, N, N), torch.randn(B, H, N, D)

    def program(x: Tensor) -> Tensor | None:
        q, mask = x.expand(B, H, N, D), bias.clone().requires_grad_()
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.2).square().sum().backward()
        return mask.grad

    out, plain = (run(program, ONE, numbers, cluster=on, seed=3) for on in ("h100", None))
    assert len(fused(out)) == 2
    torch.testing.assert_close(out.per_rank[0], plain.per_rank[0], rtol=1e-4, atol=1e-5)


def test_a_hook_that_copies_what_is_saved_is_refused_where_something_is_dropped():
    def program(q: Tensor) -> None:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            q = q.requires_grad_()
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sum().backward()

    with pytest.raises(RankError, match="random state of its dropout"):
        run(program, ONE, torch.ones(B, H, N, D), cluster="h100")


BACKENDS = {
    SDPBackend.FLASH_ATTENTION: FLASH,
    SDPBackend.EFFICIENT_ATTENTION: EFFICIENT,
    SDPBackend.CUDNN_ATTENTION: "_scaled_dot_product_cudnn_attention",
}


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_recomputed_attention_drops_the_same_and_takes_its_time_again(device: str):
    def program(x: Tensor) -> Tensor | None:
        q = x.clone().requires_grad_()
        attend = partial(F.scaled_dot_product_attention, dropout_p=0.5)
        checkpoint(attend, q, q, q, use_reentrant=False).square().sum().backward()
        return q.grad

    numbers = torch.randn(B, H, N, D, device=device)
    out, plain = (run(program, ONE, numbers, cluster=on, device=device) for on in ("h100", None))
    found = [event.op for event in out.trace.select(kind="compute").events if "attention" in event.op]
    assert found == [EFFICIENT, EFFICIENT, f"{EFFICIENT}_backward"]
    if device == "cpu":
        torch.testing.assert_close(out.per_rank[0], plain.per_rank[0], rtol=1e-4, atol=1e-5)


def test_it_takes_as_long_as_its_kernels_were_measured_to_take():
    """Those of torch, which on an H100 are FlashAttention 2; float32 at its own peak."""
    chip, kernels = find("h100-measured").chip, ("flash2", "flash2")
    for dtype in (torch.bfloat16, torch.float32):
        out = ran(attention(dtype, is_causal=True), cluster="h100-measured")
        took = [e.end - e.start for e in out.trace.select(kind="compute").events if "attention" in e.op]
        for kernel, seconds, backward in zip(kernels, took, (False, True), strict=True):
            name = str(dtype).removeprefix("torch.")
            expected = chip.attention_seconds(B, H, N, N, D, name, causal=True, backward=backward, kernel=kernel)
            assert seconds == pytest.approx(expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_program_may_choose_its_kernel(backend: SDPBackend):
    out = ran(attention(backend=backend, is_causal=True))
    assert fused(out) == [BACKENDS[backend], f"{BACKENDS[backend]}_backward"]
    work = B * H * N * (N + 1) // 2 * D
    assert [flops for op, (flops, _) in ops(out).items() if "attention" in op] == [4 * work, 10 * work]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_program_that_asks_for_unfused_attention_gets_it(device: str):
    found = ops(ran(attention(backend=SDPBackend.MATH), device))
    assert {"_safe_softmax", "bmm"} <= found.keys() and not [op for op in found if "attention" in op]

    def by_hand(x: Tensor) -> Tensor:
        q = x.expand(B, H, N, D)
        return (q @ q.mT).softmax(-1) @ q

    found = ops(run(by_hand, ONE, torch.empty(B, H, N, D, device=device), cluster="h100", device=device))
    assert found.keys() >= {"bmm", "_softmax"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_without_gradients_too(mode: Callable[[], Any], device: str):
    def program(x: Tensor) -> None:
        with mode():
            q = torch.ones(B, H, N, D, device=x.device)
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)

    assert fused(ran(program, device)) == [EFFICIENT]


def test_a_gpu_keeps_q_k_v_o_and_one_number_for_each_row():
    def program(x: Tensor) -> None:
        q, k, v = (torch.empty(B, H, N, D, device=x.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        del q, k, v
        out.backward(torch.empty_like(out))

    held = ran(program, count_memory=True).memory[0]
    row = next(row for row, op in enumerate(held.ops) if op == FLASH)
    kept = held.of("activations")[row + 1]
    assert kept - 4 * B * H * N * D * 2 - B * H * N * 4 in range(33)  # and the state of the random generator


@pytest.mark.parametrize("cluster", [None, "laptop", "ethernet"])
def test_elsewhere_nothing_changes(cluster: str | None):
    """A CPU has no such kernels: on meta, torch's own fallback; on the CPU what torch takes there."""
    dropped = ops(ran(attention(torch.float32, dropout_p=0.1), "cpu", cluster="laptop"))
    assert dropped.keys() >= {"bmm", "_safe_softmax", "bernoulli_"}
    out = ran(attention(torch.float32), "cpu", cluster=cluster)
    if cluster is not None:
        assert fused(out) == [ON_CPU, f"{ON_CPU}_backward"]
        assert "_safe_softmax" in ops(ran(attention(), cluster=cluster))


def test_after_a_run_torch_is_as_it_was():
    """Also if it ends with an error, and after runs in several threads."""
    before = torch._C._dispatch_dump("aten::scaled_dot_product_attention")
    with ThreadPoolExecutor(3) as pool:
        for out in pool.map(lambda dtype: ran(attention(dtype)), [torch.float32, torch.bfloat16, torch.float16]):
            assert len(fused(out)) == 2
    with pytest.raises(RankError, match="size"):
        ran(lambda x: x.view(7))
    assert torch._C._dispatch_dump("aten::scaled_dot_product_attention") == before


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_torch_refuses_is_still_refused(device: str):
    whole = torch.ones(B, H, N, D, device=device)
    wrong = {
        "attn_mask": lambda q: F.scaled_dot_product_attention(q, q, q, torch.ones(3, 5, device=device)),
        "dtype": lambda q: F.scaled_dot_product_attention(q, q.half(), q),
        "grouped": lambda q: F.scaled_dot_product_attention(q, q[:, :2], q[:, :2]),
        "causal": lambda q: F.scaled_dot_product_attention(q, q, q, MASK.to(device), 0.1, is_causal=True),
    }
    for name, program in wrong.items():
        for cluster in ("h100", "laptop"):
            with pytest.raises(RankError, match="raised RuntimeError") as refused:
                run(program, ONE, whole, cluster=cluster, device=device)
            assert refused.value.__cause__ is not None, name
