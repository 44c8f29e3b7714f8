"""Training over any mesh: the losses and the weights of one device; breaks that leave no trace."""

import shutil
import signal
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import tplab.jax  # before JAX is used
import tplab.torch
from tplab import Mesh
from tplab.data.text import Text
from tplab.jax.private import in_float64
from tplab.models.gpt import GPTConfig
from tplab.schedules import zb_v
from tplab.training import checkpoint
from tplab.training.progress import Stop
from tplab.training.recipe import Recipe

CONFIG = GPTConfig(32, 16, 2, 2, 8)
TEXT = Text(np.random.default_rng(0).integers(0, 32, 500).astype(np.uint8).tobytes())
STEPS = 4
TRAIN = {"torch": tplab.torch.train, "jax": tplab.jax.train}


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def trained(
    mesh,
    folder=None,
    *,
    train=tplab.torch.train,
    resume=False,
    show=lambda progress: None,
    config=CONFIG,
    text=TEXT,
    seed=0,
    on=None,
    device=None,
    **recipe,
):
    how = Recipe(**{"steps": STEPS, "batch_size": 4, "warmup": 2, "clip": 0.5, **recipe})
    where = {"on": on} if device is None else {"on": on, "device": device}
    return train(config, text, mesh, how, folder=folder, resume=resume, show=show, seed=seed, **where)


@cache
def by_hand(batch_size):
    """The same training as torch has it, on one device: losses, norms and the last weights."""
    from tplab.models.gpt import gpt_state
    from tplab.torch import GPT, run

    recipe = Recipe(STEPS, warmup=2)

    def program():
        model = GPT(CONFIG)
        model.load_state_dict({name: torch.tensor(x) for name, x in gpt_state(CONFIG).items()})
        optimizer = torch.optim.AdamW(model.parameters(), betas=recipe.betas, weight_decay=recipe.weight_decay)
        losses, norms = [], []
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = recipe.rate(step)
            loss = model.loss(*map(torch.tensor, TEXT.batch(step, batch_size, CONFIG.context)))
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            losses.append(loss.item())
        return losses, norms, {name: p.detach().numpy() for name, p in model.named_parameters()}

    return run(program, Mesh(tp=1)).per_rank[0]


def same(got, tolerance=1e-12, batch_size=4):
    losses, _, state = by_hand(batch_size)
    np.testing.assert_allclose(got.losses, losses[got.first :], rtol=tolerance)
    for name, x in state.items():
        # AdamW divides the gradient of key's bias, which is nothing but roundings, by their size and 1e-8
        np.testing.assert_allclose(got.state[name], x, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    "mesh, how",
    [
        (Mesh(tp=1), {"zero": 0}),
        (Mesh(dp=2, pp=2, tp=2), {}),
        (Mesh(tp=2, dp=2, pp=2), {"zero": 0, "sequence_parallel": True, "checkpoint_every": 1}),
        (Mesh(pp=2, dp=2), {"schedule": zb_v, "evaluate_every": 2}),
    ],
    ids=lambda case: str(case) if isinstance(case, Mesh) else ", ".join(case),  # a function's text is its address
)
def test_torch_alone_would_train_the_same(mesh, how):
    seen = []
    got = trained(mesh, show=seen.append, **how)
    same(got)
    assert [progress.loss for progress in seen] == got.losses
    np.testing.assert_allclose([progress.gradient_norm for progress in seen], by_hand(4)[1], rtol=1e-10)
    assert [progress.step for progress in seen] == [1, 2, 3, 4]
    assert list(got.held_out) == ([2, 4] if "evaluate_every" in how else [])
    assert repr(got) == f"Trained for 4 steps, to a loss of {got.losses[-1]:.4f}"


def test_a_break_changes_no_bit(tmp_path):
    mesh, config = Mesh(dp=2, pp=2, tp=2), GPTConfig(32, 16, 2, 2, 8, dropout=0.2)
    whole = trained(mesh, tmp_path, config=config, save_every=2, evaluate_every=1)
    shutil.rmtree(tmp_path / "step-00000004")
    (tmp_path / "step-00000004.partial").mkdir()  # a save that was killed
    (tmp_path / "step-00000004.partial" / "rank-0-of-8.safetensors").write_bytes(b"half")
    again = trained(mesh, tmp_path, config=config, resume=True)
    assert (again.first, again.steps) == (2, 4)
    assert again.losses == whole.losses[2:]
    for name, x in whole.state.items():
        np.testing.assert_array_equal(again.state[name], x)
    assert max(file.parent.name for file in tmp_path.glob("*/index.json")) == "step-00000004"
    with pytest.raises(FileExistsError, match="has a checkpoint of step 4 already; resume=True goes on"):
        trained(mesh, tmp_path)


