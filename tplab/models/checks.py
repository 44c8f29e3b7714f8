"""Checks of arguments, with their messages, that the layers of both frameworks share. They see only sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from tplab.errors import ShapeError, one_of
from tplab.mesh import Axis
from tplab.sharding import share

ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu")
DISPATCHES = ("all_to_all", "per_rank", "gather", "two_levels")
REDUCTIONS = ("mean", "sum", "none")
MODES = ("gather", "scatter", "none")
"""The modes of the overlapped linear layers."""

LayoutName = Literal["contiguous", "zigzag", "striped"]
"""Which tokens of a sequence each rank holds: see `tplab.sequence.TokenLayout`."""

SequenceScheme = Literal["ring", "gather", "head"]
SEQUENCE_SCHEMES: tuple[SequenceScheme, ...] = get_args(SequenceScheme)
"""How ranks that share a sequence attend to one another's tokens."""

Shape = Sequence[int]


# --- linear layers and norms ------------------------------------------------------------------------------------------


def check_column_input(shape: Shape, in_features: int, axis: Axis) -> None:
    """Raise ShapeError if x does not have all input features of a column-parallel layer."""
    if shape[-1] != in_features:
        raise ShapeError(
            f"ColumnParallelLinear takes x [..., {in_features}], but got {list(shape)}; every rank needs all input "
            f"features: gather_from(x, {axis!r}) joins pieces of them"
        )


def check_row_input(shape: Shape, expected: int, in_features: int, axis: Axis) -> None:
    """Raise ShapeError if x does not have the `expected` number of a row-parallel layer's input features."""
    if shape[-1] == expected:
        return
    way_out = ""
    if shape[-1] == in_features:
        way_out = "; that is all of x: give input_is_parallel=False, and each rank takes its piece"
    elif expected == in_features:
        way_out = f"; gather_from(x, {axis!r}) joins pieces, or give input_is_parallel=True"
    raise ShapeError(
        f"RowParallelLinear takes x [..., {expected}] of {in_features} input features over axis {axis!r}, but got "
        f"{list(shape)}{way_out}"
    )


def check_row_modes(bias: bool, input_is_parallel: bool, sequence_dim: int | None, reduce_output: bool) -> None:
    """Raise ValueError for modes of a row-parallel layer that cannot be combined."""
    if bias and not reduce_output:
        raise ValueError(
            "a bias on a partial sum is added once by each of the R ranks, R times in total; give bias=False and add "
            "it after the sum, or leave reduce_output=True"
        )
    if sequence_dim is not None and not (input_is_parallel and reduce_output):
        raise ValueError(
            f"sequence_dim={sequence_dim} says that the sum is scattered along a dim of the sequence; it needs "
            "input_is_parallel=True and reduce_output=True"
        )


def check_sequence_dim(shape: Shape, sequence_dim: int) -> None:
    """Raise ShapeError unless `sequence_dim` is a dim before the features."""
    if not -len(shape) <= sequence_dim < len(shape) or sequence_dim % len(shape) == len(shape) - 1:
        raise ShapeError(
            f"sequence_dim={sequence_dim} of x {list(shape)}: it must be a dim before the last one, which holds the "
            "features"
        )


def check_dispatch(dispatch: str, axis: Axis) -> None:
    """Raise ValueError for an unknown way of dispatching tokens to experts, or for two levels that are not two axes."""
    one_of("dispatch", dispatch, DISPATCHES)
    if dispatch == "two_levels" and (isinstance(axis, str) or len(axis) != 2):
        raise ValueError(
            f"two levels are two axes, axis=(outer, inner), where outer counts the nodes; axis is {axis!r}"
        )


def check_routed(x: Shape, choices: Shape, width: int) -> None:
    """Raise ShapeError unless x is [T, D] and choices are [T, k]."""
    if len(x) != 2 or x[-1] != width or len(choices) != 2 or choices[0] != x[0]:
        raise ShapeError(
            f"x is {list(x)} and choices are {list(choices)}; experts take tokens [T, {width}] and k choices for each, "
            "[T, k]"
        )


def check_norm_input(norm: str, shape: Shape, num_here: int, width: int) -> None:
    """Raise ShapeError if x does not have the `num_here` of `width` features that a norm is for."""
    if shape[-1] == num_here:
        return
    way_out = ""
    if num_here != width:
        way_out = f" of {width} features over all ranks; LayerNorm and RMSNorm are for whole ones"
    elif width % max(shape[-1], 1) == 0:
        way_out = "; ParallelLayerNorm and ParallelRMSNorm are for features of which each rank holds some"
    raise ShapeError(f"{norm} takes x [..., {num_here}], but got {list(shape)}{way_out}")


# --- attention --------------------------------------------------------------------------------------------------------


