"""The exercises of lab 26: clipping as one device would do it, and the fastest layout for a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

from tplab.cost import Cluster, find
from tplab.cost.data_sheets import ETHERNET_10G
from tplab.cost.named import H100_NODE
from tplab.exercises.damage import PARAMETER, Untouched
from tplab.exercises.verdict import Verdict, check, refuse, refuse_damage, right, run_on
from tplab.mesh import Mesh
from tplab.models.gpt import GPTConfig, gpt_layer_name, gpt_specs
from tplab.schedules import one_f_one_b
from tplab.sharding import P
from tplab.units import time_text

SMALL = GPTConfig(32, 16, 2, 4, 8)
LARGE = GPTConfig(32768, 4096, 2, 32, 2048, bias=False)
"""Two blocks of the size used in models of about 7 billion parameters."""

NETWORKS: Mapping[str, Cluster] = {
    "InfiniBand": replace(H100_NODE, node_size=4),
    "InfiniBand, forecast": replace(find("h100-measured", "infiniband-ndr"), node_size=4),
    "Playbook, forecast": replace(find("h100-measured", "playbook"), node_size=4),
    "10 Gb Ethernet": replace(H100_NODE, node_size=4, outer_link=ETHERNET_10G),
}
"""Nodes of four H100 GPUs, with different networks between them. Those without "forecast" are from data sheets."""

CLUSTERS: Mapping[str, Cluster] = {
    "one node of 8": replace(H100_NODE, name="one node of 8"),
    "4 machines of 2": replace(H100_NODE, name="4 machines of 2", node_size=2, outer_link=ETHERNET_10G),
    "8 machines": replace(H100_NODE, name="8 machines", node_size=1, outer_link=ETHERNET_10G),
}
"""H100 GPUs: all on NVLink; pairs on NVLink, with 10 Gb Ethernet for each GPU between them; one per machine."""

LAYOUTS = {
    "8 tp": Mesh(tp=8),
    "8 dp": Mesh(dp=8),
    "2 dp x 4 tp": Mesh(dp=2, tp=4),
    "4 dp x 2 tp": Mesh(dp=4, tp=2),
    "4 dp x 2 pp": Mesh(dp=4, pp=2),
    "2 pp x 2 dp x 2 tp": Mesh(pp=2, dp=2, tp=2),
}
"""The choices. Along the last axis, ranks are neighbours."""


# --- the step, on shapes alone ---------------------------------------------------------------------------------------


def modelled(mesh: Mesh, cluster: Cluster, config: GPTConfig = LARGE, batch_size: int = 16) -> Any:
    """The trace of one training step on the modelled clock: forward, backward, and averaging all gradients, in
    bfloat16, with tensors that have shapes but no numbers. Two microbatches per pipeline."""
    import torch

    from tplab.torch import gpt_layers, run, split_batch, stages_of, train_batch, vocab_parallel_cross_entropy
    from tplab.training.recipe import with_all_axes

    whole = with_all_axes(mesh)
    schedule = one_f_one_b(whole.shape["pp"], 2)

    def step() -> None:
        torch.set_default_dtype(torch.bfloat16)
        ids = torch.zeros(batch_size // whole.shape["dp"], config.context, dtype=torch.long, device="meta")
        with torch.device("meta"):
            stages = stages_of(gpt_layers(config), schedule)
        train_batch(schedule, stages, split_batch(ids, ids, 2), loss, data_axis="dp")

    def loss(logits: Any, targets: Any) -> Any:
        return vocab_parallel_cross_entropy(logits, targets, "tp", config.vocab_size)

    return run(step, whole, cluster=cluster, device="meta").trace


@cache
def _seconds(layout: str, cluster: str) -> float:
    return modelled(LAYOUTS[layout], CLUSTERS[cluster]).makespan


def check_layouts(chosen: Mapping[str, str]) -> Verdict:
    """Check that `chosen`, cluster -> layout, has the fastest layout of LAYOUTS for each of CLUSTERS."""
    if not isinstance(chosen, Mapping):
        return Verdict(False, f"my_layouts: give a layout for each cluster by its name, not {chosen!r}.")
    if unknown := [str(key) for key in chosen if key not in CLUSTERS]:
        return Verdict(False, f"my_layouts: {unknown[0]!r} is not among the clusters, which are {', '.join(CLUSTERS)}.")
    if not any(chosen.values()):
        return Verdict(None, "my_layouts: not started. Choose a layout for each cluster, then run this cell again.")
    judged = [(cluster, *_judged(cluster, str(chosen.get(cluster) or ""))) for cluster in CLUSTERS]
    return Verdict(all(passed for *_, passed in judged), "\n".join(f"{cluster}: {text}" for cluster, text, _ in judged))


def _judged(cluster: str, chosen: str) -> tuple[str, bool]:
    """What to say of the layout chosen for a cluster, and whether it is right."""
    layout = " ".join(chosen.replace("×", "x").split())
    if not layout:
        return "not chosen yet", False
    if layout not in LAYOUTS:
        return f"{layout!r} is not among the layouts; choose one of {', '.join(LAYOUTS)}", False
    took, least = _seconds(layout, cluster), min(_seconds(other, cluster) for other in LAYOUTS)
    if took <= 1.001 * least:
        return f"{layout} is the fastest, {time_text(took, 's')} per step", True
    return f"{layout} takes {took / least:.3g} times as long as the fastest. {_hint(layout, cluster)}", False


def _hint(layout: str, cluster: str) -> str:
    mesh, node = LAYOUTS[layout], CLUSTERS[cluster].node_size or 8
    tp, pp = mesh.shape.get("tp", 1), mesh.shape.get("pp", 1)
    if tp > node:
        return "Its tensor-parallel groups send activations over the slow links, several times per block."
    if pp > 1 and cluster == "one node of 8":
        return "With two microbatches, a pipeline of two even stages is idle for a third of the time."
    if cluster == "one node of 8":
        return "Every link is fast: work out with which layout of dp and tp a rank sends the fewest bytes."
    if tp == 1 and node > 1:
        there = "Nothing is divided" if pp == 1 else "Only the pipeline is"
        return f"{there} inside a machine, where links are fast: which axis sends the most, and belongs there?"
    return "Only gradients cross the slow links: which axis would leave each rank with fewer of them?"


# --- clipping --------------------------------------------------------------------------------------------------------

Clip = Callable[[Any, float, Any], Any]


def stage_specs(config: GPTConfig, bounds: Any) -> dict[int, dict[str, P]]:
    """How the parameters of every stage are sharded, as `clip_gradients` expects it: {stage: {name: P}}."""
    specs, found = gpt_specs(config), {}
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        found[stage] = {
            f"{layer - begin}.{name}": specs[gpt_layer_name(config, layer, name)]
            for layer in range(begin, end)
            for name in _names(config, layer)
        }
    return found


def _names(config: GPTConfig, layer: int) -> list[str]:
    if layer == 0:
        return ["embedding.weight", "positions.weight"]
    if layer == config.num_layers + 1:
        return ["embedding.weight", *[name for name in gpt_specs(config) if name.startswith("norm.")]]
    prefix = "blocks.0."
    return [name.removeprefix(prefix) for name in gpt_specs(config) if name.startswith(prefix)]


@check("my_clip", not_with=("clip_gradients", "gradient_norm"), libraries=("tplab",))
def check_clipping(clip: Clip) -> Verdict:
    """Check that `clip(stages, max_norm, specs)` scales the gradients of a GPT's stages as one device would, in place:
    by max_norm / norm where the norm is larger than max_norm, and not at all where it is not."""
    for mesh, most in CLIPPED:
        whole = _alone(most)
        found, sent = _scales(mesh, clip, most)
        scales = [factor for factor, _ in found]
        wrong = {rank: scale for rank, scale in enumerate(scales) if not abs(scale / whole - 1) <= NEAR}
        if wrong:
            rank, scale = next(iter(wrong.items()))
            refuse(
                f": With max_norm {most:g} on {mesh}, rank {rank} multiplies its gradients by {scale:.6g}, but one "
                f"device by {whole:.6g}.\n{_why(scales, whole, most)}"
            )
        extra, held = sent - _scales(mesh, lambda *_: None, most)[1], sum(num_bytes for _, num_bytes in found)
        if extra > held / 4:
            refuse(
                f": the factor is right, but on {mesh} ranks send {extra:,} bytes for it, and their gradients have "
                f"{held:,}.\nA norm is a sum of squares: what is the least that ranks must tell each other?"
            )
    return right(" is right: every rank scales by the same factor, that of one device, on three meshes.")


CLIPPED = (
    (Mesh(dp=2, pp=2, tp=2), 0.1),
    (Mesh(dp=1, pp=1, tp=4), 0.05),
    (Mesh(dp=1, pp=4, tp=1), 0.1),
    (Mesh(dp=2, pp=2, tp=2), 1000.0),  # larger than the norm
)


NEAR = 1e-4
"""A relative tolerance below the effect of every mistake. torch adds 1e-6 to the norm, and others do not."""


def _why(scales: list[float], whole: float, most: float) -> str:
    if not all(scale == scale for scale in scales):
        return "That is not a number."
    if max(scales) / min(scales) > 1 + NEAR:
        return (
            "The ranks do not agree, so copies of a parameter drift apart. Over which ranks must the squares still be "
            "added up?"
        )
    if whole == 1:
        return "The norm is below max_norm: gradients that are small enough stay as they are."
    if abs(scales[0] - 1) <= NEAR:
        return "Nothing was scaled. Are the new gradients written to `.grad`?"
    if abs(scales[0] * most / whole**2 - 1) <= NEAR:
        return "This is max_norm divided by the square of the norm. Take the root."
    if scales[0] < whole:
        return "The factor is too small: is something counted twice in the norm, or are norms added and not squares?"
    return "The factor is too large: is something missing in the norm that other ranks hold?"


@cache
def _alone(most: float) -> float:
    """The factor by which one device scales its gradients."""
    return _scales(Mesh(dp=1, pp=1, tp=1), None, most)[0][0][0]


def _scales(mesh: Mesh, clip: Clip | None, most: float) -> tuple[list[tuple[float, int]], int]:
    """(factor, bytes) of each rank's gradients for a small GPT's first batch, and the bytes that all ranks send."""
    import torch

    from tplab.torch import axis_index, clip_gradients, gpt_layers, gpt_state, split_batch, stages_of, train_batch
    from tplab.torch import vocab_parallel_cross_entropy as cross_entropy
    from tplab.torch.training.gpt_stages import load_whole

    ids = torch.arange(8 * 9).view(8, 9) % SMALL.vocab_size
    schedule = one_f_one_b(mesh.shape["pp"], 2)

    def program() -> tuple[float, int]:
        torch.set_default_dtype(torch.float64)
        stages = stages_of(gpt_layers(SMALL), schedule)
        load_whole(stages, SMALL, gpt_state(SMALL))
        own = ids.chunk(mesh.shape["dp"])[axis_index("dp")]
        pairs = split_batch(own[:, :-1], own[:, 1:], 2)
        train_batch(schedule, stages, pairs, lambda y, t: cross_entropy(y, t, "tp", 32), data_axis="dp")
        parameters = {f"{n}.{name}": p for n, stage in stages.items() for name, p in stage.named_parameters()}
        parameters = {name: p for name, p in parameters.items() if p.grad is not None}
        before, kept = {name: _gradient(p) for name, p in parameters.items()}, Untouched(parameters, instead=PARAMETER)
        (clip or clip_gradients)(stages, most, stage_specs(SMALL, stages.partition.bounds))
        after = {name: _gradient(p) for name, p in parameters.items()}
        refuse_damage(kept)
        if uneven := _uneven(before, after):
            refuse(f": on rank {axis_index(mesh.axis_names)} {uneven}")
        norms = [torch.stack([grad.norm() for grad in grads.values()]).norm() for grads in (before, after)]
        return float(norms[1] / norms[0]), sum(grad.nbytes for grad in before.values())

    out = run_on(mesh, program, distributed=True)
    return out.per_rank, out.trace.bytes_sent()


def _gradient(parameter: Any) -> Any:
    if parameter.grad is None:
        raise ValueError("a gradient is None after my_clip; write what it becomes to .grad")
    return parameter.grad.clone()


def _uneven(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """In words, gradients that are not multiplied by one factor; "" if all of them are."""
    factors = {}
    for name, old in before.items():
        factors[name] = factor = float((after[name] * old).sum() / (old * old).sum())
        if float((after[name] - factor * old).norm()) > NEAR * abs(factor) * float(old.norm()):
            return f"not all entries of the gradient of {name} are multiplied by the same factor."
    low, high = min(factors, key=factors.__getitem__), max(factors, key=factors.__getitem__)
    if not factors[high] > factors[low] * (1 + NEAR):
        return ""
    return (
        f"the gradient of {low} is multiplied by {factors[low]:.6g}, but that of {high} by {factors[high]:.6g}.\n"
        "To keep the direction of the step, multiply all gradients by the same factor, and each of them once."
    )
