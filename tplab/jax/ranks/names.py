"""The names that a function's code reads."""

from __future__ import annotations

import dis
import functools
from types import CodeType

Path = tuple[str, str, tuple[str, ...]]
"""("global", "cell" or "import", a name, the attributes that are read one after the other: `name.first.second`)"""

_KINDS = {
    "LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_FROM_DICT_OR_GLOBALS": "global", "IMPORT_NAME": "import",
    "LOAD_DEREF": "cell", "LOAD_CLASSDEREF": "cell", "LOAD_FROM_DICT_OR_DEREF": "cell",
}  # fmt: skip
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}


@functools.lru_cache(maxsize=4096)
def paths_in(code: CodeType) -> tuple[Path, ...]:
    """The globals and the variables of enclosing functions that the code reads, and the functions defined in it."""
    found: dict[Path, None] = {}
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for place, step in enumerate(steps):
        if (kind := _KINDS.get(step.opname)) is not None:
            attributes = []
            for after in steps[place + 1 :]:
                if after.opname not in _ATTRIBUTES:
                    break
                attributes.append(after.argval)
            found[kind, step.argval, tuple(attributes)] = None
    for inner in _defined_in(code):
        found.update(dict.fromkeys(paths_in(inner)))
    # What is left is not the code's own: one of its own variables may be a cell of an inner function.
    return tuple(path for path in found if path[0] != "cell" or path[1] in code.co_freevars)


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """All names of globals and attributes in the code, and in the functions defined in it."""
    return frozenset(code.co_names).union(*map(names_in, _defined_in(code)))


def _defined_in(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]
