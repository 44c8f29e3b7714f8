"""What tensor parallelism is said to save and to cost, read off traces and real buffers, in both frameworks."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.frameworks import FRAMEWORKS, Framework, gathers_alike, in_both
from tests.sharded import close, double, flat, numbers, sharded
from tplab import Mesh, P
from tplab.cost.activations import SavedTensors, activation_bytes, activation_tensors
from tplab.errors import ShapeError
from tplab.models.gpt import GPTConfig, gpt_parameters, gpt_specs

BATCH, SEQUENCE, WIDTH, HEADS, VOCABULARY = 2, 48, 32, 8, 24  # the vocabulary is one that 2, 3, 4 and 8 ranks share
TOKENS = BATCH * SEQUENCE


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def config_for(num_ranks, num_layers, **options):
    width, heads = (48, 6) if num_ranks == 3 else (WIDTH, HEADS)
    return GPTConfig(VOCABULARY, width, num_layers, heads, SEQUENCE, **options)


def ids_for(config):
    return np.random.default_rng(3).integers(0, config.vocab_size, (BATCH, SEQUENCE))


def trace_of(fw, program, mesh, *args):
    """As run(...).trace; in JAX without compiling what has been traced."""
    if fw.name == "torch":
        return fw.lab.run(program, mesh, *args).trace
    from tplab.jax.tracing import trace

    compiled, arrays = compiled_in_jax(program, mesh, *args)
    return trace.trace_of(compiled, [None] * (1 + len(arrays)), None, None, 0)


def compiled_in_jax(program, mesh, *args):
    """What run makes of a program before XLA compiles it, and the arrays it is for."""
    from tplab.jax.ranks.program import program_of

    return program_of(program, mesh, None, None, "simulated").compiled(program, args)


@cache
def traced(framework, config, num_ranks, sequence_parallel, backward, again):
    """The collectives of rank 0 in one forward pass, or in forward and backward."""
    fw = FRAMEWORKS[framework]()

    def program(ids):
        model = fw.lab.GPT(config, sequence_parallel=sequence_parallel)
        remembers = fw.lab.gather_again if again else lambda fn: fn
        if fw.name == "torch":
            loss = remembers(model.loss)(ids, ids)
            if backward:
                loss.backward()
            return [p.grad for p in model.parameters()] if backward else loss
        import jax

        params, loss_of = model.init(jax.random.key(0)), remembers(model.loss)
        return jax.grad(loss_of)(params, ids, ids) if backward else loss_of(params, ids, ids)

    trace = trace_of(fw, program, Mesh(tp=num_ranks), fw.array(ids_for(config)))
    return [(event.op, event.shape, event.bytes) for event in trace.select(kind="collective", rank=0).events]


def of_a_layer(fw, num_ranks, sequence_parallel, backward, again=False, **options):
    """What one layer more sends."""
    one, two = (
        Counter(traced(fw.name, config, num_ranks, sequence_parallel, backward, again))
        for config in (config_for(num_ranks, num_layers, **options) for num_layers in (1, 2))
    )
    assert not one - two
    return two - one


# ------------------------------------------------------------------------------------------------- communication


each_size = pytest.mark.parametrize("fw, num_ranks", in_both([(2,), (3,), (4,)], [(3,), (4,)]), indirect=["fw"])


@each_size
def test_four_communications_a_layer(fw, num_ranks):
    """Two forward and two backward, each an all_reduce of the activations: 2(R-1)/R of them leave each rank."""
    width = config_for(num_ranks, 1).width
    whole = TOKENS * width * 4  # float32
    one = ("all_reduce", (BATCH, SEQUENCE, width), 2 * whole * (num_ranks - 1) // num_ranks)
    assert of_a_layer(fw, num_ranks, False, backward=False) == {one: 2}
    assert of_a_layer(fw, num_ranks, False, backward=True) == {one: 4}


@each_size
def test_the_same_bytes_with_sequence_parallelism(fw, num_ranks):
    """Each all_reduce becomes an all_gather and a reduce_scatter; the gradients of norms and biases are more."""
    width = config_for(num_ranks, 1).width
    whole = TOKENS * width * 4
    gather = ("all_gather", (BATCH, SEQUENCE // num_ranks, width), whole * (num_ranks - 1) // num_ranks)
    scatter = ("reduce_scatter", (BATCH, SEQUENCE, width), whole * (num_ranks - 1) // num_ranks)
    assert of_a_layer(fw, num_ranks, True, backward=False) == {gather: 2, scatter: 2}
    both = of_a_layer(fw, num_ranks, True, backward=True)
    parameters = Counter({entry: count for entry, count in both.items() if entry[1] == (width,)})
    assert both - parameters == {gather: 4, scatter: 4}
    assert {op for op, _, _ in parameters} == {"all_reduce"}
    assert parameters.total() == 6  # weight and bias of two norms, bias of the two row-parallel layers

    plain = of_a_layer(fw, num_ranks, False, backward=True)
    sent = lambda entries: sum(count * bytes for (_, _, bytes), count in entries.items())  # noqa: E731
    assert sent(both - parameters) == sent(plain)


def test_gathering_again_sends_two_all_gathers_more(fw):
    usual = of_a_layer(fw, 4, True, backward=True)
    again = of_a_layer(fw, 4, True, backward=True, again=True)
    gather = ("all_gather", (BATCH, SEQUENCE // 4, WIDTH), TOKENS * WIDTH * 4 * 3 // 4)
    assert again - usual == {gather: 2}
    assert not usual - again


def mlp_collectives(fw, row_first, backward):
    """Of rank 0, in an MLP whose input and output are whole on every rank."""

    def layers():
        if not row_first:
            up = fw.lab.ColumnParallelLinear(WIDTH, 4 * WIDTH, "tp", bias=False)
            return up, fw.lab.RowParallelLinear(4 * WIDTH, WIDTH, "tp", bias=False)
        up = fw.lab.RowParallelLinear(WIDTH, 4 * WIDTH, "tp", input_is_parallel=False, bias=False)
        return up, fw.lab.ColumnParallelLinear(4 * WIDTH, WIDTH, "tp", gather_output=True, bias=False)

    def program(x):
        up, down = layers()
        if fw.name == "torch":
            x.requires_grad_()
            y = down(F.gelu(up(x)))
            return torch.autograd.grad(y.sum(), [x, up.weight, down.weight]) if backward else y
        import jax

        def loss(weights, x):
            return down(weights[1], jax.nn.gelu(up(weights[0], x))).sum()

        weights = tuple(layer.init(jax.random.key(0)) for layer in (up, down))
        return jax.value_and_grad(loss, (0, 1))(weights, x) if backward else loss(weights, x)

    x = fw.array(numbers(BATCH, WIDTH).astype(np.float32))
    trace = trace_of(fw, program, Mesh(tp=4), x)
    return sorted(event.op for event in trace.select(kind="collective", rank=0).events)


def test_row_first_communicates_twice_where_column_first_does_once(fw):
    """In either direction. gelu(a + b) is not gelu(a) + gelu(b): row first, the hidden features are summed first."""
    assert mlp_collectives(fw, row_first=False, backward=False) == ["all_reduce"]
    gather, _ = gathers_alike(fw)
    assert mlp_collectives(fw, row_first=True, backward=False) == [gather, "all_reduce"]
    assert mlp_collectives(fw, row_first=False, backward=True) == ["all_reduce"] * 2
    assert mlp_collectives(fw, row_first=True, backward=True) == [gather] * 2 + ["all_reduce"] * 2


# ---------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("fw, num_ranks", in_both([(1,), (2,), (4,), (8,)], [(1,), (4,)]), indirect=["fw"])
def test_each_rank_holds_its_share_of_the_parameters(fw, num_ranks):
    """All but the positions, the norms and the biases of row-parallel layers, of which every rank has a copy."""
    config = config_for(num_ranks, 2)
    about = gpt_parameters(config)
    copies = {name for name, parameter in about.items() if not parameter.spec.axis_names}
    assert copies == {"positions.weight", "norm.weight", "norm.bias"} | {
        f"blocks.{number}.{name}" for number in range(2)
        for name in ("norm_1.weight", "norm_1.bias", "norm_2.weight", "norm_2.bias", "attention.output.bias",
                     "mlp.down.bias")
    }  # fmt: skip
    size = {name: int(np.prod(parameter.shape)) * 4 for name, parameter in about.items()}
    copied = sum(size[name] for name in copies)
    divided = sum(size.values()) - copied
    assert divided % num_ranks == 0
    expected = {name: size[name] if name in copies else size[name] // num_ranks for name in about}
    for held in buffers(fw, config, num_ranks):
        assert held == expected
        assert sum(held.values()) == divided // num_ranks + copied


def buffers(fw, config, num_ranks):
    """The bytes of memory behind each parameter, on each rank."""
    mesh, model = Mesh(tp=num_ranks), lambda: fw.lab.GPT(config)
    if fw.name == "torch":
        program = lambda: {name: p.untyped_storage().nbytes() for name, p in model().named_parameters()}  # noqa: E731
        return fw.lab.run(program, mesh).per_rank
    import jax

    specs = gpt_specs(config)
    whole = flat(model().init(jax.random.key(0)))
    arrays = fw.lab.run(lambda params: params, mesh, whole, in_specs=(specs,), out_specs=specs).value
    return [{name: array.addressable_shards[rank].data.nbytes for name, array in arrays.items()} for rank in mesh.ranks]


# --------------------------------------------------------------------------------------------------- activations


def kept_by_a_layer(fw, num_ranks, sequence_parallel, again=False, dropout=0.1, layers=(1, 2)):
    """What a rank keeps of one layer more, in bfloat16: the tensors as (dtype, elements, made by) -> how many."""
    counts = []
    for num_layers in layers:
        config = config_for(num_ranks, num_layers, dropout=dropout)
        seen: list[SavedTensors] = []

        def program(ids, config=config, seen=seen):
            model = fw.lab.GPT(config, sequence_parallel=sequence_parallel)
            remembers = fw.lab.gather_again if again else lambda fn: fn
            if fw.name == "torch":
                model = model.bfloat16()
                seen.append(fw.lab.saved_tensors(remembers(model.loss), ids, ids))
                return torch.zeros(1)
            import jax
            import jax.numpy as jnp

            params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), model.init(jax.random.key(0)))
            key = jax.random.key(1)
            loss = remembers(lambda params, ids: model.loss(params, ids, ids, key=key))
            seen.append(fw.lab.saved_tensors(loss, params, ids))
            return jnp.zeros(1)

        if fw.name == "torch":
            fw.lab.run(program, Mesh(tp=num_ranks), fw.array(ids_for(config)))
        else:
            compiled_in_jax(program, Mesh(tp=num_ranks), fw.array(ids_for(config)))
        assert all(kept == seen[0] for kept in seen)  # every rank keeps as much
        counts.append(Counter((x.dtype, int(np.prod(x.shape)), x.bytes, x.made_by) for x in seen[0]))
    one, two = counts
    assert not one - two
    return two - one


def bytes_of(counter):
    return sum(count * bytes for (_, _, bytes, _), count in counter.items())


def paper(num_ranks, sequence_parallel, **options):
    return activation_bytes(SEQUENCE, BATCH, WIDTH, HEADS, num_ranks, sequence_parallel=sequence_parallel, **options)


def plain_attention(q, k, v, is_causal):
    """As the paper has it: the scores are kept, and there is dropout on them."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    shares = (scores + torch.full_like(scores, -torch.inf).triu(1)).softmax(-1)
    kept = torch.rand(shares.shape) >= 0.1
    return shares * kept / 0.9 @ v


