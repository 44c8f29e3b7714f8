"""Attention and a transformer block in NumPy: the plain answers for the exercises of labs 04, 05, 20 and 21."""

from __future__ import annotations

import math

import numpy as np

from tplab.exercises.exercise import Tensors
from tplab.mesh import Mesh
from tplab.sharding import P

EPSILON = 1e-6
TOLERANCE = 1e-5  # a norm without its epsilon passes, and gelu's approximation by tanh does not
BLOCK_SPECS = {
    "x": P(),
    "scale": P(),
    **dict.fromkeys("qkvo", P("tp")),
    "a": P(None, "tp"),
    "b": P("tp"),
}
_real_erf = np.vectorize(math.erf, otypes=[float])


def _erf(u: np.ndarray) -> np.ndarray:
    """erf, also where `slopes` has taken its steps, in each of which the real parts are the same."""
    real = np.real(u[:1]) if np.iscomplexobj(u) else u
    return _real_erf(real) + (u - real) * 2 / math.sqrt(math.pi) * np.exp(-(real**2))


def rms_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, sees: np.ndarray | bool = True) -> np.ndarray:
    """q [.., n, d], k, v [.., m, d], sees [n, m]: whether a query sees a key   ->   o [.., n, d], 0 if it sees none"""
    return mixed(np.where(sees, q @ k.mT / np.sqrt(q.shape[-1]), -np.inf), v)


def mixed(scores: np.ndarray, v: np.ndarray) -> np.ndarray:
    """softmax(scores) @ v; scores [.., n, m], v [.., m, d]"""
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    return weights @ v / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


def causal_attention(x: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> np.ndarray:
    """The sum of the heads' terms, where each token sees itself and those before it.

    x [.., S, D]   q, k, v [.., n, D, d]   o [.., n, d, D]   ->   [.., S, D]
    """
    each = x[..., None, :, :]  # for each head
    mixed = attend(each @ q, each @ k, each @ v, np.tri(x.shape[-2], dtype=bool))
    return (mixed @ o).sum(-3)


def gelu_mlp(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    u = x @ a
    return u * (1 + _erf(u / math.sqrt(2))) / 2 @ b


def one_norm(x: np.ndarray, scale: np.ndarray, *weights: np.ndarray) -> np.ndarray:
    """x + attention(h) + mlp(h) with h = norm(x); without attention if only a and b are given."""
    *heads, a, b = weights
    h = rms_norm(x, scale)
    return x + gelu_mlp(h, a, b) + (causal_attention(h, *heads) if heads else 0)


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
