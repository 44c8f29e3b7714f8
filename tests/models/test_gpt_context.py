"""The GPT with its sequence shared along "cp", against the whole one: logits, loss, every gradient."""

from typing import Any

import numpy as np
import pytest

from tests.frameworks import FRAMEWORKS, Framework, in_both
from tests.models.test_gpt import batch_of, config_for, dense, joined, nested, pieces, state_of
from tests.sharded import close, double
from tplab import Mesh, P
from tplab.errors import ShapeError
from tplab.models.gpt import GPTConfig, gpt_specs
from tplab.sequence import TokenLayout

IGNORED = -100


@pytest.fixture(params=FRAMEWORKS)
def fw(request: pytest.FixtureRequest) -> Framework:
    return FRAMEWORKS[request.param]()


def program_of(fw: Framework, config: GPTConfig, **options: Any) -> Any:
    """(state, ids, targets) -> logits, the loss of the whole batch, its gradients."""
    specs = gpt_specs(config)

    def in_torch(state: Any, ids: Any, targets: Any) -> Any:
        import torch

        model = fw.lab.GPT(config, "tp", context_axis="cp", **options).double()
        model.load_state_dict(pieces(fw, state, specs))
        loss = model.loss(ids, targets)
        loss.backward()
        fw.lab.average_gradients(list(model.parameters()), "cp")
        with torch.no_grad():
            mean = fw.lab.all_reduce(loss.detach(), "cp", "mean")
            return model(ids), mean, {name: p.grad for name, p in model.named_parameters()}

    def in_jax(state: Any, ids: Any, targets: Any) -> Any:
        import jax

        mine, model = pieces(fw, state, specs), fw.lab.GPT(config, "tp", context_axis="cp", **options)
        loss, grads = jax.value_and_grad(lambda mine: model.loss(nested(mine), ids, targets))(mine)
        return model(nested(mine), ids), loss, grads

    return in_torch if fw.name == "torch" else in_jax


def check(fw: Framework, mesh: Mesh, *, hidden: int = 0, **options: Any) -> None:
    """`hidden` targets at the start of the sequence do not count, so that ranks have different numbers of them."""
    config = config_for(4, num_kv_heads=2)
    state, (ids, targets) = state_of(config), batch_of(config)
    targets[:, :hidden] = IGNORED
    want_logits, want_loss, want_grads = dense(config, state, ids, targets)
    tokens = TokenLayout(options.get("layout", "zigzag"), ids.shape[1], mesh.axis_size("cp"))
    with double(fw):
        args = {n: fw.array(x) for n, x in state.items()}, *(fw.array(tokens.arrange(x)) for x in (ids, targets))
        specs = P(), P(None, "cp"), P(None, "cp")
        ranks = fw.lab.run(program_of(fw, config, **options), mesh, *args, in_specs=specs).per_rank
    logits = [
        np.concatenate([fw.numpy(ranks[r][0]) for r in mesh.group(first, "tp")], -1) for first in mesh.group(0, "cp")
    ]
    close(tokens.restore(np.concatenate(logits, 1), 1)[..., : config.vocab_size], want_logits, "logits")
    for _, loss, _ in ranks:
        assert abs(float(loss) - want_loss) < 1e-13
    for first in mesh.group(0, "cp"):
        own = [{n: fw.numpy(g) for n, g in ranks[r][2].items()} for r in mesh.group(first, "tp")]
        largest = max(np.abs(grad).max() for grad in want_grads.values())
        for name, grad in joined(own, gpt_specs(config)).items():
            close(grad, want_grads[name], f"gradient of {name}", cancelled=100 * largest)


@pytest.mark.parametrize(
    ("fw", "mesh", "options"),
    in_both(
        [
            (Mesh(cp=2, tp=1), {}),
            (Mesh(cp=4, tp=1), {"layout": "striped", "hidden": 7}),
            (Mesh(cp=3, tp=1), {"scheme": "gather", "layout": "contiguous", "hidden": 9}),
            (Mesh(tp=2, cp=4), {"sequence_parallel": True}),
            (Mesh(cp=2, tp=1), {"scheme": "head"}),
        ],
        [
            (Mesh(cp=3, tp=1), {"scheme": "gather", "layout": "contiguous", "hidden": 9}),
            (Mesh(tp=2, cp=2), {"sequence_parallel": True}),
        ],
    ),
    indirect=["fw"],
    ids=str,
)
def test_the_shared_sequence_is_the_whole_one(fw: Framework, mesh: Mesh, options: dict[str, Any]):
    check(fw, mesh, **options)


def test_too_long_a_sequence_is_refused(fw: Framework):
    def program(ids: Any) -> Any:
        model = fw.lab.GPT(GPTConfig(8, 4, 1, 1, 7), "tp", context_axis="cp")
        if fw.name == "torch":
            return model(ids)
        import jax

        return model(model.init(jax.random.key(0)), ids)

    with pytest.raises(ShapeError, match=r"up to 7 tokens, but got \[2, 4\] on each of 2 ranks"):
        fw.lab.run(program, Mesh(cp=2, tp=1), fw.array(np.zeros((2, 4), int)))
