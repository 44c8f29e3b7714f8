"""The kind of an operation, and the effect of a collective, for their colours on a timeline."""

from __future__ import annotations

import re

KINDS = ("product", "norm", "elementwise", "copy", "computing")

_PRODUCTS = re.compile(
    r"(add|badd)?b?(mm|mv)_?|matmul|linear|dot(_general)?|einsum|conv(?!ert)\w*|.*attention.*|.*matmul.*"
)
_NORMS = re.compile(r".*norm.*|.*softmax.*|logsumexp|var(_mean)?|mean|rsqrt")
_COPIES = re.compile(
    r"clone|copy_?|cat|concatenate|stack|split|slice|dynamic_(update_)?slice|gather|index(_select|_put_?)?|embedding|"
    r"transpose|reshape|pad|constant_pad_nd|convert_element_type|_to_copy|zeros?\w*|ones\w*|full\w*|fill_?|select_and_\w*|"
    r"broadcast_in_dim|squeeze|iota|arange|repeat|flip|roll|scatter\w*"
)


_ATTENTION = re.compile(r"_?scaled_dot_product_\w*attention\w*")


def name_of(op: str) -> str:
    """The displayed name of an operation, without names of CPU kernels, which the modelled GPU does not run."""
    backward = ", backward" if op.endswith("_backward") else ""
    return f"scaled dot-product attention{backward}" if _ATTENTION.fullmatch(op) else op


def kind_of(op: str) -> str:
    """ "product" (of matrices), "norm" (norms, softmax and the statistics they need), "copy", "computing" (anything
    between two measured collectives), otherwise "elementwise"."""
    if op == "compute":
        return "computing"
    if _PRODUCTS.fullmatch(op):
        return "product"
    if _NORMS.fullmatch(op):
        return "norm"
    return "copy" if _COPIES.fullmatch(op) else "elementwise"
