"""A GPT with experts, trained on any mesh: losses, norms and parameters of one device; checkpoints for any mesh."""

import shutil
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tplab.jax  # before JAX is used
import tplab.torch
from tests.training.models import X, Y
from tplab import Mesh
from tplab.data.text import Text
from tplab.errors import ShapeError
from tplab.experts import Routing
from tplab.jax.private import in_float64
from tplab.models.gpt import GPTConfig, GPTExperts, gpt_parameters, gpt_specs, gpt_state
from tplab.models.state import split_state
from tplab.schedules import gpipe, one_f_one_b, zb_v
from tplab.torch.training.gpt_stages import held_of, load_whole
from tplab.training.recipe import Recipe

EXPERTS = GPTExperts(Routing(4, 2), 12, balance=0.1)
MIXED = GPTExperts(
    Routing(8, 3, score="sigmoid", groups=4, top_groups=2, scale=2.5), 8, blocks=(1, 2), balance=0.05, over="global"
)
CONFIG = GPTConfig(32, 16, 2, 2, 8, deviation=0.2, experts=EXPERTS)
BIASED = replace(CONFIG, experts=GPTExperts(Routing(4, 2, score="sigmoid"), 12, balance=0.0, shared=8, bias_rate=0.05))
DEEP = GPTConfig(32, 16, 4, 2, 8, deviation=0.2, experts=MIXED, activation="swiglu", norm="rms", bias=False)
TEXT = Text(np.random.default_rng(0).integers(0, 32, 500).astype(np.uint8).tobytes())
SIZE, MOST = 8, 0.5


def words(given: Any) -> str:
    """The name of a case: the same in every process, so that tests can be shared out."""
    if isinstance(given, dict):
        return ", ".join(f"{key}={words(value)}" for key, value in given.items()) or "plain"
    return getattr(given, "__name__", str(given))


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def trained(
    mesh: Mesh, steps: int, config: GPTConfig = CONFIG, folder: Any = None, lab: Any = tplab.torch, **recipe: Any
) -> Any:
    norms: list[float] = []
    how = Recipe(steps, **{"batch_size": SIZE, "warmup": 2, "clip": MOST, **recipe})
    resume = folder is not None and any(folder.iterdir())
    with in_float64():
        got = lab.train(
            config, TEXT, mesh, how, folder=folder, resume=resume, show=lambda seen: norms.append(seen.gradient_norm)
        )
    return got, norms


@cache
def by_hand(steps: int, config: GPTConfig = CONFIG, microbatches: int = 1) -> Any:
    """The same training on one device, with torch's optimizer and clipping: losses, norms and the last weights.
    Routers' biases are left to neither: they move by what was chosen."""

    def program():
        recipe, model = Recipe(steps, warmup=2), tplab.torch.GPT(config)
        model.load_state_dict({name: torch.tensor(x) for name, x in gpt_state(config).items()})
        weights = [p for name, p in model.named_parameters() if not name.endswith("router.bias")]
        optimizer = torch.optim.AdamW(weights, betas=recipe.betas, weight_decay=recipe.weight_decay)
        losses, norms, counts = [], [], dict[Any, Any]()
        routers = [
            m for m in model.modules() if isinstance(m, tplab.torch.Router) and isinstance(m.bias, torch.nn.Parameter)
        ]
        for router in routers:
            router.register_forward_hook(
                lambda m, _, out: counts.update({m: counts.get(m, 0) + tplab.torch.chosen_counts(out)})
            )
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = recipe.rate(step)
            batch = (torch.tensor(x).chunk(microbatches) for x in TEXT.batch(step, SIZE, config.context))
            loss = torch.stack([model.loss(*pair) for pair in zip(*batch, strict=True)]).mean()
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(weights, MOST)))
            optimizer.step()
            for router in routers:
                router.bias.data = tplab.torch.balanced_bias(router.bias.data, counts.pop(router), 0.05)
            losses.append(loss.item())
        return losses, norms, {name: p.detach().numpy() for name, p in model.named_parameters()}

    return tplab.torch.run(program, Mesh(tp=1, ep=1)).per_rank[0]


