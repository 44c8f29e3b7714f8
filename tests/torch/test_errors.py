"""What goes wrong inside ranks is told at once and by name; the kernel lives on."""

import contextlib
import gc
import inspect
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tplab import Mesh, P
from tplab.errors import (
    ClusterError,
    CollectiveMismatchError,
    DeadlockError,
    MeshError,
    OutsideRunError,
    RankError,
    ReplicationError,
    ShapeError,
    SpecError,
)
from tplab.torch import (
    all_gather,
    all_reduce,
    axis_index,
    barrier,
    broadcast,
    gather,
    ppermute,
    reduce,
    reduce_scatter,
    ring_shift,
    run,
    scatter,
    start,
)

FOUR = Mesh(tp=4)


@pytest.fixture(autouse=True)
def the_kernel_lives_on():
    """After each test: no thread is left, and the next run works."""
    before = threading.active_count()
    yield
    gc.collect(1)  # what is older was there before
    assert threading.active_count() == before
    assert run(lambda: all_reduce(torch.ones(2), "tp").tolist(), FOUR).per_rank == [[4, 4]] * 4


def failure(program: Callable, error: type[Exception], mesh: Mesh = FOUR, **options: Any) -> Any:
    """What running the program raises."""
    with pytest.raises(error) as caught:
        run(program, mesh, **options)
    return caught.value


def line(program: Callable, text: str) -> str:
    """Where in this file the line of `program` is that holds `text`: "test_errors.py:12"."""
    lines, first = inspect.getsourcelines(program)
    (place,) = (place for place, code in enumerate(lines) if text in code)
    return f"test_errors.py:{first + place}"


# --- a rank that raises -----------------------------------------------------------------------------------------------


def helper(x: Tensor) -> None:
    raise ValueError(f"lost my shard of {x.numel()}")


def raises() -> Tensor:
    x = all_reduce(torch.ones(3), "tp")
    if axis_index("tp") == 2:
        helper(x)
    return all_reduce(x, "tp")


@pytest.mark.parametrize("options", [{}, {"cluster": "h100"}, {"clock": "measured"}])
def test_a_rank_that_raises_is_named_with_its_own_traceback(options: dict):
    error = failure(raises, RankError, **options)
    where = line(helper, "raise ValueError")
    assert str(error) == f"rank 2 raised ValueError at {where}: lost my shard of 3"
    assert error.rank == 2
    assert isinstance(error.__cause__, ValueError)
    frames = [frame.name for frame in traceback.extract_tb(error.__cause__.__traceback__)]
    assert frames[-2:] == ["raises", "helper"]


def test_an_error_from_inside_a_library_names_the_programs_line():
    def program() -> None:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))  # this line

    error = failure(program, RankError)
    assert line(program, "# this line") in str(error)
    assert error.rank == 0


def test_errors_with_causes_keep_them():
    def program() -> None:
        try:
            helper(torch.ones(1))
        except ValueError as error:
            raise KeyError("second") from error

    error = failure(program, RankError)
    assert isinstance(error.__cause__, KeyError)
    assert isinstance(error.__cause__.__cause__, ValueError)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
def test_what_is_no_exception_is_told_as_well(kind: type[BaseException]):
    def program() -> None:
        all_reduce(torch.ones(1), "tp")
        if axis_index("tp") == 1:
            raise kind("enough")
        all_reduce(torch.ones(1), "tp")

    error = failure(program, RankError)
    assert f"rank 1 raised {kind.__name__}" in str(error)
    assert type(error.__cause__) is kind


def test_the_first_error_counts():
    """The others only follow from it, also where they are raised while a rank is let go."""

    def program() -> None:
        try:
            all_reduce(torch.ones(1), "tp")
            if axis_index("tp") == 3:
                raise ValueError("first")
            all_reduce(torch.ones(1), "tp")
        finally:
            if axis_index("tp") != 3:
                raise RuntimeError("second")

    assert "rank 3 raised ValueError" in str(failure(program, RankError))


