"""The checks of lab 03: solutions pass in both frameworks, and each known mistake is told by name."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import tplab.jax as tj
import tplab.torch as tt
from labs.source import build
from tests.exercises.test_exercises import expect
from tplab.exercises.network_levels import check_gather_all, check_hybrid_step


def in_the_lab(start: str) -> dict[str, Any]:
    """The names that the cell which begins so defines."""
    cells = [cell.source for cell in build.read_source("03_network_levels").cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"tt": tt}
    exec(next(source for source in cells if source.startswith(start)), names)
    return names


def a_step(ops: Any, cut: str = "gpu", across: str = "node", piece_of: str = "", is_mean: bool = False) -> Callable:
    """A step of hybrid sharding that cuts along `cut`, adds up along `across`, and its weights along `piece_of`."""

    def hybrid_step(weights, gradient):
        piece = ops.reduce_scatter(gradient, cut) / (ops.axis_size(("node", "gpu")) if is_mean else 1)
        piece = ops.all_reduce(piece, across) if across else piece
        own = weights.reshape(ops.axis_size(cut), -1)[ops.axis_index(piece_of or cut) % ops.axis_size(cut)]
        return ops.all_gather(own - 0.1 * piece, cut)

    return hybrid_step


def gathered_first(weights, gradient):
    """The gradient is made whole before the step: the same bytes."""
    piece = tt.all_reduce(tt.reduce_scatter(gradient, "gpu"), "node")
    return weights - 0.1 * tt.all_gather(piece, "gpu")


def scattered_twice(weights, gradient):
    piece = tt.reduce_scatter(tt.reduce_scatter(gradient, "gpu"), "node")
    return weights - 0.1 * tt.all_gather(tt.all_gather(piece, "node"), "gpu")


@pytest.mark.parametrize("step", [a_step(tt), gathered_first, scattered_twice])
def test_repairs_of_hybrid_sharding_pass(step: Callable):
    expect(check_hybrid_step(step), True, "Each node sends no more to the others than it must.")


def test_a_repair_in_jax_passes():
    expect(check_hybrid_step(a_step(tj), "jax"), True)


@pytest.mark.parametrize(
    ("step", "hint"),
    [
        (a_step(tt, "node", "gpu"), "send 36 numbers in messages that may leave it, where 12 would do"),
        (lambda weights, gradient: weights - 0.1 * tt.all_reduce(gradient, ("node", "gpu")), "may leave it, where 12"),
        (lambda weights, gradient: weights - 0.1 * gradient, "Each rank makes a step with its own gradient"),
        (a_step(tt, across=""), "but not those of other nodes"),
        (a_step(tt, "node", ""), "but not inside a node"),
        (a_step(tt, is_mean=True), "the mean of the gradients"),
        (a_step(tt, piece_of="node"), "those of its own piece"),
    ],
    ids=["the lab's", "all ranks", "own", "inside", "across", "mean", "other weights"],
)
def test_what_is_wrong_with_a_step_is_told(step: Callable, hint: str):
    expect(check_hybrid_step(step), False, hint, "Mesh(node=2, gpu=3)")


def test_the_labs_bug_is_told():
    cells = [cell.source for cell in build.read_source("03_network_levels").cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"tt": tt}
    exec(next(source for source in cells if source.startswith("def hybrid_step")).split("\n\n")[0], names)
    expect(check_hybrid_step(names["hybrid_step"]), False, "On which axis should the gradient be cut")


def across_first(ops: Any) -> Callable:
    def gather_all(x):
        rows = ops.all_gather(ops.all_gather(x, "node"), "gpu")  # ordered by GPU, then by node
        by_gpu = rows.reshape(ops.axis_size("gpu"), ops.axis_size("node"), -1)
        return by_gpu.swapaxes(0, 1).reshape(rows.shape)

    return gather_all


def test_gathering_across_first_passes():
    expect(check_gather_all(across_first(tt)), True, "Every row crosses to each other node once.")
    expect(check_gather_all(across_first(tj), "jax"), True, "Every row crosses to each other node once.")


def in_the_ranks_order(rows: torch.Tensor) -> torch.Tensor:
    """Sort rows that are ordered by GPU and then by node."""
    by_gpu = rows.reshape(tt.axis_size("gpu"), tt.axis_size("node"), -1)
    return by_gpu.swapaxes(0, 1).reshape(rows.shape)


def by_hops(x):
    """Both levels as rings of hops."""

    def gather(x, axis):
        pieces = [x]
        for _ in range(tt.axis_size(axis) - 1):
            pieces.append(tt.ring_shift(pieces[-1], axis))
        size, index = tt.axis_size(axis), tt.axis_index(axis)
        return torch.cat([pieces[(index - place) % size] for place in range(size)])

    return in_the_ranks_order(gather(gather(x, "node"), "gpu"))


def by_broadcasts(x):
    """Inside a node, one GPU after the other sends what it has."""
    rows = tt.all_gather(x, "node")
    return in_the_ranks_order(torch.cat([tt.broadcast(rows, "gpu", gpu) for gpu in range(tt.axis_size("gpu"))]))


def by_all_to_all(x):
    rows = tt.all_gather(x, "node")
    return in_the_ranks_order(tt.all_to_all(rows.repeat(tt.axis_size("gpu"), 1), "gpu", 0, 0))


def by_regions(x):
    """Megatron's gather: its backward pass takes the rank's own piece."""
    return in_the_ranks_order(tt.gather_from(tt.gather_from(x, "node", 0), "gpu", 0))


def test_which_gradient_a_row_gets_is_said():
    """`all_gather` adds up all ranks' gradients for a row, and `gather_from` takes its owner's. Both are right."""

    def both_ways(x):
        return in_the_ranks_order(tt.gather_from(tt.all_gather(x, "node"), "gpu", 0))

    expect(check_gather_all(across_first(tt)), True, "the sum of all ranks' gradients for it")
    expect(check_gather_all(by_regions), True, "The gradient of a row is its owner's")
    expect(check_gather_all(both_ways), True, "the sum of those along node, but not along gpu")


def into_place(x):
    """Rows are written into an empty tensor."""
    rows, nodes, gpus = tt.all_gather(tt.all_gather(x, "node"), "gpu"), tt.axis_size("node"), tt.axis_size("gpu")
    y = torch.empty_like(rows)
    for place in range(len(rows)):
        y[(place % nodes) * gpus + place // nodes] = rows[place]
    return y


@pytest.mark.parametrize("gather_all", [by_hops, by_broadcasts, by_all_to_all, by_regions, into_place])
def test_other_right_ways_pass(gather_all: Callable):
    expect(check_gather_all(gather_all), True)


def padded_inside(x):
    """Across first, then the rows of a node are added to zeros: right numbers, and twice the bytes."""
    rows = tt.all_gather(x, "node")  # row k from node k
    places = torch.arange(tt.axis_size("node")) * tt.axis_size("gpu") + tt.axis_index("gpu")
    y = rows.new_zeros(tt.axis_size("node") * tt.axis_size("gpu"), rows.shape[1])
    return tt.all_reduce(y.index_put((places,), rows), "gpu")


def padded_across(x):
    mine = x.new_zeros(tt.axis_size("node"), x.shape[1]).index_put((torch.tensor([tt.axis_index("node")]),), x)
    return in_the_ranks_order(tt.all_gather(tt.all_reduce(mine, "node"), "gpu"))


def padded(x):
    """One all_reduce over all ranks."""
    num_ranks = tt.axis_size(("node", "gpu"))
    mine = x.new_zeros(num_ranks, x.shape[1]).index_put((torch.tensor([tt.axis_index(("node", "gpu"))]),), x)
    return tt.all_reduce(mine, ("node", "gpu"))


def padded_inside_in_jax(x):
    rows, gpus = tj.all_gather(x, "node"), tj.axis_size("gpu")
    y = jnp.zeros((len(rows), gpus, x.shape[1])).at[:, tj.axis_index("gpu")].set(rows)
    return tj.all_reduce(y, "gpu").reshape(-1, x.shape[1])


def around_all(x):
    """One ring of hops over all ranks."""
    both = ("node", "gpu")
    rows, size, index = [x], tt.axis_size(both), tt.axis_index(both)
    for _ in range(size - 1):
        rows.append(tt.ring_shift(rows[-1], both))
    return torch.cat([rows[(index - place) % size] for place in range(size)])


def sorted_wrongly(x):
    rows = tt.all_gather(tt.all_gather(x, "node"), "gpu")
    return rows.reshape(tt.axis_size("node"), tt.axis_size("gpu"), -1).transpose(0, 1).flatten(0, 1)


def of_three_columns(x):
    gathered = across_first(tt)(x)
    return gathered.reshape(-1, 3)


def detached_on_three_nodes(x):
    return across_first(tt)(x.detach() + 0 * x if tt.axis_size("node") == 3 else x)


def owners_on_three_nodes(x):
    return (by_regions if tt.axis_size("node") == 3 else across_first(tt))(x)


NO_GRADIENT = "the result is right, but it has no gradient: something cuts it off from the arguments"


@pytest.mark.parametrize(
    ("gather_all", "hints"),
    [
        (padded_inside, ("a GPU sends 8 rows inside its node, where 4 would do", "adding them to zeros")),
        (
            padded_across,
            ("a GPU sends 2 rows in messages that may leave its node, where 1 would do", "adding them to zeros"),
        ),
        (padded, ("a GPU sends 10 rows in messages that may leave its node, where 1 would do", "adding them to zeros")),
        (lambda x: across_first(tt)(x + 0 * tt.all_reduce(x, "node")), ("Something is added up here",)),
        (lambda x: tt.all_gather(across_first(tt)(x), "gpu")[: tt.axis_size(("node", "gpu"))], ("already there",)),
        (lambda x: across_first(tt)(x.detach()), (NO_GRADIENT,)),
        (lambda x: across_first(tt)(x).detach(), (NO_GRADIENT,)),
        (lambda x: across_first(tt)(x).data, (NO_GRADIENT,)),
        (lambda x: across_first(tt)(x / 5 + x.detach() * 4 / 5), ("but the gradient of x is not",)),
        (of_three_columns, ("y has shape [10, 3]", "The right one has shape [6, 5]")),
        (detached_on_three_nodes, ("but the gradient of x is not, on Mesh(node=3, gpu=2)",)),
        (owners_on_three_nodes, ("it adds up gradients over other ranks on one mesh than on another",)),
    ],
    ids=[
        "padded inside",
        "padded across",
        "padded",
        "a needless sum",
        "twice inside",
        "detached first",
        "detached",
        "data",
        "a fifth",
        "three columns",
        "detached on one mesh",
        "two meanings",
    ],
)
def test_a_gather_of_another_kind_is_refused(gather_all: Callable, hints: tuple[str, ...]):
    expect(check_gather_all(gather_all), False, *hints)


def test_a_gather_of_another_kind_is_refused_in_jax():
    expect(check_gather_all(padded_inside_in_jax, "jax"), False, "a GPU sends 8 rows inside its node, where 4 would do")

    def stopped(x):
        return across_first(tj)(jax.lax.stop_gradient(x))

    expect(check_gather_all(stopped, "jax"), False, "but the gradient of x is not")


@pytest.mark.parametrize(
    ("gather_all", "hint"),
    [
        (lambda x: tt.all_gather(tt.all_gather(x, "node"), "gpu"), "ordered by GPU and then by node"),
        (
            lambda x: tt.all_gather(tt.all_gather(x, "gpu"), "node"),
            "a GPU sends 3 rows in messages that may leave its node",
        ),
        (
            lambda x: tt.all_gather(x, ("node", "gpu")),
            "where 1 would do.\nIt begins with all ranks at once",
        ),
        (around_all, "where 1 would do.\nIt begins with all ranks at once"),
        (sorted_wrongly, "`reshape` them to [GPUs, nodes, n]"),
        (lambda x: tt.all_gather(x, "gpu"), "shape [3, 5]"),
    ],
    ids=["unsorted", "inside first", "one gather", "one ring", "sorted wrongly", "inside only"],
)
def test_what_is_wrong_with_a_gather_is_told_and_shown(gather_all: Callable, hint: str):
    verdict = check_gather_all(gather_all)
    expect(verdict, False, hint, "Mesh(node=2, gpu=3)")
    assert verdict.panels


def test_digits_are_not_lost():
    """Small whole numbers go through bfloat16 and through int unharmed; others do not."""
    right = across_first(tt)
    for dtype in (torch.bfloat16, torch.int32):
        expect(
            check_gather_all(lambda x, dtype=dtype: right(x.to(dtype)).to(x.dtype)),
            False,
            "right for small whole numbers",
        )
    expect(check_gather_all(lambda x: right(x.float())), True, "")


def test_the_labs_stub_is_not_started():
    expect(check_gather_all(in_the_lab("def gather_all")["gather_all"]), None, "gather_all: not started")  # type: ignore[arg-type]
