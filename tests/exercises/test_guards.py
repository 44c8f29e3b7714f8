"""What all checks refuse, whatever the exercise: the library's own function, computing everything on every rank,
sending far too much, and leaving an argument or a generator changed."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tplab.jax as tj
import tplab.torch as tt
from tests.exercises.test_exercises import backward, expect, gated, largest, row_linear
from tplab.exercises.axes_and_nodes import check_average, check_best_mesh
from tplab.exercises.calls import library_call
from tplab.exercises.collectives import check_sum_up
from tplab.exercises.damage import Untouched
from tplab.exercises.first_look import check_largest
from tplab.exercises.overlap import check_gather_product
from tplab.exercises.pipeline_in_jax import check_pipeline
from tplab.exercises.pipeline_schedules import check_one_f_one_b
from tplab.exercises.pipeline_schedules import check_puzzle as check_schedule
from tplab.exercises.split_a_layer import check_backward, check_gated, check_row_linear
from tplab.schedules import auto_schedule, one_f_one_b

# ------------------------------------------------------------------------------------------------ the library's own


def by_global(x):
    return tt.ring_all_reduce(x, "tp")


def by_import(x):
    from tplab.torch import ring_all_reduce as add_up

    return add_up(x, "tp")


def by_module(x):
    import tplab.torch

    return tplab.torch.ring_all_reduce(x, "tp")


def by_alias(x):
    import tplab.torch as other

    return other.ring_all_reduce(x, "tp")


def by_long_alias(x):
    import tplab.torch.comm.rings as rings

    return rings.ring_all_reduce(x, "tp")


def by_helper(x):
    return by_global(x)


def by_inner(x):
    return sum(tt.ring_all_reduce(y, "tp") for y in [x])


def ring_all_reduce(x):
    return x


def of_ones_own(x):
    return ring_all_reduce(x)


@pytest.mark.parametrize("fn", [by_global, by_import, by_module, by_alias, by_long_alias, by_helper, by_inner])
def test_a_library_function_is_found_by_whatever_name_it_is_called(fn: Callable[..., Any]):
    assert library_call(fn, ("ring_all_reduce",)) == "ring_all_reduce"
    expect(check_sum_up(fn), False, "`ring_all_reduce` does the work. Here you write it yourself.")


def test_a_function_of_ones_own_may_have_any_name():
    assert not library_call(of_ones_own, ("ring_all_reduce",))
    assert not library_call(partial(by_global), ("ring_all_reduce",))  # its code is not read; nothing is raised
    assert not library_call(np.abs, ("ring_all_reduce",))


# ------------------------------------------------------------------------------------------------- what is left behind


def reseeds(x):
    torch.manual_seed(0)
    return largest(tt, torch.maximum)(x)


def draws_in_numpy(x):
    np.random.rand()  # noqa: NPY002 - the mistake
    return largest(tt, torch.maximum)(x)


def seeds_python(x):
    random.seed(0)
    return largest(tt, torch.maximum)(x)


def in_double(x):
    torch.set_default_dtype(torch.float64)
    return largest(tt, torch.maximum)(x)


def without_gradients(x):
    torch.set_grad_enabled(False)
    return largest(tt, torch.maximum)(x)


def in_place(x):
    return x.copy_(largest(tt, torch.maximum)(x))


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (reseeds, "it leaves torch's global generator in another state"),
        (draws_in_numpy, "it leaves NumPy's global generator in another state"),
        (seeds_python, "it leaves Python's global generator in another state"),
        (in_double, "it leaves torch's default dtype changed"),
        (without_gradients, "it leaves torch.set_grad_enabled changed"),
        (in_place, "it changes x in place"),
    ],
)
def test_a_right_answer_that_damages_something_is_refused(fn: Callable[..., Any], hint: str):
    expect(check_largest(fn), False, "largest: the numbers are right, but", hint)


def kernels_draws() -> list[Any]:
    return [random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())]  # noqa: NPY002


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1), lambda: np.random.rand()])  # noqa: NPY002
def test_what_runs_on_no_rank_may_not_draw_either_and_its_harm_is_undone(draw: Callable[[], Any]):
    def best_mesh(*given):
        draw()
        return 1, given[-1]

    before = kernels_draws()
    expect(check_best_mesh(best_mesh), False, "'s global generator in another state")
    assert kernels_draws() == before


def test_harm_is_undone_after_an_error_too():
    def best_mesh(*given):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(3)
        raise KeyError("nothing")

    before = kernels_draws()
    expect(check_best_mesh(best_mesh), False, "KeyError")
    assert kernels_draws() == before and torch.get_default_dtype() == torch.float32


def test_harm_is_undone_after_an_argument_has_changed_too():
    given = torch.ones(2)
    before = Untouched({"given": given})
    given.zero_()
    torch.set_default_dtype(torch.float64)
    assert "it changes given in place" in before.damage()
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("seed", [random.seed, torch.manual_seed, np.random.seed])
def test_nor_may_it_seed_a_generator_as_the_caller_has(seed: Callable[[int], Any]):
    def best_mesh(*given):
        seed(7)
        return 1, given[-1]

    seed(7)
    before = kernels_draws()
    expect(check_best_mesh(best_mesh), False, "'s global generator in another state")
    assert kernels_draws() == before


def test_a_generator_may_be_used_inside_of_a_fork():
    def forked(x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
        return largest(tt, torch.maximum)(x)

    expect(check_largest(forked), True)


@pytest.mark.parametrize("cut", [torch.Tensor.detach, lambda y: torch.tensor(y.tolist(), dtype=y.dtype)])
def test_a_result_without_a_gradient_is_told(cut: Callable[..., Any]):
    expect(check_gated(lambda *args: cut(gated()(*args))), False, "it has no gradient", "detach()")


def leaves_a_gradient(x, a, b, target):
    a, b = a.requires_grad_(), b.requires_grad_()
    z = tt.reduce_from(torch.tanh(x @ a) @ b, "tp")
    ((z - target) ** 2).sum().backward()
    return a.grad, b.grad


def test_a_gradient_left_in_an_argument_would_be_counted_twice():
    expect(check_backward(leaves_a_gradient), False, "it leaves a gradient in its argument a", "twice as much")
    expect(check_backward(lambda x, a, b, t: leaves_a_gradient(x, a.clone(), b.clone(), t)), True)


def test_a_graph_that_is_never_freed_is_refused():
    kept: list[torch.Tensor] = []

    def remembers(x, a, g, b):
        kept.append(z := gated()(x, a, g, b))
        return z

    def remembers_numbers(x, a, g, b):
        kept.append((z := gated()(x, a, g, b)).detach())
        return z

    expect(check_gated(remembers), False, "it keeps a tensor in a variable that outlives the call", "tensor.detach()")
    expect(check_gated(remembers_numbers), True)


@pytest.mark.parametrize(
    ("wrap", "hint"),
    [
        (lambda y: (y,), "it returned a tuple with it; return the tensor itself"),
        (lambda y: [y], "it returned a list with it"),
        (lambda y: y.detach().numpy(), "it returned a NumPy array; leave it a tensor"),
    ],
)
def test_a_result_in_brackets_or_without_its_type_is_refused(wrap: Callable[..., Any], hint: str):
    expect(check_row_linear(lambda *args: wrap(row_linear(tt)(*args))), False, hint)


def test_float32_is_precise_enough():
    """Also for an answer that is first compared with a known mistake of another shape."""
    single = lambda fn: lambda *args: fn(*(arg.float() for arg in args))  # noqa: E731
    expect(check_row_linear(single(row_linear(tt))), True)
    expect(check_gated(single(gated())), True)
    expect(check_backward(single(lambda *args: backward(tt, torch.tanh, lambda z, y, t: 2 * (z - t))(*args))), True)
    half = lambda fn: lambda *args: fn(*(arg.half() for arg in args)).double()  # noqa: E731
    expect(check_gated(half(gated())), False)


# ----------------------------------------------------------------------------- right numbers in the wrong way: 00 to 02


def starting_at(number: float) -> Callable[..., Any]:
    def solution(x):
        best, passing = torch.full_like(x, number), x
        for _ in range(tt.axis_size("ring")):
            best = torch.maximum(best, passing)
            passing = tt.ring_shift(passing, "ring")
        return best

    return solution


def test_largest_refuses_what_is_right_only_for_the_labs_numbers():
    expect(check_largest(starting_at(0)), False, "your largest so far began at zero", "Mesh(ring=3)")
    expect(check_largest(starting_at(-1e9)), False, "Mesh(ring=3)")
    expect(check_largest(starting_at(-torch.inf)), True)
    expect(check_largest(lambda x: tt.all_reduce(x, "ring", "max")), False, "`all_reduce` does the work")
    expect(check_largest(lambda x: tt.all_gather(x, "ring").max(0, keepdim=True).values), False, "`all_gather` does")


def test_largest_may_send_more_only_up_to_twice_as_much():
    def a_hundred_hops(x):
        best = passing = x
        for _ in range(100):
            passing = tt.ring_shift(passing, "ring")
            best = torch.maximum(best, passing)
        return best

    expect(check_largest(a_hundred_hops), False, "the numbers are right, but on Mesh(ring=4) it sends 3,200 bytes")


def test_largest_may_not_skip_a_neighbour():
    def from_afar(x):
        return torch.stack([tt.ring_shift(x, "ring", hop) for hop in range(tt.axis_size("ring"))]).amax(0)

    expect(check_largest(from_afar), False, "which is not its neighbour")


def gathers_all(x, a, b, target):
    a, b = tt.all_gather(a, "tp", 1), tt.all_gather(b, "tp", 0)
    y = torch.tanh(x @ a)
    dz = 2 * (y @ b - target)
    return tt.scatter_to(x.T @ ((dz @ b.T) * (1 - y**2)), "tp", 1), tt.scatter_to(y.T @ dz, "tp", 0)


def test_an_unsharded_computation_is_refused():
    def whole_row(x, w, bias):
        return x @ tt.gather_from(w, "tp", 0) + bias

    def whole_gate(x, a, g, b):
        a, g, b = tt.gather_from(a, "tp", 1), tt.gather_from(g, "tp", 1), tt.gather_from(b, "tp", 0)
        return (torch.nn.functional.silu(x @ a) * (x @ g)) @ b

    expect(check_row_linear(whole_row), False, "the busiest rank does 100% of what one rank alone would do")
    for verdict in (check_backward(gathers_all), check_gated(whole_gate)):
        expect(verdict, False, "the numbers are right, but")


def bias_of(share: Callable[..., Any]) -> Callable[..., Any]:
    def solution(x, w, bias):
        width, index = w.shape[0], tt.axis_index("tp")
        return tt.all_reduce(x[:, index * width : (index + 1) * width] @ w + share(bias), "tp")

    return solution


def test_the_two_labs_agree_on_a_bias_that_is_added_before_the_sum():
    """Lab 04 refuses these for the same layer."""
    divided = bias_of(lambda bias: bias / tt.axis_size("tp"))
    first = bias_of(lambda bias: bias * (tt.axis_index("tp") == 0))
    last = bias_of(lambda bias: bias * (tt.axis_index("tp") == tt.axis_size("tp") - 1))
    expect(check_row_linear(divided), False, "y is right, but the bias learns R times too slowly")
    for one in (first, last):
        expect(check_row_linear(one), False, "on this rank the bias receives no gradient")


def test_rows_that_are_treated_as_copies():
    def shared(x, w, bias):
        return row_linear(tt)(x, tt.copy_to(w, "tp"), bias)

    expect(check_row_linear(shared), False, "The ranks' pieces of this gradient are added up", "must stay apart")


def test_the_librarys_layer_is_not_an_answer():
    def layer(x, w, bias):
        return tt.RowParallelLinear(x.shape[1], len(bias), "tp")(x)

    expect(check_row_linear(layer), False, "`RowParallelLinear` does the work")


def test_a_bias_after_a_sum_whose_gradient_is_added_up_again():
    def by_hops(x, w, bias):
        return tt.ring_all_reduce(tt.scatter_to(x, "tp", 1) @ w, "tp") + bias

    expect(check_row_linear(by_hops), False, "dw is not right", "R times too large", "ring_all_reduce and copy_to")


def test_other_peoples_right_answers():
    """The sum in another order, in two halves, or of rows that were split first; a product written as a sum."""

    def by_halves(x, w, bias):
        own = tt.scatter_to(x, "tp", 1)
        return torch.cat([tt.reduce_from(own @ half, "tp") for half in w.chunk(2, 1)], 1) + bias

    expect(check_row_linear(by_halves), True)
    expect(check_row_linear(lambda x, w, b: b + row_linear(tt, bias_out=False)(x, w, b)), True)
    expect(check_backward(backward(tt, torch.tanh, lambda z, y, t: (z - t) + (z - t))), True)


def gathers_by_hand(x):
    total = passing = x
    for _ in range(tt.axis_size("tp") - 1):
        passing = tt.ring_shift(passing, "tp")
        total = total + passing
    return total


def test_sum_up_must_be_built_of_hops_with_one_piece_each():
    expect(check_sum_up(lambda x: tt.all_reduce(x, "tp")), False, "`all_reduce` does the work")
    halves = check_sum_up(lambda x: tt.all_gather(tt.reduce_scatter(x[0], "tp"), "tp")[None])
    expect(halves, False, "`all_gather` and `reduce_scatter` do the work")
    expect(check_sum_up(gathers_by_hand), False, "A rank needs only 2(R - 1) messages of one piece")


# ----------------------------------------------------------------------- right numbers in the wrong way: 03, 08, 10, 12


def test_an_average_may_not_gather_the_other_pieces():
    def of_all(gradient):
        dp, tp = tt.axis_size("dp"), tt.axis_size("tp")
        whole = tt.all_gather(gradient, ("dp", "tp"), 0).reshape(dp, tp, -1)
        return whole.mean(0)[tt.axis_index("tp")][:, None]

    expect(check_average(of_all), False, "the numbers are right, but on Mesh(dp=2, tp=3) it sends")
    expect(check_average(lambda gradient: gradient.copy_(tt.all_reduce(gradient, "dp", "mean"))), False, "in place")
    expect(check_average(lambda gradient: tt.all_reduce(gradient / tt.axis_size("dp"), "dp")), True)


def test_the_librarys_overlapped_layers_and_schedules_are_not_answers():
    def gather_product(x, w):
        return tt.all_gather_matmul(x, w, "tp")

    def row(rank, ranks, microbatches):
        return str(one_f_one_b(ranks, microbatches)).splitlines()[rank]

    def puzzle():
        return auto_schedule(2, 2, memory_limit=2)

    expect(check_gather_product(gather_product), False, "`all_gather_matmul` does the work")
    expect(check_one_f_one_b(row), False, "`one_f_one_b` does the work")
    expect(check_schedule(1, puzzle), False, "`auto_schedule` does the work")


def test_a_pipeline_that_gathers_all_stages_is_refused():
    def whole(w, xs):
        stages = tj.all_gather(w, "pp")
        for number in range(stages.shape[0]):
            xs = jnp.tanh(xs @ stages[number])
        return tj.all_reduce(xs, "pp", "mean")

    expect(check_pipeline(whole), False)
