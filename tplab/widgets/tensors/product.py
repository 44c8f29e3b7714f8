"""A product of two sharded matrices: how the result is sharded, and the communication that it still needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tplab.errors import ShapeError, SpecError
from tplab.mesh import Mesh
from tplab.sharding import P, local_shape, names_in


@dataclass(frozen=True)
class Tensor:
    """A tensor by name, global shape and sharding."""

    name: str
    shape: tuple[int, ...]
    spec: P

    def axes(self, dim: int) -> tuple[str, ...]:
        """The mesh axes that split a dim, the slowest first."""
        return names_in(self.spec[dim]) if dim < len(self.spec) else ()


@dataclass(frozen=True)
class Product:
    """x [B, K] @ w [K, F] = y [B, F], where every rank multiplies the pieces it holds.

    y           sharded like the rows of x and the columns of w
    summed      the axes along which the ranks' products are parts of a sum: y needs an all_reduce over them
    multiplied  (rows, inner, columns) of each rank's product
    """

    x: Tensor
    w: Tensor
    y: Tensor
    summed: tuple[str, ...]
    multiplied: tuple[int, int, int]

    @property
    def flops(self) -> int:
        """FLOPs of one rank: 2 x rows x inner x columns."""
        return 2 * math.prod(self.multiplied)


def product(x: Tensor, w: Tensor, mesh: Mesh, name: str = "y") -> Product:
    """The product of x and w. Raises ShapeError or SpecError if they cannot be multiplied piece by piece, with advice
    on what to gather."""
    for tensor in (x, w):
        if len(tensor.shape) != 2:
            raise ShapeError(f"{tensor.name} has {len(tensor.shape)} dims {tensor.shape}; give two matrices")
    if x.shape[1] != w.shape[0]:
        raise ShapeError(
            f"{x.name} {list(x.shape)} @ {w.name} {list(w.shape)}: {x.name} has {x.shape[1]} columns and {w.name} "
            f"{w.shape[0]} rows; make them as many"
        )
    # An axis with one rank splits nothing.
    axes = [tuple(axis for axis in of.axes(dim) if mesh.shape[axis] > 1) for of in (x, w) for dim in (0, 1)]
    rows, inner_x, inner_w, columns = axes
    if inner_x and inner_w and inner_x != inner_w:
        raise SpecError(
            f"the columns of {x.name} are split over {_over(inner_x)} and the rows of {w.name} over {_over(inner_w)}: "
            f"the pieces on a rank do not belong together; split both alike, or gather one of them first"
        )
    inner = inner_x or inner_w
    for axis in rows:
        if axis in columns:
            raise SpecError(
                f"the rows of {x.name} and the columns of {w.name} are both split over {axis!r}: a rank would compute "
                f"only its block on the diagonal, and no rank the other blocks; "
                f"gather {x.name} or {w.name} over {axis!r} first"
            )
    for axis in inner:
        if axis in rows + columns:
            outer = x if axis in rows else w
            other = w if outer is x else x
            raise SpecError(
                f"{axis!r} splits the inner dim of {other.name} and the outer dim of {outer.name}: the other parts of "
                f"a rank's sum are computed by no rank; gather {other.name} over {axis!r} first"
            )
    y = Tensor(name, (x.shape[0], w.shape[1]), P(_entry(rows), _entry(columns)) if rows + columns else P())
    local_rows, _ = local_shape(x.shape, x.spec, mesh)
    _, local_columns = local_shape(w.shape, w.spec, mesh)
    size = x.shape[1] // (mesh.axis_size(inner) if inner else 1)
    return Product(x, w, y, inner, (local_rows, size, local_columns))


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _over(axes: tuple[str, ...]) -> str:
    return " x ".join(repr(axis) for axis in axes)
