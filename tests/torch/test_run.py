"""What `run` is asked for: where, on which clock, with how many ranks. What contradicts itself is refused."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tplab import Mesh, P
from tplab.errors import MeshError, RankError, SpecError
from tplab.torch import all_reduce, barrier, ring_shift, run, start

TWO = Mesh(tp=2)


def test_where_and_on_which_clock_is_left_to_run():
    trace = run(barrier, TWO).trace
    assert (trace.clock, trace.unit, trace.cluster) == ("modelled", "steps", None)
    assert run(barrier, TWO, on="simulated", clock="measured").trace.clock == "measured"
    assert run(barrier, TWO, cluster="h100").trace.cluster == "h100"


@pytest.mark.parametrize("given", [{"cluster": "h100"}, {"clock": "modelled"}])
def test_processes_take_no_model(given: dict[str, Any]):
    (name,) = given
    with pytest.raises(ValueError, match=f"{name}=.* is for simulated ranks.*leave {name} out, or run on='simulated'"):
        run(barrier, TWO, on="processes", **given)


def test_under_torchrun_ranks_are_not_simulated(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match="torchrun has started this process as one of 2 ranks; leave `on` out"):
        run(barrier, TWO, on="simulated")
    with pytest.raises(ValueError, match="cluster='h100' is for simulated ranks"):
        run(barrier, TWO, cluster="h100")


def test_more_ranks_than_can_be_are_refused_at_once():
    with pytest.raises(MeshError, match="has 100,000 ranks, and run takes at most 4,096 simulated ranks"):
        run(barrier, Mesh(tp=10**5))
    with pytest.raises(MeshError, match="has 300 ranks, and run takes at most 256 processes"):
        run(barrier, Mesh(tp=300), on="processes")
    assert threading.active_count() < 100


@pytest.mark.parametrize("spec", [lambda p: p, lambda p: (p,)])
def test_jaxs_own_partition_spec_is_named(spec: Callable):
    from jax.sharding import PartitionSpec

    with pytest.raises(SpecError, match=r"in_specs has JAX's own PartitionSpec; write .* and here P\('tp', None\)"):
        run(lambda x: x, TWO, torch.ones(2, 2), in_specs=spec(PartitionSpec("tp", None)))
    with pytest.raises(SpecError, match=r"out_specs has JAX's own PartitionSpec; write .* and here P\(\)"):
        run(lambda: torch.ones(2), TWO, out_specs=PartitionSpec())
    assert run(lambda x: x, TWO, torch.ones(2, 2), in_specs=spec(P("tp")), out_specs=P("tp")).value.shape == (2, 2)


def test_a_handle_that_is_used_as_a_tensor_says_to_wait():
    def used(use: Callable, is_followed: bool) -> None:
        def program() -> Any:
            return use(start(all_reduce, torch.ones(2, requires_grad=is_followed), "tp"), torch.ones(2))

        with pytest.raises(RankError, match=r"started, not its result; call .wait\(\), which returns the tensor"):
            run(program, TWO)

    used(lambda flight, x: flight + 1, False)
    used(lambda flight, x: 2 * flight, True)
    used(lambda flight, x: x @ flight, False)
    used(lambda flight, x: -flight, True)
    used(lambda flight, x: flight[0], False)
    used(lambda flight, x: flight.sum(), True)
    used(lambda flight, x: torch.cat([flight, x]), False)
    used(lambda flight, x: ring_shift(flight, "tp"), False)

    def plain() -> bool:
        flight = start(all_reduce, torch.ones(2), "tp")
        return bool(flight) and not hasattr(flight, "shape") and flight.wait().shape == (2,)

    assert run(plain, TWO).per_rank == [True, True]
