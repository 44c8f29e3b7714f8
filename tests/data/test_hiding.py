"""From how many tokens per rank messages are hidden; and labs that say how many all say the same."""

import re
from functools import cache
from pathlib import Path

import pytest

from tplab.cost import find
from tplab.data import hiding
from tplab.data.hiding import H100S, SCHEMES, block_parameters, step_seconds, thresholds, tokens_to_hide

SOURCES = Path(__file__).parents[2] / "labs" / "source"


@pytest.mark.parametrize("scheme", ["data parallel", "ZeRO 3"])
@pytest.mark.parametrize("name", ["h100", "a100", "b200"])
@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_a_data_sheets_bound_is_that_of_its_peaks(scheme, name, nodes):
    """(R-1)/R F/B; launches, memory and latency are the 4 % by which it may be off."""
    cluster, ranks = find(name), 8 * nodes
    assert cluster.outer_link
    slowest = min(cluster.inner_link.bandwidth, 8 * cluster.outer_link.bandwidth if nodes > 1 else 1e99)
    at_peak = (ranks - 1) / ranks * cluster.chip.peak("bfloat16") / slowest
    assert tokens_to_hide(scheme, name, ranks) == pytest.approx(at_peak, rel=0.04)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["h100", "h100-measured"])
def test_one_token_less_is_not_hidden(scheme, name):
    tokens = tokens_to_hide(scheme, name, 16)
    for few, hidden in ((tokens - 1, False), (tokens, True)):
        computing, sending = step_seconds(scheme, few, name, 16)
        assert (computing >= sending) is hidden


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_numbers_near_the_answer_are_tried(scheme, monkeypatch):
    """In a browser, an index has 32 bits."""
    tried = []
    monkeypatch.setattr(hiding, "step_seconds", lambda *args: tried.append(args[1]) or step_seconds(*args))
    tokens = tokens_to_hide(scheme, "h100", 16)
    assert max(tried) <= 2 * tokens


def test_what_is_sent_by_hand():
    small = find("h100")
    elements = block_parameters(64)
    assert elements == 12 * 64**2
    gather = small.collective_seconds("all_gather", 2 * elements, 16)
    scatter = small.collective_seconds("reduce_scatter", 2 * elements, 16)
    assert step_seconds("ZeRO 3", 8, small, 16, width=64).sending == 2 * gather + scatter
    codes, scales = elements // 2, 4 * elements // 256
    parts = (
        small.collective_seconds("all_gather", elements + scales, 16),
        small.collective_seconds("all_gather", 2 * elements, 8),
        small.collective_seconds("all_to_all", codes + scales, 8),
        small.collective_seconds("all_to_all", (codes + scales) / 8, (0, 8)),
    )
    assert step_seconds("ZeRO++", 8, small, 16, width=64).sending == pytest.approx(sum(parts))


def test_an_unknown_scheme():
    with pytest.raises(ValueError, match="it must be one of data parallel, ZeRO 3, ZeRO\\+\\+"):
        step_seconds("ZeRO 4", 8, "h100", 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ranks", [8, 16, 64, 512])
def test_a_threshold_names_its_network_and_has_its_band(scheme, ranks):
    clusters = [find(*on) for on in (H100S if ranks > 8 else H100S[:2])]
    rows = thresholds(scheme, ranks)
    assert [row.kind for row in rows] == [cluster.kind_on(ranks) for cluster in clusters]
    assert [row.tokens for row in rows] == [tokens_to_hide(scheme, cluster, ranks) for cluster in clusters]
    for row, cluster in zip(rows, clusters):
        if ranks == 8 or cluster.fabric is None or cluster.fabric.error is None:
            assert row.low == row.tokens == row.high
            assert str(row) == f"{row.tokens:6,} tokens per rank: {row.kind}"
        else:
            off = cluster.fabric.error.median
            assert row.low < row.tokens < row.high
            for tokens, times in ((row.low, 1 - off), (row.high, 1 + off)):
                computing, sending = step_seconds(scheme, tokens, cluster, ranks)
                fewer, _ = step_seconds(scheme, tokens - 1, cluster, ranks)
                assert fewer < times * sending <= computing
            assert f"({row.low:,} to {row.high:,})" in str(row)


def test_the_playbooks_network_needs_more_and_more_tokens():
    """A ring waits for every hop: with twice as many ranks, ZeRO 3 needs more, whatever the bandwidth."""
    for few, many in ((64, 128), (128, 256), (256, 512)):
        (_, ndr, theirs), (_, ndr_of_more, theirs_of_more) = thresholds("ZeRO 3", few), thresholds("ZeRO 3", many)
        assert theirs_of_more.tokens > 1.3 * theirs.tokens > 2 * ndr.tokens
        assert ndr_of_more.tokens < 1.2 * ndr.tokens


@cache
def in_hundreds() -> set[int]:
    ranks = (8, 16, 64, 128, 256, 512, 600)
    return {round(row.tokens, -2) for scheme in SCHEMES for many in ranks for row in thresholds(scheme, many)}


@pytest.mark.parametrize("lab", ["16_data_parallel", "17_zero", "18_quantised_communication", "19_axes_and_nodes"])
def test_labs_say_one_number(lab):
    """Every "about N tokens per rank" in prose is one of `thresholds`, to hundreds."""
    source = (SOURCES / f"{lab}.py").read_text()
    prose = " ".join(line.removeprefix("#").strip() for line in source.splitlines() if line.startswith("# "))
    said = [int(number.replace(",", "")) for number in re.findall(r"about ([\d,]+) tokens per rank", prose)]
    assert set(said) <= in_hundreds()
    if lab != "19_axes_and_nodes":
        assert said, "the lab no longer says how many tokens hide its messages"
        assert "thresholds(" in source or "tokens_to_hide(" in source
    assert not re.search(
        r"(?<!about )(?<![\d,])\d[\d,]* tokens per (rank|GPU)", prose.replace("16,384 tokens per rank", "")
    )
