"""tplab on torch: one rank's program, run on every rank of a mesh."""

from importlib import import_module
from importlib.util import find_spec
from types import FunctionType
from typing import TYPE_CHECKING, Any

from tplab.errors import MissingPackageError

if find_spec("torch") is None:
    raise MissingPackageError("tplab.torch", "torch", extra="torch")

from tplab.models.gpt import GPTConfig, GPTExperts, gpt_specs, gpt_state
from tplab.models.gpt2 import gpt2_config, gpt2_state
from tplab.models.state import async_state, blocking_state, classifier_specs
from tplab.pipeline.checks import split_batch
from tplab.rings import async_weight, blocking_weight
from tplab.torch.checking.check_parallel import check_parallel
from tplab.torch.comm.collectives import (
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
from tplab.torch.comm.messages import receive, send
from tplab.torch.comm.regions import copy_to, gather_from, reduce_from, scatter_to
from tplab.torch.comm.rings import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from tplab.torch.data.average import average_gradients, share_of_tokens, tokens_per_rank
from tplab.torch.data.clipping import clip_gradients, gradient_norm
from tplab.torch.data.parallel import data_parallel
from tplab.torch.data.quantized import (
    dequantize,
    quantize,
    quantized_all_gather,
    quantized_reduce_scatter,
    zero_plus_plus,
)
from tplab.torch.data.shard_gradients import shard_gradients
from tplab.torch.data.shard_parameters import gather_state, no_sync, shard_parameters
from tplab.torch.data.sharded_optimizer import shard_optimizer
from tplab.torch.distributed.mesh import device_mesh
from tplab.torch.layers.attention import ParallelSelfAttention
from tplab.torch.layers.dropout import dropout
from tplab.torch.layers.experts import MixtureOfExperts, ParallelExperts
from tplab.torch.layers.linear import ColumnParallelLinear, ParallelMLP, RowParallelLinear
from tplab.torch.layers.memory import gather_again, saved_tensors
from tplab.torch.layers.norms import (
    LayerNorm,
    ParallelLayerNorm,
    ParallelRMSNorm,
    RMSNorm,
    batch_norm,
    batch_statistics,
)
from tplab.torch.layers.overlap import AsyncLinear, all_gather_matmul, matmul_reduce_scatter
from tplab.torch.layers.router import (
    Routed,
    Router,
    balance_loss,
    balanced_bias,
    chosen_counts,
    z_loss,
)
from tplab.torch.layers.sequence_attention import (
    gather_attention,
    head_attention,
    head_ring_attention,
    ring_attention,
    rope,
    token_positions,
)
from tplab.torch.layers.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from tplab.torch.models.classifier import ParallelClassifier, ParallelMLPBlock
from tplab.torch.models.gpt import GPT, gpt_layers
from tplab.torch.models.huggingface import parallelize, whole_state
from tplab.torch.models.plans import FusedColumn, gpt2_plan, llama_plan
from tplab.torch.models.state import load_shards, load_state, merge_state, save_shards, save_state, split_state
from tplab.torch.pipeline.stages import Stages, num_parameters, stages_of
from tplab.torch.pipeline.train_batch import evaluate_batch, train_batch
from tplab.torch.private import not_compiled
from tplab.torch.run import Result, run
from tplab.torch.training.train import train
from tplab.torch.watching.live_bytes import LiveBytes
from tplab.torch.watching.memory import count_as

if TYPE_CHECKING:
    from tplab.torch.checking.same_model import same_model
    from tplab.torch.scripts import launch

__all__ = [
    "GPT",
    "AsyncLinear",
    "ColumnParallelLinear",
    "FusedColumn",
    "GPTConfig",
    "GPTExperts",
    "Handle",
    "LayerNorm",
    "LiveBytes",
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
    "copy_to",
    "count_as",
    "data_parallel",
    "dequantize",
    "device_mesh",
    "dropout",
    "evaluate_batch",
    "gather",
    "gather_again",
    "gather_attention",
    "gather_from",
    "gather_state",
    "gpt2_config",
    "gpt2_plan",
    "gpt2_state",
    "gpt_layers",
    "gpt_specs",
    "gpt_state",
    "gradient_norm",
    "head_attention",
    "head_ring_attention",
    "launch",
    "llama_plan",
    "load_shards",
    "load_state",
    "matmul_reduce_scatter",
    "merge_state",
    "no_sync",
    "num_parameters",
    "parallelize",
    "ppermute",
    "quantize",
    "quantized_all_gather",
    "quantized_reduce_scatter",
    "receive",
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
    "send",
    "shard_gradients",
    "shard_optimizer",
    "shard_parameters",
    "share_of_tokens",
    "split_batch",
    "split_state",
    "stages_of",
    "start",
    "token_positions",
    "tokens_per_rank",
    "train",
    "train_batch",
    "vocab_parallel_cross_entropy",
    "whole_state",
    "z_loss",
    "zero_plus_plus",
]


_LATER = {"launch": "tplab.torch.scripts", "same_model": "tplab.torch.checking.same_model"}


def __getattr__(name: str) -> Any:
    """Import what needs torch.distributed when it is first used: torch.distributed takes time to import."""
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


for _name in set(__all__) - {*_LATER}:  # torch.compile leaves these alone, and compiles the program around them
    _function = getattr(globals()[_name], "forward", globals()[_name])
    if isinstance(_function, FunctionType) and _function.__module__.startswith(__name__):
        not_compiled(_function)
