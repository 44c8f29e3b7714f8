"""check_parallel: our own layers pass, and every known mistake of tensor parallelism is caught and named."""

import copy
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import tplab.torch as lab
from tplab import Mesh, P
from tplab.checking.report import ParallelReport, Row
from tplab.checking.verdict import EPSILON, Rounding, Verdict, judge
from tplab.errors import ParallelError, SpecError
from tplab.layout import Layout, layouts_for, take
from tplab.torch import check_parallel
from tplab.torch.checking.recut import recuts
from tplab.torch.ranks.rank import this_rank

WHOLE = Layout()
VOCABULARY, WIDTH, HEADS, BATCH, SEQUENCE = 23, 24, 12, 2, 6  # 12 heads, for 2, 3 and 4 ranks


# --- a transformer block written by hand, whole, and sharded with one mistake at a time -------------------------------


class Whole(nn.Module):
    """One block with fused weights, a head tied to the embedding, and plain dropout."""

    def __init__(self, p=0.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm_1, self.norm_2, self.norm = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.p = p

    def attention(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def mlp(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + F.dropout(self.attention(self.norm_1(x)), self.p, self.training)
        x = x + F.dropout(self.mlp(self.norm_2(x)), self.p, self.training)
        return self.head(self.norm(x))


SPECS = {
    "qkv.weight": Layout(P("tp"), (WIDTH,) * 3),
    "qkv.bias": Layout(P("tp"), (WIDTH,) * 3),
    "out.weight": Layout(P(None, "tp")),
    "gate_up.weight": Layout(P("tp"), (2 * WIDTH,) * 2),
    "gate_up.bias": Layout(P("tp"), (2 * WIDTH,) * 2),
    "down.weight": Layout(P(None, "tp")),
}


class HandColumn(nn.Module):
    weight: Any
    bias: Any

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class HandRow(nn.Module):
    weight: Any
    bias: Any

    def forward(self, x, mistake=""):
        if mistake == "bias before the sum":
            return lab.all_reduce(F.linear(x, self.weight, self.bias), "tp")
        y = F.linear(x, self.weight)
        return (y if mistake == "no sum" else lab.all_reduce(y, "tp")) + self.bias


class Hand(nn.Module):
    """The same, sharded over tp by hand, as somebody would write it. `mistake` names what is wrong in it."""

    embedding: Any
    head: Any
    norm_1: Any
    norm_2: Any
    norm: Any
    qkv: Any
    gate_up: Any
    out: Any
    down: Any
    mistake: Any
    ranks: Any

    def __init__(self, whole, mistake=""):
        super().__init__()
        self.mistake, self.p, self.ranks = mistake, whole.p, lab.axis_size("tp")
        mesh, rank = this_rank().mesh, this_rank().rank
        kinds = {"qkv": HandColumn, "gate_up": HandColumn, "out": HandRow, "down": HandRow}
        for name, parameter in whole.named_parameters():
            layout = SPECS.get(name, Layout())
            if (mistake, name.split(".")[0]) in (("qkv in one piece", "qkv"), ("gate and up in one piece", "gate_up")):
                layout = Layout(layout.spec)
            module, last = name.split(".")
            holder = getattr(self, module, None) or kinds.get(module, nn.Module)()
            setattr(self, module, holder)
            holder.register_parameter(last, nn.Parameter(take(parameter.detach(), layout, mesh, rank).clone()))
        self.head = nn.Module()
        self.head.weight = self.embedding.weight
        if mistake == "not tied":
            self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())
        if mistake == "replicated gradient summed":
            self.norm.weight.register_hook(lambda g: lab.all_reduce(g, "tp"))
        if mistake == "gradient divided":
            self.norm.weight.register_hook(lambda g: g / self.ranks)
        if mistake == "embedding in a lambda":
            table = self.embedding.weight.detach()
            del self.embedding, self.head
            self.look_up, self.score = (lambda ids: table[ids]), (lambda x: x @ table.T)
        else:
            self.look_up, self.score = (lambda ids: self.embedding.weight[ids]), (lambda x: x @ self.head.weight.T)

    def into(self, x, what):
        return x if self.mistake == f"no f before {what}" else lab.copy_to(x, "tp")

    def attention(self, x):
        here = (3, HEADS // self.ranks, WIDTH // HEADS)
        if self.mistake == "sum after softmax":  # parts of all heads in place of some heads
            here = (3, 1, WIDTH // self.ranks)
        q, k, v = self.qkv(self.into(x, "attention")).unflatten(-1, here).permute(2, 0, 3, 1, 4)
        width = WIDTH // self.ranks if self.mistake == "softmax scale" else WIDTH // HEADS
        scores = q @ k.mT / math.sqrt(width)
        weights = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf).softmax(-1)
        if self.mistake == "sum after softmax":
            weights = lab.all_reduce(weights, "tp")
        if self.training and self.p:  # inside of the region
            weights = lab.dropout(weights, self.p, axis=None if self.mistake == "one generator inside" else "tp")
        y = (weights @ v).transpose(1, 2).flatten(2)
        return self.out(y, "bias before the sum" if self.mistake == "bias before the sum" else "")

    def mlp(self, x):
        gate, up = self.gate_up(self.into(x, "mlp")).chunk(2, -1)
        return self.down(F.silu(gate) * up, "no sum" if self.mistake == "no sum" else "")

    def dropped(self, x):
        if not self.training or not self.p:
            return x
        return F.dropout(x, self.p) if self.mistake == "a generator of its own outside" else lab.dropout(x, self.p)

    def norms(self, x, norm):
        return F.layer_norm(x, (WIDTH,), norm.weight, norm.bias)

    def forward(self, ids):
        x = self.look_up(ids)
        x = x + self.dropped(self.attention(self.norms(x, self.norm_1)))
        x = x + self.dropped(self.mlp(self.norms(x, self.norm_2)))
        return self.score(self.norms(x, self.norm))


def whole_model(p=0.0, dtype=torch.float64):
    torch.manual_seed(0)
    return Whole(p).to(dtype)


IDS = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, SEQUENCE)))


