"""What can go wrong, by name. Every message says what happened, the numbers, and the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class TplabError(Exception):
    """Anything tplab raises on purpose."""

    make_trace: Callable[[], Any] | None = None

    @property
    def trace(self) -> Any:
        """What simulated ranks had done until then, as a `Trace`; None of an error that no run has raised."""
        return None if self.make_trace is None else self.make_trace()


class MissingPackageError(TplabError, ImportError):
    """A package that tplab does not install by itself is not there."""

    def __init__(self, module: str, package: str, extra: str):
        way_out = f"to install it: pip install 'tplab[{extra}]'"
        super().__init__(f"{module} needs {package}, which is not installed; {way_out}")


class MeshError(TplabError, ValueError):
    """A mesh that cannot be, or an axis, coordinate or rank it does not have."""


class SpecError(TplabError, ValueError):
    """A `P` that does not fit the mesh or the tensor."""


class ShapeError(TplabError, ValueError):
    """A size that does not fit: it does not divide, or two sizes that must agree do not."""


class ClusterError(TplabError, ValueError):
    """A chip, link or cluster with impossible figures, or an unknown name."""


class TraceError(TplabError, ValueError):
    """An event or a column that a trace cannot hold."""


class ScheduleError(TplabError, ValueError):
    """A pipeline schedule that cannot be built, or that breaks a rule."""


class RankError(TplabError, RuntimeError):
    """A rank raised. `rank` says which one; `__cause__` is what it raised, with its own traceback."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class ReplicationError(TplabError, RuntimeError):
    """Ranks that were said to hold the same tensor do not."""


class DeadlockError(TplabError, RuntimeError):
    """Every rank that is still running waits, and nothing can reach any of them."""


class CollectiveMismatchError(TplabError, RuntimeError):
    """Ranks of one group called different collectives, in another order, or with other shapes or dtypes."""


class OutsideRunError(TplabError, RuntimeError):
    """A collective was called where there are no ranks: outside of `run`."""


class ParallelError(TplabError, AssertionError):
    """A parallel model does not compute what the unsharded one does. The message is `check_parallel`'s report."""


class PlanError(TplabError, ValueError):
    """A plan to shard a model that cannot be, or that would compute something else."""


def one_of(name: str, given: str, choices: Sequence[str]) -> None:
    """Raise ValueError where `given`, which the caller knows as `name`, is none of the choices."""
    if given not in choices:
        raise ValueError(f"{name} is {given!r}; it must be one of {', '.join(choices)}")
