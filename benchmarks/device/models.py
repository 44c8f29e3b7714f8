"""A transformer block and a small GPT, as people write them: plain torch, to be measured and modelled."""

from __future__ import annotations

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


def trained(model: nn.Module, x: Tensor) -> Tensor:
    """Forward and backward, with new gradients."""
    model.zero_grad(set_to_none=True)
    y = model(x)
    (y if y.dim() == 0 else y.float().square().mean()).backward()
    return y.detach()
