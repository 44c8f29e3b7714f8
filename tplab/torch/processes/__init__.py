"""Ranks that are processes: on this machine, kept warm from one run to the next, or started by torchrun."""

from tplab.torch.processes.torchrun import run_under_torchrun
from tplab.torch.processes.warm import run_on_processes, shut_down

__all__ = ["run_on_processes", "run_under_torchrun", "shut_down"]
