"""The checks of lab 07: solutions pass, and each known mistake gets its hint."""

import base64
from collections.abc import Callable
from itertools import count
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tplab.jax as tj
import tplab.torch as tt
from labs.source import build
from tplab import Mesh, P
from tplab.errors import ReplicationError
from tplab.exercises.check import Verdict
from tplab.exercises.dropout import check_block
from tplab.exercises.own_dropout import check_drop


def expect(verdict: Verdict, passed: bool | None, *parts: str) -> None:
    """The verdict is so, and its text has each of these parts."""
    assert verdict.passed is passed, verdict
    for part in parts:
        assert part in verdict.text, verdict


def code_of(name: str) -> str:
    """The lab's cell that defines this function, up to the first empty line."""
    cells = [cell.source for cell in build.read_source("07_dropout").cells if cell.cell_type == "code"]
    return next(source for source in cells if f"def {name}(" in source).split("\n\n")[0]


# ------------------------------------------------------------------------------------------------ the masks of a block


def block(
    inside: Any = "tp",
    outside: Any = None,
    p_inside: float = 0.5,
    p_outside: float = 0.5,
    sums: bool = True,
    early: bool = False,
) -> Callable[..., Any]:
    """The lab's block: the axis along which masks differ, and the share that is dropped, in both places."""

    def solution(x, a, b):
        h = tt.dropout(torch.relu(tt.copy_to(x, "tp") @ a), p_inside, axis=inside)
        y = h @ b
        if early:
            return x + tt.reduce_from(tt.dropout(y, p_outside, axis="tp"), "tp")
        y = tt.reduce_from(y, "tp") if sums else y
        return x + tt.dropout(y, p_outside, axis=outside)

    return solution


def jax_block(x, a, b, key):
    inner, outer = jax.random.split(key)
    h = tj.dropout(jax.nn.relu(x @ a), 0.5, key=inner, axis="tp")
    return x + tj.dropout(tj.reduce_from(h @ b, "tp"), 0.5, key=outer)


def test_block():
    expect(check_block(block()), True, "block is right on Mesh(tp=4), Mesh(tp=3), Mesh(tp=1)")
    expect(check_block(jax_block, framework="jax"), True)


def without_copy_to(x, a, b):
    h = tt.dropout(torch.relu(x @ a), 0.5, axis="tp")
    return x + tt.dropout(tt.reduce_from(h @ b, "tp"), 0.5)


def masked(seed: Callable[[], int], shape: Callable[[Any], Any] = lambda h: h.shape) -> Callable[..., Any]:
    """A block whose inner mask has a generator of its own."""

    def solution(x, a, b):
        h = torch.relu(tt.copy_to(x, "tp") @ a)
        h = 2 * h * (torch.rand(shape(h), generator=torch.Generator().manual_seed(seed())) < 0.5)
        return x + tt.dropout(tt.reduce_from(h @ b, "tp"), 0.5)

    return solution


def gathers(x, a, b):
    a, b = tt.gather_from(a, "tp", dim=1), tt.gather_from(b, "tp", dim=0)
    return x + tt.dropout(tt.dropout(torch.relu(x @ a), 0.5) @ b, 0.5)


def one_mask_outside(x, a, b):
    y = block(p_outside=0)(x, a, b) - x
    return x + 2 * y * (torch.rand(y.shape, generator=torch.Generator().manual_seed(0)) < 0.5)


def of_torch(x, a, b):
    """torch's own dropout inside, where each rank has a generator of its own."""
    h = torch.nn.functional.dropout(torch.relu(tt.copy_to(x, "tp") @ a), 0.5)
    return x + tt.dropout(tt.reduce_from(h @ b, "tp"), 0.5)


def reseeds_at_the_end(x, a, b):
    y = of_torch(x, a, b)
    torch.manual_seed(0)
    return y


def only_on_rank_0(x, a, b):
    y = block(p_outside=0)(x, a, b) - x
    return x + (tt.dropout(y, 0.5) if tt.axis_index("tp") == 0 else y)


def detached_sum(x, a, b):
    return x + (block()(x, a, b) - x).detach()


def test_other_blocks_that_are_right():
    def before_the_relu(x, a, b):
        h = torch.relu(tt.dropout(torch.einsum("td,df->tf", tt.copy_to(x, "tp"), a), 0.5, axis="tp"))
        return tt.dropout(tt.reduce_from(h @ b, "tp"), 0.5).add(x)

    verdict = check_block(before_the_relu)
    expect(verdict, True)
    assert "seed" not in verdict.text
    expect(check_block(of_torch), True, "On a cluster, seed these differently")


SEEDS = count()


def coins(*shape: int) -> torch.Tensor:
    """A mask that is another one in each call, and the same on all ranks."""
    return (tt.dropout(torch.ones(shape), 0.5) > 0).float()