def same(got: Any, steps: int, config: GPTConfig = CONFIG, microbatches: int = 1) -> None:
    (trained, norms), (losses, wanted, state) = got, by_hand(steps, config, microbatches)
    assert min(wanted) > MOST  # it clips
    np.testing.assert_allclose(trained.losses, losses[trained.first :], rtol=1e-9)
    np.testing.assert_allclose(norms, wanted[trained.first :], rtol=1e-9)
    assert trained.state.keys() == state.keys()
    for name, x in state.items():
        # AdamW divides the gradient of key's bias, which is nothing but roundings, by their size and 1e-8
        np.testing.assert_allclose(trained.state[name], x, atol=1e-7 if name.endswith("key.bias") else 1e-9)


def test_the_loss_is_cross_entropy_and_the_balance_of_every_sequence():
    """Token by token, with the attention and the norms of the model."""
    ids, targets = map(torch.tensor, TEXT.batch(0, 3, CONFIG.context))

    def program():
        model: Any = tplab.torch.GPT(CONFIG)
        x, balance = model.embedding(ids) + model.positions.weight, 0.0
        for block in model.blocks:
            x = x + block.attention(block.norm_1(x))
            tokens, router, experts = block.norm_2(x), block.mlp.router.weight, block.mlp.experts
            scores = (tokens @ router.T).softmax(-1)
            y = torch.zeros_like(x)
            for row in range(3):
                counts = torch.zeros(4)
                for at in range(CONFIG.context):
                    best = scores[row, at].topk(2)
                    for weight, expert in zip(best.values / best.values.sum(), best.indices):
                        hidden = F.gelu(experts.up[expert] @ tokens[row, at], approximate="tanh")
                        y[row, at] = y[row, at] + weight * (experts.down[expert] @ hidden)
                        counts[expert] += 1
                balance = balance + 0.1 * 4 * (counts / counts.sum() * scores[row].mean(0)).sum() / 3
            x = x + y
        logits = model.norm(x) @ model.embedding.weight.T
        wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + balance
        return model.loss(ids, targets).item(), wanted.item()

    got, wanted = tplab.torch.run(program, Mesh(tp=1, ep=1)).per_rank[0]
    assert abs(got - wanted) < 1e-12


@pytest.mark.timeout(300)
def test_ten_steps_on_four_axes():
    same(trained(Mesh(dp=2, tp=2, pp=2, ep=2), 10, zero=0), 10)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        (Mesh(ep=4), {"zero": 0, "dispatch": "per_rank"}),
        (Mesh(ep=2, dp=2, tp=2), {"zero": 1, "sequence_parallel": True, "dispatch": "gather"}),
        (Mesh(tp=2, cp=2, ep=2), {"zero": 0, "sequence_parallel": True}),
        (Mesh(dp=2, ep=2, cp=2), {"zero": 2}),
        (Mesh(pp=2, ep=2), {"zero": 1, "schedule": zb_v, "checkpoint_every": 1}),
        (Mesh(dp=2, tp=2), {}),
    ],
    ids=words,
)
def test_every_axis_beside_the_experts(mesh: Mesh, how: Any):
    same(trained(mesh, 3, **how), 3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        (Mesh(dp=2, ep=2, pp=2, tp=2), {"zero": 0, "sequence_parallel": True}),
        (Mesh(ep=4, cp=2), {"zero": 2}),
        (Mesh(pp=4, ep=2), {"schedule": gpipe}),  # its first stage has no experts
    ],
    ids=words,
)
def test_some_blocks_have_experts_and_the_global_batch_is_balanced(mesh: Mesh, how: Any):
    same(trained(mesh, 3, DEEP, microbatches=1, **how), 3, DEEP)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        (Mesh(tp=2, ep=2), {"sequence_parallel": True}),
        (Mesh(cp=2, ep=2), {"dispatch": "gather"}),
        (Mesh(dp=2, pp=2, ep=2), {"zero": 1, "dispatch": "per_rank"}),
        (Mesh(ep=4), {"zero": 2, "dispatch": "gather"}),  # no rank has a copy of an expert
    ],
    ids=words,
)
def test_in_jax(mesh: Mesh, how: Any):
    """What else there is, a shared expert and a bias have: see below."""
    same(trained(mesh, 3, lab=tplab.jax, **({"zero": 0} | how)), 3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("lab", "mesh", "how"),
    [
        (tplab.torch, Mesh(dp=2, ep=2, tp=2), {"zero": 2, "sequence_parallel": True}),
        (tplab.torch, Mesh(pp=2, ep=2, cp=2), {"zero": 1}),
        (tplab.torch, Mesh(ep=2, tp=2), {"zero": 0, "microbatches": 1}),
        (tplab.jax, Mesh(dp=2, ep=2, tp=2), {"zero": 2, "sequence_parallel": True}),
        (tplab.jax, Mesh(pp=2, ep=2), {"zero": 0}),
    ],
    ids=words,
)
def test_a_shared_expert_and_a_bias_that_balances(lab: Any, mesh: Mesh, how: Any):
    """The bias moves by the loads of all tokens; it is in no norm, and neither decays nor is clipped."""
    got = trained(mesh, 4, BIASED, lab=lab, **how)
    same(got, 4, BIASED)
    for block in range(2):
        moved = got[0].state[f"blocks.{block}.mlp.router.bias"] / 0.05
        assert np.abs(moved).max() > 0.9
        np.testing.assert_allclose(moved, np.rint(moved), atol=1e-6)