def test_from_mesh_to_mesh(tmp_path):
    """2x2x2, then 4x1x2 without ZeRO, then one device: all the same."""
    trained(Mesh(dp=2, pp=2, tp=2), tmp_path, save_every=2)
    shutil.rmtree(tmp_path / "step-00000004")
    trained(Mesh(tp=2, dp=4), tmp_path, resume=True, zero=0, microbatches=1, save_every=1)
    shutil.rmtree(tmp_path / "step-00000004")
    got = trained(Mesh(tp=1), tmp_path, resume=True)
    assert got.first == 3
    np.testing.assert_allclose(got.losses, by_hand(4)[0][3:], rtol=1e-12)
    np.testing.assert_allclose(got.state["norm.weight"], by_hand(4)[2]["norm.weight"], rtol=1e-12)


@pytest.mark.timeout(300)
def test_every_stage_of_zero_goes_on_from_every_other(tmp_path):
    """3 ranks have unequal pieces of the parameters. Torch and JAX take turns, and all of it is one training."""
    jax = tplab.jax.train
    how: dict[str, Any] = {"batch_size": 6, "save_every": 1}

    def back_to(step):
        for later in range(step + 1, STEPS + 1):
            shutil.rmtree(tmp_path / f"step-{later:08}")

    with in_float64():
        seen = []
        same(trained(Mesh(dp=3, tp=2), tmp_path, zero=3, checkpoint_every=1, show=seen.append, **how), batch_size=6)
        np.testing.assert_allclose([step.gradient_norm for step in seen], by_hand(6)[1], rtol=1e-10)
        back_to(2)
        got = trained(Mesh(dp=3), tmp_path, train=jax, resume=True, zero=3, evaluate_every=1, **how)
        np.testing.assert_allclose(got.losses, by_hand(6)[0][2:], rtol=1e-12)
        assert got.held_out.keys() == {3, 4}
        back_to(3)
        trained(Mesh(dp=3), tmp_path, train=jax, resume=True, zero=2, **how)
        back_to(3)
        got = trained(Mesh(dp=3), tmp_path, resume=True, zero=2, bucket_bytes=2000, evaluate_every=1, **how)
    same(got, batch_size=6)


@pytest.mark.parametrize("framework", TRAIN)
def test_zero_that_would_send_for_every_microbatch_is_refused_on_pipelines(framework):
    for stage, what in ((2, "combine all gradients"), (3, "gather all parameters")):
        with pytest.raises(ValueError, match=f"zero={stage} with pipelines of 2 ranks would {what} for each of the 2"):
            trained(Mesh(dp=2, pp=2), train=TRAIN[framework], zero=stage)


@pytest.mark.parametrize(("framework", "mesh"), [("torch", Mesh(dp=2, pp=2)), ("jax", Mesh(tp=1))], ids=str)
def test_ctrl_c_keeps_what_was_trained(tmp_path, framework, mesh):
    """Pressed in the middle of a step: all ranks finish it, and the checkpoint is that of the step."""

    def press(progress):
        if progress.step == 2:
            stop: Any = getattr(signal.getsignal(signal.SIGINT), "__self__")  # noqa: B009
            signal.raise_signal(signal.SIGINT)
            while not stop.is_asked:  # the main thread hears of it in its own time, and steps are short here
                time.sleep(0.001)

    before = signal.getsignal(signal.SIGINT)
    with in_float64():
        got = trained(mesh, tmp_path, train=TRAIN[framework], show=press)
        assert 2 <= got.steps <= 3
        assert signal.getsignal(signal.SIGINT) is before
        assert got.losses == pytest.approx(by_hand(4)[0][: got.steps])
        rest = trained(mesh, tmp_path, train=TRAIN[framework], resume=True)
    assert (rest.first, rest.steps) == (got.steps, 4)
    assert got.losses + rest.losses == pytest.approx(by_hand(4)[0])


