"""The source of a script around a line: the condition or loop that the line depends on, and where its inputs are
set."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from tplab.lines import line_text

_Own = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Source:
    """Queries return lines, named as in `places`; "" if there is none, or the file cannot be read.

    places   the file and the number of each line that has a name
    """

    def __init__(self, places: Mapping[str, tuple[str, int]]):
        self._places = dict(places)

    def condition(self, line: str) -> str:
        """Return the `if` that decides whether the line runs: the innermost one in its function."""
        return next((self._text(line, node) for node in self._above(line) if isinstance(node, ast.If)), "")

    def repetition(self, line: str) -> str:
        """Return the loop that does nothing but repeat this line."""
        above = list(self._above(line))
        loop = above[1] if len(above) > 1 else None
        return self._text(line, loop) if isinstance(loop, ast.For | ast.While) and len(loop.body) == 1 else ""

    def decision(self, line: str) -> str:
        """Return the line that decides what this line does in an iteration of its loop: it sets the input of the line's
        condition, or of its call; else the condition itself."""
        above = list(self._above(line))
        loop, tests = self._loop(above)
        inside = [x for head in _heads(above[0]) for x in ast.walk(head)] if above else []
        chosen = [node.test for node in inside if isinstance(node, ast.IfExp)]
        given = [arg for node in inside if isinstance(node, ast.Call) for arg in node.args]
        set_to = [node.value for node in above[:1] if isinstance(node, ast.Assign)]
        for expression in (*chosen, *given, *set_to, *(node.test for node in tests)):
            if found := self._set_in(line, loop, expression):
                return found
        return self._text(line, tests[0]) if tests else ""

    def argument(self, line: str, name: str) -> str:
        """Return the line of the same iteration that sets the argument of this name of a call at the line."""
        above = list(self._above(line))
        calls = [node for node in ast.walk(above[0]) if isinstance(node, ast.Call)] if above else []
        given = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == name]
        return next((found for x in given if (found := self._set_in(line, self._loop(above)[0], x))), "")

    def way_past(self, line: str) -> str:
        """Return the `continue` that skips the line in an iteration of its loop, or else the line's condition."""
        above = list(self._above(line))
        loop, tests = self._loop(above)
        for node in loop.body if loop is not None else ():
            if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Continue) and node.lineno < above[0].lineno:
                return self._text(line, node.body[-1])
        return self._text(line, tests[0]) if tests and loop is not None else ""

    # --- how ---------------------------------------------------------------------------------------------------------

    def _text(self, line: str, node: Any) -> str:
        return line_text(self._places[line][0], node.lineno)

    def _above(self, line: str) -> Iterator[ast.stmt]:
        """Yield the statement of a line and those around it in the same function, the innermost first."""
        for node in reversed(around(*self._places[line]) if line in self._places else []):
            if isinstance(node, _Own):
                return
            yield node

    def _loop(self, above: list[ast.stmt]) -> tuple[Any, list[ast.If]]:
        """Return the innermost loop around the line, and the conditions inside it; all of them if there is none."""
        loop = next((node for node in above[1:] if isinstance(node, ast.For | ast.While)), None)
        inside = above if loop is None else above[: above.index(loop)]
        return loop, [node for node in inside if isinstance(node, ast.If)]

    def _set_in(self, line: str, loop: Any, expression: ast.AST) -> str:
        """Return the last line of the loop before this one that sets a name of an expression."""
        names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
        found = [
            node
            for node in (ast.walk(loop) if loop is not None else ())
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
            and node.lineno < self._places[line][1]
            and names & {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        ]
        return self._text(line, max(found, key=lambda node: node.lineno)) if found else ""


def returned(filename: str, line: int) -> str:
    """Return the last `return` of the function that begins at a line of a file; "" if it has none."""
    for node in ast.walk(tree_of(filename)):
        if isinstance(node, ast.FunctionDef) and line in (node.lineno, *(one.lineno for one in node.decorator_list)):
            returns = [x for x in ast.walk(node) if isinstance(x, ast.Return)]
            return line_text(filename, returns[-1].lineno) if returns else ""
    return ""


def _heads(node: ast.AST) -> list[ast.AST]:
    """Return the expressions of a statement, without the statements inside it."""
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


# --- statements of any program ----------------------------------------------------------------------------------------

NOTHING = "nothing"
"""The target of a statement whose value is not used at all."""


def tree_of(filename: str) -> ast.Module:
    """Return the syntax tree of a file; an empty one for a cell with magics."""
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ast.Module([], [])


def beginning(function: Any) -> tuple[str, int] | None:
    """Return the file and the line at which a function begins; None if it is not written in Python."""
    code = getattr(function, "__code__", None)
    return None if code is None else (code.co_filename, statement(code.co_filename, code.co_firstlineno)[0])


def statement(file: str, line: int) -> tuple[int, str]:
    """Return the first line of the statement that a line belongs to, and the name that it assigns to: "" for none, or
    NOTHING."""
    return _statements(file).get(line, (line, ""))


@cache
def _statements(file: str) -> dict[int, tuple[int, str]]:
    found: dict[int, tuple[int, str]] = {}
    for node in ast.walk(tree_of(file)):  # outer statements come first
        if isinstance(node, ast.stmt):
            name = ""
            if isinstance(node, ast.Expr):
                name = NOTHING
            elif isinstance(node, ast.Assign):
                name = ", ".join(map(ast.unparse, node.targets)).strip("()")
            elif isinstance(node, ast.AnnAssign | ast.AugAssign):
                name = ast.unparse(node.target)
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            for line in range(node.lineno, max(end, node.lineno) + 1):
                found[line] = node.lineno, name
    return found


def around(file: str, line: int) -> list[ast.stmt]:
    """Return the statements that contain a line, the outermost first."""
    statements = (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.stmt))
    found = [node for node in statements if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return sorted(found, key=lambda node: (node.lineno, -(node.end_lineno or 0)))


def function_around(file: str, line: int) -> tuple[int, int] | None:
    """Return the first and the last line of the innermost function that contains a line."""
    functions = [node for node in around(file, line) if isinstance(node, ast.FunctionDef)]
    return (functions[-1].lineno, functions[-1].end_lineno or 0) if functions else None