def loss_of(logits):
    return F.cross_entropy(logits.flatten(0, 1), IDS.roll(-1, 1).flatten())


def checked(mistake="", mesh=None, whole=None, **options) -> ParallelReport:
    whole = whole or whole_model()
    options = {"loss": loss_of, **options}

    def model(whole):
        return Hand(whole, mistake).to(whole.qkv.weight.dtype).train(whole.training)

    return check_parallel(model, whole, inputs=(IDS,), mesh=mesh or Mesh(tp=4), **options)


# --- what is right passes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [Mesh(tp=1), Mesh(tp=2), Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=2)], ids=str)
def test_what_is_right_passes(mesh):
    report = checked(mesh=mesh, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    assert report.ok, report
    assert report.raise_if_wrong() is report
    assert {row.kind for row in report.rows} == {"output", "loss", "gradient", "parameter"}
    num_ranks = mesh.axis_size("tp")
    assert report.of("qkv.weight").layout == ("P('tp') in 3 parts" if num_ranks > 1 else "copies")
    assert report.of("gate_up.bias").layout == ("P('tp') in 2 parts" if num_ranks > 1 else "copies")
    assert report.of("down.weight").layout == ("P(None, 'tp')" if num_ranks > 1 else "copies")
    assert max(row.error for row in report.rows) < 1e-12
    assert ("the loss gap is 0" if report.of("loss").error == 0 else ", rounding") in report.summary()


def test_without_a_loss_outputs_are_weighted():
    assert checked(loss=None).ok
    wrong = checked("no f before mlp", loss=None)
    assert not wrong.ok and "no loss" in wrong.summary()


def sharded_gpt(whole, config, **options):
    """This rank's GPT, with its piece of the values of the whole one."""
    model = lab.GPT(config, "tp", **options).double()
    state = lab.split_state(whole.state_dict(), lab.gpt_specs(config), this_rank().mesh)
    model.load_state_dict(state[this_rank().rank])
    return model


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_our_own_gpt_passes(num_ranks, sequence_parallel):
    config = lab.GPTConfig(
        VOCABULARY, WIDTH, 2, HEADS, SEQUENCE, num_kv_heads=HEADS, activation="swiglu", norm="rms", dropout=0.1
    )
    targets = IDS.roll(-1, 1) % VOCABULARY
    ids = IDS.repeat(1, 2)[:, : 12 // 2 * 2]  # 12 tokens, which 2, 3 and 4 ranks share
    targets = targets.repeat(1, 2)
    config = lab.GPTConfig(**{**config.__dict__, "context": 12})

    report = check_parallel(
        lambda whole: sharded_gpt(whole, config, sequence_parallel=sequence_parallel),
        lambda: lab.GPT(config, "tp").double(),
        inputs=(ids,),
        mesh=Mesh(tp=num_ranks),
        loss=lambda z: lab.vocab_parallel_cross_entropy(z, targets, "tp", VOCABULARY),
        reference_loss=lambda z: F.cross_entropy(z.flatten(0, 1), targets.flatten()),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
    assert report.ok, report
    assert sum(row.kind == "dropout" for row in report.rows) == 5


def test_biases_of_zeros_are_laid_out_as_the_weights():
    """Half of the zeros of a bias could be cut along either axis of Mesh(dp=2, tp=2): weights decide."""
    config = lab.GPTConfig(VOCABULARY, WIDTH, 1, HEADS, SEQUENCE)
    report = check_parallel(
        lambda whole: sharded_gpt(whole, config),
        lambda: lab.GPT(config, "tp").double(),
        inputs=(IDS,),
        mesh=Mesh(dp=2, tp=2),
    )
    assert report.ok, report
    assert report.of("blocks.0.mlp.up.bias").layout == "P('tp')"


def test_losses_that_hardly_differ_are_still_each_ranks_own():
    """Their mean is the reference's; that each is a multiple of it, as any number is of any other, says nothing."""
    for difference in (1e-2, 1e-4, 1e-6):
        losses = [np.array(3.0 + difference), np.array(3.0 - difference)]
        assert judge(losses, np.array(3.0), Layout(), Mesh(dp=2), ROUNDING, what="loss").mistake == "mean"
    assert judge([np.array(6.0)] * 2, np.array(3.0), Layout(), Mesh(dp=2), ROUNDING, what="loss").mistake == "scaled"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_of_short_types_is_no_mistake_and_a_mistake_is_none_of_theirs(dtype):
    whole = whole_model(dtype=dtype)
    report = checked(whole=whole)
    assert report.ok, report
    assert (
        str(dtype).removeprefix("torch.") in report.of("qkv.weight").words
        or "last bit" in report.of("qkv.weight").words
    )
    assert "the loss gap is 0" in report.summary() or ", rounding" in report.summary()
    for mistake in ("bias before the sum", "no f before mlp"):
        assert not checked(mistake, whole=whole).ok


class RowParallel(nn.Module):
    """A row-parallel layer whose bias is in the sum; alone it is the root module."""

    def __init__(self, whole):
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(lab.axis_size("tp"), 1)[lab.axis_index("tp")].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        return lab.all_reduce(F.linear(x, self.weight, self.bias), "tp")


def test_the_root_module_gets_the_words_of_a_wrapped_one():
    words = (
        "its bias is added 4 times; all outputs are right with its bias on one rank of 'tp' alone, so every rank "
        "adds it before the sum: add it once, after it"
    )
    options = {"inputs": (torch.randn(5, 8, dtype=torch.float64),), "in_specs": P(None, "tp"), "mesh": Mesh(tp=4)}
    root = check_parallel(RowParallel, nn.Linear(8, 3).double(), **options)
    assert root.of("output").words == words and root.wrong[0].name == "output"
    wrapped = check_parallel(
        lambda whole: nn.Sequential(RowParallel(whole[0])), nn.Sequential(nn.Linear(8, 3)).double(), **options
    )
    assert wrapped.of("0", "activation").words == f"the first that is wrong: {words}" and wrapped.wrong[0].name == "0"
    assert wrapped.of("output").follows == "output of 0"


class Gathered(nn.Module):
    """An MLP of tokens that ranks share; `gather` puts them together again."""

    up: Any
    down: Any

    def __init__(self, whole, gather, by_hand=False):
        super().__init__()
        self.norm, self.gather, self.by_hand = copy.deepcopy(whole.norm), gather, by_hand
        for name, dim in ("up", 0), ("down", 1):
            piece = getattr(whole, name).weight.detach().chunk(lab.axis_size("tp"), dim)[lab.axis_index("tp")]
            setattr(self, name, nn.Linear(*reversed(piece.shape), bias=False).double())
            getattr(self, name).weight = nn.Parameter(piece.clone())

    def forward(self, x):
        weight, bias = (lab.copy_to(p, "tp") for p in (self.norm.weight, self.norm.bias))
        if self.by_hand:
            weight, bias = self.norm.weight, self.norm.bias
        tokens = self.gather(F.layer_norm(x, x.shape[-1:], weight, bias), "tp", 0)
        return lab.reduce_scatter(self.down(self.up(tokens).tanh()), "tp", 0)


class Ungathered(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12, bias=False), nn.Linear(12, 6, bias=False)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).tanh())


TOKENS = {"inputs": (torch.randn(12, 6, dtype=torch.float64),), "in_specs": P("tp")}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_gather_from_in_the_place_of_all_gather_is_named(num_ranks):
    options = {**TOKENS, "mesh": Mesh(tp=num_ranks)}
    right = check_parallel(lambda whole: Gathered(whole, lab.all_gather), Ungathered().double(), **options)
    assert right.ok, right
    report = check_parallel(lambda whole: Gathered(whole, lab.gather_from), Ungathered().double(), **options)
    assert report.of("output").ok
    first = report.wrong[0]
    assert first.name.startswith("norm.") and first.mistake == "gather"
    assert first.words.endswith(
        "all gradients are right with all_gather in place of gather_from ([12, 6]): ranks use what it returns in "
        "different ways, and all_gather adds gradients up"
    )


def test_one_of_two_mistakes_is_named_by_what_it_makes_right():
    """A gradient of the norm that each rank has for its own tokens is not right with all_gather, either."""
    options = {**TOKENS, "mesh": Mesh(tp=3)}
    model = lambda whole: Gathered(whole, lab.gather_from, by_hand=True)  # noqa: E731
    report = check_parallel(model, Ungathered().double(), **options)
    assert "the gradient of input 0 is right with all_gather in place of gather_from" in report.wrong[0].words
    mended = check_parallel(
        lambda whole: Gathered(whole, lab.all_gather, by_hand=True), Ungathered().double(), **options
    )
    assert {row.name for row in mended.wrong} == {"norm.weight", "norm.bias"}
    assert mended.wrong[0].words.endswith(
        "all gradients are right with the gradients of norm.weight, norm.bias added up over 'tp', as "
        "copy_to(parameter, axis) does"
    )


def test_all_gather_in_the_place_of_gather_from_is_named():
    class Columns(nn.Module):
        def __init__(self, whole, gather):
            super().__init__()
            piece = whole.up.weight.detach().chunk(lab.axis_size("tp"))[lab.axis_index("tp")]
            self.up, self.gather = nn.Linear(6, 12, bias=False), gather
            self.up.weight = nn.Parameter(piece.clone())
            self.norm, self.down = copy.deepcopy(whole.norm), copy.deepcopy(whole.down)

        def forward(self, x):
            return self.down(self.gather(self.up(lab.copy_to(self.norm(x), "tp")).tanh(), "tp", -1))

    options = {"inputs": TOKENS["inputs"], "mesh": Mesh(tp=3)}
    assert check_parallel(lambda whole: Columns(whole, lab.gather_from), Ungathered().double(), **options).ok
    report = check_parallel(lambda whole: Columns(whole, lab.all_gather), Ungathered().double(), **options)
    assert report.wrong[0].name == "up.weight" and report.wrong[0].mistake == "gather"
    assert "all gradients are right with gather_from in place of all_gather ([12, 12])" in report.wrong[0].words


def test_a_gather_that_only_some_ranks_use_is_reported_all_the_same():
    """What only rank 0 uses has no gradient on the others, so that they cannot compare theirs."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.b(self.a(x).tanh()).sum()

    class Half(Sum):
        def forward(self, x):
            index = lab.axis_index("tp")
            y = self.b(lab.gather_from(self.a(x.chunk(2)[index]), "tp", 0).tanh()).sum()
            return y if index == 0 else y.detach() + 0 * self.b.weight.sum()

    def model(whole):
        half = Half().double()
        half.load_state_dict(whole.state_dict())
        return half

    x = torch.randn(4, 4, dtype=torch.float64)
    report = check_parallel(model, Sum().double(), inputs=(x,), mesh=Mesh(tp=2))
    assert report.of("loss").ok and not report.of("b.weight").ok and not report.of("a.weight").ok


@pytest.mark.parametrize("mistake", ["", "scale"])
def test_scores_of_torch_s_own_attention_are_compared(mistake):
    """With a mask, with grouped queries, as a root module without modules inside."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(8, size)) for size in (8, 4, 4, 8))

        def forward(self, x, heads=4, scale=None, o=None, finish=lambda y: y):
            q = (x @ self.q).unflatten(-1, (heads, 2)).transpose(0, 1)
            k, v = ((x @ w).unflatten(-1, (heads // 2, 2)).transpose(0, 1) for w in (self.k, self.v))
            mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
            y = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
            return finish(y.transpose(0, 1).flatten(1) @ self.o)

    class Heads(Attention):
        def __init__(self, whole):
            super().__init__()
            for name, dim in {"q": 1, "k": 1, "v": 1, "o": 0}.items():
                setattr(
                    self, name, nn.Parameter(getattr(whole, name).detach().chunk(2, dim)[lab.axis_index("tp")].clone())
                )

        def forward(self, x):
            scale = 2 * 2**-0.5 if mistake else None
            return super().forward(lab.copy_to(x, "tp"), 2, scale, finish=lambda y: lab.all_reduce(y, "tp"))

    x = torch.randn(5, 8, dtype=torch.float64)
    report = check_parallel(Heads, Attention().double(), inputs=(x,), mesh=Mesh(tp=2))
    assert report.ok == (not mistake), report
    if mistake:
        assert report.wrong[0].name == "output" and report.wrong[0].mistake == "scale"
        words = (
            "all outputs are right with the scores that softmax takes divided by 2: they are 2 times the reference's"
        )
        assert words in report.wrong[0].words


def test_a_loss_gap_is_called_what_it_is():
    report = checked("bias before the sum", whole=whole_model(dtype=torch.float32))
    assert not report.of("loss").ok
    assert "not rounding" in report.summary()


# --- every known mistake is caught and named --------------------------------------------------------------------------

# mistake -> where it is named: kind of row, name, what its words say, its label
MISTAKES = {
    "bias before the sum": (
        "activation",
        "out",
        r"added 4 times; all outputs are right with its bias on one rank",
        "bias",
    ),
    "no sum": (
        "activation",
        "down",
        r"adds its bias to its own part.*outputs are right with an all_reduce over 'tp' here, before its bias is added",
        "partial",
    ),
    "sum after softmax": ("activation", "out", r"rows of attention weights .* add up to 4; cause not known", "softmax"),
    "softmax scale": (
        "activation",
        "out",
        r"all outputs are right with the scores that softmax takes divided by 0\.57735",
        "scale",
    ),
    "no f before mlp": (
        "gradient",
        "norm_2.weight",
        r"all gradients are right with copy_to.* input of gate_up$",
        "partial",
    ),
    "no f before attention": ("gradient", "norm_1.weight", r"right with copy_to.* input of qkv$", "partial"),
    "qkv in one piece": ("gradient", "qkv.weight", r"it holds 3 parts side by side", "fused"),
    "gate and up in one piece": ("gradient", "gate_up.weight", r"it holds 2 parts side by side", "fused"),
    "replicated gradient summed": (
        "gradient",
        "norm.weight",
        r"4 times the reference on every rank .*all gradients are right without all_reduce\(x, 'tp'\) in test_check",
        "scaled",
    ),
    "gradient divided": (
        "gradient",
        "norm.weight",
        r"1/4 of the reference on every rank.*cause not known; tried",
        "scaled",
    ),
    "not tied": ("gradient", "embedding.weight", r"'tied'.*those of both add up to the reference's", "tied"),
    "embedding in a lambda": ("value", "embedding.weight", r"neither counted nor trained", "missing"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_known_mistakes_are_named(mistake):
    kind, name, words, label = MISTAKES[mistake]
    report = checked(mistake)
    with pytest.raises(ParallelError, match="wrong on Mesh"):
        report.raise_if_wrong()
    row = report.of(name, kind)
    assert not row.ok and row.mistake == label, str(report)
    assert re.search(words, row.words), row.words
    assert name in str(report)


def test_a_missing_f_is_placed():
    report = checked("no f before mlp")
    assert report.of("output").ok and report.of("loss").ok
    assert re.search(r"right up to gate_up\.\w+ and wrong from norm_2\.\w+ on", report.notes[-1])
    assert not report.of("qkv.weight").ok  # and everything before it
    # It is on top, and what it makes wrong is folded: no second advice is given.
    first, *behind = report.wrong
    assert first.name.startswith("norm_2.") and first.follows == ""
    assert {row.follows for row in behind} == {first.title}
    assert len(str(report).splitlines()) == 5 and str(report).count("copy_to") == 1
    assert f"and {len(behind)} gradients that may follow from it: norm_2." in str(report).splitlines()[2]


def test_the_input_s_gradient_is_compared():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6, bias=False)

        def forward(self, x):
            return self.down(self.up(x).tanh())

    class Sharded(Plain):
        def forward(self, x):
            return lab.all_reduce(F.linear(self.up(x).tanh(), self.down.weight), "tp")

    def shard(whole):
        model, i = Sharded().double(), lab.axis_index("tp")
        model.up.weight, model.up.bias, model.down.weight = (
            nn.Parameter(p.detach().chunk(3, d)[i].clone())
            for p, d in ((whole.up.weight, 0), (whole.up.bias, 0), (whole.down.weight, 1))
        )
        return model

    x = torch.randn(4, 6, dtype=torch.float64)
    report = check_parallel(shard, Plain().double(), inputs=(x,), mesh=Mesh(tp=3))
    (wrong,) = report.wrong
    assert (wrong.title, wrong.mistake) == ("gradient of input 0", "partial")
    assert wrong.words.endswith("all gradients are right with copy_to(x, 'tp'), Megatron's f, at the input of up")


def test_norm_gradients_that_are_not_summed_under_sequence_parallelism_are_named():
    config = lab.GPTConfig(VOCABULARY, WIDTH, 1, HEADS, 12)
    ids = torch.randint(0, VOCABULARY, (BATCH, 12), generator=torch.Generator().manual_seed(0))

    def forgetful(whole):
        model = sharded_gpt(whole, config, sequence_parallel=True)
        model.blocks[0].norm_2.sequence_axis = None  # type: ignore[union-attr]
        return model

    report = check_parallel(forgetful, lambda: lab.GPT(config, "tp").double(), inputs=(ids,), mesh=Mesh(tp=4))
    assert {row.name for row in report.wrong} == {"blocks.0.norm_2.weight", "blocks.0.norm_2.bias"}
    assert "all gradients are right with the gradients of blocks.0.norm_2" in report.wrong[0].words
    assert "added up over 'tp', as copy_to(parameter, axis) does" in report.wrong[0].words
    assert "look at what is between" not in str(report)


DATA = {  # what is done with the gradients of two data-parallel ranks, of a mesh of (2, 2)
    "right": (lambda g: lab.all_reduce(g, "dp", "mean"), ""),
    "nothing": (lambda g: g, "are right with every gradient averaged over 'dp' after the backward pass"),
    "sum": (
        lambda g: lab.all_reduce(g, "dp"),
        "are right with a mean in place of all_reduce(x, 'dp') in test_check_parallel",
    ),
    "by the world": (lambda g: lab.all_reduce(g, ("dp", "tp")) / 8, "1/2 of the reference on every rank"),
}


@pytest.mark.parametrize("what", DATA)
def test_data_parallel_gradients(what):
    reduce, words = DATA[what]

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            return (self.layer(x) ** 2).mean()

    def finish(model):
        for parameter in model.parameters():
            parameter.grad = reduce(parameter.grad)

    torch.manual_seed(0)
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    report = check_parallel(
        lambda whole: whole,
        Linear().double(),
        inputs=(x,),
        mesh=Mesh(dp=2, tp=2),
        in_specs=P("dp"),
        after_backward=finish,
    )
    assert all(report.of(name, "gradient").ok == (not words) for name in ("layer.weight", "layer.bias"))
    first = next(iter(report.wrong), report.of("layer.bias"))
    assert words in first.words and "copy_to" not in str(report), first.words
    assert report.of("loss").ok
    assert report.summary().endswith("each rank has its part of the loss")
    # Each rank's loss is the mean over its own data; so the gradient of an input is as many times the reference's.
    assert "2 times the reference on every rank, as each rank's loss is the mean over" in report.of("input 0").words
    assert report.ok == (what == "right")


@pytest.mark.parametrize("is_cut_by_hand", [False, True])
def test_a_loss_averaged_over_data_leaves_gradients_to_be_added_up(is_cut_by_hand):
    """As all_reduce divides on the way back, each rank has its part of the gradient. No copy_to is missing."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x):
            return (self.down(self.up(x).tanh()) ** 2).mean()

    class Averaged(Mean):
        def forward(self, x):
            x = x.chunk(2)[lab.axis_index("dp")] if is_cut_by_hand else x
            return lab.all_reduce(super().forward(x), "dp", "mean")

    def model(whole):
        averaged = Averaged().double()
        averaged.load_state_dict(whole.state_dict())
        return averaged

    x = torch.randn(4, 5, dtype=torch.float64)
    options = {"inputs": (x,), "mesh": Mesh(dp=2, tp=2), "in_specs": None if is_cut_by_hand else P("dp")}
    report = check_parallel(model, Mean().double(), **options)
    assert "the loss gap is 0" in report.summary() or ", rounding" in report.summary()
    first = report.wrong[0]
    assert first.name == "down.bias"
    assert "with every gradient added up over 'dp' after the backward pass" in first.words
    assert not any("copy_to" in row.words for row in report.wrong if not row.name.startswith("input"))

    def add_up(model):
        for parameter in model.parameters():
            parameter.grad = lab.all_reduce(parameter.grad, "dp")

    mended = check_parallel(model, Mean().double(), **options, after_backward=add_up)
    assert {row.name for row in mended.wrong} <= {"input 0"}


def test_dropout_is_compared():
    report = checked(whole=whole_model(0.2).train())
    assert report.ok and sum(row.kind == "dropout" for row in report.rows) == 3, report
    for mistake, words in (
        ("one generator inside", "the same mask inside: ranks 0 and 1 hold different activations"),
        ("a generator of its own outside", "different dropout: ranks 0 and 1 hold the same tensor"),
    ):
        report = checked(mistake, whole=whole_model(0.2).train())
        (wrong,) = report.wrong
        assert wrong.kind == "dropout" and words in wrong.words


class Halves(nn.Module):
    """A layer of which ranks along "tp" have some of the hidden features, and drop from them, or from what each of
    them adds to the sum; or the whole layer."""

    def __init__(self, whole, drops):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 16, bias=False)
        self.drops, self.is_cut = drops, isinstance(whole, nn.Module)
        if self.is_cut:
            up, down = (x.detach().clone().chunk(lab.axis_size("tp"), dim)[lab.axis_index("tp")]
                        for x, dim in ((whole.up.weight, 0), (whole.down.weight, 1)))  # fmt: skip
            self.up.weight, self.down.weight = nn.Parameter(up), nn.Parameter(down)
            self.up.bias = nn.Parameter(whole.up.bias.detach().chunk(lab.axis_size("tp"))[lab.axis_index("tp")].clone())

    def dropped(self, x):
        return lab.dropout(x, 0.5) if self.training else x  # one mask, on all ranks

    def forward(self, x):
        x = lab.copy_to(x, "tp") if self.is_cut else x
        x = self.up(x).tanh()
        y = self.down(self.dropped(x) if self.drops == "pieces" else x)
        y = self.dropped(y) if self.drops == "terms" else y
        return lab.reduce_from(y, "tp") if self.is_cut else y


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(dp=2, tp=2)], ids=str)
def test_one_mask_is_right_for_the_terms_of_a_sum(mesh):
    """They are dropped alike, and their sum too. Pieces of one tensor must not be."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for drops in ("terms", "pieces"):
        report = check_parallel(
            lambda whole, drops=drops: Halves(whole, drops), Halves(None, drops), inputs=(x,), mesh=mesh
        )
        said = [row.words for row in report.wrong]
        assert len(said) == (drops == "pieces") and all("the same mask inside" in words for words in said), report


def test_the_reference_and_the_inputs_are_left_as_they_were():
    whole, ids = whole_model(0.1).train(), IDS.clone()
    for p in whole.parameters():
        p.grad = torch.ones_like(p)
    before, state = copy.deepcopy(whole.state_dict()), torch.get_rng_state()
    model = lambda whole: Hand(whole).double().train()  # noqa: E731
    sgd = lambda p: torch.optim.SGD(p, lr=1.0)  # noqa: E731
    check_parallel(model, whole, inputs=(ids,), mesh=Mesh(tp=2), loss=loss_of, optimizer=sgd)
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    assert all(bool((p.grad == 1).all()) for p in whole.parameters())
    assert whole.training and torch.equal(torch.get_rng_state(), state) and torch.equal(ids, IDS)


def test_a_bias_of_zeros_hides_its_mistake_unless_it_is_given_values():
    whole = whole_model()
    with torch.no_grad():
        whole.out.bias.zero_()
    assert not checked("bias before the sum", whole=whole).ok
    assert checked("bias before the sum", whole=whole, perturb=False).ok


def test_other_values_and_other_names():
    whole = whole_model()

    @torch.no_grad()
    def other_values(whole):
        model = Hand(whole).double()
        model.norm.weight += lab.axis_index("tp")
        return model

    options = {"inputs": (IDS,), "mesh": Mesh(tp=2), "loss": loss_of}
    row = check_parallel(other_values, whole, **options).of("norm.weight", "value")
    assert row.words.startswith("not the reference's values to begin with: a different multiple")
    report = check_parallel(Hand, whole, **options, names={"norm.weight": "last.weight"})
    assert "names= says if it is called otherwise" in report.of("norm.weight", "value").words

    def a_buffer_on_one(whole):
        model = Hand(whole).double()
        if lab.axis_index("tp"):
            held = model.norm.weight.detach()
            del model.norm.weight
            model.norm.register_buffer("weight", held)
        return model

    row = check_parallel(a_buffer_on_one, whole, **options).of("norm.weight", "value")
    assert "no such parameter on rank 1: " in row.words


def test_specs_of_a_parameter_that_the_model_does_not_have():
    with pytest.raises(SpecError, match="specs name 'qkw"):
        checked(specs={"qkw.weight": P("tp")})


@pytest.mark.timeout(120)
def test_on_processes():
    report = checked("no f before mlp", mesh=Mesh(tp=2), on="processes")
    assert str(report) == str(checked("no f before mlp", mesh=Mesh(tp=2)))


# --- the verdict, by itself -------------------------------------------------------------------------------------------

ROUNDING = Rounding("float64", 100)


@st.composite
def cases(draw):
    """A whole, a mesh, a layout and the ranks' right pieces."""
    mesh = draw(st.sampled_from([Mesh(tp=1), Mesh(tp=2), Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=2)]))
    parts = draw(st.sampled_from([(), (1, 1), (1, 1, 1), (2, 1, 1)]))
    num_ranks = mesh.axis_size("tp")
    rows = num_ranks * sum(parts) * 2 if parts else draw(st.integers(1, 13))
    shape = (rows, draw(st.integers(1, 4)))
    layout = draw(st.sampled_from([Layout(P("tp"), tuple(2 * num_ranks * p for p in parts)), Layout()]))
    whole = np.random.default_rng(draw(st.integers(0, 99))).normal(size=shape)
    return mesh, layout, whole, [take(whole, layout, mesh, rank) for rank in mesh.ranks]


@settings(max_examples=40)
@given(cases())
def test_right_pieces_are_right_and_others_are_not(case):
    mesh, layout, whole, pieces = case
    found = judge(pieces, whole, layout, mesh, ROUNDING)
    assert (found.ok, found.error, found.words) == (True, 0.0, "equal to the last bit")
    for factor in (2, 0.5, -1, 0):
        assert not judge([factor * p for p in pieces], whole, layout, mesh, ROUNDING).ok
    nearly = [p * (1 + EPSILON["float64"]) for p in pieces]
    assert judge(nearly, whole, layout, mesh, ROUNDING).ok
    one = [p.copy() for p in pieces]
    one[-1] = one[-1] + 1e-3
    assert not judge(one, whole, layout, mesh, ROUNDING).ok or one[-1].size == 0


@settings(max_examples=40)
@given(cases())
def test_a_layout_is_found_from_shapes(case):
    mesh, layout, whole, pieces = case
    assert (
        layout in layouts_for(whole.shape, [p.shape for p in pieces], mesh)
        or mesh.axis_size("tp") == 1
        or (layout.parts and len(set(layout.parts)) > 1)
        or (whole.shape[0] < mesh.axis_size("tp"))
    )


@pytest.mark.parametrize("spec", [P("tp"), P("tp", None), P(("dp", "tp"))])
def test_a_parameter_may_hold_several_parts_however_its_spec_is_written(spec):
    (cuts, _), *_ = recuts({"qkv.weight": np.zeros((48, 4))}, {"qkv.weight": Layout(spec)}, Mesh(dp=1, tp=2))
    assert cuts == {"qkv": 3}


def test_what_the_numbers_say():
    mesh, whole = Mesh(tp=4), np.random.default_rng(0).normal(size=(8, 12))
    column = Layout(P(None, "tp"))
    cut = [take(whole, column, mesh, rank) for rank in mesh.ranks]

    def words(pieces, layout=WHOLE):
        return judge(pieces, whole, layout, mesh, ROUNDING).words

    assert "the right pieces on the wrong ranks: rank 0 has that of rank 1" in words(cut[1:] + cut[:1], column)
    assert words([whole, whole, whole, whole + 1]).endswith("only ranks 0, 1, 2 are right")
    why = "the loss does not depend on it there, or autograd does not see that it does"
    assert words([None] * 4) == f"no gradient on every rank: {why}"
    assert words([whole] * 3 + [None]) == f"no gradient on rank 3: {why}"
    assert "zero on every rank" in words([0 * whole] * 4)
    assert "not finite on rank 2" in words([whole, whole, whole * np.nan, whole])
    assert "rank 0 holds [8, 3]; copies of [8, 12] would be [8, 12]" in words(cut)
    assert "minus the reference" in words([-whole] * 4)
    wrong_row = whole.copy()
    wrong_row[3] += 1
    assert "wrong in 4 of 32 places along dim 0 (the first at 3)" in words([wrong_row] * 4)
    assert "on each rank: 1, 2, 3, 4" in words([whole * (r + 1) for r in range(4)])
    assert words([whole * 1.000047] * 4) == "1.000047 times the reference on every rank"
    padded = [np.pad(p, ((0, 0), (0, 2))) for p in cut]
    assert judge(padded, whole, column, mesh, ROUNDING).ok
    near = whole + np.abs(whole).max() * 2.0**-50
    assert words([near] * 4).startswith("within rounding (9.6e-16; float64, sums of up to 100 terms")


def test_a_report_is_data():
    rows = [
        Row.of("loss", "loss", (), "copies", Verdict(True, 1e-9, 1e-6, "within rounding (1e-09; ...)")),
        Row.of("gradient", "a<b", (2,), "copies", Verdict(False, np.inf, 0, "no gradient", "missing")),
    ]
    report = ParallelReport(rows, mesh="Mesh(tp=2)", notes=["a note"])
    assert report.rows == rows
    assert str(report).splitlines() == [
        "1 of 2 wrong on Mesh(tp=2): 1 gradient; the loss gap is 1e-09, rounding",
        "  gradient of a<b  no gradient",
        "  (a note)",
    ]
    assert "<details open>" in report._repr_html_() and "a&lt;b" in report._repr_html_()
    assert report.table().count("\n") == 2
    with pytest.raises(KeyError, match="no row of 'c'; the names are loss, a<b"):
        report.of("c")


def test_a_model_of_another_shape_is_told_so():
    whole, x = nn.Linear(4, 6).double(), torch.randn(3, 4, dtype=torch.float64)
    options = {"inputs": (x,), "mesh": Mesh(tp=2)}
    model = lambda whole: nn.Linear(4, 5).double()  # noqa: E731
    report = check_parallel(model, whole, **options, loss=lambda y: y.square().sum())
    assert report.of("weight", "value").words.endswith("rank 0 holds [5, 4]; copies of [6, 4] would be [6, 4]")
    assert report.of("output").mistake == "shape" and not report.of("loss").ok
    report = check_parallel(model, whole, **options)
    assert "gradients are not compared" in report.notes[-1]


def test_keyword_arguments_reach_both_models():
    class Scaled(nn.Linear):
        def forward(self, x, *, scale):
            return super().forward(x) * scale

    options = {"inputs": (torch.randn(2, 3),), "mesh": Mesh(tp=2)}
    assert check_parallel(lambda whole: whole, Scaled(3, 3), **options, kwargs={"scale": 2.0}).ok
    with pytest.raises(TypeError, match="scael"):
        check_parallel(lambda whole: whole, Scaled(3, 3), **options, scael=2.0)  # type: ignore[call-arg]


def test_a_model_that_draws_random_numbers_hides_no_mistake():
    """In float64 the reference draws other numbers than in float32. That is no rounding."""

    class Noisy(nn.Module):
        def __init__(self, factor=1.0):
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.factor = nn.Linear(4, 6), factor

        def forward(self, x):
            y = self.layer(x).tanh()
            noise = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0))
            return self.factor * (y + noise)

    options = {"inputs": (torch.randn(3, 4),), "mesh": Mesh(tp=2)}
    assert check_parallel(lambda whole: Noisy(), Noisy(), **options, perturb=False).ok
    report = check_parallel(lambda whole: Noisy(1.5), Noisy(), **options, perturb=False)
    assert report.of("output").mistake == "scaled" and not report.of("layer.weight").ok


def test_what_makes_the_model_must_be_a_function_that_returns_one():
    with pytest.raises(TypeError, match="model is Linear; give a function that makes each rank's model"):
        check_parallel(nn.Linear(2, 2), nn.Linear(2, 2), mesh=Mesh(tp=2))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="returned NoneType; return the module"):
        check_parallel(lambda whole: None, nn.Linear(2, 2), mesh=Mesh(tp=2))  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="the reference is dict"):
        check_parallel(lambda whole: whole, dict, mesh=Mesh(tp=2))  # type: ignore[arg-type]
