"""tplab: an interactive lab for model parallelism. Write one rank's program; run it on every rank of a mesh."""

import sys
from typing import TYPE_CHECKING, Any

from tplab.mesh import Mesh
from tplab.sharding import P

if TYPE_CHECKING:
    from tplab.trace import Event, Trace

__version__ = "0.1.0"
__all__ = ["Event", "Mesh", "P", "Trace", "__version__"]


def __getattr__(name: str) -> Any:
    """Import traces on first use: they need NumPy, which takes longer to import than all of tplab.

    Anything that needs a framework lives elsewhere; `from tplab import run` raises an ImportError that says where.
    """
    if name in ("Event", "Trace"):
        from tplab import trace

        return getattr(trace, name)
    if name in ("run", "launch", "train"):
        where = "tplab.torch" if name == "launch" else "tplab.torch or tplab.jax: the import is the switch between them"
        # `from tplab import run` keeps this message only for an ImportError; hasattr needs an AttributeError.
        kind = ImportError if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap" else AttributeError
        raise kind(f"{name} is in {where}", name=__name__ if kind is ImportError else name)
    raise AttributeError(f"module 'tplab' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Register the magic `%%ranks`: `%load_ext tplab` calls this."""
    from tplab.magic import load

    load(shell)


def __dir__() -> list[str]:
    return __all__
