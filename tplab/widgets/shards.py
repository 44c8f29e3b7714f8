"""`shards(mesh, shape, P(...))`: which rank holds which slice of a tensor, or computes which part of a product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import traitlets

from tplab.errors import MeshError, ShapeError, SpecError
from tplab.mesh import Mesh
from tplab.sharding import P, check_spec
from tplab.units import count_text, counted
from tplab.widgets.paper.card import Card, script
from tplab.widgets.paper.scene import packed
from tplab.widgets.paper.shown import a, check_shown, numbers
from tplab.widgets.paper.still import still
from tplab.widgets.paper.wire import pack
from tplab.widgets.tensors import picture
from tplab.widgets.tensors.product import Product, Tensor, product

MOST_RANKS = 1024  # more could not be distinguished in the picture


class Shards(Card):
    """The card of `shards`. `rank` is the rank that is highlighted; -1: none."""

    _esm = script("shards")
    kept = ("rank",)
    scene = traitlets.Bytes().tag(sync=True)
    rank = traitlets.Int(-1).tag(sync=True)

    def __init__(self, mesh: Mesh, of: Tensor | Product):
        self.mesh, self.of = mesh, of
        self.content = content(mesh, of)
        self.sentence = self.content["sentence"]
        drawings = self.content["drawings"]
        self.scenes = [picture.tensors(drawings, mesh.size), picture.ranks(drawings, mesh)]
        self.scenes[0].label = self.sentence
        header, columns = packed(self.scenes)
        words = {name: self.content[name] for name in ("title", "about", "badge", "sentence", "says")}
        super().__init__(scene=pack({**header, **words}, columns))

    @traitlets.validate("rank")
    def _check_rank(self, proposal: Any) -> int:
        if not -1 <= proposal["value"] < self.mesh.size:
            last = self.mesh.size - 1
            raise traitlets.TraitError(f"rank is {proposal['value']}; {self.mesh} has 0 to {last}, and -1 is none")
        return proposal["value"]

    def picture(self) -> bytes:
        about, badge = self.content["about"], self.content["badge"]
        return still(self.content["title"], self.sentence, self.scenes, self.rank, about=about, badge=badge, gap=40)


def content(mesh: Mesh, of: Tensor | Product) -> dict[str, Any]:
    """Everything that is shown. `says` has a text for each rank, then one for each piece of a tensor."""
    one = isinstance(of, Tensor)
    drawings = picture.one(of, mesh) if one else picture.multiplied(of, mesh)
    about = f"{of.spec} on {mesh}" if one else f"{of.x.name} {of.x.spec}, {of.w.name} {of.w.spec} on {mesh}"
    says = [(f"rank {rank}", _of_rank(mesh, of, drawings, rank)) for rank in mesh.ranks]
    return {
        "title": f"{of.name} {list(of.shape)}" if one else f"{of.x.name} @ {of.w.name} = {of.y.name}",
        "about": about,
        "badge": counted(mesh.size, "rank"),
        "drawings": drawings,
        "sentence": picture.held(of, mesh) + "." if one else _verdict(mesh, of),
        "says": says + [_of_piece(drawing, piece) for drawing in drawings for piece in drawing.pieces],
    }


def _of_piece(drawing: picture.Drawing, piece: picture.Tile) -> tuple[str, str]:
    who = f"rank{'s' * (len(piece.ranks) > 1)} {picture.ranks_text(piece.ranks)}"
    does = f"is the sum of what {who} compute" if drawing.summed else f"is held by {who}"
    return f"{drawing.name.split(' ')[0]}{piece.index}", does


def _verdict(mesh: Mesh, of: Product) -> str:
    """The cost of the product, and the communication that it needs."""
    rows, inner, columns = of.multiplied
    whole = 2 * of.x.shape[0] * of.x.shape[1] * of.w.shape[1]
    text = (
        f"Each rank multiplies [{rows}, {inner}] by [{inner}, {columns}]: {count_text(of.flops)} of "
        f"{count_text(whole)} FLOPs; {of.y.name} {list(of.y.shape)} comes out as {of.y.spec}"
    )
    if not of.summed:
        return text + ", complete: nothing is sent."
    size = mesh.axis_size(of.summed)
    sent = 2 * (size - 1) * rows * columns / size
    return (
        f"{text}, each piece as {size} parts of a sum: it needs an all_reduce over {','.join(of.summed)} "
        f"(a ring sends 2 × {size - 1}/{size} × {rows * columns} = {count_text(sent)} elements from each rank)."
    )


def _of_rank(mesh: Mesh, of: Tensor | Product, drawings: Sequence[picture.Drawing], rank: int) -> str:
    own = [next(piece for piece in d.pieces if rank in piece.ranks) for d in drawings]
    if isinstance(of, Tensor):
        others = [other for other in own[0].ranks if other != rank]
        shared = f", and so do {picture.ranks_text(others)}" if others else ", and no other rank does"
        return f"holds {of.name}{own[0].index}{shared}"
    multiplies = f"multiplies {of.x.name}{own[0].index} by {of.w.name}{own[1].index}"
    if of.x.axes(1) != of.w.axes(0):  # one of the two is unsharded: only the matching part of it is used
        whole = of.x if not of.x.axes(1) else of.w
        multiplies += f" (of {whole.name} only what meets the other's piece)"
    result = f"{of.y.name}{own[2].index}"
    if not of.summed:
        return f"{multiplies}: {result}"
    summed = picture.ranks_text(mesh.group(rank, of.summed))
    return f"{multiplies}: its part of {result}, which is the sum over ranks {summed}"


def shards(
    mesh: Mesh, shape: Sequence[int] | None = None, spec: P | None = None, *, name: str = "x", **tensors: Any
) -> Shards:
    """Show which rank holds which slice of a tensor.

        shards(Mesh(dp=2, tp=4), (8, 12), P(None, "tp"), name="w")

    Given two matrices by name, each as (shape, P), show their product instead: how the result is sharded, what each
    rank computes, and whether the result needs an all_reduce.

        shards(mesh, x=((8, 16), P("dp", None)), w=((16, 12), P(None, "tp")))

    Raises SpecError or ShapeError if a `P` does not fit or the pieces cannot be multiplied where they are, and
    MeshError if there are more ranks than can be drawn.
    """
    check_shown([mesh], Mesh)
    if mesh.size > MOST_RANKS:
        raise MeshError(
            f"shards draws at most {MOST_RANKS:,} ranks, and {mesh} has {mesh.size:,}; a smaller mesh with the same "
            "axes shows the same pattern"
        )
    if shape is not None and not tensors:
        tensors = {name: (shape, P() if spec is None else spec)}
    elif shape is not None or spec is not None or len(tensors) not in (1, 2):
        raise SpecError(
            f"shards takes one tensor, shards(mesh, (8, 12), P(None, 'tp')), or two by name, shards(mesh, x=((8, 16), "
            f"P()), w=((16, 12), P(None, 'tp'))); there are {len(tensors) + (shape is not None)}"
        )
    found = []
    for key, given in tensors.items():
        if not (isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], P)):
            what = a(type(given)) if hasattr(given, "shape") else repr(given)
            raise SpecError(f"{key} is {what}; give its shape and its P, as {key}=((8, 16), P('dp', None))")
        asked = np.atleast_1d(numbers(f"the shape of {key}", given[0], least=0))
        sizes = tuple(int(size) for size in asked if size < np.inf)
        if list(sizes) != asked.tolist():
            raise ShapeError(f"the shape of {key} is {given[0]}; give whole numbers")
        check_spec(sizes, given[1], mesh)
        found.append(Tensor(key, sizes, given[1]))
    return Shards(mesh, found[0] if len(found) == 1 else product(found[0], found[1], mesh))