@pytest.mark.parametrize("framework", TRAIN)
def test_ctrl_c_between_two_steps(tmp_path, monkeypatch, framework):
    """Pressed when a step is over and the next one has not begun: there is a checkpoint all the same."""

    class Pressed(Stop):
        def may_begin(self, step):
            if step == 2:
                self.after_this_step()
            return super().may_begin(step)

    monkeypatch.setattr(f"tplab.{framework}.training.train.Stop", Pressed)
    got = trained(Mesh(dp=1), tmp_path, train=TRAIN[framework])
    assert got.steps == 2
    assert max(file.parent.name for file in tmp_path.glob("*/index.json")) == "step-00000002"


def test_on_processes(tmp_path):
    seen = []
    same(trained(Mesh(pp=2), tmp_path, show=seen.append, on="processes"))
    assert [progress.step for progress in seen] == [1, 2, 3, 4]
    assert max(file.parent.name for file in tmp_path.glob("*/index.json")) == "step-00000004"


@pytest.mark.parametrize("how", [{}, {"zero": 3, "checkpoint_every": 1}], ids=str)
def test_nothing_is_made_on_the_default_device(tmp_path, monkeypatch, how):
    """As on a GPU, where that is the CPU. The default device has no numbers here, so that a loss would have none. Only
    AdamW counts its steps there, which on the CPU is right."""

    class AdamW(torch.optim.AdamW):
        def step(self, closure=None):
            with torch.device("cpu"):
                return super().step(closure)

    by_hand(4)
    monkeypatch.setattr(torch.optim, "AdamW", AdamW)
    config = GPTConfig(32, 16, 2, 2, 8, dropout=0.1)
    with torch.device("meta"):
        mesh = Mesh(dp=2, tp=2) if how else Mesh(dp=2, pp=2)
        same(trained(mesh, tmp_path, device="cpu", save_every=2, **how))
        shutil.rmtree(tmp_path / "step-00000004")
        same(trained(mesh, tmp_path, device="cpu", resume=True, evaluate_every=1, **how))
        trained(mesh, device="cpu", steps=1, config=config, **how)


def test_dropout_draws_the_same_on_every_tensor_parallel_mesh():
    config = GPTConfig(32, 16, 2, 2, 8, dropout=0.2)
    one, two = (trained(mesh, config=config) for mesh in (Mesh(pp=2), Mesh(pp=2, tp=2)))
    np.testing.assert_allclose(one.losses, two.losses, rtol=1e-12)
    assert abs(one.losses[0] - by_hand(4)[0][0]) > 1e-3


@pytest.mark.parametrize("framework", TRAIN)
def test_dropout_draws_anew_in_every_step_and_the_same_after_a_break(tmp_path, framework):
    """All batches are alike and no step changes a weight, so that losses differ by what is dropped alone. Held-out text
    is read without dropout."""
    alike, dropping = Text(bytes(500)), GPTConfig(32, 16, 1, 2, 8, dropout=0.2)
    how = {"train": TRAIN[framework], "text": alike, "learning_rate": 0.0, "steps": 2, "microbatches": 1}
    with in_float64():
        whole = trained(Mesh(tp=1), tmp_path, config=dropping, evaluate_every=2, save_every=1, **how)
        shutil.rmtree(tmp_path / "step-00000002")
        again = trained(Mesh(tp=2), tmp_path, config=dropping, resume=True, **how)
    without = trained(Mesh(tp=1), text=alike, config=GPTConfig(32, 16, 1, 2, 8), steps=1).losses[0]
    first, second = whole.losses
    assert min(abs(first - second), abs(first - without), abs(second - without)) > 1e-4
    np.testing.assert_allclose(again.losses, [second], rtol=1e-12)
    np.testing.assert_allclose(whole.held_out[2], without, rtol=1e-12)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework, stages", [("torch", (0, 1, 2, 3)), ("jax", (1, 2))])
def test_dropout_draws_the_same_in_every_stage_of_zero(framework, stages):
    """Also where gradients are combined after every microbatch; and held-out text is read alike."""
    how: dict[str, Any] = {"train": TRAIN[framework], "config": GPTConfig(32, 16, 1, 2, 8, dropout=0.2), "steps": 2}
    with in_float64():
        runs = [trained(Mesh(dp=2), zero=zero, evaluate_every=2, **how) for zero in stages]
    for other in runs[1:]:
        np.testing.assert_allclose(other.losses, runs[0].losses, rtol=1e-12)
        np.testing.assert_allclose(other.held_out[2], runs[0].held_out[2], rtol=1e-12)
    assert abs(runs[0].losses[0] - trained(Mesh(dp=2), config=GPTConfig(32, 16, 1, 2, 8), steps=1).losses[0]) > 1e-4


