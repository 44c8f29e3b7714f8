"""How to train: everything but the model, the text and the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from tplab.data.gradients import BUCKET_BYTES
from tplab.data.zero import STAGES
from tplab.errors import one_of
from tplab.mesh import Mesh
from tplab.models.checks import DISPATCHES, SEQUENCE_SCHEMES, SequenceScheme, check_heads
from tplab.models.gpt import GPTConfig
from tplab.schedules import Schedule, one_f_one_b
from tplab.sequence import LAYOUTS, LayoutName, TokenLayout
from tplab.sharding import share

AXES = ("dp", "pp", "ep", "cp", "tp")
"""The names of the axes for data, pipeline, expert, context and tensor parallelism."""


@dataclass(frozen=True)
class Recipe:
    """The settings of `train`. The same recipe gives the same losses on every mesh, up to rounding.

    steps, batch_size      how many updates; sequences in each, over all data-parallel ranks together
    microbatches           how many parts each pipeline cuts its share of the batch into
    schedule               (ranks, microbatches) -> the schedule of each pipeline
    learning_rate          AdamW's peak learning rate: it rises linearly for `warmup` steps, then falls along a cosine
    final                  the fraction of the peak at which the cosine ends
    betas, weight_decay    of AdamW; every parameter decays but routers' biases, which are in no norm either
    clip                   the largest norm of all gradients together; None: they are not clipped
    zero                   what is divided over the ranks of `data_axes`: 0 nothing; 1 the optimizer's states; 2 also
                           the gradients, which are combined after every microbatch; 3 also the parameters, of which a
                           layer is whole only while it runs. 2 and 3 are for a mesh without pipelines
    bucket_bytes           the most that is sent in one message of gradients, while the last backward pass runs; in JAX
                           the compiler decides
    sequence_parallel      whether tensor-parallel ranks share the sequence between the layers
    layout, scheme         which tokens of a sequence each context-parallel rank has: "zigzag", "striped" or
                           "contiguous"; and how its queries see the keys of the others: "ring", "gather" or "head"
    dispatch               how tokens travel to their experts: "all_to_all", "per_rank" or "gather"
    checkpoint_every       recompute activations in groups of this many layers of a stage; None: all are kept
    evaluate_every         how often, in steps, the loss on held-out text is computed, forward only; None: never
    save_every             how often, in steps, a checkpoint is written, if there is a folder; None: at the end
    """

    steps: int = 100
    batch_size: int = 8
    _: KW_ONLY
    microbatches: int = 2
    schedule: Callable[[int, int], Schedule] = one_f_one_b
    learning_rate: float = 3e-3
    warmup: int = 10
    final: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float | None = 1.0
    zero: int = 1
    bucket_bytes: float | None = BUCKET_BYTES
    sequence_parallel: bool = False
    layout: LayoutName = "zigzag"
    scheme: SequenceScheme = "ring"
    dispatch: str = "all_to_all"
    checkpoint_every: int | None = None
    evaluate_every: int | None = None
    save_every: int | None = None

    def __post_init__(self) -> None:
        if self.zero not in STAGES:
            raise ValueError(f"zero is {self.zero!r}; train has ZeRO stages 0 to 3")
        one_of("layout", self.layout, LAYOUTS)
        one_of("scheme", self.scheme, SEQUENCE_SCHEMES)
        one_of("dispatch", self.dispatch, [name for name in DISPATCHES if name != "two_levels"])
        for name in ("evaluate_every", "save_every"):
            every = getattr(self, name)
            if every is not None and every < 1:
                raise ValueError(f"{name} is {every}; it is a number of steps, 1 or more, or None for never")

    def rate(self, step: int) -> float:
        """The learning rate of a step; steps are counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (self.final + (1 - self.final) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)

    def check_mesh(self, mesh: Mesh, config: GPTConfig) -> None:
        """Raise ValueError if the ZeRO stage does not support the pipelines or the experts, and ShapeError if the ranks
        cannot share heads, features or experts equally."""
        ranks, experts = mesh.axis_size("tp"), config.experts
        num_kv_heads = config.num_heads if config.num_kv_heads is None else config.num_kv_heads
        check_heads(config.width, config.num_heads, num_kv_heads, ranks, "tp", None)
        hidden = [config.hidden_width] if experts is None or experts.blocks is not None else []
        for size in hidden if experts is None else (*hidden, experts.hidden, experts.shared):
            share(size, ranks, "hidden is", axis="tp")
        if experts is not None:
            share(experts.routing.experts, mesh.axis_size("ep"), "experts is", axis="ep")
        if self.zero == 3 and experts is not None:
            raise ValueError(
                "zero=3 would share every parameter over the ranks of 'ep' too, which hold different experts; take "
                "zero=2, which shares experts over the ranks that hold copies of them"
            )
        if self.zero > 1 and mesh.axis_size("pp") > 1:
            what = "combine all gradients" if self.zero == 2 else "gather all parameters"
            raise ValueError(
                f"zero={self.zero} with pipelines of {mesh.axis_size('pp')} ranks would {what} for each of the "
                f"{self.microbatches} microbatches; take zero=1, which sends once per step, or a mesh with pp=1"
            )

    def tokens_on(self, mesh: Mesh, length: int) -> TokenLayout:
        """Which tokens of a sequence each context-parallel rank has. Raises ShapeError if they cannot share it."""
        axis = context_axis(mesh)
        if axis is None:
            return TokenLayout("contiguous", length, 1)
        return TokenLayout(self.layout, length, mesh.axis_size(axis))

    def layer_options(self, mesh: Mesh) -> dict[str, Any]:
        """The options of `gpt_layers` on this mesh."""
        own = {name: getattr(self, name) for name in ("sequence_parallel", "layout", "scheme", "dispatch")}
        return own | {"data_axis": batch_axes(mesh), "context_axis": context_axis(mesh)}

    def schedule_on(self, mesh: Mesh) -> Schedule:
        """The schedule of each pipeline, for as many microbatches as run before gradients are combined."""
        return self.schedule(mesh.axis_size("pp"), self.microbatches // self.num_parts)

    @property
    def num_parts(self) -> int:
        """How many parts a batch runs in: gradients are combined after each."""
        return self.microbatches if self.zero == 2 else 1

    def whole_loads(self, mesh: Mesh) -> int:
        """The factor that turns the gradients of routers' biases into whole numbers, so that no rounding error has a
        sign. They are means, over microbatches and ranks, of an expert's choices in excess of the mean."""
        return self.microbatches * mesh.size

    def evaluates(self, step: int) -> bool:
        """Whether the loss on held-out text is computed after this step."""
        return self.evaluate_every is not None and ((step + 1) % self.evaluate_every == 0 or step + 1 == self.steps)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is written after this step, if there is a folder."""
        return step + 1 == self.steps or (self.save_every is not None and (step + 1) % self.save_every == 0)


def context_axis(mesh: Mesh) -> str | None:
    """The axis whose ranks share each sequence; None if the mesh has none."""
    return "cp" if "cp" in mesh.axis_names else None


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes whose ranks compute equally many different tokens with the same parameters, except experts along ep.
    Losses and gradients are averaged over them, and ZeRO divides states among the ranks that have copies."""
    return tuple(name for name in ("dp", "ep", "cp") if name in mesh.axis_names)


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes whose ranks have different sequences, each its share of the batch."""
    return tuple(name for name in data_axes(mesh) if name != "cp")


def with_all_axes(mesh: Mesh, config: GPTConfig | None = None) -> Mesh:
    """The mesh with axes dp, pp and tp, and ep for a GPT with experts, in its own order, and cp if it has it. Axes that
    it lacks have one rank. Ranks stay the same.

    Raises ValueError if it has other axes.
    """
    for name in mesh.axis_names:
        one_of("an axis of the mesh", name, AXES)
    needed = ("dp", "pp", "ep", "tp") if config is not None and config.experts is not None else ("dp", "pp", "tp")
    return Mesh(**{name: 1 for name in needed if name not in mesh.axis_names}, **mesh.shape)
