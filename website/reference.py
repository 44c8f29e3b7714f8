"""The reference pages: every public name, its signature and its docstring, the twins of torch and JAX side by side.

    pages()   path -> Markdown, for all of them

Nothing is duplicated here: names come from each package's `__all__`, and the reasons why only one framework has a name
from the tables in docs/twins.md.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from website.docstrings import as_html, first_sentence

ROOT = Path(__file__).parent.parent
FOLDER = "reference"
CORE = (
    "tplab", "tplab.schedules", "tplab.pipeline", "tplab.data", "tplab.models", "tplab.sequence", "tplab.experts",
    "tplab.forecast", "tplab.trace", "tplab.cost", "tplab.widgets"
)  # fmt: skip
ROOMS = {
    "run": "Run",
    "comm": "Collectives",
    "layers": "Layers",
    "models": "Models",
    "pipeline": "Pipelines",
    "data": "Data parallelism",
    "training": "Training",
    "checking": "Checking",
}
"""The rooms of the frameworks, in the order of the pages. Other rooms come after them."""

PART_OF = {
    "ranks": "run",
    "scripts": "run",
    "distributed": "run",
    "tracing": "run",
    "processes": "run",
    "rings": "layers",
}


def pages() -> dict[str, str]:
    """Path in the site -> Markdown: a page for each room of the frameworks and each package of the core; an index."""
    frameworks = {name: import_module(f"tplab.{name}") for name in ("jax", "torch")}  # JAX's devices must be set first
    rooms: dict[str, dict[str, dict[str, Any]]] = {}
    for framework in ("torch", "jax"):
        for name in frameworks[framework].__all__:
            thing = getattr(frameworks[framework], name)
            room = next((room for room, found in rooms.items() if name in found), room_of(thing))
            rooms.setdefault(room, {}).setdefault(name, {})[framework] = thing
    order = [*ROOMS, *sorted(rooms.keys() - ROOMS.keys())]
    twins = {room: rooms[room] for room in order if room in rooms}
    core = {name: import_module(name) for name in CORE}
    found = {f"{FOLDER}/{room}.md": _twins_page(room, names) for room, names in twins.items()}
    found |= {f"{FOLDER}/{short(name)}.md": _core_page(module) for name, module in core.items()}
    found[f"{FOLDER}/index.md"] = _index(twins, core)
    return found


def room_of(thing: Any) -> str:
    """The room of a framework's public name: "comm" for tplab.torch.comm.collectives."""
    parts = [part for part in str(thing.__module__).split(".")[1:] if part not in ("torch", "jax")]
    return PART_OF.get(parts[0], parts[0])


def only_in() -> dict[str, tuple[str, str]]:
    """name -> (its framework, why the other one has no such name), from docs/twins.md."""
    found: dict[str, tuple[str, str]] = {}
    before = ""
    for name, framework, why in rows_under("Names that only"):
        before = why if not why.startswith("the same") else before + why.removeprefix("the same").replace(": ", "; ", 1)
        found[name] = framework, before
    return found


def rows_under(title: str) -> list[list[str]]:
    """The cells of the table under a title of docs/twins.md, without its head; names without backticks."""
    text = (ROOT / "docs" / "twins.md").read_text(encoding="utf8")
    (section,) = (part for part in re.split(r"^## ", text, flags=re.MULTILINE) if part.startswith(title))
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[re.sub(r"^`([^`]+)`$", r"\1", cell.strip()) for cell in row] for row in rows[2:]]


# --- pages -----------------------------------------------------------------------------------------------------------


def _twins_page(room: str, names: Mapping[str, Mapping[str, Any]]) -> str:
    parts = [
        f"# {ROOMS.get(room, room.capitalize())}",
        "From `tplab.torch` or from `tplab.jax`: the import is the switch.",
    ]
    only = only_in()
    for name in sorted(names, key=str.lower):
        parts.append(f"({_label(room, name)})=\n## {name}")
        twins = names[name]
        if len(twins) == 1:
            (framework,) = twins
            parts.append(f"Only in `tplab.{framework}`: {only[name][1]}.")
            parts.append(_about(name, twins[framework]))
        elif _about(name, twins["torch"]) == _about(name, twins["jax"]):
            parts.append(_about(name, twins["torch"]))
        else:
            parts += [f"**In torch**\n\n{_about(name, twins['torch'])}", f"**In JAX**\n\n{_about(name, twins['jax'])}"]
    return "\n\n".join(parts) + "\n"


def _core_page(module: ModuleType) -> str:
    parts = [f"# {module.__name__}", as_html(inspect.getdoc(module) or "")]
    for name in sorted(_public(module), key=str.lower):
        parts.append(f"({_label(short(module.__name__), name)})=\n## {name}")
        parts.append(_about(name, getattr(module, name), module))
    return "\n\n".join(parts) + "\n"


def _index(twins: Mapping[str, Mapping[str, Mapping[str, Any]]], core: Mapping[str, ModuleType]) -> str:
    """All names, each with its first sentence."""
    parts = [
        "# Reference",
        "Every public name. `tplab.torch` and `tplab.jax` have the same ones, but for [a few](../docs/twins.md).",
    ]
    contents = [*twins, *map(short, core)]
    parts.append("```{toctree}\n:hidden:\n\n" + "\n".join(contents) + "\n```")
    for room, names in twins.items():
        parts.append(f"## [{ROOMS.get(room, room.capitalize())}]({room}.md)")
        parts.append(_list(room, {name: next(iter(found.values())) for name, found in names.items()}))
    for name, module in core.items():
        parts.append(f"## [{name}]({short(name)}.md)")
        parts.append(_list(short(name), {one: getattr(module, one) for one in _public(module)}))
    return "\n\n".join(parts) + "\n"


