"""The same program with the same seed gives the same bits, events and modelled times; the kernel notices nothing."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tplab import Mesh
from tplab.errors import RankError
from tplab.torch import Result, all_gather, all_reduce, axis_index, reduce_scatter, ring_shift, run, start


def digest(out: Result) -> str:
    """Everything a run gave, results and events, in one string."""
    sums = hashlib.sha256()
    for result in out.per_rank:
        for tensor in result if isinstance(result, list | tuple) else [result]:
            sums.update(tensor.contiguous().numpy().tobytes())
    for event in out.trace.events:
        values = None if event.values is None else event.values.tobytes()
        sums.update(repr((*(getattr(event, name) for name in event.__slots__ if name != "values"), values)).encode())
    return sums.hexdigest()


def noisy() -> list[Tensor]:
    """Draws in the initialisation, in the forward pass, before and after collectives, blocking and not."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 4))
    x = torch.randn(3, 6, requires_grad=True)
    y = nn.functional.dropout(model(x), 0.5)
    flight = start(ring_shift, y, "tp")
    z = all_reduce(y * torch.rand(3, 4), "tp")
    z = nn.functional.dropout(z, 0.2) + flight.wait() * torch.randint(0, 5, (4,))
    w = reduce_scatter(torch.cat([z] * 3), "tp") + torch.bernoulli(torch.full((3, 4), 0.5))
    (all_gather(w, "tp").square().sum() * torch.rand(())).backward()
    assert x.grad is not None
    return [w, x.grad, torch.randperm(7)]


@pytest.mark.parametrize("cluster", [None, "ethernet"])
def test_twenty_runs_give_the_same_bits_and_events(cluster: str | None):
    mesh = Mesh(dp=2, tp=3)
    found = {digest(run(noisy, mesh, seed=7, cluster=cluster)) for _ in range(20)}
    assert len(found) == 1
    assert digest(run(noisy, mesh, seed=8, cluster=cluster)) not in found


def test_what_ran_before_does_not_matter():
    mesh = Mesh(dp=2, tp=3)
    first = digest(run(noisy, mesh, seed=3))
    torch.manual_seed(99)
    torch.randn(5)
    run(lambda: torch.randn(7), Mesh(tp=5), seed=3)
    run(lambda: ring_shift(torch.ones(2), "tp"), Mesh(tp=3), cluster="h100")
    with pytest.raises(RankError):
        run(lambda: torch.randn(7)[9], mesh)
    assert digest(run(noisy, mesh, seed=3)) == first


def test_a_tensor_that_was_sent_in_an_earlier_run_is_new_to_this_one():
    """Tensors from around the program outlive a run: what one run notes about them must not reach the next."""
    x, shared = torch.arange(4.0), nn.Linear(2, 2)

    def program():
        return ring_shift(ring_shift(x, "tp"), "tp") + ring_shift(shared.weight.detach().sum().reshape(1), "tp")

    mesh = Mesh(tp=3)
    first = digest(run(program, mesh))
    run(lambda: [ring_shift(torch.ones(k + 1), "tp") for k in range(3)] + [ring_shift(x, "tp")], mesh)
    assert digest(run(program, mesh)) == first


def test_every_rank_draws_its_own_numbers_whatever_the_mesh_around_it():
    def draws() -> Tensor:
        first = torch.rand(4)
        all_reduce(torch.ones(1), "tp")  # somebody else's turn
        return torch.cat([first, torch.rand(4)])

    eight = run(draws, Mesh(tp=8), seed=5).per_rank
    two = run(draws, Mesh(dp=2, tp=1), seed=5).per_rank
    alone = run(draws, Mesh(tp=1), seed=5).per_rank
    assert len({tuple(row.tolist()) for row in eight}) == 8
    assert torch.equal(eight[0], alone[0])
    assert torch.equal(eight[0], two[0])
    assert torch.equal(eight[1], two[1])


def test_turns_do_not_move_a_rank_along_its_stream():
    """A rank that is interrupted between every two draws draws the same numbers as one that never is."""

    def steady() -> Tensor:
        return torch.rand(12)

    def interrupted() -> Tensor:
        rows = []
        for _ in range(12):
            rows.append(torch.rand(1))
            ring_shift(torch.ones(1), "tp")
        return torch.cat(rows)

    mesh = Mesh(tp=3)
    for a, b in zip(run(steady, mesh).per_rank, run(interrupted, mesh).per_rank, strict=True):
        assert torch.equal(a, b)


