"""Lab 20's exercises: gradients of a ring, and a causal ring; the right ones pass, each wrong one gets its hint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tplab.torch as tt
from labs.source import build
from tplab.exercises.long_sequence import check_causal_ring, check_gradients

LAB = "20_long_sequence"


def namespace(*starts: str) -> dict[str, Any]:
    """The names of the lab's cells that begin so."""
    names: dict[str, Any] = {"torch": torch, "tt": tt}
    cells = [cell.source for cell in build.read_source(LAB).cells if cell.cell_type == "code"]
    for start in starts:
        (source,) = [source for source in cells if source.startswith(start)]
        exec(source.partition("torch.manual_seed")[0], names)
    return names


IN_LAB = namespace("def attend(")
attend, merge = IN_LAB["attend"], IN_LAB["merge"]


# --- the gradients -------------------------------------------------------------------------------------------------


def attention_with(old: str, new: str) -> Callable[..., Tensor]:
    """The lab's attention with one passage of its source replaced."""
    (source,) = [c.source for c in build.read_source(LAB).cells if c.source.startswith("class RingAttention")]
    names = dict(IN_LAB)
    assert old in source
    exec(source.replace(old, new), names)
    return names["attention"]


UNPACK = "    q, k, v, o, lse = ctx.saved_tensors"
USES_ARRIVED = "parts = tile_gradients(ctx, do)", "parts = tile_gradients(ctx, do, k, v)"


def repaired(*changes: tuple[str, str]) -> Callable[..., Tensor]:
    (source,) = [c.source for c in build.read_source(LAB).cells if c.source.startswith("class RingAttention")]
    names = dict(IN_LAB)
    for old, new in (
        USES_ARRIVED,
        ("def tile_gradients(ctx, do):", "def tile_gradients(ctx, do, k, v):"),
        (UNPACK, "    q, _, _, o, lse = ctx.saved_tensors"),
        *changes,
    ):
        assert old in source, old
        source = source.replace(old, new)
    exec(source, names)
    return names["attention"]


def test_the_repaired_ring_passes():
    assert check_gradients(repaired()).passed


def test_the_bug_of_the_lab_is_named():
    verdict = check_gradients(attention_with(UNPACK, UNPACK))
    assert verdict.passed is False and "own k and v" in verdict.text, verdict


RETURN = "    return dq, dk, dv"
SHIFT = 'k, v, dk, dv = (tt.ring_shift(x, "cp") for x in (k, v, dk, dv))'


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ((SHIFT, 'k, v = (tt.ring_shift(x, "cp") for x in (k, v))'), "Whose keys"),
        ((SHIFT, 'k, dk, dv = (tt.ring_shift(x, "cp") for x in (k, dk, dv))'), "k and v of the same rank"),
        (('for _ in range(tt.axis_size("cp")):', "for _ in range(1):"), "own tile was computed"),
        ((RETURN, "    return dq / tt.axis_size('cp'), dk, dv"), "divided by R once too often"),
        ((RETURN, "    return dq, dv, dk"), "dk and dv are exchanged"),
        ((RETURN, "    return parts[0], dk, dv"), "the sum of what all tiles add"),
        ((RETURN, "    return dq, *(tt.ring_shift(x, 'cp', -1) for x in (dk, dv))"), "How many hops"),
        ((RETURN, "    return dq, *(tt.ring_shift(x, 'cp') for x in (dk, dv))"), "How many hops"),
        (("ctx.save_for_backward(q, *ours, o, lse)", "ctx.save_for_backward(q, k, v, o, lse)"), "dk"),
        (
            ("ds = p * (do @ v.T - (do * o).sum(-1, keepdim=True)) * scale", "ds = p * (do @ v.T) * scale"),
            "q, do and o",
        ),
        (
            ("lse = merge(o, lse, *attend(q, k, v))", "_ = merge(o, lse, *attend(q, k, v))"),
            "over the keys of all ranks",
        ),
        (('range(tt.axis_size("cp") - 1)', "range(0)"), "pass is right"),
        (("p = (q @ k.T * scale - lse).exp()", "p = (q @ k.T * scale).softmax(-1)"), "over the keys of all ranks"),
        ((RETURN, "    return dq, dk / tt.axis_size('cp'), dv"), "divided by R once too often"),
        (("- (do * o).sum(-1, keepdim=True)) * scale", "- (do * o).sum(-1, keepdim=True))"), "dq"),
        (('for _ in range(tt.axis_size("cp")):', 'for _ in range(tt.axis_size("cp") - 1):'), "One tile is missing"),
    ],
)
def test_wrong_gradients(change: tuple[str, str], hint: str):
    verdict = check_gradients(repaired(change))
    assert verdict.passed is False and hint in verdict.text, verdict


