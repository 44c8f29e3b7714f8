"""Which part of the reference's parameters a rank's tensors are."""

from __future__ import annotations

import numpy as np

from tplab.checking.observed import uneven
from tplab.checking.places import find_places
from tplab.checking.recording import Piece, Seen

STREAM = np.random.default_rng(0).standard_normal(64)
W1, W2 = STREAM[:32].reshape(8, 4), STREAM[32:].reshape(4, 8)


def seen(**weights: np.ndarray) -> Seen:
    return Seen(weights={name.replace("_", "."): Piece(np.ascontiguousarray(x)) for name, x in weights.items()})


def test_parts_are_found_by_their_values_and_constants_where_their_neighbours_are():
    ours = [seen(w=W1[half], b=np.zeros(4)) for half in (slice(4, 8), slice(0, 4))]
    places = find_places(ours, {"w": W1, "b": np.zeros(8)})
    assert places[0, "w"].index == (((4, 8),), ((0, 4),)) and places[1, "b"].index == (((0, 4),),)
    assert places[0, "b"].index == (((4, 8),),)
    assert np.array_equal(places[0, "w"].take(W1), W1[4:])


def test_zeros_of_an_uneven_cut_begin_where_their_neighbours_do():
    parts = [slice(0, 5), slice(5, 8)]
    places = find_places([seen(w=W1[part], b=np.zeros(8)[part]) for part in parts], {"w": W1, "b": np.zeros(8)})
    assert [places[rank, "b"].index for rank in (0, 1)] == [(((0, 5),),), (((5, 8),),)]


def test_a_part_of_any_shape_is_found_element_by_element():
    columns = W2[:, 2:4].reshape(-1)
    place = find_places([seen(w=columns)], {"w": W2.reshape(-1)})[0, "w"]
    assert place.fits and np.array_equal(place.take(W2.reshape(-1)), columns)


def test_from_one_seed_a_shard_is_a_part_of_another_parameter_by_chance():
    """Rank 0 draws half of each weight from the reference's seed: its second weight is the second half of the first."""
    own = np.random.default_rng(1).standard_normal(32)
    ours = [seen(w1=STREAM[:16].reshape(4, 4), w2=STREAM[16:32].reshape(4, 4)),
            seen(w1=own[:16].reshape(4, 4), w2=own[16:].reshape(4, 4))]  # fmt: skip
    places = find_places(ours, {"w1": W1, "w2": W2})
    assert {key: place.name for key, place in places.items()} == {(r, w): w for r in (0, 1) for w in ("w1", "w2")}
    assert places[1, "w1"].index == (((4, 8),), ((0, 4),)) and not places[1, "w1"].fits
    assert len({places[rank, "w2"].index for rank in (0, 1)}) == 2


def test_a_stages_layers_may_be_numbered_anew():
    weights = {"layers.0.w": W1, "layers.0.n": np.ones(4), "layers.1.w": W1[::-1].copy(), "layers.1.n": np.ones(4)}
    places = find_places([seen(layers_0_w=W1[::-1], layers_0_n=np.ones(4))], weights)
    assert {name: place.name for (_, name), place in places.items()} == {
        "layers.0.w": "layers.1.w", "layers.0.n": "layers.1.n",
    }  # fmt: skip


def test_a_stages_name_may_be_that_of_another_parameter_of_another_shape():
    weights = {"0.w": W1, "2.w": W2, "4.w": STREAM[:12].reshape(4, 3) ** 2}
    places = find_places([seen(**{"0_w": W2, "2_w": weights["4.w"]})], weights)
    assert {name: (place.name, place.fits) for (_, name), place in places.items()} == {
        "0.w": ("2.w", True), "2.w": ("4.w", True),
    }  # fmt: skip


def test_an_optimizers_own_parameter_has_a_place_if_it_is_whole():
    weights = {"w": W1, "parameter 1": np.zeros(1), "parameter 2": np.zeros(8)}
    (mine,) = ours = [seen(w=W1, **{"parameter 1": np.zeros(1), "parameter 2": np.zeros(4)})]
    assert [name for _, name in find_places(ours, weights)] == ["w", "parameter 1"]
    assert "parameter 2" in mine.weights  # each rank's own flat part


def test_equal_values_are_no_place_of_a_part_whose_offset_is_known():
    whole = np.concatenate([np.zeros((1, 4)), W1[1:]])
    part = whole[4:] * np.array([[0], [1], [1], [1]])
    for piece in (Piece(part, shape=(8, 4), start=(4, 0)), Piece(part)):
        place = find_places([Seen(weights={"w": piece})], {"w": whole})[0, "w"]
        assert not place.fits and place.elements is None
    assert place.index[1] == ((0, 4),)


def test_a_part_of_a_trail_that_has_another_number_of_dims_is_no_piece():
    assert list(uneven(np.zeros((8, 4)), [(3, 4), (5,)])) == []
    (parts,) = uneven(np.zeros((8, 4)), [(3, 4), (5, 4)])
    assert [part.shape for part in parts.values()] == [(3, 4), (5, 4)]
