"""Every name of JAX that is private, or not the same in all versions that tplab supports. Tried on 0.7.2 and 0.10.2."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy, deepcopy
from typing import Any

import jax
import jax.experimental
import numpy as np
from jax._src import config, source_info_util, xla_bridge
from jax._src import mesh as mesh_home
from jax._src.interpreters import ad, batching

# The mesh of `jax.set_mesh` with its devices. It is in another module since 0.11.
_device_context: Any = (mesh_home if hasattr(mesh_home, "device_context") else config).device_context  # type: ignore

# A new value of this context makes JAX trace again what it has traced before: the bodies of its loops, and what jit and
# checkpoint wrap. JAX caches all of them by function, even if something that the function reads has changed.
_retracing = jax.make_user_context(default_value=None)


def retracing(token: Hashable) -> AbstractContextManager[None]:
    """A context in which JAX reuses traces only from a context with the same token."""
    return _retracing(token)


def trace_context() -> Hashable:
    """All of JAX's settings that affect tracing: precision, types, devices, the mesh."""
    return config.trace_context()


def in_float64(wide: bool = True) -> AbstractContextManager[None]:
    """A context in which JAX computes on float64 inputs in float64; with False, in float32 as it does by default. It is
    `jax.enable_x64` since 0.8."""
    home = jax if hasattr(jax, "enable_x64") else jax.experimental
    return home.enable_x64(wide)  # type: ignore[attr-defined]


def devices_around() -> tuple[Any, ...]:
    """The devices of the mesh of `jax.set_mesh`; () if there is none."""
    mesh = _device_context.value
    return () if mesh is None else tuple(mesh.devices.flat)


@contextmanager
def without_devices() -> Iterator[None]:
    """A context in which jit is not bound to the devices of the mesh of `jax.set_mesh`."""
    before = _device_context.swap_local(jax.sharding.Mesh(np.empty((), object), ()))
    try:
        yield
    finally:
        _device_context.set_local(before)


def is_float64() -> bool:
    """Whether JAX computes on float64 inputs in float64."""
    return bool(config.enable_x64.value)


def varying_axes_of(kind: Any) -> frozenset[str]:
    """The axes along which arrays of a type may differ. Before 0.9 the type held them itself."""
    manual = getattr(kind, "manual_axis_type", None)
    return manual.varying if manual is not None else kind.vma


def pvary(x: Any, axes: tuple[str, ...]) -> Any:
    """`x`, declared to differ along axes. It is `jax.lax.pcast` since 0.8."""
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)  # type: ignore[attr-defined]


def out_shardings_of(traced: Any) -> tuple[Any, ...]:
    """The shardings requested for a traced function's results, in order; () if JAX does not record them."""
    return tuple(getattr(traced, "_params", {}).get("out_shardings", ()))


def is_ref(leaf: Any) -> bool:
    """Whether it is a Ref, an array that can be written to. Before 0.8 JAX has no public Refs."""
    return isinstance(leaf, getattr(jax, "Ref", ()))


def new_ref(x: Any) -> Any:
    """A Ref that holds `x`."""
    return jax.new_ref(x)  # type: ignore[attr-defined]


def kept_of(compiled: Any) -> list[int]:
    """The places of the arguments that a compiled program uses, in order; [] if JAX does not record them."""
    return sorted(getattr(getattr(compiled, "_executable", None), "_kept_var_idx", ()))


def changed(traced: Any, **params: Any) -> Any:
    """A traced function with another "jaxpr" or other "out_shardings"."""
    new = copy(traced)
    new._params = {**traced._params, **params}
    return new


@contextmanager
def as_written() -> Iterator[None]:
    """A context in which JAX records more about the equations that it traces. Equations in the backward function of a
    custom_vjp have their own lines rather than the line of the call. A constraint inside vmap has a scope
    "tplab.batched2" for each dim that vmap has inserted into its array, in order."""

    def in_backward(rule: Any) -> Any:
        def transposed(*args: Any, **kwargs: Any) -> Any:
            context = source_info_util._source_info_context
            before, context.context = context.context, source_info_util.SourceInfo(None, context.context.name_stack)
            try:
                return rule(*args, **kwargs)
            finally:
                context.context = before

        return transposed

    def in_vmap(rule: Any) -> Any:
        def batched(axis: Any, values: Any, dims: Any, **params: Any) -> Any:
            with nullcontext() if dims[0] is None else source_info_util.extend_name_stack(f"tplab.batched{dims[0]}"):
                return rule(axis, values, dims, **params)

        return batched

    is_fancy = all(each.name != "custom_lin" for each in ad.primitive_transposes)  # since 0.11
    rules = (
        (ad.fancy_transposes if is_fancy else ad.primitive_transposes, "custom_lin", in_backward),
        (batching.fancy_primitive_batchers, "sharding_constraint", in_vmap),
    )
    before = []
    with retracing("as written"):
        for table, name, wrapped in rules:
            primitive = next(each for each in table if each.name == name)
            before.append((table, primitive, table[primitive]))
            table[primitive] = wrapped(table[primitive])
        try:
            yield
        finally:
            for table, primitive, rule in before:
                table[primitive] = rule


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """(how many constants a scan takes, how many arrays it carries). Since 0.11 these are in a tree."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def own_copy(constant: Any) -> Any:
    """A copy of a constant that may share memory with a NumPy array; anything else unchanged. JAX's wrapper of a NumPy
    array is itself one since 0.8; before that it was a class, with another name in 0.7."""
    if isinstance(constant, np.ndarray):
        return constant.copy()
    return deepcopy(constant) if type(constant).__name__ in ("LiteralArray", "TypedNdArray") else constant


def moved(array: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
    """`array` with another sharding. Before 0.9, device_put looked for an array's Explicit axes in the new mesh. An
    array without a mesh is on one device."""
    if jax.__version_info__ < (0, 9) and array.is_fully_addressable and any(jax.typeof(array).sharding.spec):
        array = jax.device_put(array, jax.sharding.SingleDeviceSharding(next(iter(array.devices()))))
    return jax.device_put(array, sharding)


def at_first_use(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Make JAX create its devices, on first use, inside this context. Nothing happens if they already exist."""
    if xla_bridge.backends_are_initialized():
        return
    make = xla_bridge.backends

    def first() -> Any:
        with context():
            found = make()
        xla_bridge.backends = make
        return found

    xla_bridge.backends = first


def knows_patience_flag() -> bool:
    """Whether XLA can be made to wait longer than 40 seconds for a rank. It aborts on an unknown flag: versions before
    0.8 do not have this one, and libtpu has its own flags."""
    return jax.__version_info__ >= (0, 8) and importlib.util.find_spec("libtpu") is None
