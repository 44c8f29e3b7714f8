"""The common part of all checks: a stub, a library function, an error and a mistake all become a `Verdict`.

A check is a function under `@check(...)`. It examines the learner's functions, calls `refuse` when something is wrong,
also on a rank, and returns the verdict if all is right. A check never raises, so a notebook with an unsolved exercise
still runs from top to bottom.
"""

from __future__ import annotations

import dis
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import chain, pairwise
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, NoReturn, ParamSpec, TypeVar

import numpy as np

from tplab.errors import OutsideRunError, RankError
from tplab.exercises.calls import LIBRARIES, library_call
from tplab.exercises.damage import Untouched, moved_on
from tplab.mesh import Mesh
from tplab.widgets.matrices import Matrices, Panel
from tplab.widgets.paper.card import Card

P = ParamSpec("P")
K = TypeVar("K")


class Verdict:
    """The result of a check. `passed` is True, False, or None if the exercise was not started."""

    def __init__(self, passed: bool | None, text: str, panels: Sequence[Panel] = ()):
        self.passed, self.text, self.panels = passed, text, tuple(panels)

    def __repr__(self) -> str:
        return self.text

    def card(self) -> Card | None:
        """The picture, if there is one."""
        if not self.panels:
            return None
        title, _, text = self.text.partition("\n")
        card = Matrices(self.panels, title, text)
        card.sentence = self.text
        return card

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        card = self.card()
        return card._repr_mimebundle_(**kwargs) if card else {"text/plain": self.text}


class Refused(Exception):
    """Raised for a wrong answer. `of` is the function at fault, if not all of them are."""

    def __init__(self, verdict: Verdict, of: str = ""):
        super().__init__(verdict.text)
        self.verdict, self.of = verdict, of


def refuse(text: str, panels: Sequence[Panel] = (), of: str = "") -> NoReturn:
    """End a check with a refusal. The text follows the function's name, as in ": it returned None"."""
    raise Refused(Verdict(False, text, panels), of)


def right(text: str, panels: Sequence[Panel] = ()) -> Verdict:
    """The verdict on a right answer. The text follows the function's name, as in " is right."."""
    return Verdict(True, text, panels)


def check(
    name: str = "",
    not_with: tuple[str, ...] = (),
    libraries: tuple[str, ...] = LIBRARIES,
    functions: int = 1,
    takes: tuple[type, ...] = (FunctionType, MethodType),
    how: str = "Write a function, with `def`.",
    aside: str = "",
) -> Callable[[Callable[P, Verdict]], Callable[P, Verdict]]:
    """Make a check of a function that judges the learner's functions, its first `functions` arguments.

    name       of the exercise, which begins every text; by default, the name of the learner's function
    not_with   functions of these libraries that would solve the exercise
    takes      the types of an answer; `how` says how to write one
    aside      one more sentence for an answer that uses a library function
    """

    def decorate(judge: Callable[P, Verdict]) -> Callable[P, Verdict]:
        @wraps(judge)
        def checked(*args: P.args, **options: P.kwargs) -> Verdict:
            fns: Any = args[:functions]
            called = name or getattr(fns[0], "__name__", judge.__name__.removeprefix("check_"))
            try:
                for fn in fns:
                    if not isinstance(fn, takes):
                        refuse(f": this is an object of type {type(fn).__name__}. {how}")
                    if not isinstance(fn, type) and not_started(fn):
                        return untouched(called, fn)
                    if lazy := library_call(fn, not_with, libraries):
                        refuse(f": `{lazy}` does the work. Here you write it yourself.{aside}")
                verdict = judge(*args, **options)
            except Exception as error:
                refused = _told(error, fns)
                verdict, called = refused.verdict, refused.of or called
            verdict.text = called + verdict.text
            return verdict

        return checked

    return decorate


def not_started(fn: Callable[..., Any]) -> bool:
    """Whether `fn` is a stub: nothing but `...`, or with `name = ...` left in it."""
    code = list(dis.get_instructions(fn))
    ends = ("STORE_FAST", "STORE_NAME", "STORE_DEREF", "RETURN")  # and not STORE_SUBSCR, as in `x[...] = y`
    if any(one.argval is Ellipsis and two.opname.startswith(ends) for one, two in pairwise(code)):
        return True
    if any("CONST" in one.opname and one.argval not in (None, ...) for one in code):
        return False
    nothing = ("RESUME", "NOP", "LOAD_CONST", "RETURN", "COPY_FREE_VARS", "POP_TOP")
    return all(one.opname.startswith(nothing) for one in code)


def untouched(name: str, stub: Callable[..., Any]) -> Verdict:
    """The verdict on a stub, in which a learner may have replaced the `...` by `pass`."""
    try:
        source = inspect.getsource(stub)
    except OSError:
        source = "..."
    way = "Replace the `...`" if "..." in source else "The function does nothing yet: write its body"
    return Verdict(None, f"{name}: not started. {way}, then run this cell again.")


def with_task(verdict: Verdict, task: object) -> Verdict:
    """The verdict; if the exercise was not started, its text also states the task."""
    if verdict.passed is None:
        verdict.text = verdict.text.replace("not started. ", f"not started. {task}.\n", 1)
    return verdict


def refuse_damage(before: Untouched, but: str = "") -> None:
    """End a check if something has changed: ": it changes x in place ..."."""
    if harm := before.damage():
        refuse(f": {but}{harm}")


# --- running what the learner wrote --------------------------------------------------------------------------------


class Raised(Exception):
    """An error of a learner's function, its `__cause__`, and where: " of Mesh(tp=2)", " for 4 ranks"."""

    def __init__(self, where: str):
        super().__init__(where)
        self.where = where


