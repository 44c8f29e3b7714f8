"""A sequence cut over ranks: which tokens each rank holds, which scores it computes and when, and what that costs."""

from tplab.sequence.call import check_attention, check_heads_to_share, check_rope
from tplab.sequence.costs import (
    SCHEMES,
    BytesSent,
    Scheme,
    attention_bytes,
    tokens_to_hide_hop,
)
from tplab.sequence.layout import (
    LAYOUTS,
    AttentionMask,
    LayoutName,
    Tile,
    TokenLayout,
    efficiency,
    layout_of,
    load,
    tiles_of,
)

__all__ = [
    "LAYOUTS",
    "SCHEMES",
    "AttentionMask",
    "BytesSent",
    "LayoutName",
    "Scheme",
    "Tile",
    "TokenLayout",
    "attention_bytes",
    "check_attention",
    "check_heads_to_share",
    "check_rope",
    "efficiency",
    "layout_of",
    "load",
    "tiles_of",
    "tokens_to_hide_hop",
]
