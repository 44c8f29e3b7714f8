"""Your own cluster: constants fitted to what you measured on it, kept in a file that `find` accepts for a name."""

from tplab.cost.own.file import load, save
from tplab.cost.own.fit import Row, fit_cluster
from tplab.cost.own.nccl_tests import read_tables

__all__ = ["Row", "fit_cluster", "load", "read_tables", "save"]
