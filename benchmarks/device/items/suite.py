"""Tests of layers, collectives, pipelines and the data dimension, with their simulated ranks on the GPU. Tests of JAX
and of pictures need other packages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.device import tests_of
from benchmarks.device.check import Place, Task

ROOMS = {
    "layers": ("layers/test_linear.py", "layers/test_attention.py", "layers/test_vocabulary.py",
               "layers/test_norms.py", "layers/test_overlap.py", "layers/test_dropout.py"),
    "sequence attention": ("layers/test_sequence_attention.py",),
    "collectives": ("comm",),
    "pipelines": ("pipeline/test_pipeline_torch.py", "pipeline/test_split_backward.py", "pipeline/test_pipeline.py"),
    "experts": ("layers/test_experts.py",),
    "data parallel and ZeRO": ("data",),
    "models and training": ("models", "training/test_train.py", "training/test_gpt_stages.py"),
}  # fmt: skip


def tasks(place: Place) -> Iterator[Task]:
    rooms = {"collectives": ("comm/test_messages.py",)} if place.quick else ROOMS
    for what, paths in rooms.items():
        files = [f"tests/{path}" for path in paths]
        work = partial(
            tests_of.run, files, 55, "-k", "not jax", "--ignore-glob=*jax*", "--ignore-glob=*test_rows*",
            workers=0 if place.quick else 6, device=place.device,
        )  # fmt: skip
        yield Task(what, work, 70)
