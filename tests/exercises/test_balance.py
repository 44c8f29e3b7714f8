"""Lab 21's exercises: positions in zigzag, and a ring with a window. Each wrong answer gets its hint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tplab.torch as tt
from labs.source import build
from tplab.exercises.balance import check_positions, check_window_ring
from tplab.sequence import TokenLayout

LAB = "21_balance"


def namespace(start: str) -> dict[str, Any]:
    """The names of the lab's cell that begins so."""
    names: dict[str, Any] = {"torch": torch, "tt": tt}
    (source,) = [cell.source for cell in build.read_source(LAB).cells if cell.source.startswith(start)]
    exec(source, names)
    return names


# --- positions -----------------------------------------------------------------------------------------------------


def layer_with(positions: Callable[[int], Any]) -> Callable[..., Tensor]:
    def layer_with_rope(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = positions(q.shape[2])
        return tt.ring_attention(tt.rope(q, where), tt.rope(k, where), v, "cp", layout="zigzag")

    return layer_with_rope


def by_hand(n: int) -> Tensor:
    num, me, half = tt.axis_size("cp"), tt.axis_index("cp"), n // 2
    last = 2 * num - 1 - me
    return torch.cat([torch.arange(me * half, (me + 1) * half), torch.arange(last * half, (last + 1) * half)])


def by_library(n: int) -> Tensor:
    return tt.token_positions(n * tt.axis_size("cp"), "cp", layout="zigzag")


def from_layout(n: int) -> Any:
    """NumPy's integers, as TokenLayout has them."""
    num = tt.axis_size("cp")
    return TokenLayout("zigzag", n * num, num).positions[tt.axis_index("cp")]


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return layer_with(by_hand)(q.float(), k.float(), v.float())


def test_float32_is_fine():
    assert check_positions(in_float32).passed


@pytest.mark.parametrize("positions", [by_hand, by_library, from_layout, lambda n: by_hand(n).tolist()])
def test_right_positions(positions: Callable[[int], Any]):
    verdict = check_positions(layer_with(positions))
    assert verdict.passed, verdict


def test_the_bug_of_the_lab_is_named():
    verdict = check_positions(namespace("def layer_with_rope(")["layer_with_rope"])
    assert verdict.passed is False and "consecutive tokens" in verdict.text, verdict


def for_two_ranks(n: int) -> Tensor:
    half, me = n // 2, tt.axis_index("cp")
    return torch.cat([torch.arange(half) + me * half, torch.arange(half) + (3 - me) * half])


def up_to_four(n: int) -> Tensor:
    """A table for the usual sizes."""
    return by_hand(n) if tt.axis_size("cp") <= 4 else torch.arange(n)


def backwards(n: int) -> Tensor:
    """The late piece in the reverse order, as if it were folded."""
    early, late = by_hand(n).chunk(2)
    return torch.cat([early, late.flip(0)])


def gathers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    where = by_hand(q.shape[2])
    q, k = tt.rope(q, where), tt.rope(k, where)
    k, v, all_where = (tt.all_gather(x, "cp", dim) for x, dim in ((k, 2), (v, 2), (where, 0)))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(all_where > where[:, None], -torch.inf).softmax(-1) @ v


def only_q(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tt.ring_attention(tt.rope(q, by_hand(q.shape[2])), k, v, "cp", layout="zigzag")


def k_consecutive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2]
    q, k = tt.rope(q, by_hand(n)), tt.rope(k, tt.axis_index("cp") * n + torch.arange(n))
    return tt.ring_attention(q, k, v, "cp", layout="zigzag")


def only_k(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tt.ring_attention(q, tt.rope(k, by_hand(q.shape[2])), v, "cp", layout="zigzag")


def one_piece_late(n: int) -> Tensor:
    early, late = by_hand(n).chunk(2)
    return torch.cat([early, late + n // 2])


def v_too(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return layer_with(by_hand)(q, k, tt.rope(v, by_hand(q.shape[2])))


def as_if_consecutive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    where = by_hand(q.shape[2])
    return tt.ring_attention(tt.rope(q, where), tt.rope(k, where), v, "cp")


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (layer_with(lambda n: torch.arange(n)), "begin at 0"),
        (layer_with(lambda n: tt.axis_index("cp") * n + torch.arange(n)), "consecutive"),
        (layer_with(lambda n: torch.arange(n) * tt.axis_size("cp") + tt.axis_index("cp")), "striped"),
        (layer_with(for_two_ranks), "Mesh(cp=3)"),
        (layer_with(lambda n: torch.cat(by_hand(n).chunk(2)[::-1])), "piece r and then piece"),
        (layer_with(lambda n: by_hand(n)[: n // 2].repeat(2)), "piece r and then piece"),
        (k_consecutive, "both q and k"),
        (layer_with(backwards), "rising positions"),
        (layer_with(one_piece_late), "counted from 0"),
        (layer_with(up_to_four), "cp=6"),
        (layer_with(lambda n: torch.zeros(n, dtype=torch.long)), "not rotated"),
        (gathers, "does the work"),
        (only_q, "both q and k"),
        (only_k, "both q and k"),
        (as_if_consecutive, "in the same layout"),
        (v_too, "and not v"),
        (lambda q, k, v: tt.ring_attention(q, k, v, "cp", layout="zigzag"), "not rotated"),
        (lambda q, k, v: layer_with(by_hand)(q.detach(), k, v), "dq is not right yet"),
    ],
)
def test_wrong_positions(wrong: Callable[..., Tensor], hint: str):
    verdict = check_positions(wrong)
    assert verdict.passed is False and hint in verdict.text, verdict


# --- a window ------------------------------------------------------------------------------------------------------

IN_LAB = namespace("def attend(")
attend, merge = IN_LAB["attend"], IN_LAB["merge"]


def ring_with(
    hops: Callable[[int, int], int],
    window_of: Callable[[int], int] = lambda w: w,
    looks_back: bool = True,
    far: Callable[[int, int], int] = lambda t, n: t * n,
    way: int = 1,
) -> Callable[..., Tensor]:
    def window_ring(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        n, num = len(q), tt.axis_size("cp")
        o, lse = attend(q, k, v, 0, window_of(window))
        for t in range(1, min(num - 1, hops(window, n)) + 1):
            k, v = tt.ring_shift(k, "cp", way), tt.ring_shift(v, "cp", way)
            if t <= tt.axis_index("cp") or not looks_back:
                o, lse = merge(o, lse, *attend(q, k, v, far(t, n), window_of(window)))
        return o

    return window_ring


def fewest(window: int, n: int) -> int:
    return -(-(window - 1) // n)


def also_in_one_message(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Another right way: keys and values in one message, all tiles joined at the end."""
    n, num, me = len(q), tt.axis_size("cp"), tt.axis_index("cp")
    pieces = [torch.stack([k, v])]
    for _ in range(min(num - 1, fewest(window, n))):
        pieces.append(tt.ring_shift(pieces[-1], "cp"))
    keys, values = torch.cat(pieces[: me + 1][::-1], 1)
    return attend(q, keys, values, len(keys) - n, window)[0]


@pytest.mark.parametrize("right", [ring_with(fewest), also_in_one_message])
def test_right_windows(right: Callable[..., Tensor]):
    verdict = check_window_ring(right)
    assert verdict.passed, verdict


def added_up(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    parts = [attend(q, k, v, 0, window)]
    for t in range(1, min(tt.axis_size("cp") - 1, fewest(window, len(q))) + 1):
        k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
        if t <= tt.axis_index("cp"):
            parts.append(attend(q, k, v, t * len(q), window))
    return torch.stack([o for o, _ in parts]).sum(0)


def without_logarithms(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    above = below = torch.zeros(())
    for t in range(min(tt.axis_size("cp") - 1, fewest(window, len(q))) + 1):
        k, v = (tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")) if t else (k, v)
        if t <= tt.axis_index("cp"):
            away = torch.arange(len(q))[:, None] + t * len(q) - torch.arange(len(k))
            weights = (q @ k.T / q.shape[-1] ** 0.5).exp() * ((away >= 0) & (away < window))
            above, below = above + weights @ v, below + weights.sum(-1, keepdim=True)
    return above / below


def all_hidden(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Scores of -inf in place of -1e30: a query that sees no key of a tile makes its log-sum-exp -inf too."""

    def tile(keys: Tensor, values: Tensor, distance: int) -> tuple[Tensor, Tensor]:
        away = torch.arange(len(q))[:, None] + distance - torch.arange(len(keys))
        scores = (q @ keys.T / q.shape[-1] ** 0.5).masked_fill((away < 0) | (away >= window), -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        return (scores - lse).exp() @ values, lse

    o, lse = tile(k, v, 0)
    for t in range(1, min(tt.axis_size("cp") - 1, fewest(window, len(q))) + 1):
        k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
        if t <= tt.axis_index("cp"):
            o, lse = merge(o, lse, *tile(k, v, t * len(q)))
    return o


def gathers_first(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    keys, values = (tt.all_gather(x, "cp") for x in (k, v))
    return attend(q, keys, values, tt.axis_index("cp") * len(q), window)[0]


def ends_early(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Ranks that see nothing leave the ring, and the others wait for them."""
    o, lse = attend(q, k, v, 0, window)
    for t in range(1, min(tt.axis_index("cp"), fewest(window, len(q))) + 1):
        k, v = tt.ring_shift(k, "cp"), tt.ring_shift(v, "cp")
        o, lse = merge(o, lse, *attend(q, k, v, t * len(q), window))
    return o


def library(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return tt.ring_attention(q[None, None], k[None, None], v[None, None], "cp", window=window)[0, 0]


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (ring_with(lambda w, n: 100), "How many ranks back"),
        (ring_with(lambda w, n: 1), "window was 5, with 3"),
        (ring_with(lambda w, n: (w + 1) // 3), "with 4 tokens on each rank"),
        (ring_with(lambda w, n: 0), "own tokens alone"),
        (ring_with(lambda w, n: -(-w // n)), "How many ranks back"),
        (ring_with(lambda w, n: w // n), "window was 2"),
        (ring_with(fewest, window_of=lambda w: w + 1), "itself included"),
        (ring_with(fewest, window_of=lambda w: w - 1), "itself included"),
        (ring_with(fewest, looks_back=False), "no beginning"),
        (ring_with(fewest, far=lambda t, n: t), "`distance` is t times the tokens"),
        (ring_with(fewest, far=lambda t, n: 0), "`distance` is t times the tokens"),
        (ring_with(fewest, way=-1), "Which way do they hop?"),
        (added_up, "the next merge needs both"),
        (without_logarithms, "where scores are in the hundreds, it returns nan"),
        (all_hidden, "some are nan: is anything divided by 0, or infinity subtracted from infinity?"),
        (gathers_first, "does the work"),
        (library, "does the work"),
        (ends_early, "rank"),
        (lambda q, k, v, window: attend(q, k, v, 0, window)[0], "own tokens alone"),
    ],
)
def test_wrong_windows(wrong: Callable[..., Tensor], hint: str):
    verdict = check_window_ring(wrong)
    assert verdict.passed is False and hint in verdict.text, verdict


def test_a_stub_is_not_started():
    assert check_window_ring(namespace("def window_ring(")["window_ring"]).passed is None