def test_ranks_that_are_let_go_can_clean_up():
    closed = []

    def program() -> None:
        try:
            all_reduce(torch.ones(axis_index("tp") // 3 + 1), "tp")
        finally:
            closed.append(axis_index("tp"))

    failure(program, CollectiveMismatchError)
    assert sorted(closed) == [0, 1, 2, 3]


def test_ranks_that_are_let_go_cannot_go_on_talking():
    after = []

    def program() -> None:
        try:
            all_reduce(torch.ones(1), "tp")
            if axis_index("tp") == 0:
                raise ValueError("first")
            all_reduce(torch.ones(1), "tp")
        finally:
            if axis_index("tp") != 0:
                ring_shift(torch.ones(1), "tp")
                after.append(axis_index("tp"))

    assert "rank 0 raised ValueError" in str(failure(program, RankError))
    assert after == []


def test_an_exception_that_the_program_catches_is_its_own_business():
    def program() -> float:
        with contextlib.suppress(ShapeError):
            reduce_scatter(torch.ones(5), "tp")
        with pytest.raises(MeshError):
            all_reduce(torch.ones(2), "pp")
        return all_reduce(torch.ones(1), "tp").item()

    assert run(program, FOUR).per_rank == [4.0] * 4


def test_an_error_of_tplabs_own_says_on_which_rank_it_was():
    def program() -> None:
        if axis_index("tp") == 2:
            all_gather(torch.ones(2), "tp", 3)
        barrier()

    error = failure(program, ShapeError)
    assert error.__notes__ == ["on rank 2 {'tp': 2} at " + line(program, "all_gather")]


def test_a_failed_run_inside_a_rank_is_that_ranks_error():
    def program() -> None:
        if axis_index("tp") == 1:
            run(raises, FOUR)
        barrier()

    error = failure(program, RankError, Mesh(tp=2))
    assert str(error).startswith("rank 1 raised RankError at " + line(program, "run(raises"))
    assert isinstance(error.__cause__, RankError)
    assert error.__cause__.rank == 2


def test_a_run_inside_a_rank_is_a_run_of_its_own():
    def inner() -> Tensor:
        return all_reduce(torch.rand(1), "tp")

    def program() -> tuple:
        first = torch.rand(1)
        inside = run(inner, FOUR, seed=9).per_rank[0]
        return first, torch.rand(1), inside, ring_shift(torch.tensor([axis_index("dp")]), "dp")

    def without() -> Tensor:
        return torch.rand(2)

    alone, plain = run(inner, FOUR, seed=9).per_rank[0], run(without, Mesh(dp=2)).per_rank
    for rank, (a, b, inside, neighbor) in enumerate(run(program, Mesh(dp=2)).per_rank):
        assert torch.equal(torch.cat([a, b]), plain[rank])
        assert torch.equal(inside, alone)
        assert neighbor.item() == 1 - rank


# --- collectives that do not match ------------------------------------------------------------------------------------


def other_kind() -> None:
    x = torch.ones(4, 2)
    if axis_index("tp") == 1:
        all_gather(x, "tp")  # second
    else:
        all_reduce(x, "tp")  # first


def other_order() -> None:
    x = torch.ones(4, 2)
    if axis_index("tp") == 1:
        ring_shift(x, "tp")  # second
        all_reduce(x, "tp")
    else:
        all_reduce(x, "tp")  # first
        ring_shift(x, "tp")


def other_shape() -> None:
    if axis_index("tp") == 1:
        all_reduce(torch.ones(3, 2), "tp")  # second
    else:
        all_reduce(torch.ones(4, 2), "tp")  # first


def other_dtype() -> None:
    if axis_index("tp") == 1:
        all_reduce(torch.ones(4, 2, dtype=torch.float64), "tp")  # second
    else:
        all_reduce(torch.ones(4, 2), "tp")  # first


def other_reduction() -> None:
    if axis_index("tp") == 1:
        all_reduce(torch.ones(4, 2), "tp", "max")  # second
    else:
        all_reduce(torch.ones(4, 2), "tp")  # first


def other_root_of_a_reduce() -> None:
    if axis_index("tp") == 1:
        reduce(torch.ones(4, 2), "tp", 1)  # second
    else:
        reduce(torch.ones(4, 2), "tp")  # first


def other_root_of_a_scatter() -> None:
    if axis_index("tp") == 1:
        scatter(torch.ones(4, 2), "tp", 1)  # second
    else:
        scatter(torch.ones(4, 2), "tp")  # first


def other_root_of_a_gather() -> None:
    if axis_index("tp") == 1:
        gather(torch.ones(4, 2), "tp", 1)  # second
    else:
        gather(torch.ones(3, 2), "tp")  # first


def other_root() -> None:
    if axis_index("tp") == 1:
        broadcast(torch.ones(4, 2), "tp", 1)  # second
    else:
        broadcast(torch.ones(4, 2), "tp")  # first


def other_shift() -> None:
    if axis_index("tp") == 1:
        ring_shift(torch.ones(4, 2), "tp", -1)  # second
    else:
        ring_shift(torch.ones(4, 2), "tp")  # first


def other_pairs() -> None:
    if axis_index("tp") == 1:
        ppermute(torch.ones(4, 2), "tp", [(1, 0)])  # second
    else:
        ppermute(torch.ones(4, 2), "tp", [(0, 1)])  # first


def other_dim() -> None:
    if axis_index("tp") == 1:
        start(all_gather, torch.ones(4, 4), "tp", 1).wait()  # second
    else:
        start(all_gather, torch.ones(4, 4), "tp").wait()  # first


SIDES = {
    other_kind: ("all_reduce(x, 'tp', 'sum') of float32 [4, 2]", "all_gather(x, 'tp', 0) of float32 [4, 2]"),
    other_order: ("all_reduce(x, 'tp', 'sum') of float32 [4, 2]", "ring_shift(x, 'tp', 1) of float32 [4, 2]"),
    other_shape: ("all_reduce(x, 'tp', 'sum') of float32 [4, 2]", "all_reduce(x, 'tp', 'sum') of float32 [3, 2]"),
    other_dtype: ("all_reduce(x, 'tp', 'sum') of float32 [4, 2]", "all_reduce(x, 'tp', 'sum') of float64 [4, 2]"),
    other_reduction: ("all_reduce(x, 'tp', 'sum') of float32 [4, 2]", "all_reduce(x, 'tp', 'max') of float32 [4, 2]"),
    other_root: ("broadcast(x, 'tp', 0) of float32 [4, 2]", "broadcast(x, 'tp', 1) of float32 [4, 2]"),
    other_root_of_a_reduce: (
        "reduce(x, 'tp', 0, 'sum') of float32 [4, 2]",
        "reduce(x, 'tp', 1, 'sum') of float32 [4, 2]",
    ),
    other_root_of_a_scatter: ("scatter(x, 'tp', 0, 0) of float32 [4, 2]", "scatter(x, 'tp', 1, 0) of float32 [4, 2]"),
    other_root_of_a_gather: ("gather(x, 'tp', 0, 0) of float32 [3, 2]", "gather(x, 'tp', 1, 0) of float32 [4, 2]"),
    other_shift: ("ring_shift(x, 'tp', 1) of float32 [4, 2]", "ring_shift(x, 'tp', -1) of float32 [4, 2]"),
    other_pairs: ("ppermute(x, 'tp', ((0, 1),)) of float32 [4, 2]", "ppermute(x, 'tp', ((1, 0),)) of float32 [4, 2]"),
    other_dim: ("all_gather(x, 'tp', 0) of float32 [4, 4]", "all_gather(x, 'tp', 1) of float32 [4, 4]"),
}


@pytest.mark.parametrize("program", SIDES)
def test_a_mismatch_shows_both_sides_with_their_lines(program: Callable):
    first, second = SIDES[program]
    error = failure(program, CollectiveMismatchError)
    assert str(error) == (
        "collective number 1 over axis 'tp' is not the same on all of ranks 0, 1, 2, 3:\n"
        f"  rank 0: {first} at {line(program, '# first')}\n"
        f"  rank 1: {second} at {line(program, '# second')}\n"
        "every rank of a group must call the same collectives in the same order, with the same shapes and dtypes"
    )


def test_a_mismatch_ends_the_run_also_where_the_program_swallows_it():
    def program() -> Tensor | None:
        try:
            return all_reduce(torch.ones(axis_index("tp") + 1), "tp")
        except Exception:
            return None

    failure(program, CollectiveMismatchError)


def test_a_mismatch_is_counted_within_its_group():
    def program() -> None:
        barrier("dp")
        all_reduce(torch.ones(1), "tp")
        if axis_index("dp") == 1:
            all_reduce(torch.ones(1 + axis_index("tp")), "tp")
        else:
            all_reduce(torch.ones(1), "tp")

    error = failure(program, CollectiveMismatchError, Mesh(dp=2, tp=2))
    assert "collective number 2 over axis 'tp' is not the same on all of ranks 2, 3" in str(error)


# --- nobody can move --------------------------------------------------------------------------------------------------


def test_a_deadlock_names_every_rank_with_what_it_waits_for_and_where():
    def program() -> None:
        x = torch.ones(2)
        index = axis_index(("dp", "tp"))
        if index == 0:
            all_reduce(x, "dp")  # zero
        elif index == 1:
            start(all_reduce, x, "tp").wait()  # one
        elif index == 2:
            ring_shift(x, "tp", -1)  # two
        # rank 3 returns

    error = failure(program, DeadlockError, Mesh(dp=2, tp=2))
    zero, one, two = (line(program, f"# {name}") for name in ("zero", "one", "two"))
    assert str(error) == (
        "no rank can go on:\n"
        f"  rank 0 waits in all_reduce(x, 'dp', 'sum') at {zero} for rank 2\n"
        f"  rank 1 waits in all_reduce(x, 'tp', 'sum') at {one} for rank 0\n"
        f"  rank 2 waits in ring_shift(x, 'tp', -1) at {two} for a message from rank 3\n"
        "  rank 3 has returned\n"
        "every rank of a group must call the same collectives in the same order, and none may return before the others"
    )


def test_a_deadlock_in_which_all_ranks_wait():
    def program() -> None:
        first, second = ("dp", "tp") if axis_index("dp") == axis_index("tp") else ("tp", "dp")
        all_reduce(torch.ones(1), first)  # here
        all_reduce(torch.ones(1), second)

    error = failure(program, DeadlockError, Mesh(dp=2, tp=2))
    assert str(error).count(line(program, "# here")) == 4
    assert "returned" not in str(error).split("\nevery")[0]


@pytest.mark.parametrize("who", [0, 3])
def test_a_rank_that_leaves_early_is_named(who: int):
    def program() -> int | None:
        if axis_index("tp") == who:
            return 1
        all_reduce(torch.ones(3), "tp")
        return None

    error = failure(program, DeadlockError)
    assert f"rank {who} has returned" in str(error)
    assert f"for rank {who}\n" in str(error)


def test_a_rank_that_leaves_early_is_named_also_where_nobody_waits_for_it():
    def message() -> None:
        if axis_index("tp") < 2:
            ppermute(torch.ones(1), "tp", [(0, 1)])  # here

    def started() -> None:
        if axis_index("tp") != 1:
            start(all_reduce, torch.ones(1), "tp")  # here

    error = failure(message, CollectiveMismatchError)
    assert "ranks 2, 3 returned without calling it" in str(error)
    assert f"ppermute(x, 'tp', ((0, 1),)), which rank 0 called at {line(message, '# here')}" in str(error)
    assert "rank 1 returned without calling it" in str(failure(started, CollectiveMismatchError))


# --- what is claimed of results ---------------------------------------------------------------------------------------


def claim(result: Callable, spec: Any = None, mesh: Mesh | None = None) -> str:
    return str(failure(result, ReplicationError, mesh or Mesh(tp=3), out_specs=P() if spec is None else spec))


def test_results_that_were_said_to_agree_and_do_not():
    text = claim(lambda: torch.tensor([1.0, -8.0]) * (1 + (axis_index("tp") > 0) * 0.25))
    assert text == (
        "out_specs=P() says that ranks 0, 1, 2 return the same tensor, but rank 0's differs from that of "
        "ranks 1, 2, by up to 2 (largest value: 8);\nall_reduce over 'tp' makes a partial result the same "
        "on every rank; if they are meant to differ, name the axis in out_specs"
    )


def test_of_several_results_the_one_that_differs_is_named():
    def program() -> Any:
        x = torch.ones(2)
        return {"loss": x, "logits": (x, x + axis_index("tp"))}

    text = claim(program)
    assert "ranks 0, 1, 2 return the same result['logits'][1], but rank 0's differs from that of ranks 1" in text
    shapes = claim(lambda: (torch.ones(1), torch.ones(axis_index("tp") + 1)))
    assert "ranks 0 and 1 return copies of result[1], but one is torch.float32 [1] and the other" in shapes


def test_a_claim_is_checked_within_its_groups():
    mesh = Mesh(dp=2, tp=2)

    def program() -> Tensor:
        return torch.tensor([axis_index("dp") * 10.0 + (axis_index("dp") * axis_index("tp")) * 0.5])

    text = claim(program, P("dp"), mesh)
    assert "ranks 2, 3 return the same tensor, but rank 2's differs from that of rank 3, by up to 0.5" in text
    assert "all_reduce over 'tp'" in text
    assert "all_reduce over 'dp' or 'tp'" in claim(program, P(), mesh)


def test_claims_about_shapes_dtypes_nans_and_whole_numbers():
    big = 2**60
    assert "float32 [1] and the other torch.float32 [2]" in claim(lambda: torch.ones(axis_index("tp") + 1))
    kinds = [torch.float32, torch.float64, torch.float32]
    assert "torch.float32 [1] and the other torch.float64 [1]" in claim(
        lambda: torch.ones(1, dtype=kinds[axis_index("tp")])
    )
    nan, inf = float("nan"), float("inf")
    for odd in (nan, inf, -inf):
        text = claim(lambda odd=odd: torch.tensor([1.0, odd if axis_index("tp") == 1 else 2.0]))
        assert "rank 1, where one is NaN or infinite and the other is not" in text
    assert "NaN or infinite" in claim(lambda: torch.tensor([inf if axis_index("tp") else -inf]))
    assert "by up to 1 (" in claim(lambda: torch.tensor([big + axis_index("tp") // 2]))
    assert "by up to 1 (" in claim(lambda: torch.tensor([axis_index("tp") == 1]))
    assert "by up to 3 (" in claim(lambda: torch.tensor([3j * (axis_index("tp") == 1)]))
    assert "by up to 1 (" in claim(lambda: torch.tensor([1.0 + axis_index("tp") // 2]).to(torch.float8_e5m2))


def test_claims_hold_up_to_a_few_roundings():
    def apart(dtype: torch.dtype, roundings: float) -> Callable:
        eps = torch.finfo(dtype).eps
        return lambda: torch.tensor([1.0, 1.0 + axis_index("tp") * roundings * eps], dtype=torch.float64).to(dtype)

    for dtype, roundings in ((torch.float64, 64), (torch.float32, 64), (torch.float16, 4), (torch.bfloat16, 4)):
        run(apart(dtype, roundings), Mesh(tp=2), out_specs=P())
        failure(apart(dtype, roundings + 1), ReplicationError, Mesh(tp=2), out_specs=P())
    nan = torch.tensor([float("nan"), float("inf"), 1.0])
    assert run(lambda: nan + axis_index("tp") * 0, Mesh(tp=2), out_specs=P()).value.isnan().tolist() == [
        True,
        False,
        False,
    ]
    assert run(lambda: torch.tensor([-0.0 if axis_index("tp") else 0.0]), Mesh(tp=2), out_specs=P()).value == 0


def test_results_are_put_together_as_the_specs_say():
    mesh = Mesh(dp=2, tp=2)

    def program() -> dict:
        rank = axis_index(("dp", "tp"))
        return {
            "x": torch.full((1, 2), float(rank)),
            "n": (7, torch.tensor(True)),
            "t": torch.tensor([axis_index("tp")]),
        }

    out = run(program, mesh, out_specs={"x": P("dp", "tp"), "n": P(), "t": P("tp")})
    assert out.value["x"].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert out.value["n"][0].item() == 7 and out.value["n"][1].item() is True
    assert out.value["t"].tolist() == [0, 1]
    assert repr(out) == "Result of program on Mesh(dp=2, tp=2): value, per_rank, trace"
    with pytest.raises(SpecError, match="give out_specs"):
        _ = run(program, mesh).value


def test_bad_specs_are_refused():
    x = torch.ones(4, 6)

    def spec(
        message: str, out: Any = None, into: Any = None, program: Callable = lambda *xs: xs[0], args: tuple = (x,)
    ) -> None:
        with pytest.raises((SpecError, ShapeError), match=message):
            run(program, Mesh(tp=4), *args, in_specs=into, out_specs=out)

    spec(r"dim 1 has size 6, which the 4 ranks of axis 'tp' cannot share", into=(P(None, "tp"),))
    spec(r"names axis 'pp'", into=P("pp"))
    spec(r"in_specs has 2 entries, but there are 1 arguments", into=(P(), P()))
    spec(r"in_specs is 'tp'; give a P", into="tp")
    spec(r"has 'tp' where the value is a Tensor", into=("tp",))
    spec(r"has 'tp' where the value is a str", into=("tp",), args=("tp",))
    spec(r"3 entries, and the tensor of shape \(4, 6\) has 2 dims", into=P(None, None, "tp"))
    spec(r"splits a int as P\('tp'\); only tensors", into=P("tp"), args=(3,))
    spec(r"has the keys \['b'\] where the value has \['a'\]", into=({"b": P()},), args=({"a": x},))
    spec(r"names axis 'pp'", out=P("pp"))
    spec(r"out_specs has .* where the value is a Tensor", out=(P(), P()))
    spec(r"rank 0 returned 'text', of type str", out=P(), program=lambda x: "text")
    spec(r"rank 0 returned None, of type NoneType", out=P(), program=lambda x: None)
    spec(r"the pieces of P\('tp'\) must have one shape", out=P("tp"), program=lambda x: x[: axis_index("tp")])
    spec(
        r"result\[1\] is None on rank 1, and a tensor on other ranks",
        out=P(),
        program=lambda x: (x, None if axis_index("tp") == 1 else x),
    )
    spec(
        r"one structure, but rank 0 returned \(Tensor, Tensor\) and rank 1 Tensor",
        out=P(),
        program=lambda x: x if axis_index("tp") else (x, x),
    )
    spec(
        r"must have one dtype, but rank 0 returned torch.float32 and rank 3 torch.float64",
        out=P("tp"),
        program=lambda x: x.double() if axis_index("tp") == 3 else x,
    )


def test_options_that_run_does_not_have():
    def f() -> None: ...

    for options, message in [
        ({"on": "the moon"}, "on is 'the moon'; it must be 'simulated', 'processes', or None"),
        ({"clock": "sundial"}, "clock is 'sundial'; it must be 'modelled', 'measured', or None"),
        ({"cluster": "abacus"}, "no cluster is named 'abacus'"),
        ({"cluster": 3}, "cluster is 3"),
        ({"keep_values": -1}, "keep_values is -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(f, FOUR, **options)
    assert issubclass(ClusterError, ValueError)
    with pytest.raises(TypeError, match=r"run takes a function and a mesh, as run\(f, Mesh\(tp=4\), ...\)"):
        run(f, 4)  # type: ignore
    with pytest.raises(TypeError, match="run takes a function and a mesh"):
        run(FOUR, f)  # type: ignore


def test_a_threads_own_thread_is_no_rank():
    def program() -> None:
        found: list[BaseException] = []

        def work() -> None:
            try:
                all_reduce(torch.ones(1), "tp")
            except OutsideRunError as error:
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        raise found[0]

    failure(program, OutsideRunError)
    with pytest.raises(
        OutsideRunError, match=r"this thread belongs to no rank.*distributed=True\), where threads belong"
    ):
        run(program, FOUR)


def test_the_end_of_a_run_is_the_end_of_its_ranks():
    run(lambda: None, FOUR)
    with pytest.raises(OutsideRunError):
        axis_index("tp")


def test_more_ranks_than_there_can_be_threads(monkeypatch: pytest.MonkeyPatch):
    """Threads that were started are ended."""
    begin = threading.Thread.start

    def starts_three(thread: threading.Thread) -> None:
        if thread.name == "rank 3":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", starts_three)
    state = torch.get_rng_state()
    error = failure(lambda: barrier(), MeshError)
    assert "this machine would not start more than 3 of them" in str(error)
    monkeypatch.undo()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_exception_without_words_ends_with_its_line():
    def program() -> None:
        raise AssertionError

    with pytest.raises(RankError, match=r"rank 0 raised AssertionError at test_errors\.py:\d+$"):
        run(program, Mesh(tp=2), on="simulated")
