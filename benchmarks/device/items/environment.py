"""The machine: its chip, its driver, and the versions of all packages involved."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.device.check import Figures, Place, Task

PACKAGES = ("torch", "triton", "jax", "jaxlib", "jax-cuda13-plugin", "numpy", "transformers", "accelerate",
            "cloudpickle", "optax", "anywidget", "ipywidgets", "pytest")  # fmt: skip


def tasks(place: Place) -> Iterator[Task]:
    yield Task("versions", versions)
    yield Task("chip", lambda: chip(place))
    yield Task("tplab without widgets", without_widgets)


def versions() -> Figures:
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def chip(place: Place) -> Figures:
    place.need_gpu()
    import torch
    import torch.cuda.nccl

    about = torch.cuda.get_device_properties(0)
    torch.ones(1, device="cuda").add_(1).item()
    return {
        "chip": about.name,
        "chips": torch.cuda.device_count(),
        "memory": about.total_memory,
        "multiprocessors": about.multi_processor_count,
        "cache": getattr(about, "L2_cache_size", None),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": _driver(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        said = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"Kernel Module.*?([\d.]{5,})", said)
    return found[1] if found else "unknown"


def without_widgets() -> Figures:
    """tplab.torch and its commands need no package of notebooks."""
    import sys

    for name in ("torch", "cost", "trace", "record", "merge", "torchrun", "doctor", "torch.scripts"):
        __import__(f"tplab.{name}")
    found = sorted({"anywidget", "ipywidgets", "IPython", "matplotlib"} & set(sys.modules))
    assert not found, f"tplab.torch has imported {', '.join(found)}"
    return {}
