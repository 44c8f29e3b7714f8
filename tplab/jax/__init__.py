"""tplab on JAX: one rank's program, compiled once for all ranks of a mesh.

Importing it fixes how many CPU devices JAX will simulate (16; `prepare` for more), so import it before you use JAX.
"""

from importlib.util import find_spec

from tplab.errors import MissingPackageError

if find_spec("jax") is None:
    raise MissingPackageError("tplab.jax", "jax", extra="jax")

from tplab.jax.ranks.devices import prepare  # first: it settles what JAX cannot change later  # isort: skip
from tplab.jax.checking.check_parallel import check_parallel
from tplab.jax.checking.same_model import same_model
from tplab.jax.comm.collectives import (
    Handle,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    barrier,
    broadcast,
    gather,
    ppermute,
    reduce,
    reduce_scatter,
    ring_shift,
    scatter,
    start,
)
from tplab.jax.comm.regions import copy_to, gather_from, reduce_from, scatter_to
from tplab.jax.comm.rings import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from tplab.jax.data.average import average_gradients, data_parallel, share_of_tokens, tokens_per_rank
from tplab.jax.data.clipping import clip_gradients, gradient_norm
from tplab.jax.data.quantized import (
    dequantize,
    quantize,
    quantized_all_gather,
    quantized_reduce_scatter,
    zero_plus_plus,
)
from tplab.jax.data.shard_parameters import shard_parameters
from tplab.jax.data.sharded_optimizer import shard_gradients, shard_optimizer
from tplab.jax.layers.attention import ParallelSelfAttention
from tplab.jax.layers.dropout import dropout
from tplab.jax.layers.experts import MixtureOfExperts, ParallelExperts
from tplab.jax.layers.linear import ColumnParallelLinear, ParallelMLP, RowParallelLinear
from tplab.jax.layers.memory import gather_again, saved_tensors
from tplab.jax.layers.norms import LayerNorm, ParallelLayerNorm, ParallelRMSNorm, RMSNorm, batch_norm, batch_statistics
from tplab.jax.layers.overlap import AsyncLinear, all_gather_matmul, matmul_reduce_scatter
from tplab.jax.layers.router import (
    Routed,
    Router,
    balance_loss,
    balanced_bias,
    chosen_counts,
    z_loss,
)
from tplab.jax.layers.sequence_attention import (
    gather_attention,
    head_attention,
    head_ring_attention,
    ring_attention,
    rope,
    token_positions,
)
from tplab.jax.layers.vocabulary import VocabParallelEmbedding, pad_vocabulary, vocab_parallel_cross_entropy
from tplab.jax.models.classifier import ParallelClassifier, ParallelMLPBlock
from tplab.jax.models.gpt import GPT, gpt_layers
from tplab.jax.models.huggingface import gpt2_params, shard_params
from tplab.jax.models.state import load_shards, load_state, merge_state, save_shards, save_state, split_state
from tplab.jax.pipeline.stages import Stages, num_parameters, stages_of
from tplab.jax.pipeline.train_batch import evaluate_batch, train_batch
from tplab.jax.ranks.context import rank_key
from tplab.jax.run import Result, run
from tplab.jax.tracing.compiled import CompiledCollective, collectives_in, temporary_bytes
from tplab.jax.tracing.explain import explain
from tplab.jax.tracing.unroll import trace
from tplab.jax.training.train import train
from tplab.models.gpt import GPTConfig, GPTExperts, gpt_specs, gpt_state
from tplab.models.gpt2 import gpt2_config, gpt2_state
from tplab.models.state import async_state, blocking_state, classifier_specs
from tplab.pipeline.checks import split_batch
from tplab.rings import async_weight, blocking_weight

__all__ = [
    "GPT",
    "AsyncLinear",
    "ColumnParallelLinear",
    "CompiledCollective",
    "GPTConfig",
    "GPTExperts",
    "Handle",
    "LayerNorm",
    "MixtureOfExperts",
    "ParallelClassifier",
    "ParallelExperts",
    "ParallelLayerNorm",
    "ParallelMLP",
    "ParallelMLPBlock",
    "ParallelRMSNorm",
    "ParallelSelfAttention",
    "RMSNorm",
    "Result",
    "Routed",
    "Router",
    "RowParallelLinear",
    "Stages",
    "VocabParallelEmbedding",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "async_state",
    "async_weight",
    "average_gradients",
    "axis_index",
    "axis_size",
    "balance_loss",
    "balanced_bias",
    "barrier",
    "batch_norm",
    "batch_statistics",
    "blocking_state",
    "blocking_weight",
    "broadcast",
    "check_parallel",
    "chosen_counts",
    "classifier_specs",
    "clip_gradients",
    "collectives_in",
    "copy_to",
    "data_parallel",
    "dequantize",
    "dropout",
    "evaluate_batch",
    "explain",
    "gather",
    "gather_again",
    "gather_attention",
    "gather_from",
    "gpt2_config",
    "gpt2_params",
    "gpt2_state",
    "gpt_layers",
    "gpt_specs",
    "gpt_state",
    "gradient_norm",
    "head_attention",
    "head_ring_attention",
    "load_shards",
    "load_state",
    "matmul_reduce_scatter",
    "merge_state",
    "num_parameters",
    "pad_vocabulary",
    "ppermute",
    "prepare",
    "quantize",
    "quantized_all_gather",
    "quantized_reduce_scatter",
    "rank_key",
    "reduce",
    "reduce_from",
    "reduce_scatter",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_attention",
    "ring_reduce_scatter",
    "ring_shift",
    "rope",
    "run",
    "same_model",
    "save_shards",
    "save_state",
    "saved_tensors",
    "scatter",
    "scatter_to",
    "shard_gradients",
    "shard_optimizer",
    "shard_parameters",
    "shard_params",
    "share_of_tokens",
    "split_batch",
    "split_state",
    "stages_of",
    "start",
    "temporary_bytes",
    "token_positions",
    "tokens_per_rank",
    "trace",
    "train",
    "train_batch",
    "vocab_parallel_cross_entropy",
    "z_loss",
    "zero_plus_plus",
]
