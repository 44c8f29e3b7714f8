"""The GPT in torch's own layers, unsharded: a reference for the sharded one, and a model for DTensor to shard."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.errors import ShapeError
from tplab.models.gpt import GPTConfig
from tplab.pipeline.partition import LayerSpec


class PlainGPT(nn.Module):
    """ids [B, S]   ->   logits [B, S, V]: GPT(config) on one rank, without tplab; parameters have the same names.

    The head is a module with the embedding's weight. It only covers a GPT like GPT-2: LayerNorm, GeLU by its tanh
    formula, biases, as many key heads as query heads; no dropout.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        kind = config.norm, config.activation, config.bias, config.num_kv_heads in (None, config.num_heads)
        if kind != ("layer", "gelu_tanh", True, True):
            raise ShapeError(f"PlainGPT is for models like GPT-2, with GPTConfig's defaults, not for {config}")
        width = config.width
        self.config = config
        self.embedding, self.positions = nn.Embedding(config.vocab_size, width), nn.Embedding(config.context, width)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def load(self, state: Mapping[str, Tensor]) -> PlainGPT:
        """Load the whole state of a GPT. Returns self."""
        self.load_state_dict({**state, "head.weight": state["embedding.weight"]})
        return self

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of targets [B, S]; targets of -100 do not count."""
        return token_loss(self(ids), targets)


class PlainBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention, self.mlp = PlainAttention(config), PlainMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class PlainAttention(nn.Module):
    """y = output(softmax(q k^T / sqrt(d)) v) of the heads in query's output: all heads, or a rank's."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        width = config.width
        self.head_width = width // config.num_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))


class PlainMLP(nn.Module):
    """y = down(gelu(up(x)))."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden_width)
        self.down = nn.Linear(config.hidden_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def plain_layers(config: GPTConfig) -> list[LayerSpec]:
    """A GPT like PlainGPT as a list of num_layers + 3 layers, which `stages_of` can cut into pipeline stages.

        stages = stages_of(plain_layers(config), schedule)

    layer 0              ids [B, S] -> x [B, S, D]       embedding, without positions
    layers 1 to L        x -> x                          blocks
    layers L + 1, L + 2  x -> logits [B, S, V]           norm; head, with its own weight
    """
    block, norm = LayerSpec(PlainBlock, config), LayerSpec(nn.LayerNorm, config.width)
    head = LayerSpec(nn.Linear, config.width, config.vocab_size, bias=False)
    return [LayerSpec(nn.Embedding, config.vocab_size, config.width), *[block] * config.num_layers, norm, head]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of logits [B, S, V] and targets [B, S] over all tokens; targets of -100 do not count."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