@contextmanager
def on(where: Mesh | str) -> Iterator[None]:
    """Report errors of the learner's function inside with this mesh, or with these words: "for 4 ranks". Refuse changes
    of global state."""
    said, place = (f" of {where}", f"on {where}") if isinstance(where, Mesh) else (f" {where}", where)
    try:
        with nullcontext() if isinstance(where, Mesh) else moved_on():
            before = Untouched({})
            try:
                yield
                refuse_damage(before, f"{place}, ")
            finally:
                before.damage()  # restores global state, also after an error
    except Refused:
        raise
    except Raised as error:
        error.where += said
        raise
    except Exception as error:
        raise Raised(said) from error


def run_on(mesh: Mesh, program: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """torch's `run`. Errors of the learner's function on a rank are reported with the mesh."""
    from tplab.torch import run

    with on(mesh):
        return run(program, mesh, *args, **options)


def _told(error: BaseException, fns: Sequence[Any]) -> Refused:
    """The refusal, also if it was raised on a rank; or one with the error of the learner's functions and its line."""
    where = error.where if isinstance(error, Raised) else ""
    error = error.__cause__ or error if isinstance(error, Raised) else error
    rank = f" on rank {error.rank}" if isinstance(error, RankError) else ""
    cause = error.__cause__ or error if isinstance(error, RankError) else error
    if isinstance(cause, Refused):
        return cause
    codes = [getattr(getattr(fn, "forward", fn), "__code__", None) for fn in fns]
    files, through = {code.co_filename for code in codes if code}, traceback.extract_tb(cause.__traceback__)
    mine = [one.line for one in through if one.filename in files and one.line]
    line = f"\nin the line: {mine[-1]}" if mine else ""
    if isinstance(cause, OutsideRunError) and any("jax" in Path(one.filename).parts for one in through[-1:]):
        line += '\nIs your program in JAX? If the check takes JAX, add "jax" to its arguments.'
    return Refused(Verdict(False, f": {type(cause).__name__}{rank}{where}: {cause}{line}"))


# --- comparing -----------------------------------------------------------------------------------------------------


def differs(got: Any, want: Any, slack: Any = 1e-9) -> Any:
    """Whether a number, or each of an array, is further than `slack` from what is right; nan always is."""
    return ~(np.abs(np.asarray(got) - np.asarray(want)) <= slack)


def beside(name: str, got: Any, want: Any, off: Any = None, apart: bool = False) -> list[Panel]:
    """The learner's result beside the right one, with wrong entries marked; if `apart`, also their difference."""
    got, want = np.asarray(got), np.asarray(want)
    panels = [Panel(name, got, off), Panel("right", want)]
    return [*panels, Panel("yours - right", got - want, off)] if apart else panels


def cause(tried: Iterable[tuple[Any, Mapping[K, Any]]], otherwise: K, slack: float = 1e-9) -> K:
    """The first mistake that explains the learner's results in all cases, each of them (got, mistake -> prediction).

    One case is not enough: in small ones, unrelated mistakes look the same. If a case raises, nothing is explained.
    Every case has the same mistakes in the same order; the wording is that of the first case.
    """
    left: dict[int, K] | None = None
    try:
        for got, known in tried:
            left = dict(enumerate(known)) if left is None else left
            of, guesses = np.asarray(got, float), [np.asarray(guess, float) for guess in known.values()]
            left = {place: said for place, said in left.items() if _agree(of, guesses[place], slack)}
            if not left:
                return otherwise
    except Exception:
        return otherwise
    return next(iter((left or {}).values()), otherwise)


def _agree(got: np.ndarray, guess: np.ndarray, slack: float) -> bool:
    return guess.shape in ((), got.shape) and np.allclose(got, guess, rtol=0, atol=slack)


def hint(got: Any, known: Mapping[str, Any], otherwise: str = "", slack: float = 1e-9) -> str:
    """The first hint whose prediction, a number or an array, equals the learner's result: `cause` for a single case."""
    return cause([(got, known)], otherwise, slack)


@dataclass(frozen=True)
class Case:
    """The learner's result in one case, and the right one.

    known       hint on a mistake -> its result here
    text        the beginning of a refusal   given   the input, to check the numbers by: "For 3 tokens, "
    otherwise   what to say instead of both results, if no mistake explains the learner's
    """

    got: np.ndarray
    want: np.ndarray
    known: Mapping[str, Any]
    text: str
    given: str = ""
    otherwise: str = ""

    def numbers(self, slack: float) -> str:
        """Both results in words; of a table, the first wrong row."""
        got, want, said = self.got, self.want, "these numbers are right"
        if want.ndim > 1:
            row = int(np.flatnonzero(differs(got, want, slack).any(1))[0])
            got, want, said = got[row], want[row], f"this is right for token {row}"
        right, yours = (f"[{', '.join(f'{float(number):.6g}' for number in one)}]" for one in (want, got))
        text = f"{self.given}{said}: {right}. Yours {'are' if said.endswith('are right') else 'is'} {yours}."
        return text[0].upper() + text[1:]


def compare(cases: Iterable[Case], slack: float = 1e-9) -> list[Case]:
    """All cases. Refuses the first that is wrong: with its cause if one mistake explains all, or else with numbers."""
    cases, before = iter(cases), list[Case]()
    for case in cases:
        if (off := np.atleast_2d(differs(case.got, case.want, slack))).any():
            tried = ((one.got, one.known) for one in chain([case], before, cases))
            said = cause(tried, case.otherwise or case.numbers(slack), slack)
            refuse(f"{case.text}\n{said}", beside("yours", np.atleast_2d(case.got), np.atleast_2d(case.want), off))
        before.append(case)
    return before


def listed(things: Iterable[Any]) -> str:
    """In words: "1, 2 and 3"."""
    *most, last = map(str, things)
    return f"{', '.join(most)} and {last}" if most else last
