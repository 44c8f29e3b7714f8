"""JAX on the GPU: a rank's program, the trace of a compiled function, the cause of a collective, and training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

import tplab.jax as tj  # before JAX is used
from benchmarks.device.check import Figures, Place, Task, Wrong
from tplab import Mesh, P


def tasks(place: Place) -> Iterator[Task]:
    on = "gpu" if place.device == "cuda" else "cpu"
    yield Task("devices", partial(devices, place))
    yield Task("run, one rank", partial(ran, on))
    yield Task("run, scan and branches", partial(looped, on))
    yield Task("trace and explain of a jitted step", partial(traced, on))
    yield Task("same_model", partial(same, on))
    yield Task("train", partial(trained, on), 120)
    yield Task("four ranks, which are CPU devices", partial(on_cpu_beside))


def devices(place: Place) -> Figures:
    import jax

    found = [f"{device.platform}: {device.device_kind}" for device in jax.devices()]
    if place.device == "cuda" and jax.default_backend() != "gpu":
        raise Wrong("JAX sees no GPU", {"devices": found})
    return {"devices": found[:2], "CPU devices": len(jax.devices("cpu"))}


def _mlp(x: Any, a: Any, b: Any) -> Any:
    from jax import numpy as jnp

    return tj.all_reduce(jnp.tanh(x @ a) @ b, "tp")


def _numbers() -> list[np.ndarray]:
    draws = np.random.default_rng(0)
    return [draws.normal(size=shape).astype(np.float32) for shape in ((4, 8), (8, 16), (16, 8))]


def _near(found: Any, x: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """The largest error, relative to the largest entry. By default XLA multiplies float32 in TF32: 2^-10 per factor."""
    want = np.tanh(x.astype(float) @ a) @ b
    off = float(np.abs(np.asarray(found) - want).max() / np.abs(want).max())
    if not off < 4e-3:
        raise Wrong(f"off by {off}", {"off by": off})
    return off


def ran(on: str) -> Figures:
    x, a, b = _numbers()
    specs: dict[str, Any] = {"in_specs": (P(), P(None, "tp"), P("tp")), "out_specs": P()}
    out = tj.run(_mlp, Mesh(tp=1), x, a, b, **specs, on=on, cluster="h100")
    where = sorted(str(device.platform) for device in out.value.devices())
    return {
        "off by": _near(out.value, x, a, b),
        "where": where,
        "events": len(out.trace),
        "seconds": out.trace.makespan,
    }


def looped(on: str) -> Figures:
    """Loops and branches that depend on data: the trace runs the program again."""
    import jax
    from jax import numpy as jnp

    def program(x: Any) -> Any:
        def body(carry: Any, row: Any) -> tuple[Any, Any]:
            return carry + tj.all_reduce(row, "tp").sum(), row * 2

        total, rows = jax.lax.scan(body, jnp.zeros(()), x)
        return jax.lax.cond(total > 0, lambda y: y + 1, lambda y: y - 1, total), rows

    out = tj.run(program, Mesh(tp=1), np.ones((3, 4), np.float32), on=on)
    total, _ = out.per_rank[0]
    if float(total) != 13.0:
        raise Wrong(f"the total is {float(total)}, not 13", {})
    return {"events": len(out.trace)}


def traced(on: str) -> Figures:
    """The compiled program of this backend has fusions, and calls of cuBLAS instead of dots."""
    import jax
    from jax import numpy as jnp
    from jax.sharding import Mesh as JaxMesh
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = JaxMesh(np.array(jax.devices(on)[:1]).reshape(1, 1), ("data", "model"))

    def put(array: np.ndarray, *spec: str | None) -> Any:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    def loss(params: Any, x: Any) -> Any:
        a, b = params
        return (jnp.tanh(x @ a) @ b - x).var()

    step = jax.jit(jax.value_and_grad(loss))
    draws = np.random.default_rng(0)
    x, a, b = (draws.normal(size=shape).astype(np.float32) for shape in ((512, 256), (256, 1024), (1024, 256)))
    args = (put(a, None, "model"), put(b, "model")), put(x, "data")
    value, _ = step(*args)
    if not np.isfinite(float(value)):
        raise Wrong(f"the loss is {value}", {})
    trace = tj.trace(step, *args, cluster="h100-measured")
    flops = sum(event.flops or 0 for event in trace.events)
    products = 5 * 2 * 512 * 256 * 1024  # two forward, three backward: x needs no gradient
    figures: Figures = {
        "events": len(trace), "seconds": trace.makespan, "flops of the five products": flops / products,
        "operations": sorted({str(event.op) for event in trace.events})[:20],
        "explained": str(tj.explain(step, *args)).splitlines()[:3],
    }  # fmt: skip
    if not 0.9 < flops / products < 1.2:
        raise Wrong("the trace has not the five products of the step", figures)
    return figures


def same(on: str) -> Figures:
    """With one device there is nothing to compare, and the report says so."""
    import jax
    from jax import numpy as jnp

    def make(mesh: Any) -> Any:
        @jax.jit
        def step(params: Any, x: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda p: jnp.square(jnp.tanh(x @ p) - x).mean())(params)
            return {"loss": loss, "grads": grads, "params": params - 0.1 * grads}

        return step

    draws = np.random.default_rng(0)
    params, x = (draws.normal(size=shape).astype(np.float32) for shape in ((16, 16), (8, 16)))
    report = tj.same_model(make, (params, x), mesh=Mesh(dp=1))
    if "the mesh has one device" not in str(report):
        raise Wrong(str(report), {})
    return {"said": str(report).splitlines()[:3]}


def trained(on: str) -> Figures:
    """Compare losses with those of the CPU. With TF32, they differ by more than rounding in float32."""
    from tplab.data.text import Text
    from tplab.models.gpt import GPTConfig
    from tplab.training.recipe import Recipe

    text = Text(np.random.default_rng(0).integers(0, 32, 500).astype(np.uint8).tobytes())
    config, recipe = GPTConfig(32, 16, 2, 2, 8), Recipe(3, 4, warmup=1)
    here, there = (
        tj.train(config, text, Mesh(tp=1), recipe, show=lambda progress: None, on=where).losses for where in ("cpu", on)
    )
    off = max(abs(a / b - 1) for a, b in zip(here, there, strict=True))
    if not off < 5e-3:
        raise Wrong(f"losses are {there}, and {here} on the CPU", {"losses off by": off})
    return {"losses off by": off}


def on_cpu_beside() -> Figures:
    """More ranks than GPUs: JAX simulates devices on the CPU, also on a machine with a GPU."""
    x, a, b = _numbers()
    specs: dict[str, Any] = {"in_specs": (P(), P(None, "tp"), P("tp")), "out_specs": P()}
    out = tj.run(_mlp, Mesh(tp=4), x, a, b, **specs)
    if out.trace.bytes_sent(rank=0) != 192:
        raise Wrong(f"rank 0 sends {out.trace.bytes_sent(rank=0)} B, not 192", {})
    return {"off by": _near(out.value, x, a, b), "where": sorted({d.platform for d in out.value.devices()})}
