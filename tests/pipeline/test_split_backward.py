"""I and W of many kinds of layers: together they give B's gradients for B's FLOPs, and keep only what W needs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tplab.torch.pipeline.graph import Graph

D = 16


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.qkv, self.out, self.up, self.down = (nn.Linear(a * D, b * D) for a, b in [(1, 3), (1, 1), (1, 4), (4, 1)])

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class UsedTwice(nn.Module):
    """Weights that several nodes of the chain lead to: directly, transposed, viewed, indexed."""

    def __init__(self):
        super().__init__()
        self.linear, self.w, self.v = nn.Linear(D, D), nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D))

    def forward(self, x):
        y = (x @ self.w.t()) @ self.w + self.linear(self.linear(x).relu() * self.v)
        return y.tanh() * self.v.view(1, 1, -1) + self.w[0]


class Recurrent(nn.Module):
    """Whose first step is a branch of its own: the state it begins with is a constant."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(D, D, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w.T, torch.einsum("bsd,bse->de", x, dy)


class PythonFunction(nn.Module):
    """Which computes both gradients or none."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        return Product.apply(x, self.w).tanh()


class Normed(nn.Module):
    """Whose weight is computed from two parameters."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))

    def forward(self, x):
        return self.linear(x).tanh()


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        return self.linear(x.mul_(2)).relu_()


class MixedTypes(nn.Module):
    """Numbers of one precision times a weight of another, over a dim that it does not have."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return (x * self.w.float()).tanh() + self.w.float()


class TiedWords(nn.Module):
    """Tokens in, logits by the same matrix out."""

    def __init__(self):
        super().__init__()
        self.words, self.block = nn.Embedding(11, D), Block()

    def forward(self, ids):
        return self.block(self.words(ids)) @ self.words.weight.t()


class Several(nn.Module):
    """Several tensors in and out: one that passes through, a mask, one that nothing depends on."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, y, mask, unused):
        return self.a(x) * mask, self.b(x), y, mask


CASES = {
    "block": lambda: nn.Sequential(Block(), Block()),
    "used twice": lambda: nn.Sequential(UsedTwice(), nn.Tanh(), UsedTwice()),
    "one module twice": lambda: nn.Sequential(module := UsedTwice(), nn.Tanh(), module),
    "recurrent": Recurrent,
    "python function": lambda: nn.Sequential(PythonFunction(), PythonFunction()),
    "weight norm": lambda: nn.Sequential(Normed(), Normed()),
    "in place": InPlace,
    "mixed types": lambda: nn.Sequential(MixedTypes(), nn.Linear(D, D)),
    "no bias": lambda: nn.Sequential(nn.Linear(D, D, bias=False), nn.Tanh(), nn.Linear(D, D, bias=False)),
    "convolution": lambda: nn.Sequential(nn.Conv1d(5, 7, 3), nn.ReLU(), nn.BatchNorm1d(7), nn.Conv1d(7, 5, 3)),
    "no parameters": nn.Tanh,
    "frozen": lambda: nn.Sequential(Block(), nn.Linear(D, D).requires_grad_(False), Block()),
}
X = torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(10).reshape(2, 5)


def passes(module, inputs, wants_grads):
    """(dx, dw, FLOPs) of B, then of I and W, and the bytes kept before I, between, after W."""
    parameters = [p for p in module.parameters() if p.requires_grad]

    def function(*xs):
        outputs = module(*xs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def graph():
        made, outputs = Graph.of(function, parameters, wants_grads, tuple(x.clone() for x in inputs))
        random = torch.Generator().manual_seed(1)
        return made, tuple(
            torch.randn(y.shape, dtype=y.dtype, generator=random) for y in outputs if y.is_floating_point()
        )

    def counted(function, *args):
        with FlopCounterMode(display=False) as counter:
            return function(*args), counter.get_total_flops()

    def num_bytes(made):
        return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in made.tensors()}.values())

    whole, grads = graph()
    (dx, dw), flops = counted(whole.backward, grads)
    parts, grads = graph()
    held = [num_bytes(parts)]
    dx_i, flops_i = counted(parts.input_grads, grads)
    held.append(num_bytes(parts))
    dw_w, flops_w = counted(parts.weight_grads)
    held.append(num_bytes(parts))
    assert len(dx_i) == len(dx)
    assert dw_w.keys() == dw.keys()
    for got, want in [*zip(dx_i, dx), *((dw_w[p], dw[p]) for p in dw)]:
        # the same operations on the same numbers; where a weight is used twice, its terms are added in another order
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    return flops, flops_i, flops_w, held, (dx, dw)


