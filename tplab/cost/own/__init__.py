"""Your own cluster: constants fitted to your measurements, in a file that `find` accepts in place of a name."""

from tplab.cost.own.file import load, save
from tplab.cost.own.fit import Row, fit_cluster
from tplab.cost.own.nccl_tests import read_tables

__all__ = ["Row", "fit_cluster", "load", "read_tables", "save"]