def test_an_evaluation_reduces_nothing(monkeypatch):
    """With ZeRO 3: parameters are gathered for the forward passes alone, which is less than a step gathers."""
    from tplab.torch.training import train as home
    from tplab.trace.traffic import Traffic

    traces = []

    def recorded(*args, **options):
        traces.append(tplab.torch.run(*args, **options))
        return traces[-1]

    monkeypatch.setattr(home, "run", recorded)
    for every in (None, 2):
        trained(Mesh(dp=2), zero=3, steps=2, evaluate_every=every)
    without, evaluated = (Traffic.of_trace(out.trace) for out in traces)
    assert evaluated["reduce_scatter"].bytes == without["reduce_scatter"].bytes > 0
    more = evaluated["all_gather"].bytes - without["all_gather"].bytes
    assert 0 < more < without["all_gather"].bytes / 2


def test_clipping_is_clip_gradients_own(tmp_path):
    """At the largest norm that is allowed, gradients shrink by the 1e-6 that is added to it, as torch's do."""
    how: dict[str, Any] = {"steps": 1, "warmup": 0}
    norms: list[float] = []
    trained(Mesh(tp=1), tmp_path / "free", clip=None, show=lambda p: norms.append(p.gradient_norm), **how)
    trained(Mesh(dp=2), tmp_path / "clipped", clip=norms[0], **how)
    free, clipped = (checkpoint.load(tmp_path / which, 1) for which in ("free", "clipped"))
    name = "exp_avg.norm.weight"
    np.testing.assert_allclose(clipped[name] / free[name], norms[0] / (norms[0] + 1e-6), rtol=1e-9)


def test_a_plain_line_now_and_then(capsys):
    trained(Mesh(dp=2), show=None, evaluate_every=4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"step 1 of 4: loss {by_hand(4)[0][0]:.4f}"
    assert "held out" in lines[-1]
    assert len(lines) == 4


def test_jax_trains_the_same_and_each_reads_what_the_other_has_saved(tmp_path):
    """2x2x2 in JAX with ZeRO: a break changes no bit. Torch goes on from there, and JAX has what it ends with, on other
    meshes."""
    mesh, jax = Mesh(dp=2, pp=2, tp=2), tplab.jax.train
    with in_float64():
        whole = trained(mesh, tmp_path, train=jax, save_every=2)
        same(whole)
        shutil.rmtree(tmp_path / "step-00000004")
        again = trained(mesh, tmp_path, train=jax, resume=True)
        assert again.losses == whole.losses[2:]
        for name, x in whole.state.items():
            np.testing.assert_array_equal(again.state[name], x)
        shutil.rmtree(tmp_path / "step-00000004")
        torchs = trained(Mesh(tp=2, dp=2), tmp_path, resume=True)
        np.testing.assert_allclose(torchs.losses, whole.losses[2:], rtol=1e-12)
        done = trained(Mesh(tp=2, dp=4), tmp_path, train=jax, resume=True)  # nothing is left to do
    assert done.losses == []
    for name, x in torchs.state.items():
        np.testing.assert_array_equal(done.state[name], x)


def test_jax_without_zero_on_axes_in_another_order():
    with in_float64():
        how = {"zero": 0, "sequence_parallel": True, "checkpoint_every": 1, "evaluate_every": 2}
        got = trained(Mesh(tp=2, dp=2, pp=2), train=tplab.jax.train, **how)
    same(got)
    assert list(got.held_out) == [2, 4]


@pytest.mark.parametrize("framework", TRAIN)
def test_another_models_checkpoint_is_refused(tmp_path, framework):
    """Before anything runs: arrays of the same names and shapes may be of a model that computes something else."""
    trained(Mesh(tp=1), tmp_path, steps=1)
    for config, said in [
        (GPTConfig(32, 16, 1, 2, 8), r"of a model with num_layers 2, and this one has num_layers 1; train that model"),
        (GPTConfig(32, 16, 2, 4, 4, num_kv_heads=2), "num_heads 2, context 8, and this one has num_heads 4, context 4"),
    ]:
        with pytest.raises(ValueError, match=said):
            trained(Mesh(tp=1), tmp_path, train=TRAIN[framework], resume=True, config=config)
    same_model = GPTConfig(32, 16, 2, 2, 8, num_kv_heads=2, hidden=64, dropout=0.1)
    assert trained(Mesh(tp=1), tmp_path, resume=True, config=same_model, steps=2).first == 1
