"""Durations on the device: the median of several samples, after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Work = Callable[[], object]
SAMPLE = 0.004
"""The least seconds of a sample, so that the clock's resolution does not matter."""
SAMPLES = 7
MOST_CALLS = 400


def eager_seconds(work: Work, device: str) -> float:
    """The time of one call launched from Python, in a sequence of calls."""
    samples = _cuda_samples if device == "cuda" else _cpu_samples
    samples(work, 1, 2)  # libraries are loaded, and algorithms chosen
    once = min(samples(work, 1, 2))
    calls = max(1, min(MOST_CALLS, round(SAMPLE / max(once, 1e-7))))
    return statistics.median(samples(work, calls, SAMPLES)) / calls


def kernel_seconds(work: Work, device: str) -> float:
    """The time of one call without Python, from a replayed CUDA graph of several. On the CPU, `eager_seconds`."""
    if device != "cuda":
        return eager_seconds(work, device)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(beside)
    once = min(_cuda_samples(work, 1, 2))
    calls = max(1, min(50, round(SAMPLE / max(once, 1e-7))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    seconds = eager_seconds(graph.replay, device) / calls
    del graph
    return seconds


def _cuda_samples(work: Work, calls: int, samples: int) -> list[float]:
    found = []
    for _ in range(samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return found


def _cpu_samples(work: Work, calls: int, samples: int) -> list[float]:
    found = []
    for _ in range(samples):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        found.append(time.perf_counter() - begin)
    return found
