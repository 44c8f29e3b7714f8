"""The errors that tplab raises. Every message says what happened, with the numbers, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

REPOSITORY = "https://github.com/tplab/tplab"
"""The source to install tplab from; it is not in a package registry."""


class TplabError(Exception):
    """Anything tplab raises on purpose."""

    make_trace: Callable[[], Any] | None = None

    @property
    def trace(self) -> Any:
        """The `Trace` of the simulated ranks until the error; None if it was not raised in a run."""
        return None if self.make_trace is None else self.make_trace()


class MissingPackageError(TplabError, ImportError):
    """An optional package, which tplab does not install by itself, is missing."""

    def __init__(self, module: str, package: str, extra: str):
        way_out = f"to install it: pip install 'tplab[{extra}] @ git+{REPOSITORY}'"
        super().__init__(f"{module} needs {package}, which is not installed; {way_out}")


class MeshError(TplabError, ValueError):
    """An impossible mesh, or an axis, coordinate or rank that the mesh does not have."""


class SpecError(TplabError, ValueError):
    """A `P` that does not fit the mesh or the tensor."""


class ShapeError(TplabError, ValueError):
    """A size that does not divide evenly, or two sizes that must agree and do not."""


class ClusterError(TplabError, ValueError):
    """A chip, link or cluster with impossible figures, or an unknown name."""


class TraceError(TplabError, ValueError):
    """An event or a column that a trace cannot hold."""


class ScheduleError(TplabError, ValueError):
    """A pipeline schedule that cannot be built, or that breaks a rule."""


class RankError(TplabError, RuntimeError):
    """A rank raised an error. `rank` says which rank; `__cause__` is the error itself, with its own traceback."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class ReplicationError(TplabError, RuntimeError):
    """Ranks hold different tensors where they should hold the same one."""


class DeadlockError(TplabError, RuntimeError):
    """All ranks that are still running are waiting, and what they wait for can never come."""


class CollectiveMismatchError(TplabError, RuntimeError):
    """Ranks of one group called different collectives, or the same ones in another order or with other shapes or
    dtypes."""


class OutsideRunError(TplabError, RuntimeError):
    """A collective was called outside of `run`, where there are no ranks."""


class ParallelError(TplabError, AssertionError):
    """A parallel model does not compute the same as the unsharded one. The message is `check_parallel`'s report."""


class CheckpointError(TplabError, ValueError):
    """A damaged checkpoint: a file is missing, truncated or changed."""


class PlanError(TplabError, ValueError):
    """A plan for sharding a model that is impossible, or that would change what the model computes."""


def one_of(name: str, given: object, choices: Iterable[object], error: type[ValueError] = ValueError) -> None:
    """Raise `error` if `given` is not one of the choices; the message calls it `name`."""
    known = [*choices]  # a list also compares with what cannot be hashed
    if given not in known:
        raise error(f"{name} is {given!r}; it must be one of {', '.join(map(str, known))}")


def near(given: str, choices: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the names it resembles, or else all known names."""
    known = [*choices]
    found = get_close_matches(given.lower(), known, 3)
    return f"; did you mean {' or '.join(found)}?" if found else f"; there are {', '.join(known)}"


class CrossedOrderWarning(UserWarning):
    """Ranks issue two collectives in opposite orders: the program runs here, and may hang on GPUs."""
