"""Real runs: what each rank's process has written down, merged into one measured trace."""

from tplab.trace.recorded.merge import Merged, merge

__all__ = ["Merged", "merge"]
