"""Dropout: which ranks draw the same mask, what flows back, and that a mask can be drawn again."""

import itertools

import numpy as np
import pytest

from tests.frameworks import FRAMEWORKS, Framework
from tplab import Mesh, P

MESH = Mesh(dp=2, tp=3)


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def drops(fw, axes, p=0.5, shape=(40, 30), seed=0, mesh=MESH):
    """What each rank makes of ones, once for each of `axes`, and the gradient of each."""

    def program(x):
        results = []
        for number, axis in enumerate(axes):
            if fw.name == "torch":
                x = x.detach().requires_grad_()
                y = fw.lab.dropout(x, p, axis=axis)
                y.sum().backward()
                results.append((y.detach(), x.grad))
            else:
                import jax

                key = jax.random.fold_in(jax.random.key(seed), number)
                dropped = lambda x, key=key, axis=axis: fw.lab.dropout(x, p, key=key, axis=axis)  # noqa: E731
                y, back = jax.vjp(dropped, fw.lab.copy_to(x, mesh.axis_names))
                results.append((y, back(y / y.max())[0]))
        return results

    results = fw.lab.run(program, mesh, fw.array(np.ones(shape, np.float32)), seed=seed).per_rank
    return [[tuple(map(fw.numpy, pair)) for pair in rank] for rank in results]


@pytest.mark.parametrize(
    "axis, same_along", [(None, ("dp", "tp")), ("tp", ("dp",)), ("dp", ("tp",)), (("dp", "tp"), ())]
)
def test_masks_differ_along_the_axis_and_agree_along_the_others(fw, axis, same_along):
    masks = [rank[0][0] for rank in drops(fw, [axis])]
    for a, b in itertools.combinations(MESH.ranks, 2):
        differ = [n for n in MESH.axis_names if MESH.coordinates(a)[n] != MESH.coordinates(b)[n]]
        if set(differ) <= set(same_along):
            np.testing.assert_array_equal(masks[a], masks[b])
        else:  # two masks of a half agree on a half: 600 of 1200, with a deviation of 17
            assert 500 < (masks[a] == masks[b]).sum() < 700


def test_one_draw_after_the_other_differs_and_one_run_after_the_other_does_not(fw):
    first, second = drops(fw, [None, None])[0]
    assert 500 < (first[0] == second[0]).sum() < 700
    for axis in (None, "tp"):
        for again, before in zip(drops(fw, [axis]), drops(fw, [axis]), strict=True):
            np.testing.assert_array_equal(again[0][0], before[0][0])
    other = drops(fw, [None], seed=1)[0][0][0]
    assert 500 < (first[0] == other).sum() < 700


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_p_says_and_the_rest_make_up_for_it(fw, p):
    ((y, _),) = drops(fw, [None], p, (200, 100), mesh=Mesh(tp=2))[0]
    share = (y == 0).mean()
    assert abs(share - p) < 5 * (p * (1 - p) / y.size) ** 0.5  # five deviations
    np.testing.assert_allclose(y[y != 0], 1 / (1 - p), rtol=1e-6)


def test_the_gradient_has_the_same_mask(fw):
    for rank in drops(fw, [None, "tp"]):
        for y, dx in rank:
            np.testing.assert_array_equal(dx, y)


def test_nothing_dropped(fw):
    assert all((y == 1).all() for rank in drops(fw, [None], p=0.0) for y, _ in rank)


def test_the_mask_outside_of_the_regions_keeps_copies_the_same(fw):
    """A mask of each rank's own after a row-parallel layer makes copies differ: a known mistake. Here run sees none."""

    def program(x):
        if fw.name == "torch":
            return fw.lab.dropout(fw.lab.reduce_from(x, "tp"), 0.5)
        import jax

        return fw.lab.dropout(fw.lab.reduce_from(x, "tp"), 0.5, key=jax.random.key(0))

    out = fw.lab.run(program, Mesh(tp=4), fw.array(np.ones((8, 8), np.float32)), out_specs=P())
    assert set(np.unique(fw.numpy(out.value))) == {0, 8}
    assert [event.op for event in out.trace.select(kind="collective", rank=0).events] == ["all_reduce"]


