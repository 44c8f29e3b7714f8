"""The table of collectives: what each rank contributes and receives, and everything else tplab needs to know.

Code that depends on the collective reads its row: for results (in torch, and for the pictures of JAX), labels, types,
gradients, bytes and words. The argument checks below the table, of collectives and of `run`, are shared by both
frameworks.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from tplab.errors import MeshError, ShapeError, SpecError, one_of
from tplab.mesh import Mesh

REDUCTIONS = ("sum", "mean", "max", "min")
EXTREMES = ("max", "min")

Array = TypeVar("Array")


@dataclass(frozen=True, slots=True)
class Row:
    """One collective over R ranks, or one kind of message.

    takes        whose inputs it uses: those of "all" ranks, the "root", or for a message "one" rank; "": of none
    gives        what ranks receive: "all" receive the whole result, position i receives its own one of R "pieces", only
                 the "root" receives it, for a message only "one" rank does; "": there is no result
    combines     whether inputs are combined element by element (sum, max, ...); otherwise they are joined along a dim
    params       the names of its parameters in the program: "op" is the reduction, "root" a position,
                 and "dim", "split_dim", "concat_dim" are dims
    hidden       the names of further parameters, which tplab adds: "sizes" are those of the pieces
    type         the type of its result along the axis: "I" if all ranks use it in the same way, so that its gradient
                 is also the same on every rank; "R" if each rank uses it in its own way; "V" if it differs
    transposed   the collective of its backward pass, then the parameters of this one that it uses. (): nothing is sent
                 (type I), or the message returns along the same path
    words        a sentence about {group} that says what happens; {result} is the result of the reduction
    hlo          XLA's name for it; jax: the collective that JAX uses if XLA has none
    """

    name: str
    takes: Literal["all", "root", "one", ""]
    gives: Literal["all", "pieces", "root", "one", ""]
    combines: bool = False
    params: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    type: Literal["R", "I", "V"] = "V"
    transposed: tuple[str, ...] = ()
    words: str = ""
    hlo: str = ""
    jax: str = ""

    @property
    def gathers(self) -> bool:
        """Whether a rank's input is only a part of the whole tensor, and may differ in size from the others'."""
        return self.takes == "all" and self.gives in ("all", "root") and not self.combines

    def about(self, params: Sequence[Any]) -> dict[str, Any]:
        """The parameters by name."""
        return dict(zip((*self.params, *self.hidden), params, strict=False))

    def outcomes(
        self,
        inputs: Sequence[Array],
        cut: Callable[[Array, int], Sequence[Array]],
        merge: Callable[[Sequence[Array]], Array],
        root: int = 0,
    ) -> list[Array | None]:
        """Return what each position receives, None for nothing. All positions share one array if "all" receive it.

        cut     (the input of a position, the position) -> its R pieces
        merge   combines or joins several of them
        """
        found: list[Array | None] = [None] * len(inputs)
        if not self.takes:
            return found
        positions = [root] if self.takes == "root" else range(len(inputs))
        if self.gives == "pieces":
            return [merge(column) for column in zip(*(cut(inputs[index], index) for index in positions), strict=True)]
        whole = merge([inputs[root]] if self.takes == "root" else inputs)
        if self.gives == "all":
            return [whole] * len(inputs)
        found[root] = whole
        return found


_ROWS = (
    Row(
        "all_reduce", "all", "all", True, ("op",), type="I", hlo="all-reduce",
        words="every rank of {group} ends with the {result} of all their tensors",
    ),
    Row(
        "all_gather", "all", "all", False, ("dim",), type="R", hlo="all-gather",
        transposed=("reduce_scatter", "dim", "op", "sizes"),
        words="every rank of {group} ends with the pieces of all of them",
    ),
    Row(
        "reduce_scatter", "all", "pieces", True, ("dim", "op"), ("sizes",), hlo="reduce-scatter",
        transposed=("all_gather", "dim"),
        words="every rank of {group} ends with its own slice of the {result} of their tensors",
    ),
    Row(
        "all_to_all", "all", "pieces", False, ("split_dim", "concat_dim"), hlo="all-to-all",
        transposed=("all_to_all", "concat_dim", "split_dim"),
        words="every rank of {group} sends a different piece to each of the others",
    ),
    Row(
        "broadcast", "root", "all", False, ("root",), type="I", hlo="collective-broadcast", jax="all_reduce",
        words="every rank of {group} ends with a copy of one rank's tensor",
    ),
    Row(
        "reduce", "all", "root", True, ("root", "op"), jax="all_reduce", transposed=("broadcast", "root"),
        words="one rank of {group} ends with the {result} of all their tensors",
    ),
    Row(
        "gather", "all", "root", False, ("root", "dim"), jax="all_gather",
        transposed=("scatter", "root", "dim", "sizes"),
        words="one rank of {group} ends with the pieces of all of them",
    ),
    Row(
        "scatter", "root", "pieces", False, ("root", "dim"), ("sizes",), jax="reduce_scatter",
        transposed=("gather", "root", "dim"),
        words="one rank of {group} sends a different piece to each of the others",
    ),
    Row("barrier", "", "", words="the ranks of {group} wait for each other"),
    Row("ppermute", "one", "one", params=("perm",), hlo="collective-permute"),
    Row("ring_shift", "one", "one", params=("shift",), jax="ppermute"),
    Row("send", "one", "one", params=("target",), hidden=("following", "device"), jax="ppermute"),
    Row("receive", "", "one", params=("source",)),
)  # fmt: skip

ROWS: Mapping[str, Row] = {row.name: row for row in _ROWS}
"""All collectives, by tplab's name."""


