"""Where the tokens are that a rank has of a sequence that ranks share, and rotary embeddings of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from tplab.jax.comm.collectives import axis_index, axis_size
from tplab.mesh import Axis
from tplab.sequence import AttentionMask, LayoutName, TokenLayout, check_rope


def token_positions(
    num_tokens: int, axis: Axis, *, layout: LayoutName = "contiguous", documents: Sequence[int] = ()
) -> Array:
    """The positions [n] of the tokens that this rank of `axis` has of a whole sequence: ids[:, positions] are its ids.

    documents   lengths of packed documents: positions in the token's own document, as RoPE needs them
    """
    positions = TokenLayout(layout, num_tokens, axis_size(axis)).positions
    return jnp.asarray(AttentionMask(documents=documents).in_document(positions, num_tokens))[axis_index(axis)]


def rope(x: Array, positions: Any, *, base: float = 10000.0) -> Array:
    """Rotary position embedding (Su et al. 2021), with the two halves of a head paired, as in Llama.

    x [.., n, d], d even   positions [n]: those of this rank's tokens, as token_positions or TokenLayout gives them
    ->   [.., n, d]
    y_i = x_i cos a_i - x_(i + d/2) sin a_i      y_(i + d/2) = x_(i + d/2) cos a_i + x_i sin a_i      i < d/2
    a_i = position base^(-2i/d), in float32 at least
    """
    positions = jnp.asarray(positions)
    half = check_rope(x.shape, positions.shape)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    angles = positions.astype(dtype)[:, None] * base ** (jnp.arange(half, dtype=dtype) / -half)
    first, second = jnp.split(x.astype(dtype), 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
