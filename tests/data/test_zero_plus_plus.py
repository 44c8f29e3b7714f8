"""ZeRO++ in numbers."""

from __future__ import annotations

from typing import Any

from tplab.data.zero_plus_plus import ZeroPlusPlus, secondary_bytes, step_bytes

NONE: dict[str, Any] = {"weight_bits": None, "secondary": False, "gradient_bits": None}
SAVINGS: dict[str, dict[str, Any]] = {
    "none": NONE,
    "qwZ": NONE | {"weight_bits": 8},
    "hpZ": NONE | {"secondary": True},
    "qgZ": NONE | {"gradient_bits": 4},
    "all": {},
}


def test_three_quarters_of_m_cross_in_the_place_of_three():
    """M parameters of 2 bytes on O nodes; scales are listed apart."""
    num_elements, nodes, gpus = 4096, 4, 8
    m = num_elements * nodes * gpus * 2 * (nodes - 1) / nodes  # bytes that leave a node in a plain pass
    passes = {name: step_bytes(num_elements, nodes, gpus, ZeroPlusPlus("gpu", **how)) for name, how in SAVINGS.items()}
    across = {name: [gpus * one.across.codes / m for one in sent] for name, sent in passes.items()}
    assert across == {
        "none": [1, 1, 1], "qwZ": [0.5, 0.5, 1], "hpZ": [1, 0, 1], "qgZ": [1, 1, 0.25], "all": [0.5, 0, 0.25],
    }  # fmt: skip
    assert passes["all"].across.codes * 4 == passes["none"].across.codes
    assert passes["all"].across.scales == 2 * (nodes - 1) * 4 * num_elements // 256
    assert passes["none"].across.scales == passes["hpZ"].across.scales == 0


def test_a_second_piece_is_a_share_of_a_nodes_ranks():
    assert secondary_bytes(100, 4, ZeroPlusPlus("gpu")) == 4 * 100 * 2  # M = 4 I 100 elements: M / I of 2 bytes
    assert secondary_bytes(100, 4, ZeroPlusPlus("gpu", secondary=False)) == 0
