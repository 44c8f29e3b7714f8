"""Embedding, tied head and loss with the vocabulary spread over ranks, against torch's own on one: float64."""

import inspect
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.frameworks import FRAMEWORKS, Framework, in_both
from tests.sharded import close, double, numbers
from tplab import Mesh, P
from tplab.errors import ShapeError

WIDTH = 6


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def some_ids(vocab_size, *shape, seed=5):
    return np.random.default_rng(seed).integers(0, vocab_size, shape)


def dense(weight, ids, targets, **options):
    """A model of one tanh between embedding and tied head: loss, and the gradient of the weight."""
    weight = torch.tensor(weight, requires_grad=True)
    logits = F.embedding(torch.tensor(ids), weight).tanh() @ weight.T
    loss = F.cross_entropy(logits.reshape(-1, weight.shape[0]), torch.tensor(targets).reshape(-1), **options)
    loss = loss.reshape(ids.shape) if options.get("reduction") == "none" else loss
    (grad,) = torch.autograd.grad(weighted(loss), weight)
    return loss.detach().numpy(), grad.numpy()


def weighted(loss):
    """One number of a loss a token: each counts in its own way."""
    if loss.ndim == 0:
        return loss
    places = np.arange(1.0, np.prod(loss.shape) + 1).reshape(tuple(loss.shape))
    return (loss * (torch.tensor(places) if isinstance(loss, torch.Tensor) else places)).sum()


def sharded(fw, mesh, weight, ids, targets, sequence_dim=None, **options):
    """The same with the vocabulary over tp: loss, the gradient of the whole weight, and the trace."""
    vocab_size = weight.shape[0]

    def program(weight, ids, targets):
        layer = fw.lab.VocabParallelEmbedding(vocab_size, WIDTH, "tp", sequence_dim=sequence_dim)
        loss_of = lambda logits: fw.lab.vocab_parallel_cross_entropy(logits, targets, "tp", vocab_size, **options)  # noqa: E731
        if fw.name == "torch":
            from tplab.torch.layers.parameters import piece_of

            layer = layer.double()
            layer.load_state_dict({"weight": piece_of(weight, P("tp"))})
            loss = loss_of(layer.logits(layer(ids).tanh()))
            weighted(loss).backward()
            return loss.detach(), layer.weight.grad
        import jax

        from tplab.jax.layers.parameters import here

        def model(params):
            loss = loss_of(layer.logits(params, fw.tanh(layer(params, ids))))
            return weighted(loss), loss

        (_, loss), grads = jax.value_and_grad(model, has_aux=True)({"weight": here(weight, P("tp"))})
        return loss, grads["weight"]

    out = fw.lab.run(program, mesh, fw.array(weight), fw.array(ids), fw.array(targets), keep_values=0)
    losses = [fw.numpy(loss) for loss, _ in out.per_rank]
    for loss in losses[1:]:
        close(loss, losses[0], "another rank's loss")
    grad = np.concatenate([fw.numpy(grad) for _, grad in out.per_rank])
    assert not grad[vocab_size:].any(), "padding has a gradient"
    return losses[0], grad[:vocab_size], out.trace


def check(fw, num_ranks, vocab_size, shape=(3, 8), sequence_dim=None, ignored=0, **options):
    weight, ids = numbers(vocab_size, WIDTH), some_ids(vocab_size, *shape)
    targets = some_ids(vocab_size, *shape, seed=6)
    targets.reshape(-1)[:ignored] = options.get("ignore_index", -100)
    want_loss, want_grad = dense(weight, ids, targets, **options)
    with double(fw):
        loss, grad, _ = sharded(fw, Mesh(tp=num_ranks), weight, ids, targets, sequence_dim, **options)
        close(loss, want_loss, "loss")
        close(grad, want_grad, "gradient of the weight")


