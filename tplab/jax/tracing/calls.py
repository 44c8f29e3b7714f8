"""Equations of a jaxpr that call another one with their own operands: what jit, remat and custom gradients leave."""

from __future__ import annotations

from typing import Any

_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}  # fmt: skip

LAYOUTS = {"reshape", "transpose", "squeeze", "expand_dims", "copy", "pvary", "pcast"}
"""Primitives whose result has the numbers of their operand, in another layout or of another type."""


def called(eqn: Any) -> Any:
    """The jaxpr that an equation calls, open or closed; None where it calls none once."""
    if eqn.primitive.name not in _CALLS:
        return None
    params = eqn.params
    return params["call_jaxpr"] if "call_jaxpr" in params else params.get("jaxpr", params.get("fun_jaxpr"))