def statistics(num_ranks, sequence_parallel):
    """Two norms keep the mean and the deviation of each token, which the paper leaves out: 4 numbers of 16 bits."""
    return 4 * TOKENS * 2 // (num_ranks if sequence_parallel else 1)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_torch_keeps_what_the_paper_says(monkeypatch, num_ranks):
    """Korthikanti et al. 2022: s b h (10 + 24/t + 5 a s / (h t)), and with sequence parallelism (34 + 5 a s / h) / t.

    To the byte, where attention is the paper's. That every rank keeps the two gathered inputs whole is the difference
    which gather_again takes away."""
    fw = FRAMEWORKS["torch"]()
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain_attention)
    s, b, h, a, t = SEQUENCE, BATCH, WIDTH, HEADS, num_ranks
    assert paper(t, False) == s * b * (10 * h + 24 * h // t + 5 * a * s // t)
    assert paper(t, True) == s * b * (34 * h + 5 * a * s) // t

    assert bytes_of(kept_by_a_layer(fw, t, False)) == paper(t, False) + statistics(t, False)
    gathered = 2 * (2 * s * b * h) * (t - 1) // t
    assert bytes_of(kept_by_a_layer(fw, t, True)) == paper(t, True) + statistics(t, True) + gathered
    assert bytes_of(kept_by_a_layer(fw, t, True, again=True)) == paper(t, True) + statistics(t, True)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_torch_keeps_no_scores(num_ranks, dropout):
    """Ours: a fused attention computes the scores again, and keeps the log of a sum for each of their rows, float32."""
    fw = FRAMEWORKS["torch"]()
    rows = 4 * HEADS * TOKENS // num_ranks
    for sequence_parallel in (False, True):
        kept = kept_by_a_layer(fw, num_ranks, sequence_parallel, again=True, dropout=dropout)
        expected = paper(num_ranks, sequence_parallel, scores=False, dropout=dropout > 0)
        assert bytes_of(kept) == expected + statistics(num_ranks, sequence_parallel) + rows


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_torch_tensor_by_tensor(num_ranks):
    """Every tensor that is kept has its line in the paper's account, and every line its tensor."""
    kept = kept_by_a_layer(FRAMEWORKS["torch"](), num_ranks, False)
    expected = Counter(activation_tensors(SEQUENCE, BATCH, WIDTH, HEADS, num_ranks, scores=False).values())
    expected[TOKENS * 2] += 4  # norms' statistics
    expected[4 * HEADS * TOKENS // num_ranks] += 1
    assert Counter(bytes for (_, _, bytes, _), count in kept.items() for _ in range(count)) == expected


@cache
def of_one_layer_in_jax(num_ranks, sequence_parallel, again=False):
    """Element counts, not scalars: dtype and elements of what jax.vjp keeps, by the operation that made it."""
    kept = kept_by_a_layer(FRAMEWORKS["jax"](), num_ranks, sequence_parallel, again, layers=(2, 3))
    return Counter({entry: count for entry, count in kept.items() if entry[1] > 1})


def test_jax_tensor_by_tensor():
    """jax.vjp keeps an operand of every nonlinear operation: of gelu five of the paper's one, and the scores in float32
    as well. Between the two passes of one compiled program XLA computes these again as it sees fit; what products made
    stays: the paper's account. A norm keeps its input."""
    s, b, h, a, t = SEQUENCE, BATCH, WIDTH, HEADS, 2
    token, square = s * b * h, a * s * s * b
    kept = Counter()
    for (dtype, elements, _, made_by), count in of_one_layer_in_jax(t, False).items():
        kept[dtype, elements, "product" if made_by in ("add", "dot_general") else "other"] += count
    assert kept == {
        ("bfloat16", token, "product"): 2,  # inputs of the two regions, which a norm gave
        ("bfloat16", token, "other"): 2,  # of each norm its input
        ("bool", token, "other"): 2,  # masks
        ("bfloat16", token // t, "product"): 4,  # query, key, value; what attention gave
        ("float32", square // t, "other"): 1,  # exp of the scores
        ("bfloat16", square // t, "other"): 1,  # the scores after softmax
        ("float32", a * s * b // t, "other"): 2,  # of each row the sum, and 1 / its square
        ("bfloat16", 4 * token // t, "product"): 1,  # gelu's input goes into 1 + tanh(..), as a factor
        ("bfloat16", 4 * token // t, "other"): 5,
    }


def test_jax_keeps_less_where_the_paper_says_so():
    """10 + 24/t has the form A + B/t, and with sequence parallelism it is (A + B)/t once what was gathered is gathered
    again; the two tensors are the difference."""
    kept = {t: bytes_of(of_one_layer_in_jax(t, False)) for t in (1, 2, 4)}
    divided = 2 * (kept[1] - kept[2])
    everywhere = kept[1] - divided
    assert kept[4] == everywhere + divided // 4
    token = TOKENS * WIDTH
    assert everywhere == token * 10
    usual, again = (bytes_of(of_one_layer_in_jax(4, True, again)) for again in (False, True))
    assert usual == (everywhere + divided) // 4 + 2 * (2 * token) * 3 // 4
    norm = 3 * 4 * token + 2 * 4 * TOKENS  # its arrays and statistics in 32 bits, in place of its input in 16
    assert again == (everywhere + divided + 2 * (norm - 2 * token)) // 4


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_gathering_again_changes_no_gradient(fw, num_ranks):
    """In torch bit for bit: the same numbers are computed in the same order. XLA may fuse them in another way."""
    make = lambda lab: lab.ParallelMLP(6, 12, "tp", activation="swiglu", sequence_dim=1)  # noqa: E731
    specs = flat({name: {"weight": P("tp"), "bias": P("tp")} for name in ("gate", "up")})
    specs |= {"down.weight": P(None, "tp"), "down.bias": P()}
    shapes = {"gate.weight": (12, 6), "up.weight": (12, 6), "down.weight": (6, 12)}
    shapes |= {"gate.bias": (12,), "up.bias": (12,), "down.bias": (6,)}
    state = {name: numbers(*shapes[name], seed=seed) for seed, name in enumerate(specs)}
    x, c = numbers(2, 9, 6), numbers(2, 9, 6, seed=9)
    across = P(None, "tp")
    with double(fw):
        usual, trace = sharded(fw, Mesh(tp=num_ranks), make, state, specs, x, c, across, across)
        again, other = sharded(fw, Mesh(tp=num_ranks), remembering(fw, make), state, specs, x, c, across, across)
    gathers = [len(t.select(kind="collective", op="all_gather", rank=0)) for t in (trace, other)]
    assert gathers == ([2, 3] if num_ranks > 1 else [0, 0])
    tolerance = 0 if fw.name == "torch" else 1e-14
    close(again[0], usual[0], "y", tolerance)
    close(again[1], usual[1], "dx", tolerance)
    for name, grad in usual[2].items():
        close(again[2][name], grad, name, tolerance)


def remembering(fw, make):
    """What makes the same layer, whose call gathers again."""

    def made(lab):
        layer = make(lab)
        if fw.name == "jax":
            return lab.gather_again(layer)
        layer.forward = lab.gather_again(layer.forward)
        return layer

    return made


def test_torch_gathers_again_as_often_as_there_are_backward_passes():
    """A graph that is kept is gone through twice; hooks that were there before still see what is kept."""
    lab = FRAMEWORKS["torch"]().lab

    def program(x):
        x.requires_grad_()
        columns = lab.ColumnParallelLinear(4, 4, "tp", sequence_dim=0)
        y = lab.gather_again(columns)(x)
        loss = (y * y).sum()
        grads = [torch.autograd.grad(loss, [x, columns.weight], retain_graph=True) for _ in range(2)]
        want = torch.autograd.grad(columns(x).square().sum(), [x, columns.weight])
        assert all(torch.equal(one, other) for found in grads for one, other in zip(found, want, strict=True))
        with torch.autograd.graph.save_on_cpu():
            found = torch.autograd.grad(lab.gather_again(columns)(x).square().sum(), [x, columns.weight])
        assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
        return len(grads)

    trace = lab.run(program, Mesh(tp=2), torch.ones(3, 4)).trace
    assert len(trace.select(kind="collective", op="all_gather", rank=0)) == 3 + 3  # forward, and backward


def test_what_is_kept_is_listed(fw):
    """Memory once, however many share it; parameters and what is made of them not at all."""

    def program(x):
        if fw.name == "torch":
            weight = torch.nn.Parameter(torch.ones(3, 4))
            seen.append(fw.lab.saved_tensors(lambda x: (x @ weight.T).exp() * (x @ weight.T.contiguous().T.T), x))
            return x
        import jax.numpy as jnp

        weight = jnp.ones((3, 4))
        fn = lambda weight, x: jnp.exp(x @ weight.T) * (x @ weight.T)  # noqa: E731
        seen.append(fw.lab.saved_tensors(fn, weight, x))
        return x

    seen: list[SavedTensors] = []
    fw.lab.run(program, Mesh(tp=1), fw.array(np.ones((2, 4), np.float32)), in_specs=(P(),))
    (kept,) = seen
    by = Counter(x.shape for x in kept)
    assert by[2, 4] == 1  # x, used twice
    assert by[2, 3] == 2  # exp, and the other factor
    assert kept.bytes == sum(x.bytes for x in kept)
    lines = repr(kept).splitlines()
    assert "float32[2, 4], made by" in lines[0]
    assert lines[-1].endswith(f"{kept.bytes:,}  bytes in {len(kept)} tensors")


def test_jax_functions_that_are_called_twice_keep_twice():
    """JAX keeps the jaxpr of a jitted function: two calls have the same variables, and other values."""
    import jax
    import jax.numpy as jnp

    from tplab.jax import saved_tensors

    def cosines(params, x):
        return twice(x) + twice(x + 1)

    twice = jax.jit(jnp.sin)
    kept = saved_tensors(cosines, {}, jnp.ones(5))
    assert [x.shape for x in kept] == [(5,), (5,)]


# -------------------------------------------------------------------------------------------------- the formulas


def test_the_papers_figures():
    """One layer of its 22B model (Table 3: 64 heads, hidden size 6144, sequence 2048, microbatch 4), on 8 ranks."""
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    unit = s * b * h
    assert activation_bytes(s, b, h, a) / unit == pytest.approx(34 + 5 * a * s / h, rel=1e-15)
    assert activation_bytes(s, b, h, a, t) / unit == pytest.approx(10 + 24 / t + 5 * a * s / (h * t), rel=1e-15)
    assert activation_bytes(s, b, h, a, t, sequence_parallel=True) / unit == pytest.approx((34 + 5 * a * s / h) / t)
    assert activation_bytes(s, b, h, a, t, scores=False) / unit == 10 + 24 / t
    assert activation_bytes(s, b, h, a, t, scores=False, sequence_parallel=True) / unit == 34 / t
    assert sum(activation_tensors(s, b, h, a, t).values()) == activation_bytes(s, b, h, a, t)


def test_what_cannot_be_counted_is_said():
    with pytest.raises(ShapeError, match="num_heads is 8, which 3 ranks cannot share equally: heads are sharded whole"):
        activation_bytes(16, 2, 32, 8, 3)
    told = "the sequence has length 10, which 4 ranks cannot share equally;\npad it to 12"
    with pytest.raises(ShapeError, match=told):
        activation_bytes(10, 2, 32, 8, 4, sequence_parallel=True)