@pytest.mark.parametrize(
    "fw, num_ranks, sequence_dim",
    in_both(product([1, 2, 3, 4, 8], [None, 1]), [(1, None), (8, None), (3, 1), (4, 1)]),
    indirect=["fw"],
)
def test_tied_model_with_a_vocabulary_that_does_not_divide(fw, num_ranks, sequence_dim):
    check(fw, num_ranks, 41, (2, 24), sequence_dim)


def test_ranks_without_any_word(fw):
    """5 words over 4 ranks: 2, 2, 1 and none."""
    check(fw, 4, 5, label_smoothing=0.1)


SEVERAL = [  # JAX: every option once, in company
    ({"label_smoothing": 0.3, "reduction": "none"},),
    ({"ignored": 5, "ignore_index": 2},),
    ({"ignored": 5, "label_smoothing": 0.2, "reduction": "sum"},),
]
ALONE = [({"reduction": "sum"},), ({"reduction": "none"},), ({"label_smoothing": 0.1},), ({"ignored": 5},)]


@pytest.mark.parametrize("fw, options", in_both(ALONE + SEVERAL, SEVERAL), indirect=["fw"], ids=str)
def test_options_mean_what_they_mean_in_torch(fw, options):
    check(fw, 3, 13, **options)


@pytest.mark.parametrize("vocab_size", [200, 256])
def test_ids_may_be_bytes(vocab_size):
    """In JAX: torch takes ids of 32 or 64 bits. As bytes, -100 is 156, and 256 is 0."""
    fw, weight, ids = FRAMEWORKS["jax"](), numbers(vocab_size, WIDTH), np.array([[3, 156, vocab_size - 1]])
    with double(fw):
        loss, grad, _ = sharded(fw, Mesh(tp=2), weight, ids.astype(np.uint8), ids.astype(np.uint8))
    want, want_grad = dense(weight, ids, ids)
    close(loss, want, "loss")
    close(grad, want_grad, "gradient")


@settings(max_examples=8)
@given(
    name=st.sampled_from(list(FRAMEWORKS)),
    num_ranks=st.integers(1, 5),
    vocab_size=st.integers(2, 19),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    ignored=st.integers(0, 1),
)
def test_any_shape(name, num_ranks, vocab_size, shape, reduction, label_smoothing, ignored):
    shape = [*shape[:-1], shape[-1] + 1]  # one token at least is counted
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    check(FRAMEWORKS[name](), num_ranks, vocab_size, shape, ignored=ignored, **options)


# -------------------------------------------------------------------------------------------------- the loss alone


def loss_and_gradient(fw, num_ranks, logits, targets, vocab_size, **options):
    """Of whole logits, padded so that the ranks can share them, whatever is in the padding."""
    padding = np.full((*logits.shape[:-1], -logits.shape[-1] % num_ranks), 1e30, logits.dtype)
    padded = np.concatenate([logits, padding], -1)

    def program(logits, targets):
        loss_of = lambda z: fw.lab.vocab_parallel_cross_entropy(z, targets, "tp", vocab_size, **options)  # noqa: E731
        return loss_of(logits), *fw.gradients(loss_of, logits)

    split = P(*[None] * (logits.ndim - 1), "tp")
    args = fw.array(padded), fw.array(targets)
    out = fw.lab.run(program, Mesh(tp=num_ranks), *args, in_specs=(split, P()), out_specs=(P(), split))
    loss, grad = (fw.numpy(part) for part in out.value)
    assert not grad[..., logits.shape[-1] :].any(), "padding has a gradient"
    return loss, grad[..., : logits.shape[-1]]


