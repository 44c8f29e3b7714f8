"""A GPT as a list of layers, for `stages_of` to cut into the stages of a pipeline."""

from __future__ import annotations

from torch import Tensor, nn

from tplab.mesh import Axis
from tplab.models.checks import SequenceScheme
from tplab.models.gpt import GPTConfig
from tplab.pipeline.layer_spec import LayerSpec, TiedSpec
from tplab.sequence import LayoutName
from tplab.torch.layers.dropout import dropout
from tplab.torch.models.gpt import Block, Spread, draw_parameters


def gpt_layers(
    config: GPTConfig,
    axis: Axis = "tp",
    *,
    sequence_parallel: bool = False,
    data_axis: Axis | None = None,
    context_axis: Axis | None = None,
    layout: LayoutName = "zigzag",
    scheme: SequenceScheme = "ring",
) -> list[LayerSpec]:
    """The layers of GPT(config, axis): num_layers + 2 of them, each of which is tensor-parallel along `axis`.

        layers = gpt_layers(config)
        stages = stages_of(layers, schedule)

    layer 0              ids [B, S] -> x [B, S, D]       embedding and positions
    layers 1 to L        x -> x                          blocks
    layer L + 1          x -> logits [B, S, n]           norm, and the head, whose weight is tied to the embedding

    Under sequence parallelism x is this rank's piece [B, S/R, D], also between stages. Arguments are those of GPT. The
    loss of the logits is vocab_parallel_cross_entropy(logits, targets, axis, config.vocab_size).
    """
    spread, tied = (
        Spread(axis, sequence_parallel, data_axis, context_axis, layout=layout, scheme=scheme),
        "embedding.weight",
    )
    return [
        TiedSpec("embedding", GPTEmbedding, config, spread, weight=tied),
        *[LayerSpec(GPTBlock, config, spread)] * config.num_layers,
        TiedSpec("embedding", GPTHead, config, spread, weight=tied),
    ]


class GPTEmbedding(nn.Module):
    """ids [B, S]   ->   x [B, S, D]: the rows of the tokens and of the positions."""

    def __init__(self, config: GPTConfig, spread: Spread):
        super().__init__()
        self.p, self.spread = config.dropout, spread
        self.embedding = spread.embedding(config)
        self.positions = nn.Embedding(config.context, config.width)
        draw_parameters(self, config, spread.axis, layer=0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.spread.rows(self.positions.weight, ids)
        return dropout(x, self.p if self.training else 0.0, axis=self.spread.varies_along)


class GPTBlock(Block):
    """A block, with the initial weights of a block in a GPT."""

    def __init__(self, config: GPTConfig, spread: Spread):
        super().__init__(config, spread)
        draw_parameters(self, config, spread.axis, layer=1)


class GPTHead(nn.Module):
    """x [B, S, D]   ->   logits [B, S, n], of this rank's n entries."""

    def __init__(self, config: GPTConfig, spread: Spread):
        super().__init__()
        self.embedding, self.norm = spread.embedding(config), spread.norm(config)
        draw_parameters(self, config, spread.axis, layer=config.num_layers + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding.logits(self.norm(x))