def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (tt.all_gather(x, "cp") for x in (k, v))
    return attend(q, k, v)[0]


def libraries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tt.ring_attention(q[None, None], k[None, None], v[None, None], "cp", causal=False)[0, 0]


def traced_by_autograd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return IN_LAB["ring"](q, k, v)


def computed_again_at_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keeps only its arguments, and every tile of a row while the backward pass runs."""
    return checkpoint(IN_LAB["ring"], q, k, v, use_reentrant=False)


def test_damage_in_the_backward_pass():
    reseeds = RETURN, "    torch.manual_seed(0)\n    " + RETURN
    assert "global generator" in check_gradients(repaired(reseeds)).text
    zeroes = RETURN, "    ctx.saved_tensors[0].zero_()\n    " + RETURN
    assert "changes q in place" in check_gradients(repaired(zeroes)).text


def test_other_ways_to_the_gradients():
    assert "`all_gather` does the work" in check_gradients(gathered).text
    assert "`ring_attention` does the work" in check_gradients(libraries).text
    kept = check_gradients(traced_by_autograd)  # autograd sends the gradients home by itself, and keeps every tile
    assert kept.passed is False and "times as much as its q" in kept.text, kept
    again = check_gradients(computed_again_at_once)
    assert again.passed is False and "27 times as much as its q on 4 ranks, and 52 times on 8" in again.text, again


def test_keys_of_all_ranks_are_not_kept():
    """They would be there without travelling again, but then a rank holds the whole sequence."""
    change = (
        "return o\n\n    @staticmethod\n    def backward",
        "ctx.kept = kept\n        return o\n\n    @staticmethod\n    def backward",
    )
    keeps = (
        "            o, lse = merge(o, lse, *attend(q, k, v))",
        "            kept = [*kept, k, v]\n            o, lse = merge(o, lse, *attend(q, k, v))",
    )
    verdict = check_gradients(repaired(change, keeps, ("        ours = k, v", "        ours, kept = (k, v), []")))
    assert verdict.passed is False and "a rank keeps 18 times" in verdict.text, verdict


def test_sending_twice_gets_a_remark():
    twice = RETURN, "    [tt.ring_shift(x, 'cp') for x in (k, v, dk, dv)]\n    " + RETURN
    verdict = check_gradients(repaired(twice))
    assert verdict.passed and "would do" in verdict.text, verdict
    assert "would do" not in check_gradients(repaired()).text


# --- the causal ring -----------------------------------------------------------------------------------------------


def causal_ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o, lse = attend(q, k, v, causal=True)
    for t in range(1, tt.axis_size("cp")):
        k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
        if t <= tt.axis_index("cp"):
            o, lse = merge(o, lse, *attend(q, k, v))
    return o


def with_sources(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Another right way: the own tile comes where it comes, and the result is made at the end."""
    num, me, parts = tt.axis_size("cp"), tt.axis_index("cp"), []
    for t in range(num):
        flight = tt.start(tt.ring_shift, torch.stack([k, v]), "cp") if t < num - 1 else None
        if (source := (me - t) % num) <= me:
            parts.append(attend(q, k, v, causal=source == me))
        if flight:
            k, v = flight.wait().unbind()
    o, lse = parts.pop()
    for part in parts:
        o, lse = merge(o, lse, *part)
    return o