def test_no_two_pairs_of_seed_and_rank_draw_the_same():
    seeds = [0, 1, 2, 5, 2**32, 2**32 + 5, 5 + 2**33, 2**64 - 1]
    rows = [tuple(row.tolist()) for seed in seeds for row in run(lambda: torch.rand(3), Mesh(tp=4), seed=seed).per_rank]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("seed", [-1, 1.5, "seven", None])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ValueError, match="seed"):
        run(lambda: None, Mesh(tp=2), seed=seed)


def fails_at_once() -> None:
    torch.rand(3)
    raise ValueError("no")


def fails_among_others() -> None:
    torch.rand(3)
    all_reduce(torch.rand(3), "tp")
    if axis_index("tp") == 1:
        raise ValueError("no")
    all_reduce(torch.rand(3), "tp")


def never_meets() -> None:
    torch.rand(3)
    if axis_index("tp") == 1:
        all_reduce(torch.rand(3), "tp")


@pytest.mark.parametrize("program", [noisy, fails_at_once, fails_among_others, never_meets])
def test_the_kernels_own_generator_is_untouched(program: Callable):
    torch.manual_seed(42)
    torch.rand(3)
    before = torch.get_rng_state()
    if program is noisy:
        run(program, Mesh(tp=3))
    else:
        with pytest.raises(Exception, match="rank"):
            run(program, Mesh(tp=3))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.initial_seed() == 42


def test_a_seed_set_inside_a_rank_is_that_ranks_alone():
    def program() -> Tensor:
        if axis_index("tp") == 0:
            torch.manual_seed(1)
        ring_shift(torch.ones(1), "tp")
        return torch.rand(3)

    before = torch.get_rng_state()
    zero, one = run(program, Mesh(tp=2)).per_rank
    torch.manual_seed(1)
    assert torch.equal(zero, torch.rand(3))
    assert not torch.equal(zero, one)
    torch.set_rng_state(before)


# --- what a thread does not inherit by itself -------------------------------------------------------------------------


def settings() -> tuple:
    ring_shift(torch.ones(1), "tp")  # the setting must survive a change of turns
    x = torch.ones(2, 2, requires_grad=True)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        (x * 2).requires_grad,
        (x @ x).dtype,
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_default_device().type,
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def ranks_settings() -> tuple:
    zero, one = run(settings, Mesh(tp=2)).per_rank
    assert zero == one
    return zero


def test_ranks_see_the_callers_gradient_mode():
    assert ranks_settings()[:3] == (True, False, True)
    with torch.no_grad():
        assert ranks_settings()[:3] == (False, False, False)
    with torch.inference_mode():
        assert ranks_settings()[:3] == (False, True, False)
        with torch.inference_mode(False), torch.enable_grad():
            assert ranks_settings()[:3] == (True, False, True)
    with torch.no_grad(), torch.enable_grad():
        assert ranks_settings()[:3] == (True, False, True)


def test_ranks_see_the_callers_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ranks_settings()[3] == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert ranks_settings()[3] == torch.float32
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        assert ranks_settings()[3] == torch.float16
        assert ranks_settings()[7:9] == (True, False)
    assert ranks_settings()[3] == torch.float32


def test_ranks_see_the_callers_number_of_threads_default_dtype_and_device():
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        torch.set_num_threads(threads + 1)
        torch.set_default_dtype(torch.float64)
        assert ranks_settings()[3:6] == (torch.float64, threads + 1, torch.float64)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
    with torch.device("meta"):
        assert run(lambda: torch.ones(2).device.type, Mesh(tp=2)).per_rank == ["meta", "meta"]
    assert ranks_settings()[6] == "cpu"


def test_what_a_rank_sets_ends_with_it():
    def program() -> None:
        torch.set_grad_enabled(axis_index("tp") == 0)
        ring_shift(torch.ones(1), "tp")
        assert torch.is_grad_enabled() == (axis_index("tp") == 0)

    run(program, Mesh(tp=2))
    assert torch.is_grad_enabled()


def test_context_variables_are_those_of_the_caller():
    from contextvars import ContextVar

    name = ContextVar("name", default="nobody")
    token = name.set("caller")

    def program() -> str:
        before = name.get()
        name.set(f"rank {axis_index('tp')}")
        ring_shift(torch.ones(1), "tp")
        return f"{before}, {name.get()}"

    assert run(program, Mesh(tp=2)).per_rank == ["caller, rank 0", "caller, rank 1"]
    assert name.get() == "caller"
    name.reset(token)


def test_numpy_float_rules_reach_the_ranks():
    with np.errstate(divide="raise"), pytest.raises(RankError, match="divide by zero"):
        run(lambda: np.ones(1) / np.zeros(1), Mesh(tp=2))