@pytest.mark.parametrize("lab", [tplab.torch, tplab.jax], ids=words)
def test_the_bias_of_an_expert_with_a_mean_load_stays(lab: Any):
    """In float32, what five microbatches have too much and too little adds up to 0 but for rounding."""
    routing = Routing(6, 2, score="sigmoid")
    config = replace(CONFIG, experts=GPTExperts(routing, 12, balance=0.0, shared=8, bias_rate=0.05))
    text = Text(np.random.default_rng(20).integers(0, 32, 800).astype(np.uint8).tobytes())
    torch.set_default_dtype(torch.float32)

    def loads():  # -> [5 microbatches, 2 blocks, 6 experts]
        model, found = tplab.torch.GPT(config), []
        model.load_state_dict({name: torch.tensor(x, dtype=torch.float32) for name, x in gpt_state(config).items()})
        for module in model.modules():
            if isinstance(module, tplab.torch.Router):
                module.register_forward_hook(lambda m, _, out: found.append(tplab.torch.chosen_counts(out)))
        for pair in zip(*(torch.tensor(x).chunk(5) for x in text.batch(0, 15, config.context)), strict=True):
            model.loss(*pair)
        return torch.stack(found).view(5, 2, 6)

    counts = tplab.torch.run(loads, Mesh(tp=1, ep=1)).per_rank[0]
    excess = 6 * counts - counts.sum(-1, keepdim=True)
    assert (excess.sum(0) == 0).any()
    trained = lab.train(config, text, Mesh(ep=1), Recipe(1, 15, microbatches=5, zero=0, clip=MOST))
    for block, over in enumerate(excess.sum(0).numpy()):
        np.testing.assert_allclose(trained.state[f"blocks.{block}.mlp.router.bias"], -0.05 * np.sign(over), atol=1e-7)


def test_a_microbatch_is_balanced_by_itself():
    """The two microbatches of one device are the batches of two ranks, and not the batch of all."""
    config = replace(CONFIG, experts=replace(EXPERTS, over="microbatch"))
    same(trained(Mesh(dp=2), 3, config, microbatches=1), 3, config, microbatches=2)
    same(trained(Mesh(ep=2), 3, config, microbatches=1), 3, config, microbatches=2)
    assert by_hand(3, config, 2)[0] != by_hand(3, config)[0]


@pytest.mark.timeout(300)
def test_a_checkpoint_is_cut_again(tmp_path):
    """ep=2, then ep=4, ep=2 in JAX, and a pipeline with all of it: each goes on from the one before."""
    for first, mesh, zero, lab in (
        (0, Mesh(ep=2, tp=2), 1, tplab.torch),
        (2, Mesh(ep=4), 0, tplab.torch),
        (3, Mesh(ep=2, dp=2), 2, tplab.jax),
        (4, Mesh(pp=2, ep=2, dp=2), 1, tplab.torch),
    ):
        got = trained(mesh, 5, folder=tmp_path, lab=lab, save_every=1, zero=zero)
        assert got[0].first == first
        same(got, 5)
        for step in range(max(first + 2, 3) if first != 4 else 6, 6):
            shutil.rmtree(tmp_path / f"step-{step:08}")