def agreed(shape: tuple[int, ...]) -> torch.Tensor:
    """Rank 0's own coins, sent to all."""
    return tt.all_reduce((torch.rand(shape) < 0.5) * float(tt.axis_index("tp") == 0), "tp")


def outside(drop: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """The lab's block, with this dropout after the sum."""

    def solution(x, a, b):
        h = tt.dropout(torch.relu(tt.copy_to(x, "tp") @ a), 0.5, axis="tp")
        return x + drop(tt.reduce_from(h @ b, "tp"))

    return solution


def sums_x_too(x, a, b):
    h = tt.dropout(torch.relu(tt.copy_to(x, "tp") @ a), 0.5, axis="tp")
    return tt.reduce_from(x + tt.dropout(h @ b, 0.5), "tp")


def without_relu(x, a, b):
    h = tt.dropout(tt.copy_to(x, "tp") @ a, 0.5, axis="tp")
    return x + tt.dropout(tt.reduce_from(h @ b, "tp"), 0.5)


in_pairs = masked(lambda: tt.axis_index("tp") // 2)
one_mask_for_all_tokens = masked(lambda: tt.axis_index("tp"), lambda h: h.shape[1:])


@pytest.mark.parametrize(
    ("fn", "hint", "is_shown"),
    [
        (block(inside=None, outside="tp"), "each rank has dropped different entries", True),
        (block(outside="tp"), "each rank has dropped different entries", True),
        (block(inside=None), "these have nothing to do with each other", True),
        (block(sums=False), "Is the sum over the ranks missing?", True),
        (block(early=True), "outside, a token keeps different numbers, on Mesh(tp=4)", True),
        (block(p_outside=0.1), "of what the block adds to x is dropped, but it should be half.", True),
        (outside(lambda y: 2 * y * coins(len(y), 1)), "outside, whole tokens are dropped, on Mesh(tp=4)", True),
        (outside(lambda y: 2 * y * coins(1, y.shape[1])), "the same entries of every token are dropped", True),
        (outside(lambda y: 2 * y * agreed(y.shape)), "bytes more than the sums of y and of the gradient of x", False),
        (outside(lambda y: tt.all_gather(tt.scatter_to(tt.dropout(y, 0.5), "tp", 0), "tp")), "R times too large", True),
        (sums_x_too, "outside, x is added once per rank, on Mesh(tp=4)", True),
        (masked(lambda: next(SEEDS), lambda h: (len(h), 1)), "a rank drops all of a token's hidden features", True),
        (without_relu, "the masks are right, but a relu is missing, on Mesh(tp=4)", True),
        (block(p_outside=0), "outside, p is not 1/2 on Mesh(tp=4).\n0% of what the block adds to x is dropped", True),
        (block(p_inside=0, p_outside=0), "\n0% of what the block adds to x is dropped", True),
        (block(p_inside=0), "Is one missing", True),
        (block(p_inside=0.1), "Is one missing", True),
        (without_copy_to, "the gradient of x is not, on rank 0 of Mesh(tp=4)", True),
        (in_pairs, "inside, ranks 0 and 1 of Mesh(tp=4) draw the same mask", True),
        (one_mask_for_all_tokens, "the same hidden features are dropped for every token", True),
        (gathers, "the busiest rank does 100% of what one rank alone would do", False),
        (one_mask_outside, "outside, the mask is the same whenever the block runs", True),
        (masked(lambda: tt.axis_index("tp")), "inside, the mask is the same whenever the block runs", True),
        (reseeds_at_the_end, "it seeds torch's global generator", False),
        (only_on_rank_0, "Outside, rank 1 drops nothing", True),
        (detached_sum, "Is something detached?", True),
        (lambda x, a, b: tt.dropout(block(p_outside=0)(x, a, b), 0.5), "x does not pass through", True),
        (lambda x, a, b: block()(x, a, b) - x, "x does not pass through", True),
        (lambda x, a, b: print(end=""), "it returned None; is a `return` missing?", False),
        (lambda x, a, b: (x, a), "it returned an object of type tuple", False),
        (3, "this is an object of type int", False),
        (lambda x, a, b: block()(x, a, b).detach(), "has no gradient", False),
        (lambda x, a, b: block()(x, a, b) + 0 * x.data.zero_(), "it changes x", False),
        (lambda x, a, b: x[:1], "the result has shape [1, 16]", False),
        (lambda x, a, b: x @ b, "RuntimeError on rank", False),
    ],
)
def test_block_gone_wrong(fn: Callable[..., Any], hint: str, is_shown: bool):
    verdict = check_block(fn)
    expect(verdict, False, hint)
    assert bool(verdict.panels) == is_shown


def test_a_block_that_drops_too_rarely_inside_is_told():
    def solution(x, a, b):
        h = torch.relu(tt.copy_to(x, "tp") @ a)
        h = torch.where(tt.dropout(h, 0.1, axis="tp") > 0, 2 * h, 0)
        return x + tt.dropout(tt.reduce_from(h @ b, "tp"), 0.5)

    expect(check_block(solution), False, "inside, p is not 1/2 on Mesh(tp=4)")


def test_a_wrong_mask_is_shown():
    """By rank: of the first tokens, which hidden features were kept."""
    verdict = check_block(block(inside=None))
    assert [panel.title for panel in verdict.panels] == [f"rank {rank}, kept" for rank in range(4)]
    assert all(panel.array.shape == (6, 2) for panel in verdict.panels)
    assert all((panel.array == verdict.panels[0].array).all() for panel in verdict.panels)
    data, _ = verdict._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")


def test_the_lab_shows_the_second_bug():
    """The check refuses it for what is outside; with that mended, for what is inside; then it passes."""
    names: dict[str, Any] = {"torch": torch, "tt": tt}
    bug = code_of("block")
    exec(bug, names)
    expect(check_block(names["block"]), False, "each rank has dropped different entries")
    args = [np.ones(shape, np.float32) for shape in ((4, 6), (6, 8), (8, 6))]
    with pytest.raises(ReplicationError):
        tt.run(names["block"], Mesh(tp=4), *args, in_specs=(P(), P(None, "tp"), P("tp")), out_specs=P())
    half = bug.replace('tt.dropout(y, 0.5, axis="tp")', "tt.dropout(y, 0.5)")
    assert half != bug
    exec(half, names)
    expect(check_block(names["block"]), False, "draws the same mask")
    mended = half.replace("dropout(h, 0.5)", 'dropout(h, 0.5, axis="tp")')
    assert mended != half
    exec(mended, names)
    expect(check_block(names["block"]), True)


# ------------------------------------------------------------------------------------------------ one's own dropout


def drop(
    seed: Callable[[int, int], int] = lambda key, index: hash((key, index)), scale: bool = True, p_times: float = 1
) -> Callable[..., Any]:
    """A dropout whose generator's seed is made from the key and the rank's place along the axis."""

    def solution(x, p, key, axis=None):
        index = 0 if axis is None else tt.axis_index(axis)
        generator = torch.Generator().manual_seed(seed(key, index))
        kept = torch.rand(x.shape, generator=generator) >= p * p_times
        return x * kept / (1 - p if scale else 1)

    return solution


def shared_generator(x, p, key, axis=None):
    """The usual recipe: torch's own generator outside, which the ranks keep in step, and another one inside."""
    if axis is not None:
        return drop()(x, p, key, axis)
    return torch.nn.functional.dropout(x, p)


def forks(x, p, key, axis=None):
    """torch's own generator, seeded, and put back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash((key, 0 if axis is None else tt.axis_index(axis) + 1)))
        return torch.nn.functional.dropout(x, p)


def by_bernoulli(x, p, key, axis=None):
    """A seed made by NumPy, and a mask by torch.bernoulli."""
    place = [] if axis is None else [1, tt.axis_index(axis)]
    seed = np.random.SeedSequence([key, *place]).generate_state(1, np.uint64)[0]
    generator = torch.Generator().manual_seed(int(seed >> np.uint64(1)))
    return torch.bernoulli(torch.full_like(x, 1 - p), generator=generator) * x / (1 - p)


def reseeds(x, p, key, axis=None):
    torch.manual_seed(hash((key, 0 if axis is None else tt.axis_index(axis) + 1)))
    return torch.nn.functional.dropout(x, p)


def in_place(x, p, key, axis=None):
    with torch.no_grad():
        x *= drop()(torch.ones_like(x), p, key, axis)
    return x


def of_rows(shape: Callable[[Any], Any]) -> Callable[..., Any]:
    """A mask that is broadcast."""

    def solution(x, p, key, axis=None):
        generator = torch.Generator().manual_seed(hash((key, 0 if axis is None else tt.axis_index(axis))))
        return x * (torch.rand(shape(x), generator=generator) >= p) / (1 - p)

    return solution


def of_two_dimensions(x, p, key, axis=None):
    generator = torch.Generator().manual_seed(hash((key, 0 if axis is None else tt.axis_index(axis))))
    return x * (torch.rand(x.shape[0], x.shape[1], generator=generator) >= p) / (1 - p)


def test_a_generator_looks_only_at_the_low_32_bits_of_a_seed():
    low, high = (torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 7 << 32 | 1))
    assert torch.equal(low, high)


def test_drop():
    verdict = check_drop(drop())
    expect(verdict, True, "drop is right on Mesh(tp=4), Mesh(tp=3), Mesh(dp=2, tp=2), Mesh(tp=1)")
    assert len(verdict.panels) == 4
    expect(check_drop(drop(seed=lambda key, index: 1000 * key + index)), True)
    expect(check_drop(drop(seed=lambda key, index: hash((68, key, index)))), True)  # drops 27.5% in its first draws
    expect(check_drop(forks), True)
    expect(check_drop(by_bernoulli), True)


def broadcasts(x, p, key, axis=None):
    mask = drop(seed=lambda key, index: hash((key, index)))(torch.ones(x.shape), p, key, axis)
    return x * (tt.broadcast(mask, "tp", 0) if axis in (None, "dp") else mask)


def drops_exactly(x, p, key, axis=None):
    """Drops p of the numbers, and not each of them with probability p."""
    generator = torch.Generator().manual_seed(hash((key, 0 if axis is None else tt.axis_index(axis))))
    order = torch.randperm(x.numel(), generator=generator).reshape(x.shape)
    return x * (order >= p * x.numel()) / (1 - p)


def with_the_axis_name(x, p, key, axis=None):
    place = 0 if axis is None else tt.axis_index(axis)
    generator = torch.Generator().manual_seed(hash((key, axis, place)))
    return x * (torch.rand(x.shape, generator=generator) >= p) / (1 - p)


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (drop(scale=False), "every number of x must become 0 or x / 0.75"),
        (drop(p_times=2), "with p = 0.25, 50% of the numbers are dropped"),
        (of_rows(lambda x: x.shape[-1:]), "on Mesh(tp=4): every row of a mask is the same"),
        (of_rows(lambda x: (*x.shape[:-1], 1)), "on Mesh(tp=4): every column of a mask is the same"),
        (drop(seed=lambda key, index: hash((key, index)) % 1000), "draws the same mask with key"),
        (drop(seed=lambda key, index: hash(key)), "ranks 0 and 1 draw the same mask with axis='tp'"),
        (
            drop(seed=lambda key, index: key + index),
            "Two different pairs of key and index must never give the same mask",
        ),
        (drop(seed=lambda key, index: index), "keys 0 and 1 give the same mask"),
        (drop(seed=lambda key, index: key << 32 | index), "looks only at the low 32 bits of a seed"),
        (shared_generator, "ranks 0 and 1 draw different masks with axis=None"),
        (
            drop(seed=lambda key, index: hash((key, tt.axis_index("tp")))),
            "Others differ: torch's own, one made from the rank",
        ),
        (lambda x, p, key, axis: drop()(x, p, key, axis)[:1], "shape [1, 16]"),
        (lambda x, p, key, axis: tt.dropout(x, p, axis=axis), "`dropout` does the work"),
        (reseeds, "it leaves torch's global generator in another state"),
        (lambda *args: drop()(*args).detach(), "no gradient reaches x"),
        (in_place, "it changes x in place"),
        (broadcasts, "can agree on a mask without any message"),
        (drops_exactly, "every mask drops the same number of entries"),
        (lambda x, p, key, axis: x.numpy(), "it returned an object of type ndarray"),
        (lambda x, p, key, axis: print(end=""), "it returned None; is a `return` missing?"),
        ("drop", "this is an object of type str"),
        (of_two_dimensions, "RuntimeError on rank 0 of Mesh(tp=4)"),
        (drop(seed=lambda key, index: key * 4 + index), "never give the same mask"),
        (drop(seed=lambda key, index: key * 10 + index), "on Mesh(tp=12)"),
        (drop(seed=lambda key, index: key + 10 * index), "on Mesh(tp=12)"),
        (drop(seed=lambda key, index: key + 1000 * index), "on Mesh(tp=12)"),
        (drop(seed=lambda key, index: key * 100 + index), "on Mesh(tp=130)"),
        (drop(seed=lambda key, index: hash((key, index % 8))), "on Mesh(tp=12)"),
        (with_the_axis_name, "which is another number in every Python process"),
        (lambda x, p, key, axis: x.missing, "AttributeError"),
    ],
)
def test_drop_gone_wrong(fn: Callable[..., Any], hint: str):
    expect(check_drop(fn), False, hint)


def test_a_dropout_that_differs_along_tp_only_is_wrong_with_data_parallelism():
    def solution(x, p, key, axis=None):
        generator = torch.Generator().manual_seed(hash((key, tt.axis_index("tp") if axis else 0)))
        return x * (torch.rand(x.shape, generator=generator) >= p) / (1 - p)

    expect(check_drop(solution), False, "Mesh(dp=2, tp=2)", "axis='dp'")


def test_untouched_stubs_are_not_started():
    for check, name in ((check_block, "block"), (check_drop, "drop")):

        def stub(*args): ...

        expect(check(stub), None, f"{name}: not started")
