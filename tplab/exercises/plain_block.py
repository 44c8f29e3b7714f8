"""A transformer block in NumPy, with gradients derived by hand: the plain answer for the exercises of labs 04 and 05.

Each part returns its result and its backward pass: a function of dy that returns the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tplab.exercises.exercise import Seen, Tensors
from tplab.exercises.trials import weight
from tplab.mesh import Mesh
from tplab.sharding import P

Backward = Callable[[np.ndarray], Tensors]

EPSILON = 1e-6
TOLERANCE = 1e-5  # a norm without its epsilon passes, and gelu's approximation by tanh does not
BLOCK_SPECS = {
    "x": P(),
    "scale": P(),
    **dict.fromkeys("qkvo", P("tp")),
    "a": P(None, "tp"),
    "b": P("tp"),
}
_erf = np.vectorize(math.erf, otypes=[float])


def rms_norm(x: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, Backward]:
    """x / sqrt(mean(x^2) + eps) * scale; and dy -> dx, and the part "of each token" of scale's gradient."""
    root = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPSILON)
    unit = x * root

    def backward(dy: np.ndarray) -> Tensors:
        dunit = dy * scale
        dx = root * (dunit - unit * (dunit * unit).mean(-1, keepdims=True))
        return {"dx": dx, "of each token": (dy * unit).sum(0)}

    return unit * scale, backward


def causal_attention(x: np.ndarray, weights: Tensors) -> tuple[np.ndarray, Backward]:
    """The sum of the heads' terms, where each token sees itself and those before it; and dy -> all gradients."""
    q, k, v = (np.einsum("bsD,nDd->bnsd", x, weights[name]) for name in "qkv")
    size = q.shape[-1] ** -0.5
    scores = np.einsum("bnsd,bntd->bnst", q, k) * size
    length = x.shape[1]
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares = shares / shares.sum(-1, keepdims=True)
    mixed = np.einsum("bnst,bntd->bnsd", shares, v)

    def backward(dy: np.ndarray) -> Tensors:
        dmixed = np.einsum("bsD,ndD->bnsd", dy, weights["o"])
        dshares = np.einsum("bnsd,bntd->bnst", dmixed, v)
        dscores = shares * (dshares - (dshares * shares).sum(-1, keepdims=True)) * size
        into = {
            "q": np.einsum("bnst,bntd->bnsd", dscores, k),
            "k": np.einsum("bnst,bnsd->bntd", dscores, q),
            "v": np.einsum("bnst,bnsd->bntd", shares, dmixed),
        }
        grads = {f"d{name}": np.einsum("bsD,bnsd->nDd", x, into[name]) for name in "qkv"}
        dx = np.stack([np.einsum("bnsd,nDd->bsD", into[name], weights[name]) for name in "qkv"])
        return {"dx": dx.sum(0), **grads, "do": np.einsum("bnsd,bsD->ndD", mixed, dy)}

    return np.einsum("bnsd,ndD->bsD", mixed, weights["o"]), backward


def gelu_mlp(x: np.ndarray, weights: Tensors) -> tuple[np.ndarray, Backward]:
    """gelu(x @ a) @ b; and dy -> all gradients."""
    a, b = weights["a"], weights["b"]
    u = x @ a
    below = (1 + _erf(u / math.sqrt(2))) / 2  # the normal distribution function at u
    hidden = u * below

    def backward(dy: np.ndarray) -> Tensors:
        du = dy @ b.T * (below + u * np.exp(-(u**2) / 2) / math.sqrt(2 * math.pi))
        da, db = (np.tensordot(left, right, ([0, 1], [0, 1])) for left, right in ((x, du), (hidden, dy)))
        return {"dx": du @ a.T, "da": da, "db": db}

    return hidden @ b, backward


def one_norm(tensors: Tensors) -> Tensors:
    """y = x + attention(h) + mlp(h) with h = norm(x), and the gradients of sum(y * weight); without attention if
    `tensors` has no q.

    Also "residual", the part of dx that does not pass through h; "through ...", the part through each of the two paths
    from h; and the part "of each token" of scale's gradient.
    """
    x = tensors["x"]
    h, through_norm = rms_norm(x, tensors["scale"])
    parts = {"mlp": gelu_mlp(h, tensors)}
    if "q" in tensors:
        parts["attention"] = causal_attention(h, tensors)
    y = x + sum(term for term, _ in parts.values())
    dy, grads, through = weight(y), Tensors(), Tensors()
    tokens = np.zeros_like(x[0])
    for name, (_, backward) in parts.items():
        grads |= backward(dy)
        into = through_norm(grads["dx"])
        through[f"through {name}"], tokens = into["dx"], tokens + into["of each token"]
    grads |= {"dx": dy + sum(through.values()), "dscale": tokens.sum(0), "of each token": tokens}
    return {"y": y, "residual": dy, **grads, **through}


def own_weights(seen: Seen) -> Tensors:
    """`one_norm` of all tokens with this rank's heads and hidden features: its own part of every gradient."""
    return one_norm({**seen.own, "x": seen.tensors["x"]})


def block_tensors(rng: np.random.Generator, mesh: Mesh) -> Tensors:
    """Small random arguments of a block with one norm."""
    width, num_heads, head_width, hidden = 4, 12, 2, 12
    shapes = {
        "x": (2, 12, width),
        "scale": (width,),
        **dict.fromkeys("qkv", (num_heads, width, head_width)),
        "o": (num_heads, head_width, width),
        "a": (width, hidden),
        "b": (hidden, width),
    }
    tensors = {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}
    return {**tensors, "x": 4 * tensors["x"]}  # so large that the norm's epsilon is less than rounding in float32
