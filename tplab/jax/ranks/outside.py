"""What a program reads from outside itself: globals, closures, attributes. Compiling a program fixes their values.

`jax.jit` never checks them again, but a notebook is full of globals that change. So `run` checks at every call: if
everything that the program can read is unchanged since it was traced, the compiled program is called. Otherwise it is
traced again.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import re
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from tplab.mesh import Mesh
from tplab.sharding import P

_MOST = 20_000  # objects looked at; a program that can reach more is traced at every call

_STATELESS = {"jax", "jaxlib", "tplab", "optax", "math", "cmath", "functools", "itertools", "operator", "typing"}
"""Modules in which nothing that a program reads ever changes, whatever it does with them."""

_TRUSTED = _STATELESS | {
    "numpy", "builtins", "collections", "contextlib", "dataclasses", "enum", "abc", "types", "copy", "numbers", "re",
    "inspect", "reprlib", "_operator", "_functools", "_collections", "_collections_abc",
    "einops", "flax", "equinox", "chex",
}  # fmt: skip
"""Modules whose functions and classes depend only on their arguments."""

_UNSEEN = {id(f) for f in (open, input, eval, exec, compile, globals, breakpoint, __import__, id)}
_UNSEEN_NAMES = {"__globals__", "__closure__", "cell_contents", "f_globals", "f_locals", "f_back", "_getframe"}
"""Names through which code can read anything."""

_PLAIN = {int, bool, str, bytes, type(None), range, type(Ellipsis), type(NotImplemented), Mesh, P}
_PRINTED = {float, complex, slice}  # compared by what they print: 0.0 is not -0.0, and NaN is NaN
_SEQUENCES = {list, tuple, deque, set, frozenset}
_MAPPINGS = {dict, types.MappingProxyType, OrderedDict, defaultdict}
_READ = (*_SEQUENCES, *_MAPPINGS, *_PLAIN, *_PRINTED, types.SimpleNamespace, object)
"""Types whose entire contents are read, also if a class written in Python inherits from them."""

_OF_C = (
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
"""Types of the members of a class written in C."""

_UNCHANGING = (
    types.CodeType,
    types.GenericAlias,
    types.UnionType,
    types.MemberDescriptorType,
    *_OF_C,
    types.MethodWrapperType,
    type(NamedTuple("_", [("field", int)]).__dict__["field"]),
    re.Pattern,
    np.ufunc,
    type(np.dot),
    np.dtype,
    jax.Array,
    jax.Device,
    jax.sharding.Sharding,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.tree_util.PyTreeDef,
)
"""Types whose objects never change, so that they can be compared by identity."""

_WRAPPERS = (type(functools.lru_cache(lambda: None)), type(jax.jit(lambda: None)))

_NOT_READ = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__dataclass_fields__", "__dataclass_params__", "__match_args__",
    "__slots__", "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl", "__parameters__",
    "__orig_bases__", "__hash__",
}  # fmt: skip
"""Attributes of a class that its methods do not compute with."""

_NO_VALUE = NotImplemented  # for a name without a value: None is a value


class Outside:
    """The current state of everything that a call of some functions can read.

    values      one entry for each object that can be read: equal if all of it is equal
    codes       the codes of the functions that are not in a trusted module, by id
    is_known    False if something cannot be compared, such as a random number generator

    Numbers, strings and NumPy arrays are compared by value; JAX's arrays, which never change, by identity; containers
    and objects by their contents; functions by their code and by what they can read in turn. Functions and classes of
    JAX, NumPy and tplab count as constant. Objects that support weak references are not kept alive.
    """

    def __init__(self, roots: Sequence[Any]):
        self.is_known = True
        self.codes: list[int] = []
        self._values: list[Any] = []
        self._references: list[Callable[[], Any]] = []
        self._read(roots)
        self.values = tuple(self._values)

    def same_as(self, other: Outside) -> bool:
        """Whether a program that was traced with `other` would be traced the same way now."""
        return self.is_known and other.is_known and self.values == other.values and other.is_alive()

    def is_alive(self) -> bool:
        """Whether every object still exists. Otherwise the ids in `values` are meaningless."""
        return all(reference() is not None for reference in self._references)

    def _read(self, roots: Sequence[Any]) -> None:
        seen: dict[int, int] = {}
        held = []  # objects made on the way, so that their ids are not reused
        pending = list(reversed(roots))
        while pending and self.is_known:
            value = pending.pop()
            kind = type(value)
            if kind in _PLAIN:
                self._values.append((kind, value))
            elif kind in _PRINTED:
                self._values.append((kind, repr(value)))
            elif id(value) in seen:
                self._values.append(("again", seen[id(value)]))
            else:
                seen[id(value)] = len(seen)
                held.append(value)
                self.is_known = len(seen) <= _MOST
                try:
                    pending += reversed(self._parts(value, kind))
                except Exception:  # an object that cannot be inspected, whatever it raises
                    self.is_known = False

    def _parts(self, value: Any, kind: type) -> Sequence[Any]:
        """Note what must be compared of a value itself. Returns further objects that can be read through it."""
        if kind is types.FunctionType:
            return self._function(value)
        if kind is types.BuiltinFunctionType:
            return self._builtin(value)
        if kind in _SEQUENCES or kind in _MAPPINGS:
            return self._items(value, kind)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._numbers(np.asarray(value), kind)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            self.is_known &= _is_of(value.__name__, _STATELESS)
            return ()
        if isinstance(value, _UNCHANGING):
            return self._itself(value)
        if isinstance(value, _WRAPPERS):
            return [*self._itself(value), value.__wrapped__]  # type: ignore[attr-defined]
        self._values.append(kind.__name__)
        if kind is types.MethodType:
            return value.__func__, value.__self__
        if isinstance(value, functools.partial):
            return kind, value.func, value.args, value.keywords, vars(value)
        if isinstance(value, staticmethod | classmethod):
            return (value.__func__,)
        if isinstance(value, property):
            return value.fget, value.fset, value.fdel
        if isinstance(value, functools.cached_property):
            return (value.func,)
        return self._object(value, kind)

    def _itself(self, value: Any) -> tuple[()]:
        try:
            self._references.append(weakref.ref(value))
        except TypeError:
            self._references.append(lambda: value)
        self._values.append(id(value))
        return ()

    def _function(self, function: types.FunctionType) -> list[Any]:
        code = function.__code__
        self._itself(code)
        closure = zip(code.co_freevars, function.__closure__ or (), strict=True)
        cells = {name: _held(attrgetter("cell_contents"), cell) for name, cell in closure}
        parts = [function.__defaults__, function.__kwdefaults__, vars(function)]
        parts += [content for content in cells.values() if not isinstance(content, types.ModuleType)]
        if not _is_of(function.__globals__.get("__name__", ""), _TRUSTED):
            self.codes.append(id(code))
            self.is_known &= _UNSEEN_NAMES.isdisjoint(names_in(code))
            for kind, name, attributes in paths_in(code):
                if kind == "cell":
                    value = cells.get(name, _NO_VALUE)
                elif kind == "import":
                    value = sys.modules.get(name, sys)
                else:
                    value = function.__globals__.get(name, vars(builtins).get(name, _NO_VALUE))
                parts += _beyond_modules(value, attributes)
        return parts

    def _builtin(self, function: Any) -> Sequence[Any]:
        owner = function.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            self.is_known &= _is_of(function.__module__ or "", _TRUSTED) and id(function) not in _UNSEEN
            return self._itself(function)
        self._values.append(function.__name__)  # a method is a new object at each access
        return (owner,)

    def _items(self, value: Any, kind: type) -> list[Any]:
        self._values.append((kind.__name__, len(value)))
        if kind in _SEQUENCES:
            return list(value)
        return [getattr(value, "default_factory", None), *value, *value.values()]

    def _numbers(self, array: np.ndarray, kind: type) -> list[Any]:
        if array.dtype.hasobject:
            self._values.append((kind, array.shape))
            return array.ravel().tolist()
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        known = content.tobytes() if content.size <= 1024 else hashlib.blake2b(content.data).digest()
        self._values.append((kind, array.shape, array.dtype, known))
        return []

    def _class(self, value: type) -> list[Any]:
        parts: list[Any] = list(self._itself(value))
        for base in value.__mro__:
            if not _is_of(base.__module__, _TRUSTED):
                self.is_known &= _is_transparent(base)
                members = {name: member for name, member in vars(base).items() if name not in _NOT_READ}
                self._values.append(tuple(members))
                parts += [*members.values(), type(base)]
        return parts

    def _object(self, value: Any, kind: type) -> list[Any]:
        """An object of a class written in Python: its class, its attributes, and its contents if it is a number, a
        string or a container."""
        self.is_known &= all(map(_is_transparent, kind.__mro__))
        if not self.is_known:
            return []
        attributes = {
            name: _held(member.__get__, value)
            for base in kind.__mro__
            for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType)
        }
        worked_out = _worked_out(kind)
        own = getattr(value, "__dict__", {})
        attributes |= {name: attribute for name, attribute in own.items() if name not in worked_out}
        self._values.append(tuple(attributes))
        parts = [kind, *attributes.values()]
        for base in kind.__mro__:
            if base in _PLAIN or base in _PRINTED:
                self._values.append(base.__repr__(value))  # type: ignore[call-arg]
            elif base in _SEQUENCES or base in _MAPPINGS:
                self._values.append(base.__len__(value))
                parts += base.__iter__(value)
                if base in _MAPPINGS:
                    parts += base.values(value)
        return parts


def roots_in(structure: Any) -> Iterator[Any]:
    """The contents of a structure of arguments besides its leaves: the classes of its nodes, and their metadata."""
    if (about := structure.node_data()) is not None:
        kind, kept = about
        if kind not in (tuple, list, dict, type(None)):
            yield kind
        if kept:
            yield kept
        for child in structure.children():
            yield from roots_in(child)


def _is_of(module: str, modules: set[str]) -> bool:
    return module.partition(".")[0] in modules and not module.startswith("numpy.random")


def _beyond_modules(value: Any, attributes: Sequence[str]) -> list[Any]:
    """What code reads of the value of a name: all of it, but of a module only the attribute that the code names."""
    for attribute in attributes:
        if not isinstance(value, types.ModuleType) or _is_of(value.__name__, _STATELESS):
            break
        value = getattr(value, attribute, _NO_VALUE)
    return [value]


def _held(how: Callable[[Any], Any], value: Any) -> Any:
    """What a cell or a slot holds."""
    try:
        return how(value)
    except (AttributeError, ValueError):
        return _NO_VALUE


def _is_transparent(cls: type) -> bool:
    """Whether everything that its objects hold can be read: C code may keep state that Python cannot see."""
    if cls in _READ or cls.__module__ == "typing":
        return True
    return not any(
        isinstance(member, _OF_C) and member.__objclass__ is cls and name not in ("__dict__", "__weakref__")
        for name, member in vars(cls).items()
    )


def _worked_out(kind: type) -> set[str]:
    """The attributes that a trusted class computes from others on first access."""
    return {
        name
        for base in kind.__mro__
        if _is_of(base.__module__, _TRUSTED)
        for name, member in vars(base).items()
        if isinstance(member, functools.cached_property)
    }


# --- the names that code reads ----------------------------------------------------------------------------------------


Path = tuple[str, str, tuple[str, ...]]
"""("global", "cell" or "import", a name, the attributes that are read one after the other: `name.first.second`)"""

_KINDS = {
    "LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_FROM_DICT_OR_GLOBALS": "global", "IMPORT_NAME": "import",
    "LOAD_DEREF": "cell", "LOAD_CLASSDEREF": "cell", "LOAD_FROM_DICT_OR_DEREF": "cell",
}  # fmt: skip
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}


@functools.lru_cache(maxsize=4096)
def paths_in(code: types.CodeType) -> tuple[Path, ...]:
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
    # Keep only variables of enclosing functions: the code's own variables may be cells of inner functions.
    return tuple(path for path in found if path[0] != "cell" or path[1] in code.co_freevars)


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """All names of globals and attributes in the code, and in the functions defined in it."""
    return frozenset(code.co_names).union(*map(names_in, _defined_in(code)))


def _defined_in(code: types.CodeType) -> list[types.CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
