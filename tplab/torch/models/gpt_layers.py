"""A GPT as a list of layers, for `stages_of` to cut into the stages of a pipeline."""

from __future__ import annotations

from torch import Tensor, nn

from tplab.mesh import Axis
from tplab.models.gpt import GPTConfig
from tplab.pipeline.layer_spec import LayerSpec, TiedSpec
from tplab.torch.layers.dropout import dropout
from tplab.torch.layers.vocabulary import VocabParallelEmbedding
from tplab.torch.models.gpt import Block, draw_parameters, norm_of, positions_of, together


def gpt_layers(
    config: GPTConfig, axis: Axis = "tp", *, sequence_parallel: bool = False, data_axis: Axis | None = None
) -> list[LayerSpec]:
    """The layers of GPT(config, axis): num_layers + 2 of them, each of which is tensor-parallel along `axis`.

        layers = gpt_layers(config)
        stages = stages_of(layers, schedule)

    layer 0              ids [B, S] -> x [B, S, D]       embedding and positions
    layers 1 to L        x -> x                          blocks
    layer L + 1          x -> logits [B, S, n]           norm, and the head, whose weight is tied to the embedding

    Under sequence parallelism x is this rank's piece [B, S/R, D], also between stages. The loss of the logits is
    vocab_parallel_cross_entropy(logits, targets, axis, config.vocab_size).
    """
    sequence_dim, tied = 1 if sequence_parallel else None, "embedding.weight"
    varies_along = together(data_axis, axis if sequence_parallel else None)
    return [
        TiedSpec("words", GPTEmbedding, config, axis, sequence_dim, varies_along, weight=tied),
        *[LayerSpec(GPTBlock, config, axis, sequence_dim, varies_along)] * config.num_layers,
        TiedSpec("words", GPTHead, config, axis, sequence_dim, weight=tied),
    ]


class GPTEmbedding(nn.Module):
    """ids [B, S]   ->   x [B, S, D]: the rows of the words and of the positions."""

    def __init__(self, config: GPTConfig, axis: Axis, sequence_dim: int | None, varies_along: Axis | None):
        super().__init__()
        self.p, self.axis, self.sequence_dim, self.varies_along = config.dropout, axis, sequence_dim, varies_along
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.width, axis, sequence_dim=sequence_dim)
        self.positions = nn.Embedding(config.context, config.width)
        draw_parameters(self, config, axis, layer=0)

    def forward(self, ids: Tensor) -> Tensor:
        positions = positions_of(self.positions.weight, ids, self.axis, self.sequence_dim)
        return dropout(self.embedding(ids) + positions, self.p if self.training else 0.0, axis=self.varies_along)


class GPTBlock(Block):
    """A block, with the initial weights of a block in a GPT."""

    def __init__(self, config: GPTConfig, axis: Axis, sequence_dim: int | None, varies_along: Axis | None):
        super().__init__(config, axis, sequence_dim, varies_along)
        draw_parameters(self, config, axis, layer=1)


class GPTHead(nn.Module):
    """x [B, S, D]   ->   logits [B, S, n], of this rank's n words."""

    def __init__(self, config: GPTConfig, axis: Axis, sequence_dim: int | None):
        super().__init__()
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.width, axis, sequence_dim=sequence_dim)
        self.norm = norm_of(config, axis, sequence_dim)
        draw_parameters(self, config, axis, layer=config.num_layers + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding.logits(self.norm(x))
