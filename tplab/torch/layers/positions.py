"""Where the tokens are that a rank has of a sequence that ranks share, and rotary embeddings of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tplab.mesh import Axis
from tplab.sequence import AttentionMask, LayoutName, TokenLayout, check_rope
from tplab.torch.comm.collectives import axis_index, axis_size


def token_positions(
    num_tokens: int, axis: Axis, *, layout: LayoutName = "contiguous", documents: Sequence[int] = ()
) -> Tensor:
    """The positions [n] of the tokens that this rank of `axis` has of a whole sequence: ids[:, positions] are its ids.

    documents   lengths of packed documents: positions in the token's own document, as RoPE needs them
    """
    positions = TokenLayout(layout, num_tokens, axis_size(axis)).positions[axis_index(axis)]
    return torch.tensor(AttentionMask(documents=documents).in_document(positions, num_tokens))


def rope(x: Tensor, positions: Any, *, base: float = 10000.0) -> Tensor:
    """Rotary position embedding (Su et al. 2021), with the two halves of a head paired, as in Llama.

    x [.., n, d], d even   positions [n]: those of this rank's tokens, as token_positions or TokenLayout gives them
    ->   [.., n, d]
    y_i = x_i cos a_i - x_(i + d/2) sin a_i      y_(i + d/2) = x_(i + d/2) cos a_i + x_i sin a_i      i < d/2
    a_i = position base^(-2i/d)
    """
    positions = torch.as_tensor(positions)
    half = check_rope(x.shape, positions.shape)
    dtype = torch.promote_types(x.dtype, torch.float32)
    angles = positions.to(x.device, dtype)[:, None] * base ** (torch.arange(half, dtype=dtype, device=x.device) / -half)
    first, second = x.to(dtype).split(half, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
