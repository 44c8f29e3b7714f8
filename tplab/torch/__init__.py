"""tplab on torch: one rank's program, run on every rank of a mesh."""

from tplab.gpt import GPTConfig, gpt_specs
from tplab.torch.attention import ParallelSelfAttention
from tplab.torch.comm import (
    Handle,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    barrier,
    broadcast,
    ppermute,
    reduce_scatter,
    ring_shift,
    start,
)
from tplab.torch.dropout import dropout
from tplab.torch.gpt import GPT
from tplab.torch.layers import ColumnParallelLinear, ParallelMLP, RowParallelLinear
from tplab.torch.norms import LayerNorm, ParallelLayerNorm, ParallelRMSNorm, RMSNorm
from tplab.torch.regions import copy_to, gather_from, reduce_from, scatter_to
from tplab.torch.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from tplab.torch.state import load_shards, load_state, merge_state, save_shards, save_state, split_state
from tplab.torch.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from tplab.torch.world import Result, run

__all__ = [
    "GPT",
    "ColumnParallelLinear",
    "GPTConfig",
    "Handle",
    "LayerNorm",
    "ParallelLayerNorm",
    "ParallelMLP",
    "ParallelRMSNorm",
    "ParallelSelfAttention",
    "RMSNorm",
    "Result",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "axis_size",
    "barrier",
    "broadcast",
    "copy_to",
    "dropout",
    "gather_from",
    "gpt_specs",
    "load_shards",
    "load_state",
    "merge_state",
    "ppermute",
    "reduce_from",
    "reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "ring_shift",
    "run",
    "save_shards",
    "save_state",
    "scatter_to",
    "split_state",
    "start",
    "vocab_parallel_cross_entropy",
]