@pytest.mark.parametrize("wants_grads", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_i_and_w_are_b(name, wants_grads):
    module = CASES[name]().double()
    flops, flops_i, flops_w, held, (dx, dw) = passes(module, (X[:, :, :D],), wants_grads)
    assert flops_i + flops_w == flops
    assert held[2] == 0
    assert len(dx) == wants_grads
    if wants_grads or dw:
        torch.testing.assert_close(*against_autograd(module, (X,), wants_grads, dx, dw))


def against_autograd(module, inputs, wants_grads, dx, dw):
    """Ours and torch's own, both as one row of numbers."""
    xs = [x.clone().requires_grad_(wants_grads) for x in inputs]
    module.zero_grad()
    y = module(*(x * 1 for x in xs))
    random = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, dtype=y.dtype, generator=random))
    theirs = [x.grad for x in xs if wants_grads] + [p.grad for p in dw]
    return torch.cat([g.flatten() for g in (*dx, *dw.values())]), torch.cat([g.flatten() for g in theirs])


def test_a_linear_layer_splits_in_two_halves():
    flops, flops_i, flops_w, *_ = passes(nn.Linear(D, D).double(), (X,), True)
    assert flops_i == flops_w == flops / 2 == 2 * 10 * D * D


def test_the_first_stage_has_a_chain_too():
    """Its tokens have no gradient; still I does the chain, and W no more than the weights."""
    layers = nn.Sequential(nn.Embedding(11, D), nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)).double()
    flops, flops_i, flops_w, *_ = passes(layers, (IDS,), False)
    assert flops_i == flops_w == flops / 2
    flops, flops_i, flops_w, *_ = passes(TiedWords().double(), (IDS,), False)
    assert flops_i + flops_w == flops


def test_what_i_lets_go():
    """Attention and GELU are I's; W keeps each layer's input and the gradient at its output."""
    *_, held, _ = passes(nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Tanh(), nn.Tanh()).double(), (X,), True)
    one = X.nbytes
    weight = D * D * 8  # the graph refers to it; a stage does not count parameters
    assert held == [one * 4 + weight, one * 2 + weight, 0]  # x and three outputs; x and dy; nothing


def test_several_tensors_through_a_stage():
    mask = torch.tensor([True, False]).repeat(8)[None, None]
    flops, flops_i, flops_w, _, (dx, _) = passes(Several().double(), (X, X + 1, mask, X + 2), True)
    assert flops_i + flops_w == flops
    assert len(dx) == 3  # of the mask there is none
    assert dx[1].abs().max() > 0  # passed through
    assert dx[2].abs().max() == 0  # nothing depends on it: zeros, and not nothing


def test_writing_to_what_is_saved_is_found():
    module = nn.Sequential(nn.Linear(D, D), nn.Sigmoid()).double()
    graph, outputs = Graph.of(lambda x: (module(x),), list(module.parameters()), True, (X.clone(),))
    outputs[0].add_(1)
    with pytest.raises(RuntimeError, match="version 1, and was saved at version 0"):
        graph.input_grads((torch.ones_like(X),))


# --- hooks ------------------------------------------------------------------------------------------------------------