@pytest.mark.parametrize(
    "fw, num_ranks, scale",
    in_both(product([1, 3, 4], [1e4, -1e4, 1e30]), [(1, 1e4), (3, -1e4), (4, 1e30)]),
    indirect=["fw"],
)
def test_large_logits_in_float32(fw, num_ranks, scale):
    """exp(1e4) is infinite. The loss is exact to float32's rounding of the logits."""
    logits = (np.random.default_rng(1).normal(size=(6, 10)) * scale).astype(np.float32)
    targets = logits.argmax(-1)
    targets[0] = logits[0].argmin()
    whole = torch.tensor(logits.astype(np.float64), requires_grad=True)
    want = F.cross_entropy(whole, torch.tensor(targets))
    (want_grad,) = torch.autograd.grad(want, whole)
    loss, grad = loss_and_gradient(fw, num_ranks, logits, targets, 10)
    np.testing.assert_allclose(loss, want.detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad.numpy(), rtol=1e-5, atol=1e-7)


def test_logits_of_16_bits_are_computed_with_in_32(fw):
    logits = fw.array(numbers(4, 8).astype(np.float32))
    short = logits.bfloat16() if fw.name == "torch" else logits.astype("bfloat16")
    back = short.float() if fw.name == "torch" else short.astype("float32")
    targets = fw.array(some_ids(8, 4))
    program = lambda z, t: fw.lab.vocab_parallel_cross_entropy(z, t, "tp", 8)  # noqa: E731
    losses = [
        fw.lab.run(program, Mesh(tp=2), z, targets, in_specs=(P(None, "tp"), P()), out_specs=P()).value
        for z in (short, back)
    ]
    assert str(losses[0].dtype).endswith("float32")
    assert float(losses[0]) == float(losses[1])


def test_nothing_counted_is_nothing_over_nothing(fw):
    """As in torch: the mean over no token is NaN, the sum 0."""
    logits, targets = numbers(3, 8).astype(np.float32), np.full(3, -100)
    assert np.isnan(loss_and_gradient(fw, 2, logits, targets, 8)[0])
    loss, grad = loss_and_gradient(fw, 2, logits, targets, 8, reduction="sum")
    assert loss == 0
    assert not grad.any()


@pytest.mark.parametrize("label_smoothing, sums", [(0.0, 2), (0.1, 3)])
def test_what_is_sent_does_not_grow_with_the_vocabulary(fw, label_smoothing, sums):
    """One maximum and two sums a token, nothing backward; gathering would send the logits."""
    tokens, mesh_size = 16, 4
    for vocab_size in (64, 256):
        logits, targets = numbers(tokens, vocab_size).astype(np.float32), some_ids(vocab_size, tokens)

        def program(logits, targets, vocab_size=vocab_size):
            return fw.gradients(
                lambda z: fw.lab.vocab_parallel_cross_entropy(
                    z, targets, "tp", vocab_size, label_smoothing=label_smoothing
                ),
                logits,
            )

        args = fw.array(logits), fw.array(targets)
        specs = (P(None, "tp"), P())
        trace = fw.lab.run(program, Mesh(tp=mesh_size), *args, in_specs=specs, keep_values=0).trace
        per_number = 2 * 3 * tokens * 4 // 4  # a ring all_reduce sends 2(R-1)/R
        sent = [(e.op, e.bytes) for e in trace.select(kind="collective", rank=1).events]
        assert sent == [("all_reduce", per_number), ("all_reduce", sums * per_number)]


def test_embedding_and_head_send_one_sum_each(fw):
    """Forward: the embedding's; backward: the head's copy_to. The tied weight's gradient needs none."""
    shape, vocab_size, mesh = (2, 8), 12, Mesh(tp=4)
    args = numbers(vocab_size, WIDTH).astype(np.float32), some_ids(vocab_size, *shape), some_ids(vocab_size, *shape)
    if fw.name == "torch":
        args = (args[0].astype(np.float64), *args[1:])
    _, _, trace = sharded(fw, mesh, *args)
    activation = 2 * 3 * 2 * 8 * WIDTH * args[0].itemsize // 4
    sent = [event.bytes for event in trace.select(kind="collective", rank=0).events]
    assert sent.count(activation) == 2
    assert len(sent) == 4  # and the loss's two


# ---------------------------------------------------------------------------------------------------------- errors


