"""JAX's check_parallel and a GPT whose sequence ranks share: right in each scheme; and mistakes people made."""

from typing import Any

import jax
import numpy as np
import pytest
from jax import Array

import tplab.jax as lab
from tests.sequence.counted import next_tokens
from tplab import Mesh, P
from tplab.jax.layers.vocabulary import vocab_parallel_cross_entropy
from tplab.jax.private import in_float64
from tplab.sequence import TokenLayout

CONFIG = lab.GPTConfig(32, 16, 1, 4, context=24)
IDS = np.random.default_rng(0).integers(0, 32, (2, 24))
TARGETS = next_tokens(IDS, (20, 4))  # two of them do not count, and not on every rank


def report(mesh: Mesh, mistake: str = "", layout: Any = "zigzag", **about: Any) -> Any:
    tokens, whole = TokenLayout(layout, 24, mesh.axis_size("cp")), lab.GPT(CONFIG)
    shared = lab.GPT(CONFIG, context_axis="cp", layout=layout, **about)

    def reference(params: Any, ids: Array, targets: Array) -> Array:
        return whole.loss(params, tokens.restore(ids), tokens.restore(targets))

    def model(params: Any, ids: Array, targets: Array) -> Array:
        if mistake == "a mean of means":
            mean = vocab_parallel_cross_entropy(shared(params, ids), targets, "tp", CONFIG.vocab_size)
            return lab.all_reduce(mean, "cp", "mean")
        loss = shared.loss(params, ids, targets)
        return loss * lab.axis_size("cp") if mistake == "times cp" else loss

    with in_float64():
        return lab.check_parallel(
            model, reference, params=whole.init(jax.random.key(0)), mesh=mesh, specs=shared.specs,
            inputs=(tokens.arrange(IDS), tokens.arrange(TARGETS)), in_specs=P(None, "cp"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "about"),
    [
        (Mesh(cp=4, tp=1), {}),
        (Mesh(cp=3, tp=1), {"scheme": "gather", "layout": "striped"}),
        (Mesh(tp=2, cp=2), {"scheme": "head", "layout": "contiguous", "sequence_parallel": True}),
    ],
    ids=str,
)
def test_every_scheme_trains_the_whole_model(mesh: Mesh, about: dict[str, Any]):
    found = report(mesh, **about)
    assert found.ok, found


@pytest.mark.parametrize("mistake", ["a mean of means", "times cp"])
def test_published_mistakes_are_seen(mistake: str):
    """Those of what is added up, which is JAX's own. Mistakes of labels and positions are tried in torch."""
    assert not report(Mesh(cp=2, tp=1), mistake).ok
