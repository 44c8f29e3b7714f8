"""tplab on JAX: one rank's program, compiled once for all ranks of a mesh.

Importing it settles how many CPU devices JAX will simulate (16; `prepare` for more), so import it before JAX is used.
"""

from tplab.jax.devices import prepare  # first: it settles what JAX cannot change later  # isort: skip
from tplab.gpt import GPTConfig, gpt_specs
from tplab.jax.attention import ParallelSelfAttention
from tplab.jax.comm import (
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
from tplab.jax.compiled import CompiledCollective, collectives_in
from tplab.jax.context import rank_key
from tplab.jax.dropout import dropout
from tplab.jax.gpt import GPT
from tplab.jax.layers import ColumnParallelLinear, ParallelMLP, RowParallelLinear
from tplab.jax.norms import LayerNorm, ParallelLayerNorm, ParallelRMSNorm, RMSNorm
from tplab.jax.regions import copy_to, gather_from, reduce_from, scatter_to
from tplab.jax.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from tplab.jax.state import load_shards, load_state, merge_state, save_shards, save_state, split_state
from tplab.jax.vocabulary import VocabParallelEmbedding, pad_vocabulary, vocab_parallel_cross_entropy
from tplab.jax.world import Result, run

__all__ = [
    "GPT",
    "ColumnParallelLinear",
    "CompiledCollective",
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
    "collectives_in",
    "copy_to",
    "dropout",
    "gather_from",
    "gpt_specs",
    "load_shards",
    "load_state",
    "merge_state",
    "pad_vocabulary",
    "ppermute",
    "prepare",
    "rank_key",
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
