"""Models in plain torch, to be measured and modelled: a transformer block, a small GPT, experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm; fused causal attention; an MLP four times as wide.   x [B, S, D] -> [B, S, D]"""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class SmallGPT(nn.Module):
    """Embedding, blocks, tied head and loss.   ids [B, S] -> ()"""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.norm(self.blocks(self.words(ids))) @ self.words.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Mixture(nn.Module):
    """Experts as most libraries compute them: rows sorted by expert, and one product for all of them.

    x [T, D] -> [T, D]; each token's k experts have equal shares, and token t chooses experts t k, t k + 1, .., so that
    loads are equal
    """

    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    order: Tensor
    offsets: Tensor

    def __init__(self, width: int, hidden: int, experts: int, k: int, tokens: int):
        super().__init__()
        for name, shape in {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items():
            setattr(self, name, nn.Parameter(torch.randn(experts, *shape) * shape[0] ** -0.5))
        choices = torch.arange(tokens * k) % experts
        self.register_buffer("order", choices.argsort(stable=True))
        self.register_buffer("offsets", choices.bincount(minlength=experts).cumsum(0).to(torch.int32), persistent=False)
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.order // self.k
        rows = x[tokens]
        hidden = F.silu(self._by_expert(rows, self.gate)) * self._by_expert(rows, self.up)
        return torch.zeros_like(x).index_add(0, tokens, self._by_expert(hidden, self.down) / self.k)

    def _by_expert(self, rows: Tensor, weights: Tensor) -> Tensor:
        return torch._grouped_mm(rows, weights, offs=self.offsets)


def trained(model: nn.Module, x: Tensor) -> Tensor:
    """Run the forward and the backward pass, with new gradients."""
    model.zero_grad(set_to_none=True)
    y = model(x)
    (y if y.dim() == 0 else y.float().square().mean()).backward()
    return y.detach()