def test_ids_that_are_no_words(fw):
    """torch says so; a compiled program cannot raise, and gives NaN, which nobody overlooks."""
    for bad in (41, -1):
        ids = np.array([0, bad])

        def program(ids):
            layer = fw.lab.VocabParallelEmbedding(41, WIDTH, "tp")
            if fw.name == "torch":
                return layer(ids)
            import jax

            return layer(layer.init(jax.random.key(0)), ids)

        loss = lambda ids: fw.lab.vocab_parallel_cross_entropy(  # noqa: E731
            fw.array(numbers(2, 21).astype(np.float32)), ids, "tp", 41, "none"
        )
        said = f"ids run from {min(0, bad)} to {max(0, bad)}, but a vocabulary of 41"
        for fn in (program, loss):
            if fw.name == "torch":
                with pytest.raises(RuntimeError, match=said):
                    fw.lab.run(fn, Mesh(tp=2), fw.array(ids))
            else:
                for result in fw.lab.run(fn, Mesh(tp=2), fw.array(ids)).per_rank:
                    assert np.isfinite(fw.numpy(result)[0]).all()
                    assert np.isnan(fw.numpy(result)[1]).all()


WRONG = {
    "ids are numbers": (
        lambda lab, z, t: lab.vocab_parallel_cross_entropy(z, z[..., 0], "tp", 12),
        r"ids are whole numbers",
    ),
    "reduction": (
        lambda lab, z, t: lab.vocab_parallel_cross_entropy(z, t, "tp", 12, "max"),
        r"must be one of mean, sum, none",
    ),
    "smoothing": (
        lambda lab, z, t: lab.vocab_parallel_cross_entropy(z, t, "tp", 12, label_smoothing=2.0),
        r"label_smoothing is 2.0",
    ),
    "shapes": (
        lambda lab, z, t: lab.vocab_parallel_cross_entropy(z, t[:2], "tp", 12),
        r"logits \[3, 12\] are for ids \[3\], but got ids \[2\]",
    ),
    "whole logits": (
        lambda lab, z, t: lab.vocab_parallel_cross_entropy(z, t, "tp", 12),
        r"logits have 12 columns, but of 12 vocabulary entries .* has 3.*; scatter_to\(logits, 'tp'\) gives",
    ),
    "other logits": (
        lambda lab, z, t: lab.vocab_parallel_cross_entropy(z[:, :4], t, "tp", 12),
        r"logits have 4 columns, but of 12 vocabulary entries .* has 3.*; each rank computes those of its own",
    ),
    "no words": (lambda lab, z, t: lab.VocabParallelEmbedding(0, 3, "tp"), r"vocab_size is 0"),
    "axis": (lambda lab, z, t: lab.vocab_parallel_cross_entropy(z, t, "pp", 12), r"no axis 'pp'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(fw, name):
    wrong, message = WRONG[name]
    args = fw.array(numbers(3, 12).astype(np.float32)), fw.array(some_ids(12, 3))
    with pytest.raises((ShapeError, ValueError, TypeError, RuntimeError), match=message):
        fw.lab.run(lambda z, t: wrong(fw.lab, z, t) and None, Mesh(tp=4), *args)


def test_jax_pads_a_vocabulary():
    lab = FRAMEWORKS["jax"]().lab
    weight = numbers(5, 2).astype(np.float32)
    padded = np.asarray(lab.pad_vocabulary(weight, 4))
    assert padded.shape == (8, 2)
    np.testing.assert_array_equal(padded[:5], weight)
    assert not padded[5:].any()
    assert lab.pad_vocabulary(weight, 5).shape == (5, 2)


def test_the_embedding_is_made_alike_in_both():
    twins = [
        inspect.signature(FRAMEWORKS[f]().lab.VocabParallelEmbedding.__init__).parameters for f in ("torch", "jax")
    ]
    about = [[(p.name, p.kind, p.default, p.annotation) for p in list(twin.values())[1:]] for twin in twins]
    assert about[0] == about[1]
