"""A Python cell that makes a widget of a notebook again, from the statements of the notebook that it needs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence


def making(cells: Sequence[str]) -> str:
    """A cell that makes what the last of these cells shows, and calls it `card`; "" if that is no expression.

    A statement is needed if it assigns to a needed name, or calls a method of it (`torch.manual_seed(0)`). Statements
    that only print are left out.
    """
    statements = [(source, one) for source in cells for one in ast.parse(source).body]
    source, last = statements.pop()
    if not isinstance(last, ast.Expr):
        return ""
    shown = ast.get_source_segment(source, last.value)
    needed, lines = names_read(last), [f"card = {shown}" if shown and "\n" not in shown else f"card = (\n{shown}\n)"]
    for source, one in reversed(statements):
        if needed & (names_made(one) | _told(one)):
            if isinstance(one, _DEFINING):
                needed -= {name for node in _outside_functions(one) for name in _made(node, whole=True)}
            needed |= names_read(one)
            start = min([one.lineno, *(each.lineno for each in getattr(one, "decorator_list", ()))])
            lines.append("\n".join(source.splitlines()[start - 1 : one.end_lineno]))
    return "\n".join(reversed(lines))


def needing(cells: Sequence[str], is_missing: Callable[[str], bool]) -> list[bool]:
    """For each cell, whether it reads a name that comes from a missing module, or from such a cell. A cell that only
    imports a missing module does not count.

    is_missing   module -> whether it cannot be imported
    """
    missing, found = set[str](), []
    for source in cells:
        needs = False
        for one in ast.parse(source).body:
            if isinstance(one, ast.Import):
                missing |= {name for alias in one.names if is_missing(alias.name) for name in _imported(alias)}
            elif isinstance(one, ast.ImportFrom):
                for alias in one.names:
                    if is_missing(one.module or "") or is_missing(f"{one.module}.{alias.name}"):
                        missing |= {*_imported(alias)}
            else:
                needs |= bool(names_read(one) & missing)
        missing |= names_made(ast.parse(source)) if needs else set()
        found.append(needs)
    return found


def _imported(alias: ast.alias) -> list[str]:
    return [(alias.asname or alias.name).partition(".")[0]]


_FUNCTIONS = ast.FunctionDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_DEFINING = ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


def names_read(node: ast.AST) -> set[str]:
    """The names of the notebook that are read. Names that a function or a comprehension assigns are local."""
    read = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load | ast.Del) else set[str]()
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        read.add(node.target.id)
    for child in ast.iter_child_nodes(node):
        read |= names_read(child)
    if isinstance(node, _FUNCTIONS):
        inside = list(ast.walk(node))
        read -= {one.arg for one in inside if isinstance(one, ast.arg)}
        read -= {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return read


def names_made(statement: ast.AST) -> set[str]:
    """The names of the notebook that are assigned, also in part."""
    return {name for one in _outside_functions(statement) for name in _made(one)}


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, ast.ClassDef | _FUNCTIONS):
        for child in ast.iter_child_nodes(node):
            yield from _outside_functions(child)


def _made(node: ast.AST, whole: bool = False) -> Iterable[str]:
    """The names that this node assigns: only as a `whole`, or also in part."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [name for alias in node.names for name in _imported(alias)]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store) and not whole:
        return [_root(node)]
    return []


def _told(statement: ast.AST) -> set[str]:
    """The name whose method is called, which may change its value."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return {_root(call.func)} if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else set()


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
