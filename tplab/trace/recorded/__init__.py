"""Real runs: the files that the ranks' processes have written, merged into one measured trace."""

from tplab.trace.recorded.merge import Merged, merge

__all__ = ["Merged", "merge"]