@pytest.mark.timeout(300)
def test_a_checkpoint_has_the_bias(tmp_path):
    """ep=2 with ZeRO 1, then JAX on a pipeline, then torch again."""
    for first, mesh, lab in (
        (0, Mesh(ep=2, dp=2), tplab.torch),
        (2, Mesh(pp=2, ep=2), tplab.jax),
        (3, Mesh(tp=2), tplab.torch),
    ):
        got = trained(mesh, 4, BIASED, folder=tmp_path, lab=lab, save_every=1)
        assert got[0].first == first
        same(got, 4, BIASED)
        for step in range(max(first + 2, 3) if first != 2 else 4, 5):
            shutil.rmtree(tmp_path / f"step-{step:08}")


def test_a_checkpoint_of_other_experts_is_refused(tmp_path):
    trained(Mesh(ep=2), 1, folder=tmp_path)
    biased = replace(EXPERTS, bias_rate=1e-3)
    for changed in (replace(EXPERTS, routing=Routing(4, 1)), replace(EXPERTS, blocks=(1,)), biased, None):
        with pytest.raises(ValueError, match="is of a model with experts"):
            trained(Mesh(ep=2), 2, replace(CONFIG, experts=changed), folder=tmp_path)


def test_a_checkpoint_says_nothing_of_their_balance(tmp_path):
    some = replace(EXPERTS, blocks=(1,))
    trained(Mesh(ep=2), 1, replace(CONFIG, experts=some), folder=tmp_path)
    got, _ = trained(Mesh(tp=2), 2, replace(CONFIG, experts=replace(some, balance=0.0, over="global")), folder=tmp_path)
    assert got.first == 1


def test_a_pipeline_averages_experts_over_their_copies():
    """`train_batch` itself, with data_axis."""
    lab, schedule = tplab.torch, one_f_one_b(2, 2)

    def program():
        stages = lab.stages_of(lab.gpt_layers(CONFIG), schedule)
        load_whole(stages, CONFIG, gpt_state(CONFIG))
        index = lab.axis_index(("dp", "ep"))
        own = [torch.tensor(x[2 * index : 2 * index + 2, : CONFIG.context]) for x in (X, Y)]

        def loss(outputs, targets):
            return lab.vocab_parallel_cross_entropy(outputs[0], targets, "tp", CONFIG.vocab_size) + outputs[1]

        mean = lab.train_batch(schedule, stages, lab.split_batch(*own, 2), loss, data_axis=("dp", "ep"))
        held: Any = held_of(stages, CONFIG)
        return mean.item(), {name: parameters[0].grad.numpy() for name, parameters in held.items()}

    def whole():
        model: Any = lab.GPT(CONFIG)
        model.load_state_dict({name: torch.tensor(x) for name, x in gpt_state(CONFIG).items()})
        model.loss(*(torch.tensor(x[:, : CONFIG.context]) for x in (X, Y))).backward()
        return {name: p.grad.numpy() for name, p in model.named_parameters()}

    mesh = Mesh(dp=2, pp=2, ep=2, tp=1)
    pieces = split_state(lab.run(whole, Mesh(tp=1, ep=1)).per_rank[0], gpt_specs(CONFIG), mesh)
    for (_, held), wanted in zip(lab.run(program, mesh).per_rank, pieces, strict=True):
        for name, grad in held.items():
            np.testing.assert_allclose(grad, wanted[name], atol=1e-12, err_msg=name)


def test_what_cannot_be():
    with pytest.raises(ValueError, match="zero=3 would share every parameter over the ranks of 'ep' too"):
        trained(Mesh(ep=2), 1, zero=3)
    with pytest.raises(ValueError, match="dispatch is 'two_levels'; it must be one of"):
        Recipe(dispatch="two_levels")
    with pytest.raises(ShapeError, match=r"blocks \(0, 2\) have experts, and there are blocks 0 to 1"):
        replace(CONFIG, experts=replace(EXPERTS, blocks=(0, 2)))
    with pytest.raises(ValueError, match="over is 'all'"):
        replace(EXPERTS, over="all")
    with pytest.raises(ShapeError, match="experts is 4, which the 3 ranks of axis 'ep'"):
        trained(Mesh(ep=3), 1, batch_size=6)
    assert {name for name in gpt_parameters(DEEP) if ".2.mlp" in name} == {
        "blocks.2.mlp.router.weight",
        *(f"blocks.2.mlp.experts.{name}" for name in ("gate", "up", "down")),
    }
