"""Your own cluster: constants fitted to your measurements, in a file that `find` accepts in place of a name."""

from tplab.cost.own.file import load, read_tables, save
from tplab.cost.own.fit import Row, fit_cluster

__all__ = ["Row", "fit_cluster", "load", "read_tables", "save"]
