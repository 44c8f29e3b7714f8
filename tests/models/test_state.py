"""States split for a mesh and joined again, bit for bit; written, and read for another mesh, in both frameworks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.frameworks import FRAMEWORKS, Framework
from tests.sharded import flat, nested, numbers
from tplab import Mesh, P
from tplab.errors import ShapeError, SpecError
from tplab.models.gpt import GPTConfig, gpt_parameters, gpt_specs

CONFIG = GPTConfig(11, 16, 2, 8, 6, activation="swiglu")
SPECS = gpt_specs(CONFIG)
MESHES = [Mesh(tp=1), Mesh(tp=2), Mesh(tp=4), Mesh(tp=8), Mesh(dp=2, tp=4)]


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def formed(fw, named):
    """Flat in torch, nested in JAX."""
    return named if fw.name == "torch" else nested(named)


def whole_state(fw):
    named = {n: numbers(*p.shape, seed=i).astype(np.float32) for i, (n, p) in enumerate(gpt_parameters(CONFIG).items())}
    named["norm.weight"][:4] = [np.nan, np.inf, -0.0, 1e-45]  # bits are kept of these too
    return formed(fw, {name: fw.array(value) for name, value in named.items()})


def bits(fw, state):
    return {name: (fw.numpy(x).shape, fw.numpy(x).tobytes()) for name, x in flat(state).items()}


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_there_and_back_bit_for_bit(fw, mesh):
    """The vocabulary of 11 is one that no number of ranks here divides."""
    state, specs = whole_state(fw), formed(fw, SPECS)
    states = fw.lab.split_state(state, specs, mesh)
    assert len(states) == mesh.size
    assert bits(fw, fw.lab.merge_state(states, specs, mesh)) == bits(fw, state)
    words = [fw.numpy(flat(s)["embedding.weight"]).shape[0] for s in states[: mesh.axis_size("tp")]]
    assert words == {1: [11], 2: [6, 5], 4: [3, 3, 3, 2], 8: [2, 2, 2, 2, 2, 1, 0, 0]}[mesh.axis_size("tp")]
    for rank in mesh.ranks:  # each rank holds what another one with its place on tp does
        assert bits(fw, states[rank]) == bits(fw, states[mesh.index(rank, "tp")])


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    entries=st.permutations([None, "a", "b", ("a", "b"), ("b", "a")]),
    mesh=st.sampled_from([Mesh(a=1, b=3), Mesh(a=2, b=2), Mesh(a=3, b=2)]),
)
def test_any_spec(sizes, entries, mesh):
    spec, named = [], set()
    for entry in entries[: len(sizes)]:
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        spec.append(None if named & set(names) else entry)
        named |= set(names)
    whole = np.arange(np.prod(sizes)).reshape(sizes).astype(np.float32)
    for make in FRAMEWORKS.values():
        fw = make()
        states = fw.lab.split_state({"w": fw.array(whole)}, {"w": P(*spec)}, mesh)
        assert {str(state["w"].dtype).removeprefix("torch.") for state in states} == {"float32"}
        np.testing.assert_array_equal(fw.numpy(fw.lab.merge_state(states, {"w": P(*spec)}, mesh)["w"]), whole)


def test_the_model_takes_its_piece_and_gives_it_back(fw):
    """What a rank holds is what split_state gives it, and what run returns can be merged."""
    state, specs, mesh = whole_state(fw), formed(fw, SPECS), Mesh(tp=2)
    states = fw.lab.split_state(state, specs, mesh)

    def program():
        model = fw.lab.GPT(CONFIG)
        if fw.name == "torch":
            model.load_state_dict(states[fw.lab.axis_index("tp")])
            return dict(model.state_dict())
        import jax

        return model.init(jax.random.key(0))

    ranks = fw.lab.run(program, mesh).per_rank
    if fw.name == "torch":
        assert bits(fw, fw.lab.merge_state(ranks, specs, mesh)) == bits(fw, state)
    else:  # padded with rows of zeros, as compiled programs hold it
        merged = flat(fw.lab.merge_state(ranks, specs, mesh))
        assert merged["embedding.weight"].shape == (12, 16)
        assert not fw.numpy(merged["embedding.weight"])[11:].any()
        assert {n: x.shape for n, x in merged.items() if n != "embedding.weight"} == {
            n: p.shape for n, p in gpt_parameters(CONFIG).items() if n != "embedding.weight"
        }


def test_saved_whole(fw, tmp_path):
    state = whole_state(fw)
    fw.lab.save_state(state, tmp_path / "model.safetensors")
    assert bits(fw, fw.lab.load_state(tmp_path / "model.safetensors")) == bits(fw, state)


def test_saved_by_four_ranks_and_read_by_two_and_back(fw, tmp_path):
    state, specs = whole_state(fw), formed(fw, SPECS)
    four, two = Mesh(tp=4), Mesh(tp=2)
    fw.lab.save_shards(fw.lab.split_state(state, specs, four), four, tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [f"rank-{r}-of-4.safetensors" for r in range(4)]
    on_two = fw.lab.load_shards(tmp_path / "a", specs, four, two)
    for got, want in zip(on_two, fw.lab.split_state(state, specs, two), strict=True):
        assert bits(fw, got) == bits(fw, want)
    fw.lab.save_shards(on_two, two, tmp_path / "b")
    back = fw.lab.load_shards(tmp_path / "b", specs, two, four)
    for got, want in zip(back, fw.lab.split_state(state, specs, four), strict=True):
        assert bits(fw, got) == bits(fw, want)
    same = fw.lab.load_shards(tmp_path / "b", specs, two, two)
    assert bits(fw, fw.lab.merge_state(same, specs, two)) == bits(fw, state)


def test_each_framework_reads_what_the_other_has_written(tmp_path):
    torch, jax = (make() for make in FRAMEWORKS.values())
    for writer, reader in ((torch, jax), (jax, torch)):
        path = tmp_path / f"{writer.name}.safetensors"
        writer.lab.save_state(whole_state(writer), path)
        assert bits(reader, reader.lab.load_state(path)) == bits(writer, whole_state(writer))


def test_bfloat16_is_kept(fw, tmp_path):
    x = fw.array(numbers(6).astype(np.float32))
    x = x.bfloat16() if fw.name == "torch" else x.astype("bfloat16")
    for r, state in enumerate(fw.lab.split_state({"w": x}, {"w": P("tp")}, Mesh(tp=3))):
        fw.lab.save_state(state, tmp_path / f"{r}")
        back = fw.lab.load_state(tmp_path / f"{r}")["w"]
        assert str(back.dtype).endswith("bfloat16")
        np.testing.assert_array_equal(fw.numpy(back), fw.numpy(x)[2 * r : 2 * r + 2])


def test_torch_pieces_have_memory_of_their_own():
    import torch

    from tplab.torch import split_state

    whole = torch.zeros(4)
    for state in split_state({"w": whole, "b": whole}, {"w": P("tp"), "b": P()}, Mesh(tp=2)):
        state["w"].fill_(1)
        state["b"].fill_(1)
    assert not whole.any()


def test_tied_weights_are_saved_under_both_names(fw, tmp_path):
    whole = numbers(4, 3).astype(np.float32)
    embedding = fw.array(whole)
    tied = {"embedding": embedding, "half": embedding[2:], "turned": embedding.T, "head": embedding}
    fw.lab.save_state(tied, tmp_path / "tied")
    loaded = fw.lab.load_state(tmp_path / "tied")
    want = {"embedding": whole, "half": whole[2:], "turned": whole.T, "head": whole}
    assert loaded.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_array_equal(fw.numpy(loaded[name]), x)


def test_pieces_that_cannot_be_joined_and_values_that_are_no_arrays(fw, tmp_path):
    lab, mesh, specs = fw.lab, Mesh(tp=2), {"w": P("tp")}
    a, b, c = (fw.array(np.ones(shape, np.float32)) for shape in ((4, 2), (4,), (3, 2)))
    with pytest.raises(ShapeError, match=r"w is .*float32 \(4, 2\) on rank 0 and .*float32 \(4,\) on rank 1; pieces"):
        lab.merge_state([{"w": a}, {"w": b}], specs, mesh)
    with pytest.raises(ShapeError, match=r"P\(None, 'tp'\) joins along dim 1 may differ in the size of this dim only"):
        lab.merge_state([{"w": a}, {"w": c}], {"w": P(None, "tp")}, mesh)
    with pytest.raises(ShapeError, match=r"on rank 0 and .*int32 \(4, 2\) on rank 1"):
        lab.merge_state([{"w": a}, {"w": fw.array(np.ones((4, 2), np.int32))}], specs, mesh)
    with pytest.raises(SpecError, match=r"has 2 entries, and w of shape \(4,\) has 1 dims"):
        lab.merge_state([{"w": b}, {"w": b}], {"w": P(None, "tp")}, mesh)
    assert lab.merge_state([{"w": a}, {"w": c}], specs, mesh)["w"].shape == (7, 2)
    wrong = {"int": 3, "list": [a], "NoneType": None} | ({"dict": {"v": a}} if fw.name == "torch" else {})
    for kind, value in wrong.items():
        for call in (
            lambda: lab.save_state({"w": value}, tmp_path / "no"),  # noqa: B023
            lambda: lab.split_state({"w": value}, specs, mesh),  # noqa: B023
            lambda: lab.merge_state([{"w": a}, {"w": value}], specs, mesh),  # noqa: B023
        ):
            with pytest.raises(SpecError, match=f"the state has a {kind} under 'w'; a state holds arrays"):
                call()
    assert not (tmp_path / "no").exists()


def test_jax_names_are_those_of_one_array_each(tmp_path):
    import jax.numpy as jnp

    from tplab.jax import save_state, split_state

    x = jnp.ones(2)
    with pytest.raises(SpecError, match=r"two arrays named 'a\.b', one of them nested"):
        save_state({"a": {"b": x}, "a.b": x}, tmp_path / "no")
    with pytest.raises(SpecError, match="specs have a dict under 'a', where a state has none"):
        split_state({"a": x}, {"a": {"b": P()}}, Mesh(tp=2))
    with pytest.raises(SpecError, match="the state has a dict under 'a'"):
        split_state({"a": {"b": x}}, {"a": P()}, Mesh(tp=2))


def test_what_is_wrong_is_said(fw, tmp_path):
    lab, w = fw.lab, fw.array(np.ones((4, 2), np.float32))
    mesh, specs = Mesh(tp=2), {"w": P("tp")}
    with pytest.raises(SpecError, match=r"only in specs: w; only in the state: v"):
        lab.split_state({"v": w}, specs, mesh)
    with pytest.raises(SpecError, match=r"only in specs: w"):
        lab.merge_state([{"w": w}, {}], specs, mesh)
    with pytest.raises(ShapeError, match=r"Mesh\(tp=2\) has 2 ranks, but there are 1 states; give one per rank"):
        lab.merge_state([{"w": w}], specs, mesh)
    with pytest.raises(ShapeError, match=r"there are 3 states"):
        lab.save_shards([{"w": w}] * 3, mesh, tmp_path)
    with pytest.raises(SpecError, match=r"has 3 entries, and w of shape \(4, 2\) has 2 dims"):
        lab.split_state({"w": w}, {"w": P(None, None, "tp")}, mesh)
    with pytest.raises(ValueError, match="no axis 'pp'"):
        lab.split_state({"w": w}, {"w": P("pp")}, mesh)
    lab.save_shards([{"w": w}] * 2, mesh, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no files of 4 ranks \(rank-0-of-4.* but rank-0-of-2"):
        lab.load_shards(tmp_path, specs, Mesh(tp=4), mesh)