def check_reduction(op: str, reduction: str, dtype: Any, *, is_fraction: bool, is_complex: bool) -> None:
    """Raise ValueError for an unknown reduction, and TypeError for one that `dtype` does not support.

    The mean of integers need not be an integer, and complex numbers have no order. A sum of booleans is "any".
    """
    one_of("op", reduction, REDUCTIONS)
    if is_complex and reduction in EXTREMES:
        raise TypeError(f"{op}: there is no {reduction} of {dtype}; reduce the real and imaginary parts on their own")
    if reduction == "mean" and not (is_fraction or is_complex):
        raise TypeError(f"{op}: the mean of {dtype} would not be whole numbers; convert to a floating-point type first")


def whole_number(given: Any, name: str) -> int:
    """`given` as an int. Raises TypeError for 1.0 and the like."""
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {given!r}") from None


def dim_of(shape: Sequence[int], dim: Any, op: str) -> int:
    """`dim` counted from the front. Raises ShapeError if a tensor of this shape does not have it."""
    dim = whole_number(dim, f"{op}: dim")
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(
            f"{op} along dim {dim}: the tensor has {len(shape)} dims {tuple(shape)}"
            + ("" if shape else "; reshape(1) makes a scalar a tensor of one element")
        )
    return dim % len(shape)


def position_of(op: str, position: Any, num_ranks: int, label: str, name: str = "root") -> int:
    """`position`, the argument `name` of `op`, as an int. Raises MeshError if the axis does not have this position."""
    position = whole_number(position, f"{op}: {name}")
    if not 0 <= position < num_ranks:
        raise MeshError(f"{op}: axis {label!r} has positions 0 to {num_ranks - 1}; {name}={position} is not one")
    return position


def pairs_of(perm: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """The permutation passed to `ppermute`, as pairs of ints. Raises TypeError."""
    return tuple(map(_pair, perm))


def check_pairs(pairs: Sequence[tuple[int, int]], num_ranks: int, label: str) -> None:
    """Raise MeshError if a position is not on the axis, sends twice or receives twice."""
    last, listed = num_ranks - 1, list(pairs)
    for side, positions in (("sends", [a for a, _ in pairs]), ("receives", [b for _, b in pairs])):
        times = Counter(positions)
        for one in times:
            if not 0 <= one < num_ranks:
                raise MeshError(f"ppermute: axis {label!r} has positions 0 to {last}; {one} in {listed} is not one")
            if times[one] > 1:
                raise MeshError(f"ppermute: position {one} of axis {label!r} {side} twice in {listed}; once at most")


def _pair(given: Any) -> tuple[int, int]:
    try:
        source, target = given
        return operator.index(source), operator.index(target)
    except (TypeError, ValueError):
        raise TypeError(f"ppermute sends along pairs (from index, to index), as (0, 1); {given!r} is no pair") from None


def check_run(fn: Any, mesh: Any, *, seed: Any, keep_values: Any) -> None:
    """Raise TypeError unless `run` was given a function and a mesh, and ValueError if a number is invalid."""
    if not isinstance(mesh, Mesh) or not callable(fn):
        raise TypeError(f"run takes a function and a mesh, as run(f, Mesh(tp=4), ...), not {fn!r} and {mesh!r}")
    check_counts(seed=seed, keep_values=keep_values)


def check_counts(**given: Any) -> None:
    """Raise ValueError unless each of these is a whole number, 0 or more."""
    for name, number in given.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
            raise ValueError(f"{name} is {number!r}; it must be a whole number, 0 or more")


def check_entries(specs: Any, count: int, name: str, what: str) -> None:
    """Raise SpecError unless the specs are a sequence with one entry for each of `count` things."""
    if not isinstance(specs, tuple | list):
        raise SpecError(f"{name} is {specs!r}; give a P, or a tuple with one P for each of the {count} {what}")
    if len(specs) != count:
        raise SpecError(f"{name} has {len(specs)} entries, but there are {count} {what}; give one for each")


def no_out_specs() -> SpecError:
    """The error for reading the whole result of a run without `out_specs`."""
    return SpecError(
        "run was given no out_specs, so it does not know how the ranks' results make a whole; "
        "give out_specs (P() where all ranks return the same), or read .per_rank"
    )
