"""Execute a plan: one training step of tplab's GPT on simulated ranks, with its messages and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tplab import Mesh
from tplab.cost import Cluster
from tplab.data.text import Text
from tplab.errors import ScheduleError
from tplab.forecast import Model, Plan
from tplab.models.gpt import GPTConfig
from tplab.schedules import RULES
from tplab.training.recipe import Recipe, batch_axes, context_axis, data_axes

TEXT = Text(b"abcdefghijklmnopqrstuvwxyz" * 40)


class Case(NamedTuple):
    """A model, its recipe and the mesh; as properties, the forecast's model and plan."""

    config: GPTConfig
    recipe: Recipe
    mesh: Mesh
    schedule: str

    @property
    def model(self) -> Model:
        return Model.of_config(self.config)

    @property
    def plan(self) -> Plan:
        recipe, axes = self.recipe, dict[str, Any](self.mesh.shape)
        if self.config.experts is not None:
            axes |= {"dp": axes["dp"] * axes["ep"], "etp": axes["tp"], "dispatch": recipe.dispatch}
        ranks = axes["pp"]
        stages = RULES[self.schedule](ranks, 2 * ranks).num_stages // ranks
        return Plan(
            **axes,
            microbatch=recipe.batch_size // axes["dp"] // recipe.microbatches,
            zero=recipe.zero,
            schedule=self.schedule,
            virtual=max(1, stages),
            sequence_parallel=recipe.sequence_parallel,
            recompute="full" if recipe.checkpoint_every else "none",
            dtype="float32",
            grad_dtype="float32",
            balance="parameters",
        )

    def executed(self, cluster: Cluster | None = None) -> Any:
        """One step on simulated ranks, as in tplab.torch.train, with counted memory or, if given, on the clock of a
        cluster."""
        return _executed(self.config, self.recipe, self.mesh, cluster)


def case(
    config: GPTConfig,
    schedule: str = "one_f_one_b",
    *,
    dp: int = 1,
    pp: int = 1,
    cp: int = 1,
    tp: int = 1,
    **recipe: Any,
):
    """A case, by default with a batch of two microbatches of two sequences per data-parallel rank."""
    recipe = {"microbatches": 2, "zero": 0, **recipe}
    recipe.setdefault("batch_size", 2 * dp * recipe["microbatches"])
    how = Recipe(steps=1, schedule=RULES[schedule], **recipe)
    return Case(config, how, Mesh(pp=pp, dp=dp, **({"cp": cp} if cp > 1 else {}), tp=tp), schedule)


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    """Any model and plan of up to eight ranks, with sizes such that no piece needs padding."""
    dp, pp, tp = draw(
        st.sampled_from([(a, b, c) for a in (1, 2, 3) for b in (1, 2, 3, 4) for c in (1, 2, 3) if a * b * c <= 8])
    )
    cp = draw(st.sampled_from([1, 2] if dp != 2 and dp * pp * tp <= 4 else [1]))
    microbatches = draw(st.integers(1, 4)) * pp
    schedules = [name for name in RULES if pp > 1 and _is_possible(name, pp, microbatches)] or ["one_f_one_b"]
    is_gated = draw(st.booleans())
    config = GPTConfig(
        132,
        24,
        draw(st.integers(2 * pp, 2 * pp + 2)),
        12,
        12,
        num_kv_heads=draw(st.sampled_from([6, 12])),
        hidden=36,
        activation="swiglu" if is_gated else "gelu",
        norm=draw(st.sampled_from(["layer", "rms"])),
        bias=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1])),
    )
    return case(
        config,
        draw(st.sampled_from(schedules)),
        dp=dp,
        pp=pp,
        cp=cp,
        tp=tp,
        microbatches=microbatches,
        batch_size=draw(st.integers(1, 2)) * microbatches * dp,
        zero=draw(st.sampled_from([0, 1] if pp > 1 else [0, 1, 2, 3])),
        sequence_parallel=draw(st.booleans()),
        checkpoint_every=draw(st.sampled_from([None, 1])),
    )


def sent_by_axis(out: Any, rank: int) -> dict[str, int]:
    """axis -> the bytes that a rank sent, without sums of a single number: the loss, the norm of the gradients."""
    found: Counter[str] = Counter()
    for event in out.trace.select(rank=rank).events:
        is_number = event.op == "all_reduce" and event.axis != "tp" and event.bytes <= 16
        if event.kind in ("collective", "send") and not is_number:
            found["dp" if "dp" in event.axis.split(",") else event.axis] += event.bytes  # together with cp
    return dict(found)


def _is_possible(name: str, ranks: int, microbatches: int) -> bool:
    try:
        RULES[name](ranks, microbatches)
    except ScheduleError:
        return False
    return True


def _executed(config: GPTConfig, recipe: Recipe, mesh: Mesh, cluster: Cluster | None) -> Any:
    import torch

    from tplab.models.gpt import gpt_state
    from tplab.torch import run
    from tplab.torch.comm.collectives import axis_index, axis_size
    from tplab.torch.data.shard_parameters import shard_parameters
    from tplab.torch.models.gpt import gpt_layers
    from tplab.torch.pipeline.stages import stages_of
    from tplab.torch.ranks.rank import this_rank
    from tplab.torch.training.gpt_stages import load_whole
    from tplab.torch.training.optimizer import Optimizer
    from tplab.torch.training.train import _run_batch

    whole = gpt_state(config)

    def program() -> None:
        torch.set_default_dtype(torch.float32)
        more: dict[str, Any] = {"context_axis": context_axis(mesh), "layout": recipe.layout, "scheme": recipe.scheme}
        more |= {"dispatch": recipe.dispatch} if config.experts else {}
        layers = gpt_layers(config, sequence_parallel=recipe.sequence_parallel, data_axis="dp", **more)
        stages = stages_of(layers, recipe.schedule_on(this_rank().mesh))
        load_whole(stages, config, whole)
        if recipe.zero == 3:
            for module in stages.values():
                shard_parameters(module, data_axes(mesh))
        optimizer = Optimizer(stages, config, recipe)
        place = {"rank": axis_index(batch_axes(mesh)), "num_ranks": axis_size(batch_axes(mesh))}
        _run_batch(stages, TEXT.batch(0, recipe.batch_size, config.context, **place), 0, config, recipe)
        optimizer.step(recipe.rate(0))

    return run(program, mesh, keep_values=0, count_memory=cluster is None, cluster=cluster)