def one_hop_too_many(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o, lse = torch.zeros_like(q), torch.full_like(q[:, :1], -1e30)
    for t in range(tt.axis_size("cp")):
        if t <= tt.axis_index("cp"):
            o, lse = merge(o, lse, *attend(q, k, v, causal=t == 0))
        k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
    return o


@pytest.mark.parametrize("right", [causal_ring, with_sources, one_hop_too_many])
def test_right_causal_rings(right: Callable[..., Tensor]):
    verdict = check_causal_ring(right)
    assert verdict.passed and "the busiest one does" in verdict.text, verdict


def loop(which: Callable[[int, int], str | None], averaged: bool = False) -> Callable[..., Tensor]:
    """A ring that takes the tile of step t whole ("all"), its triangle, or not at all."""

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for t in range(tt.axis_size("cp")):
            if kind := which(t, tt.axis_index("cp")):
                parts.append(attend(q, k, v, causal=kind == "triangle"))
            if t < tt.axis_size("cp") - 1:
                k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
        if averaged:
            return torch.stack([o for o, _ in parts]).mean(0)
        o, lse = parts[0]
        for part in parts[1:]:
            o, lse = merge(o, lse, *part)
        return o

    return ring


def added_up(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o, _ = attend(q, k, v, causal=True)
    for t in range(1, tt.axis_size("cp")):
        k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
        if t <= tt.axis_index("cp"):
            o = o + attend(q, k, v)[0]
    return o


def forgets(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Merges each tile by the log-sum-exp of the first one."""
    o, lse = attend(q, k, v, causal=True)
    for t in range(1, tt.axis_size("cp")):
        k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
        if t <= tt.axis_index("cp"):
            o, _ = merge(o, lse, *attend(q, k, v))
    return o


def hops_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o, lse = attend(q, k, v, causal=True)
    for t in range(1, tt.axis_size("cp")):
        if t <= tt.axis_index("cp"):
            o, lse = merge(o, lse, *attend(q, k, v))
        k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
    return o


def collects_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sends and computes as little as possible, and holds the keys and values of all ranks before it."""
    keys, values = [k], [v]
    for _ in range(1, tt.axis_size("cp")):
        k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
        keys, values = [k, *keys], [v, *values]
    k, v = (torch.cat(kept[-1 - tt.axis_index("cp") :]) for kept in (keys, values))
    sees = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    return (q @ k.T / q.shape[-1] ** 0.5).masked_fill(~sees, -torch.inf).softmax(-1) @ v


def masked_everywhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Right, but it computes what it then masks."""
    o, lse = attend(q, k, v, causal=True)
    for t in range(1, tt.axis_size("cp")):
        k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
        part, also = attend(q, k, v)
        o, lse = merge(o, lse, part, torch.where(torch.tensor(t <= tt.axis_index("cp")), also, -torch.inf))
    return o


def without_logarithms(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    above = below = torch.zeros(())
    for t in range(tt.axis_size("cp")):
        k, v = (tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")) if t else (k, v)
        if t <= tt.axis_index("cp"):
            weights = (q @ k.T / q.shape[-1] ** 0.5).exp()
            weights = weights if t else weights.tril()
            above, below = above + weights @ v, below + weights.sum(-1, keepdim=True)
    return above / below


def keys_alone_travel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o, lse = attend(q, k, v, causal=True)
    for t in range(1, tt.axis_size("cp")):
        k = tt.ring_shift(k, "cp")
        if t <= tt.axis_index("cp"):
            o, lse = merge(o, lse, *attend(q, k, v))
    return o


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q *= 1
    o = causal_ring(q, k, v)
    q.zero_()
    return o


def gathers_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    whole = [tt.all_gather(x, "cp") for x in (q, k, v)]
    return attend(*whole, causal=True)[0].chunk(tt.axis_size("cp"))[tt.axis_index("cp")]


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (loop(lambda t, r: "all"), "later ones too"),
        (loop(lambda t, r: "triangle"), "and a later one not at all"),
        (loop(lambda t, r: "all" if t else "triangle"), "Tiles of later ranks are merged too"),
        (loop(lambda t, r: "triangle" if t <= r else None), "earlier ranks were cut"),
        (loop(lambda t, r: "triangle" if t == 0 else "all" if t > r else None), "ranks after it"),
        (loop(lambda t, r: "all" if t <= r else None), "causal=True"),
        (loop(lambda t, r: "triangle" if t == 0 else None), "own tile alone"),
        (loop(lambda t, r: ("all" if t else "triangle") if t <= r else None, averaged=True), "averaged"),
        (lambda q, k, v: attend(q, k, v, causal=True)[0], "own tile alone"),
        (loop(lambda t, r: ("all" if t else "triangle") if t < max(r, 1) else None), "that of rank 0's keys"),
        (added_up, "were added up"),
        (hops_last, "After t hops"),
        (forgets, "the next merge needs both"),
        (collects_first, "Merge each tile as it comes"),
        (masked_everywhere, "Skip those"),
        (without_logarithms, "where scores are in the hundreds, it returns nan"),
        (in_place, "in place"),
        (keys_alone_travel, "k and v are those of rank r - t"),
        (gathers_first, "`all_gather` does the work"),
        (lambda q, k, v: tt.ring_attention(q[None, None], k[None, None], v[None, None], "cp")[0, 0], "does the work"),
    ],
)
def test_wrong_causal_rings(wrong: Callable[..., Tensor], hint: str):
    verdict = check_causal_ring(wrong)
    assert verdict.passed is False and hint in verdict.text, verdict


def test_a_stub_is_not_started():
    assert check_causal_ring(namespace("def causal_ring(")["causal_ring"]).passed is None
