"""What replicas must do together beside gradients: the loss's denominator, batch statistics, and random numbers."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.frameworks import FRAMEWORKS, Framework, in_both
from tests.sharded import close, double, numbers
from tplab import Mesh, P


@pytest.fixture
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


# --- loss normalisation -----------------------------------------------------------------------------------------------

WORDS, WIDTH = 7, 5


def masked(num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """x [B, D] and targets [B], of which each rank counts another number; the last of several counts none."""
    random = np.random.default_rng(num_ranks)
    targets = random.integers(0, WORDS, (num_ranks, 6))
    for rank in range(num_ranks):
        targets[rank, : 6 if rank == num_ranks - 1 > 0 else rank] = -100
    return random.normal(size=(num_ranks * 6, WIDTH)), targets.reshape(-1)


def summed_loss(fw: Framework, w, x, targets):
    if fw.name == "torch":
        return F.cross_entropy(x @ w, targets, reduction="sum")
    import jax
    import jax.numpy as jnp

    losses = -jnp.take_along_axis(jax.nn.log_softmax(x @ w), jnp.maximum(targets, 0)[:, None], -1)[:, 0]
    return jnp.where(targets == -100, 0, losses).sum()


@pytest.mark.parametrize("fw, num_ranks", in_both([(1,), (2,), (3,), (8,)], [(3,)]), indirect=["fw"])
def test_the_mean_over_ranks_is_the_mean_over_tokens(fw, num_ranks):
    w, (x, targets) = numbers(WIDTH, WORDS), masked(num_ranks)

    def program(w, x, targets):
        value = lambda w: summed_loss(fw, w, x, targets) / fw.lab.tokens_per_rank(targets, "dp")  # noqa: E731
        own = fw.lab.copy_to(w, "dp")  # each rank's own, for JAX's types
        (grad,) = fw.gradients(value, own)
        mean = lambda x: fw.lab.all_reduce(x, "dp", "mean")  # noqa: E731
        return mean(value(own)), mean(grad), fw.lab.share_of_tokens(targets, "dp")

    with double(fw):
        args = fw.array(w), fw.array(x), fw.array(targets)
        per_rank = fw.lab.run(program, Mesh(dp=num_ranks), *args, in_specs=(P(), P("dp"), P("dp"))).per_rank
        per_rank = [tuple(fw.numpy(value) for value in values) for values in per_rank]
    whole = torch.tensor(w, requires_grad=True)
    want = F.cross_entropy(torch.tensor(x) @ whole, torch.tensor(targets))
    (want_grad,) = torch.autograd.grad(want, whole)
    counts = (targets.reshape(num_ranks, 6) != -100).sum(1)
    for rank, (loss, grad, share) in enumerate(per_rank):
        close(loss, want.detach().numpy(), "loss")
        close(grad, want_grad.numpy(), "gradient")
        assert share == pytest.approx(counts[rank] / counts.mean(), rel=1e-15)


@pytest.mark.parametrize("fw", FRAMEWORKS, indirect=True)
def test_targets_may_be_bytes(fw):
    """As a byte, -100 is 156."""
    targets = fw.array(np.array([156, 3, 156, 156], np.uint8))
    out = fw.lab.run(lambda t: fw.lab.tokens_per_rank(t, "dp"), Mesh(dp=2), targets, in_specs=P("dp"))
    assert [float(tokens) for tokens in out.per_rank] == [2, 2]


@pytest.mark.parametrize("fw", FRAMEWORKS, indirect=True)
def test_no_token_at_all_gives_zero(fw):
    targets = fw.array(np.full((4, 3), -100))
    out = fw.lab.run(lambda t: fw.lab.share_of_tokens(t, "dp"), Mesh(dp=2), targets, in_specs=P("dp"))
    assert [float(share) for share in out.per_rank] == [0, 0]


# --- batch statistics -------------------------------------------------------------------------------------------------

FEATURES = 4
EPS = 1e-3
"""Larger than the default, so that a missing eps is seen."""


def in_whole(x, w, b, c):
    """y, dx, dw, db of sum(y * c) on one device."""
    x_, w_, b_ = (torch.tensor(value, requires_grad=True) for value in (x, w, b))
    y = F.batch_norm(x_, None, None, w_, b_, training=True, eps=EPS)
    grads = torch.autograd.grad((y * torch.tensor(c)).sum(), (x_, w_, b_))
    return [t.detach().numpy() for t in (y, *grads)]


@pytest.mark.parametrize(
    "fw, sizes", in_both([((5,),), ((2, 2),), ((1, 4, 2),), ((3, 0),), ((1,) * 8,)], [((1, 4, 2),)]), indirect=["fw"]
)
def test_batch_norm_of_uneven_batches_is_that_of_the_whole(fw, sizes):
    """In JAX all ranks have arrays of one shape, of which some rows are not counted; what is in them is not seen."""
    random = np.random.default_rng(5)
    x, c = random.normal(size=(2, sum(sizes), FEATURES)) * 3 + 5
    w, b = random.normal(size=(2, FEATURES))
    begin = np.cumsum((0, *sizes))
    pieces = [(x[i:j], c[i:j]) for i, j in pairwise(begin.tolist())]
    if fw.name == "jax":
        pad = lambda a, fill: np.concatenate([a, np.full((max(sizes) - len(a), FEATURES), fill)])  # noqa: E731
        pieces = [(pad(a, np.nan), pad(b, 0.0)) for a, b in pieces]

    def program(pieces, w, b):
        x, c = mine(fw, pieces)
        counted = None if fw.name == "torch" else np.arange(max(sizes)) < fw.array(np.array(sizes))[index(fw)]
        norm = lambda x, w, b: fw.lab.batch_norm(x, w, b, "dp", counted=counted, eps=EPS)  # noqa: E731
        kept = (lambda y: y) if counted is None else lambda y: where(counted, y)
        value = lambda x, w, b: (kept(norm(x, w, b)) * c).sum()  # noqa: E731
        return [norm(x, w, b), *fw.gradients(value, x, w, b)]

    with double(fw):
        given = [[fw.array(a) for a in piece] for piece in pieces]
        per_rank = fw.lab.run(program, Mesh(dp=len(sizes)), given, fw.array(w), fw.array(b)).per_rank
        per_rank = [[fw.numpy(value) for value in values] for values in per_rank]
    y, dx, dw, db = in_whole(x, w, b, c)
    for which, want in enumerate((y, dx)):
        close(np.concatenate([r[which][:n] for r, n in zip(per_rank, sizes)]), want, ["y", "dx"][which])
    for which, want in ((2, dw), (3, db)):  # in JAX they are added up by the types
        total = per_rank[0][which] if fw.name == "jax" else sum(r[which] for r in per_rank)
        close(total, want, ["dw", "db"][which - 2])


def index(fw):
    return fw.lab.axis_index("dp")


def mine(fw, pieces):
    """This rank's piece; in JAX taken from all of them, as every rank runs one program."""
    if fw.name == "torch":
        return pieces[index(fw)]
    import jax.numpy as jnp

    return [jnp.stack([piece[which] for piece in pieces])[index(fw)] for which in (0, 1)]


def where(counted, y):
    import jax.numpy as jnp

    return jnp.where(counted[:, None], y, 0)


# --- random numbers ---------------------------------------------------------------------------------------------------


def test_replicas_drop_other_elements_and_tensor_ranks_the_same():
    """dropout(axis="dp"): each replica its own mask, along tp the same one; the same again with the run's seed."""
    from tplab.torch import dropout, run

    def program():
        x = torch.ones(200)
        return dropout(x, 0.5, axis="dp"), torch.randint(10**9, (1,))

    mesh = Mesh(dp=2, tp=2)
    masks, own = zip(*run(program, mesh, seed=3).per_rank)
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])
    assert len({int(number) for number in own}) == 4  # torch's generator is each rank's own: not for what must agree
    again, _ = zip(*run(program, mesh, seed=3).per_rank)
    assert all(torch.equal(a, b) for a, b in zip(masks, again))