class Hooked(nn.Module):
    """Layers with hooks on what they compute; each hook changes the gradient, and counts how often it is called.

    steps   (kind of layer, where its hooks are)
    """

    def __init__(self, steps):
        super().__init__()
        torch.manual_seed(0)
        self.steps, self.calls = steps, Counter()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in steps)
        self.words = nn.Embedding(11, D)
        for place, (layer, (_, hooks)) in enumerate(zip(self.layers, steps)):
            if "parameter" in hooks:
                layer.weight.register_hook(self.hook(f"parameter {place}"))  # type: ignore[operator]
            if "module" in hooks:
                layer.register_full_backward_hook(
                    lambda module, into, out, place=place: self.seen(f"module {place}", *filter(torch.is_tensor, into))
                )
                layer.register_full_backward_pre_hook(lambda module, out, place=place: self.seen(f"pre {place}", *out))

    def seen(self, name, *grads):
        self.calls[name] += 1
        return tuple(g * 1.25 for g in grads) or None

    def hook(self, name):
        return lambda g: self.seen(name, g)[0]  # type: ignore[index]

    def forward(self, x):
        x = x if x.is_floating_point() else self.words(x)
        for place, (kind, hooks) in enumerate(self.steps):
            layer = self.layers[place]
            if "input" in hooks and x.requires_grad:
                x.register_hook(self.hook(f"input {place}"))
            x = getattr(self, kind)(x, layer, hooks, place)
            if "output" in hooks and x.requires_grad:
                x.register_hook(self.hook(f"output {place}"))
            if "node" in hooks and x.requires_grad:
                x.grad_fn.register_prehook(lambda grads, place=place: self.seen(f"prehook {place}", *grads))
                x.grad_fn.register_hook(lambda into, out, place=place: self.calls.update([f"posthook {place}"]))
        return x

    def linear(self, x, layer, hooks, place):
        return layer(x)

    def derived(self, x, layer, hooks, place):
        """A weight that is computed, whose gradients have hooks."""
        weight = layer.weight * 0.5
        turned = weight.t()
        if "weight" in hooks:
            weight.register_hook(self.hook(f"weight {place}"))
            turned.register_hook(self.hook(f"turned {place}"))
        return torch.addmm(layer.bias, x.flatten(0, 1), turned).reshape(x.shape)

    def twice(self, x, layer, hooks, place):
        return F.layer_norm(layer(x) * layer.bias + layer.bias, (D,), layer.bias)

    def parts(self, x, layer, hooks, place):
        """Several outputs of one node, and writing to a part of one."""
        a, b = layer(x).chunk(2, -1)
        if "weight" in hooks and a.requires_grad:
            b.register_hook(self.hook(f"part {place}"))
        y = torch.cat([a * 2, b], -1)
        y[..., 0] = (layer.weight.sum(0) * x).sum(-1)
        return y

    def python(self, x, layer, hooks, place):
        return Product.apply(x, layer.weight) + layer.bias

    def unit(self, x, layer, hooks, place):
        return x.tanh()


HOOKS = st.sets(st.sampled_from(["input", "output", "weight", "parameter", "module", "node"]))
KINDS = st.sampled_from(["linear", "derived", "twice", "parts", "python", "unit"])


@settings(max_examples=60)
@given(st.lists(st.tuples(KINDS, HOOKS), min_size=1, max_size=3), st.sampled_from(["tokens", "constant", "gradient"]))
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
def test_hooks_are_called_as_often_as_by_backward_and_change_the_gradients_as_often(steps, inputs):
    module, wants_grads = Hooked(steps).double(), inputs == "gradient"
    x = IDS if inputs == "tokens" else X
    parameters = list(module.parameters())

    def calls_of(passes):
        module.calls.clear()
        graph, (y,) = Graph.of(lambda x: (module(x),), parameters, wants_grads, (x,))
        found = passes(graph, (y.cos(),))
        return found, Counter(module.calls)

    plain = x.clone().requires_grad_(wants_grads) if x.is_floating_point() else x
    module.zero_grad()
    y = module(plain * 1)
    if y.requires_grad:
        y.backward(y.detach().cos())
    want, calls = {p: p.grad for p in parameters if p.grad is not None}, Counter(module.calls)
    (dx, dw), whole = calls_of(lambda graph, grads: graph.backward(grads))
    (dx_i, dw_w), split = calls_of(lambda graph, grads: (graph.input_grads(grads), graph.weight_grads()))
    assert whole == split == calls
    assert dw.keys() == dw_w.keys() == want.keys()
    for got in dw, dw_w:
        for parameter, grad in want.items():
            torch.testing.assert_close(got[parameter], grad, rtol=1e-12, atol=1e-12)  # sums in another order
    for got in dx, dx_i:
        if wants_grads:
            torch.testing.assert_close(got[0], plain.grad, rtol=1e-12, atol=1e-12)