def test_torch_draws_a_mask_again_where_a_checkpoint_computes_again():
    import torch
    from torch.utils.checkpoint import checkpoint

    from tplab.torch import axis_index, dropout, run

    def program():
        torch.rand(axis_index("tp"))  # each rank's own generator is somewhere else
        x = torch.ones(40, 30, requires_grad=True)
        seen = []

        def block(x):
            y = dropout(dropout(x * 2, 0.5), 0.5, axis="tp")
            seen.append(y.detach())
            return y.square()

        between = checkpoint(block, x, use_reentrant=False)
        after = dropout(x, 0.5).detach()
        between.sum().backward()
        return seen, after, dropout(torch.ones(40, 30), 0.5)

    masks = run(program, Mesh(tp=2)).per_rank
    for seen, after, later in masks:
        assert len(seen) == 2
        assert torch.equal(*seen)
        assert not torch.equal(after, later)
    assert torch.equal(masks[0][1], masks[1][1])
    assert torch.equal(masks[0][2], masks[1][2])  # and the ranks still agree afterwards
    assert not torch.equal(masks[0][0][0], masks[1][0][0])


def test_a_rank_that_reseeds_its_generator_still_draws_the_same_mask():
    """Before each draw; so the state is one that it has had before, where the other rank's is new."""
    import torch

    from tplab.torch import axis_index, dropout, run

    def program():
        masks = []
        for _ in range(3):
            if axis_index("tp") == 1:
                torch.manual_seed(7)
            masks.append(dropout(torch.ones(50), 0.5))
        return masks

    zero, one = run(program, Mesh(tp=2)).per_rank
    assert all(map(torch.equal, zero, one))
    assert not torch.equal(zero[0], zero[1])
    assert not torch.equal(zero[1], zero[2])


@pytest.mark.parametrize("reseeding_ranks", [(1,), (0, 1)])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_are_checkpointed_at_the_same_state_get_each_its_own_mask_again(reseeding_ranks, use_reentrant):
    import torch
    from torch.utils.checkpoint import checkpoint

    from tplab.torch import axis_index, dropout, run

    def program():
        y = torch.ones(50, requires_grad=True)
        seen = []

        def layer(number, x):
            mask = dropout(torch.ones(50), 0.5)
            seen.append((number, mask))
            return x * mask

        for number in range(3):
            if axis_index("tp") in reseeding_ranks:
                torch.manual_seed(7)
            y = checkpoint(layer, number, y, use_reentrant=use_reentrant)
        for _ in range(2):
            y.sum().backward(retain_graph=True)
        return seen

    zero, one = run(program, Mesh(tp=2)).per_rank
    assert [number for number, _ in zero] == [number for number, _ in one] == [0, 1, 2, 2, 1, 0, 2, 1, 0]
    for seen in (zero, one):
        assert all(torch.equal(mask, zero[number][1]) for number, mask in seen)
    assert not torch.equal(zero[0][1], zero[1][1])


@pytest.mark.parametrize("p", [-0.1, 1, 2])
def test_what_is_wrong_is_said(fw, p):
    with pytest.raises((ValueError, RuntimeError), match=f"p is {p}; it is the share that is dropped"):
        drops(fw, [None], p)
    with pytest.raises(ValueError, match="no axis 'pp'"):
        drops(fw, ["pp"])


def test_jax_refuses_a_key_of_each_rank_s_own():
    lab = FRAMEWORKS["jax"]().lab
    with pytest.raises(ValueError, match="dropout's key differs along 'tp' already"):
        lab.run(lambda x: lab.dropout(x, 0.5, key=lab.rank_key()), Mesh(tp=2), np.ones(3, np.float32))
