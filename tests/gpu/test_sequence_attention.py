"""Attention over a sequence that ranks share, on a GPU: torch's flash attention for each tile."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sharded import close
from tplab import Mesh, P
from tplab.sequence import LAYOUTS, AttentionMask, Tile, TokenLayout, tiles_of
from tplab.torch import gather_attention, head_attention, ring_attention, run
from tplab.torch.layers import attention_tile
from tplab.torch.layers.attention_tile import attend, attend_backward

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here: attention over ranks was NOT tested on one", allow_module_level=True)
if not torch.backends.cuda.is_flash_attention_available() or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("no flash attention for this GPU: torch's kernel was NOT tested", allow_module_level=True)

GPU = torch.device("cuda")


def drawn(heads: int, size: int, width: int, seed: int) -> torch.Tensor:
    made = torch.randn(2, heads, size, width, generator=torch.Generator().manual_seed(seed))
    return made.to(GPU, torch.bfloat16)


class Operations(TorchDispatchMode):
    """The names of what torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchs_kernel_is_the_plain_equations(layout: Any, width: int, monkeypatch: pytest.MonkeyPatch):
    """Tile by tile, forward and backward, up to bfloat16's rounding of what goes in and of the result."""
    tiles = [tile for row in tiles_of(TokenLayout(layout, 192, 2), AttentionMask()) for tile in row if tile.entries]
    q, do, o = (drawn(4, 96, width, seed) for seed in (0, 1, 2))
    k, v = (drawn(2, 96, width, seed) for seed in (3, 4))
    lse = torch.full((2, 4, 96), 6.0, device=GPU)  # of more keys than those of the tile

    def results(tile: Tile) -> list[torch.Tensor]:
        parts = (*attend(q, k, v, tile, 0.1), *attend_backward(do, q, k, v, o, lse, tile, 0.1))
        return [part.double().cpu() for part in parts]

    for tile in tiles:
        with Operations() as seen:
            found = results(tile)
        assert {name for name in seen.names if "flash" in name} == {
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_backward",
        }
        with monkeypatch.context() as patch:
            patch.setattr(attention_tile, "_kernel_for", lambda *_: "none")
            want = results(tile)
        for ours, theirs in zip(found, want, strict=True):
            close(ours, theirs, tolerance=4 * 2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", [ring_attention, gather_attention, head_attention])
@pytest.mark.parametrize("about", [{}, {"window": 40}, {"documents": (100, 28, 128)}], ids=str)
def test_ranks_that_share_a_gpu_compute_what_the_cpu_does(attention: Any, dtype: torch.dtype, about: dict[str, Any]):
    """Also where there is no kernel: float32, and tiles that need a mask."""
    tokens, spec = TokenLayout("zigzag", 256, 4), P(None, None, "cp")
    x = [tokens.arrange(drawn(4, 256, 64, seed).cpu().to(dtype), 2) for seed in range(4)]

    def program(q: Any, k: Any, v: Any, c: Any) -> Any:
        for leaf in (q, k, v):
            leaf.requires_grad_()
        o = attention(q, k, v, "cp", layout="zigzag", **about)
        return (o.detach(), *torch.autograd.grad((o * c).sum(), (q, k, v)))

    here, there = (
        run(program, Mesh(cp=4), *x, in_specs=(spec,) * 4, out_specs=(spec,) * 4, device=device).value
        for device in (None, "cuda")
    )
    for ours, theirs in zip(there, here, strict=True):
        close(ours.cpu().double(), theirs.double(), tolerance=16 * torch.finfo(dtype).eps)
