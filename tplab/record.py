"""`torchrun --nproc-per-node 8 -m tplab.record train.py --its --own args`: records an unchanged script."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from tplab.commands import leave_working_directory_out
from tplab.errors import MissingPackageError
from tplab.parser import Parser
from tplab.trace.recorded.rank_file import FOLDER

LAUNCHED = "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"
"""What torchrun, srun and mpirun set for each process."""


def main() -> None:
    """Run the script in this process, which is one rank of the run."""
    parser = Parser(
        prog="torchrun [...] -m tplab.record",
        description="Run a script for torchrun as it is, and write down what each rank sends.",
    )
    parser.add_argument("--to", default=FOLDER, metavar="DIR", help=f"folder of the ranks' files (default: {FOLDER})")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    parser.add_argument("script", help="the script, or with -m the name of a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's own arguments").required = False
    given = parser.parse_args()
    if not given.module and not Path(given.script).is_file():
        parser.refuse(f"there is no script {given.script}")
    leave_working_directory_out()
    try:
        from tplab.torch.record.group import start
    except MissingPackageError as error:
        parser.refuse(error)
    if os.environ.keys().isdisjoint(LAUNCHED):
        parser.refuse(f"RANK is not set; start it with torchrun --nproc-per-node 8 -m tplab.record {given.script}")

    sys.argv = [given.script, *given.args]
    start(given.to)
    if given.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(given.script).resolve().parent))
        runpy.run_path(given.script, run_name="__main__")


if __name__ == "__main__":
    main()