def check_heads(
    width: int, num_heads: int, num_kv_heads: int, num_ranks: int, label: str, sequence_dim: int | None
) -> None:
    """Raise ShapeError if the heads are impossible, or cannot be shared equally."""
    if num_heads < 1 or width % num_heads:
        raise ShapeError(
            f"a width of {width} does not divide into {num_heads} heads; make it "
            f"{-(-width // max(num_heads, 1)) * max(num_heads, 1)}, or take a number of heads that divides {width}"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ShapeError(
            f"num_kv_heads is {num_kv_heads}, which does not divide the {num_heads} heads: each key and value head "
            "serves equally many query heads"
        )
    share(num_heads, num_ranks, "num_heads is", axis=label, why="heads are sharded whole")
    if num_kv_heads % num_ranks:
        raise ShapeError(
            f"num_kv_heads is {num_kv_heads}, which the {num_ranks} ranks of axis {label!r} cannot share: heads are "
            f"sharded whole;\nuse a mesh whose {label!r} divides {num_kv_heads}, or repeat the rows of each key and "
            f"value head {num_heads // num_kv_heads} times and leave num_kv_heads out"
        )
    if sequence_dim not in (None, 1, -2):
        raise ShapeError(f"sequence_dim is {sequence_dim}; of x [batch, sequence, width] the sequence is dim 1")


def check_ids(ids: Shape, context: int, num_ranks: int = 1) -> None:
    """Raise ShapeError unless a GPT takes ids [batch, tokens]: of up to `context` tokens on all context ranks."""
    if len(ids) != 2 or ids[1] * num_ranks > context:
        each = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
        raise ShapeError(
            f"a GPT takes ids [batch, sequence] of up to {context} tokens, but got {list(ids)}{each}; "
            "GPTConfig.context says how long a sequence may be"
        )


def check_attention_input(shape: Shape, width: int) -> None:
    """Raise ShapeError if x is not [batch, sequence, width]."""
    if len(shape) != 3:
        raise ShapeError(f"ParallelSelfAttention takes x [batch, sequence, {width}], but got {list(shape)}")


# --- the vocabulary ---------------------------------------------------------------------------------------------------


def check_vocabulary(vocab_size: int) -> None:
    """Raise ShapeError for a vocabulary without entries."""
    if vocab_size < 1:
        raise ShapeError(f"vocab_size is {vocab_size}; a vocabulary needs one entry or more")


def check_loss(logits: Shape, ids: Shape, reduction: str, label_smoothing: float) -> None:
    """Raise ValueError or ShapeError if no loss can be computed from these arguments."""
    one_of("reduction", reduction, REDUCTIONS)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; it is a share, from 0 to 1")
    if tuple(logits[:-1]) != tuple(ids):
        raise ShapeError(
            f"logits {list(logits)} are for ids {list(logits[:-1])}, but got ids {list(ids)}; the last dim of the "
            "logits is that of the vocabulary"
        )


def check_entries(num_columns: int, accepted: Sequence[int], vocab_size: int, whose: str, axis: Axis) -> None:
    """Raise ShapeError unless logits have one column per entry of the rank, with or without padding.

    whose   how the sentence about the entries begins: "each of the 4 ranks of axis 'tp' has"
    """
    if num_columns in accepted:
        return
    if num_columns == vocab_size:
        way_out = f"scatter_to(logits, {axis!r}) gives each rank its entries"
    else:
        way_out = "each rank computes those of its own entries, as VocabParallelEmbedding.logits does"
    padded = f" (or {accepted[-1]}, padded)" if accepted[-1] != accepted[0] else ""
    raise ShapeError(
        f"logits have {num_columns} columns, but of {vocab_size} vocabulary entries {whose} "
        f"{accepted[0]}{padded}; {way_out}"
    )


# --- overlapped layers ------------------------------------------------------------------------------------------------


def check_sharded_input(layer: str, shape: Shape, num_here: int, in_features: int) -> None:
    """Raise ShapeError if x does not have this rank's share of the input features."""
    if shape[-1] != num_here:
        way_out = "; that is all of x: scatter_to(x, axis) gives each rank its features"
        raise ShapeError(
            f"{layer} takes x [..., {num_here}], this rank's share of {in_features} features, but got {list(shape)}"
            + (way_out if shape[-1] == in_features else "")
        )


def check_ring_weight(op: str, shape: Shape, num_features: int, num_pieces: int) -> None:
    """Raise ShapeError unless a weight is a matrix for `num_pieces` pieces of `num_features` each."""
    if len(shape) != 2:
        raise ShapeError(f"{op}: the weight is a matrix [F, D], as nn.Linear has it, not {list(shape)}")
    expected = num_features * num_pieces
    if shape[1] != expected:
        pieces = f" of {num_features} on each of {num_pieces} ranks" if num_pieces > 1 else ""
        raise ShapeError(
            f"{op}: the weight {list(shape)} takes {shape[1]} features, but there are {expected}{pieces};"
            f"\ngive weight [F, {expected}], as nn.Linear({expected}, F) has it"
        )
