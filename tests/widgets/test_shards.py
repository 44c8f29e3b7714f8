"""`shards`: what it draws and says is what the sharding does; a product's result is what the ranks really compute."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
import traitlets
from PIL import Image

from tplab import Mesh, P
from tplab.errors import MeshError, ShapeError, SpecError
from tplab.sharding import join, shard_slices, split
from tplab.widgets import shards
from tplab.widgets.paper.palette import PAPER
from tplab.widgets.paper.scene import Scene
from tplab.widgets.tensors.picture import drawing, index_text, ranks_text
from tplab.widgets.tensors.product import Tensor, product

MESHES = [Mesh(tp=1), Mesh(tp=2), Mesh(tp=3), Mesh(dp=2, tp=2), Mesh(dp=2, tp=3), Mesh(a=2, b=2, c=2)]
SHAPE_X, SHAPE_W = (12, 24), (24, 36)


def specs(mesh: Mesh) -> list[P]:
    """Every P of a matrix with one axis or none a dim, and one with two on a dim."""
    entries = [None, *mesh.axis_names]
    found = [P(a, b) for a in entries for b in entries if a is None or a != b]
    names = mesh.axis_names
    return found + ([P(names[:2], None), P(None, names[:2])] if len(names) > 1 else [])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_product_is_what_the_ranks_compute_and_what_is_refused_cannot_be_computed(mesh: Mesh):
    rng = np.random.default_rng(0)
    x, w = rng.integers(-5, 5, SHAPE_X), rng.integers(-5, 5, SHAPE_W)
    num_refused = 0
    for x_spec, w_spec in itertools.product(specs(mesh), specs(mesh)):
        tensor_x, tensor_w = Tensor("x", SHAPE_X, x_spec), Tensor("w", SHAPE_W, w_spec)
        try:
            found = product(tensor_x, tensor_w, mesh)
        except SpecError:
            num_refused += 1
            assert not computable(tensor_x, tensor_w, mesh)
            continue
        assert computable(tensor_x, tensor_w, mesh)
        parts = []
        for rank in mesh.ranks:
            rows, of_x = shard_slices(SHAPE_X, x_spec, mesh, rank)
            of_w, columns = shard_slices(SHAPE_W, w_spec, mesh, rank)
            inner = slice(max(of_x.start, of_w.start), min(of_x.stop, of_w.stop))
            part = x[rows, inner] @ w[inner, columns]
            assert found.multiplied == (part.shape[0], inner.stop - inner.start, part.shape[1])
            parts.append(part)
        if found.summed:
            parts = [sum(parts[other] for other in mesh.group(rank, found.summed)) for rank in mesh.ranks]
        for rank, own in enumerate(split(x @ w, found.y.spec, mesh)):
            assert np.array_equal(parts[rank], own)
        assert np.array_equal(join(parts, found.y.spec, mesh), x @ w)
    assert num_refused or mesh.size in (1, 2, 3) or len(mesh.shape) == 1


def computable(x: Tensor, w: Tensor, mesh: Mesh) -> bool:
    """Whether every term x[i, k] w[k, j] is there as often as every other, where each rank multiplies what meets."""
    times = np.zeros((SHAPE_X[0], SHAPE_X[1], SHAPE_W[1]), int)
    for rank in mesh.ranks:
        rows, of_x = shard_slices(x.shape, x.spec, mesh, rank)
        of_w, columns = shard_slices(w.shape, w.spec, mesh, rank)
        if x.axes(1) and w.axes(0) and (of_x.start, of_x.stop) != (of_w.start, of_w.stop):
            return False
        inner = slice(max(of_x.start, of_w.start), min(of_x.stop, of_w.stop))
        times[rows, inner, columns] += 1
    return times.min() > 0 and times.min() == times.max()


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (((8, 16), P(None, "tp")), ((12, 8), P()), "x has 16 columns and w 12 rows"),
        (((8, 16), P("tp", None)), ((16, 8), P(None, "tp")), "block on the diagonal.*gather x or w over 'tp' first"),
        (((8, 16), P("tp", None)), ((16, 8), P("tp", None)), "computed by no rank; gather w over 'tp' first"),
        (((8, 16), P(None, "tp")), ((16, 8), P(None, "tp")), "computed by no rank; gather x over 'tp' first"),
        (((8, 16), P(None, "dp")), ((16, 8), P("tp", None)), "do not belong together; split both alike"),
        (((8, 16, 2), P()), ((16, 8), P()), "x has 3 dims"),
        (((8, 16), P("pp")), ((16, 8), P()), "names axis 'pp'"),
        (((8, 10), P(None, "tp")), ((10, 8), P()), "cannot share equally"),
        ((8, 16), ((16, 8), P()), "give its shape and its P"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(x, w, message: str):
    with pytest.raises((ShapeError, SpecError), match=message):
        shards(Mesh(dp=2, tp=4), x=x, w=w)


def test_more_ranks_than_can_be_drawn_are_refused_at_once():
    with pytest.raises(MeshError, match="at most 1,024 ranks, and Mesh\\(tp=1048576\\) has 1,048,576"):
        shards(Mesh(tp=2**20), (2**20,), P("tp"))


def test_the_coordinates_beside_the_ranks_have_room():
    ranks = shards(Mesh(a=2, b=2, c=2, d=2), (16, 16), P(("a", "b"), ("c", "d"))).scenes[1]
    first = min(part.place[0] for part in ranks.parts if part.method == "box")
    beside = [part for part in ranks.parts if part.text.startswith("a ")]
    assert len(beside) == 8 and beside[0].text == "a 0 b 0 c 0"
    assert all(ranks.width_of(part.text, 10.5) <= part.place[0] <= first - 4 for part in beside)


def test_one_two_or_no_tensors():
    mesh = Mesh(tp=2)
    for call in (
        lambda: shards(mesh),
        lambda: shards(mesh, (4, 4), P(), w=((4, 4), P())),
        lambda: shards(mesh, a=((4, 4), P()), b=((4, 4), P()), c=((4, 4), P())),
    ):
        with pytest.raises(SpecError, match="shards takes one tensor"):
            call()
    assert shards(mesh, (4, 4)).sentence == "every rank holds all of x [4, 4]: 2 copies."
    assert shards(mesh, h=((4, 4), P("tp"))).sentence == (
        "h [4, 4] is split over tp (dim 0): each rank holds [2, 4], 1/2 of it."
    )


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 12), P(None, "tp")),
        ((8, 12), P("dp", "tp")),
        ((8, 12), P(("dp", "tp"))),
        ((16,), P("tp")),
        ((16,), P()),
        ((4, 6, 8), P("dp", None, "tp")),
        ((2, 3, 4, 4), P(None, None, "dp", "tp")),
        ((4, 4, 6), P("pp", "tp", "dp")),
        ((), P()),
    ],
)
def test_the_pieces_cover_the_tensor_once_and_name_who_holds_them(shape: tuple[int, ...], spec: P):
    mesh = Mesh(dp=2, tp=4, pp=2)
    drawn = drawing(Tensor("t", shape, spec), mesh, 0, 0, (240.0, 120.0))
    area = sum(piece.width * piece.height for piece in drawn.pieces)
    assert area == pytest.approx(240 * 120)
    for a, b in itertools.combinations(drawn.pieces, 2):
        apart_x = a.x + a.width <= b.x + 1e-9 or b.x + b.width <= a.x + 1e-9
        apart_y = a.y + a.height <= b.y + 1e-9 or b.y + b.height <= a.y + 1e-9
        assert apart_x or apart_y
    for piece in drawn.pieces:
        for rank in piece.ranks:
            assert index_text(shape, shard_slices(shape, spec, mesh, rank)) == piece.index
    assert sorted(rank for piece in drawn.pieces for rank in piece.ranks) == list(mesh.ranks)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "3"),
        ((0, 4), "0, 4"),
        ((0, 1, 2, 3), "0–3"),
        ((0, 2, 4, 6), "0, 2, 4, 6"),
        (range(0, 64, 8), "0, 8, … 56"),
    ],
)
def test_ranks_in_a_few_letters(ranks, text: str):
    assert ranks_text(list(ranks)) == text


def test_what_a_product_says():
    mesh = Mesh(dp=2, tp=4)
    column = shards(mesh, x=((8, 16), P("dp")), a=((16, 12), P(None, "tp")))
    assert column.sentence == (
        "Each rank multiplies [4, 16] by [16, 3]: 384 of 3,072 FLOPs; y [8, 12] comes out as P('dp', 'tp'), complete: "
        "nothing is sent."
    )
    row = shards(mesh, x=((8, 16), P("dp", "tp")), b=((16, 12), P("tp")))
    assert row.sentence == (
        "Each rank multiplies [4, 4] by [4, 12]: 384 of 3,072 FLOPs; y [8, 12] comes out as P('dp', None), each piece "
        "as 4 parts of a sum: it needs an all_reduce over tp (a ring sends 2 × 3/4 × 48 = 72 elements from each rank)."
    )
    assert row.content["says"][5][1] == (
        "multiplies x[4:8, 4:8] by b[4:8, :]: its part of y[4:8, :], which is the sum over ranks 4–7"
    )
    whole = shards(Mesh(tp=2), x=((8, 16), P()), b=((16, 12), P("tp")))
    assert "(of x only what meets the other's piece)" in whole.content["says"][1][1]
    assert repr(row) == row.sentence


def test_the_rank_that_is_pointed_out_can_be_read_and_set():
    widget = shards(Mesh(tp=4), (8, 8), P("tp"))
    assert widget.rank == -1
    widget.rank = 3
    with pytest.raises(traitlets.TraitError, match="has 0 to 3"):
        widget.rank = 4
    assert widget.rank == 3


@pytest.mark.parametrize("mesh", [Mesh(tp=1), Mesh(tp=4), Mesh(dp=2, tp=4), Mesh(dp=8, tp=8)], ids=str)
def test_a_picture_without_a_kernel(mesh: Mesh):
    axis = mesh.axis_names[-1]
    for widget in (
        shards(mesh, (64, 64), P(axis), name="w"),
        shards(mesh, x=((64, 64), P(None, axis)), w=((64, 64), P(axis))),
    ):
        data, _ = widget._repr_mimebundle_()
        assert data["text/plain"] == widget.sentence
        picture = Image.open(io.BytesIO(widget.picture()))
        assert len(widget.picture()) < 300_000
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 10
        sent = sum(len(value) for value in widget.get_state().values() if isinstance(value, str | bytes))
        assert sent < 40_000


def test_the_small_copies_show_each_rank_s_own_piece():
    mesh = Mesh(dp=2, tp=4)
    tensor = Tensor("w", (8, 12), P("dp", "tp"))
    boxes = [part for part in shards(mesh, tensor.shape, tensor.spec).scenes[1].parts if part.method == "box"]
    copies = [place for place, box in enumerate(boxes) if dict(box.look).get("fill") == PAPER]
    assert len(copies) == 8
    for rank, place in enumerate(copies):
        (x, y, width, height), (own_x, own_y, own_width, own_height) = (boxes[at].place for at in (place, place + 1))
        rows, columns = shard_slices(tensor.shape, tensor.spec, mesh, rank)
        assert (own_x - x) / width == pytest.approx(columns.start / 12, abs=0.01)
        assert (own_y - y) / height == pytest.approx(rows.start / 8, abs=0.01)
        assert own_width / width == pytest.approx(1 / 4, abs=0.01)
        assert own_height / height == pytest.approx(1 / 2, abs=0.01)


def test_to_point_at_a_rank_or_a_piece_shows_it_in_both_pictures():
    """Of each position, the pieces whose outline is strong, and the ranks whose outline is blue."""
    mesh = Mesh(dp=2, tp=4)
    card = shards(mesh, x=((8, 16), P("dp")), w=((16, 12), P(None, "tp")))
    pieces = [piece for drawing in card.content["drawings"] for piece in drawing.pieces]
    for position in range(-1, mesh.size + len(pieces)):
        is_rank = 0 <= position < mesh.size
        own = set() if position < 0 else {position} if is_rank else set(pieces[position - mesh.size].ranks)
        strong, blue = (strong_outlines(scene, position) for scene in card.scenes)
        if is_rank:
            assert {mesh.size + at for at, piece in enumerate(pieces) if position in piece.ranks} == strong
        else:
            assert strong == ({position} if position >= 0 else set())
        assert blue == own
        assert len(card.content["says"]) == mesh.size + len(pieces)


def strong_outlines(scene: Scene, position: int) -> set[int]:
    """The keys of what has an outline of 1.8 pixels or more: those of the marks at the same places."""
    there = [part for part in scene.parts if part.method == "box" and part.when.begin < position <= part.when.end]
    marks = scene.marks
    at = {part.place: marks[part.mark].key for part in there if part.mark >= 0}
    return {at[part.place] for part in there if dict(part.look).get("line", 0) >= 1.8}