def _list(page: str, things: Mapping[str, Any]) -> str:
    rows = []
    for name in sorted(things, key=str.lower):
        said = first_sentence(inspect.getdoc(things[name]) or "") if _has_own_doc(things[name]) else ""
        rows.append(f"- [`{name}`](#{_label(page, name)})" + (f" {said}" if said else ""))
    return "\n".join(rows)


# --- one name --------------------------------------------------------------------------------------------------------


def _about(name: str, thing: Any, module: ModuleType | None = None) -> str:
    """Signature, docstring and, of a class, its public methods and properties."""
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return _constant(name, thing, module)
    parts = [f"```python\n{signature(name, thing)}\n```"]
    if _has_own_doc(thing):
        parts.append(as_html(inspect.getdoc(thing) or ""))
    if inspect.isclass(thing):
        parts += [_member(one, inspect.getattr_static(thing, one)) for one in _members(thing)]
    return "\n\n".join(parts)


def _member(name: str, thing: Any) -> str:
    function = _function(thing)
    is_value = isinstance(thing, property) or hasattr(thing, "func")
    text = f".{name}" if is_value else f".{signature(name, function, method=not isinstance(thing, staticmethod))}"
    return f"```python\n{text}\n```\n\n{as_html(inspect.cleandoc(function.__doc__))}"


def _constant(name: str, thing: Any, module: ModuleType | None) -> str:
    said = _said_below(name, module) if module else ""
    value = "{" + ", ".join(map(str, thing)) + "}" if isinstance(thing, Mapping) else repr(thing)
    value = "\n".join(textwrap.wrap(value, 88, subsequent_indent="    "))
    return f"```text\n{value}\n```" + (f"\n\n{as_html(said)}" if said else "")


def _said_below(name: str, package: ModuleType) -> str:
    """The string below a constant in the source of the module that defines it, which Python does not keep."""
    folder = Path(inspect.getfile(package)).parent
    for file in sorted(folder.rglob("*.py")):
        for made, below in pairwise(_statements(file)):
            targets = made.targets if isinstance(made, ast.Assign) else [getattr(made, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                value = below.value if isinstance(below, ast.Expr) else None
                return inspect.cleandoc(str(value.value)) if isinstance(value, ast.Constant) else ""
    return ""


@cache
def _statements(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf8")).body


def signature(name: str, thing: Any, method: bool = False) -> str:
    """Signature as in the source: annotations without quotes, and one parameter per line if one line is too long."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return f"{name}(...)"
    parameters = list(found.parameters.values())[1 if method else 0 :]
    texts, star = [], False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            texts.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        texts.append(_parameter(parameter))
    gives = (
        ""
        if found.return_annotation is found.empty or inspect.isclass(thing)
        else f" -> {_type(found.return_annotation)}"
    )
    line = f"{name}({', '.join(texts)}){gives}"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){gives}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    has_type = parameter.annotation is not parameter.empty
    text = f"{stars}{parameter.name}" + (f": {_type(parameter.annotation)}" if has_type else "")
    if parameter.default is parameter.empty:
        return text
    default = getattr(parameter.default, "__name__", None) or repr(parameter.default)
    default = "..." if " at 0x" in default or "<factory>" in default else default
    return text + (f" = {default}" if has_type else f"={default}")


def _type(annotation: Any) -> str:
    text = getattr(annotation, "__forward_arg__", annotation)
    return str(text) if isinstance(text, str) else str(getattr(text, "__name__", text))


# --- what there is ---------------------------------------------------------------------------------------------------


def _public(module: ModuleType) -> list[str]:
    return [name for name in module.__all__ if not name.startswith("_")]


def _members(thing: type) -> Iterable[str]:
    """The public methods and properties that tplab's own classes define, with a docstring of their own."""
    kinds = [kind for kind in reversed(thing.__mro__) if kind.__module__.startswith("tplab")]
    for name in dict.fromkeys(name for kind in kinds for name in vars(kind)):
        function = _function(inspect.getattr_static(thing, name))
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield name


def _function(member: Any) -> Any:
    """The function behind a property, a cached property, a class method or a static method."""
    if isinstance(member, property):
        return member.fget
    return getattr(member, "func", getattr(member, "__func__", member))


def _has_own_doc(thing: Any) -> bool:
    """Whether it has a written docstring. The default of a dataclass is its signature, and of a constant its type's."""
    doc = getattr(thing, "__doc__", None)
    if not doc or not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return False
    return not (is_dataclass(thing) and doc.startswith(f"{getattr(thing, '__name__', '')}("))


def _label(page: str, name: str) -> str:
    """The anchor of a name on its page. Sphinx ignores case here, and `Gantt` differs from `gantt`."""
    return f"{page}-{name}{'-class' if name[0].isupper() else ''}".replace("_", "-").lower()


def short(name: str) -> str:
    """The page of a package of the core. A room of the frameworks may have the same name."""
    last = "core" if name == "tplab" else name.removeprefix("tplab.")
    return f"core-{last}" if last in ROOMS else last
