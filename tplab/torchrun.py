"""`python -m tplab.torchrun --nproc-per-node 8 train.py`: runs a script written for torchrun on simulated ranks.

The flags are torchrun's. Those that only real processes need (rendezvous, ports, restarts) are accepted and ignored.
"""

from __future__ import annotations

import argparse
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from tplab.commands import add_flags, behind, check_files, leave_working_directory_out, mesh_of, whole, write_files
from tplab.cost import Cluster
from tplab.errors import CrossedOrderWarning, RankError, TplabError
from tplab.forecast import Forecast
from tplab.forecast.beside import beside
from tplab.forecast.clusters import COLUMNS, flagged
from tplab.forecast.clusters import add_flags as add_cluster_flags
from tplab.forecast.plan import AXES
from tplab.forecast.rows import forecast_row, unread
from tplab.mesh import Mesh
from tplab.parser import Parser, ended
from tplab.trace import summary

if TYPE_CHECKING:
    from tplab.torch.checking.watch import Watch

_ONLY_REAL = (
    "node-rank",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "master-addr",
    "master-port",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "role",
    "log-dir",
    "tee",
    "redirects",
    "local-addr",
    "local-ranks-filter",
    "event-log-handler",
    "logs-specs",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "numa-binding",
    "signals-to-handle",
    "shutdown-timeout",
)
_FORECAST = "model=llama3-8b,batch=64,sequence=4096,zero=0"
_SHORT = {"redirects": "-r", "tee": "-t"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if the script finished on every rank. With --check-copies, 1 if copies differ, and 2 if there
    are none."""
    given = _parser().parse_args(arguments)
    leave_working_directory_out()
    try:
        cluster = flagged(given) if any(getattr(given, name) is not None for name in COLUMNS) else None
        num_nodes = whole(str(given.nnodes).rpartition(":")[2], "--nnodes")
        mesh = mesh_of(given.nproc_per_node, given.mesh, num_nodes)
        if not given.module and not Path(given.script).is_file():
            raise FileNotFoundError(f"there is no script {given.script}")
        if given.module and given.script.endswith(".py"):
            raise ValueError(f"-m {given.script}: -m needs the name of a module, without .py; or leave -m out")
        check_files(given)
        if mesh.size == 1 and (said := behind(given.script, given.args)):
            print(f"tplab.torchrun: on 1 rank: {said}", file=sys.stderr)
        planned = _planned(given, mesh, cluster)
        from tplab.torch.scripts import Script
    except (ValueError, OSError, TplabError) as error:
        return _refuse(error)
    watch = _watch(mesh) if given.check_copies else None
    try:
        warnings.simplefilter("ignore", CrossedOrderWarning)  # the summary lists them
        with watch or nullcontext():
            out = Script(given.script, given.args, module=given.module).run(
                mesh,
                num_nodes=num_nodes,
                cluster=cluster,
                clock=given.clock,
                seed=given.seed,
                device=given.device,
                count_memory=True,
                print_live=True,
                around=watch.around if watch else nullcontext,
                types=given.types or given.spmd_types,
            )
    except KeyboardInterrupt:
        print("tplab.torchrun: interrupted", file=sys.stderr)
        return 130
    except TplabError as error:
        _explain(error)
        if error.trace is not None and len(error.trace):
            print("\nuntil then, " + summary(error.trace))
            write_files(error.trace, given)
        return 1
    except SyntaxError as error:
        sys.stderr.write("".join(traceback.format_exception_only(error)))
        return 1
    except (ValueError, ImportError) as error:
        return _refuse(error)
    if out.mesh == mesh:  # a run for types only uses a smaller mesh
        print("\n" + summary(out.trace, out.peaks))
        if planned is not None:
            print("\n" + beside(out.trace, planned))
    if given.types or given.spmd_types:
        out.types.results.clear()  # a script returns nothing
        print(f"\n{out.types}")
        if given.spmd_types:
            print(f"\n{out.types.as_spmd_types()}")
    if out.mapped:
        print("\n" + out.mapped)
    write_files(out.trace, given)
    if watch is None:
        return 0
    from tplab.checking.copies import check_copies

    report = check_copies(watch.seen, f"{Path(given.script).name}, its copies compared with one another")
    print(f"\n{report}")
    return report.exit_code


def _watch(mesh: Mesh) -> Watch:
    from tplab.torch.checking.handed import Plan
    from tplab.torch.checking.watch import Watch

    return Watch(mesh.size, Plan(steps=3, ends=False))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tplab.torchrun",
        description="Run a script that was written for torchrun on simulated ranks, and report what it sent. "
        "torchrun's flags for rendezvous, restarts and logs are accepted and have no effect.",
    )
    add = parser.add_argument
    add(
        "--nproc-per-node",
        "--nproc_per_node",
        metavar="N",
        help="simulated ranks per node, or gpu, cpu, auto (default: 1)",
    )
    add("--nnodes", default="1", metavar="N", help="number of nodes (default: 1)")
    add("--mesh", metavar="dp=2,tp=4", help="axes of the mesh: they name the groups of ranks in the output")
    add_cluster_flags(parser)
    add("--forecast", metavar=_FORECAST, help="what a step takes by tplab.forecast, and its bytes beside the run's")
    add("--clock", choices=("modelled", "measured"), help="measured: time the ranks' computing on this machine")
    add("--seed", type=int, default=0, metavar="N", help="seed of every rank's random numbers (default: 0)")
    add("--device", metavar="cpu", help="cpu: run a script that asks for GPUs on the CPU")
    add("--check-copies", action="store_true", help="compare gradients and parameters on ranks that hold copies")
    add("--types", action="store_true", help="print what each tensor is along each axis: R, I, V or P, line by line")
    add("--spmd-types", action="store_true", help="print them as annotations of spmd_types, too")
    add_flags(parser)
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    add("--standalone", action="store_true", help=argparse.SUPPRESS)
    for name in _ONLY_REAL:
        short = [_SHORT[name]] if name in _SHORT else []
        add(*short, f"--{name}", f"--{name.replace('-', '_')}", help=argparse.SUPPRESS)
    add("script", help="the script, or with -m the name of a module")
    add("args", nargs=argparse.REMAINDER, help="the script's own arguments").required = False
    return parser


def _planned(given: argparse.Namespace, mesh: Mesh, cluster: Cluster | None) -> Forecast | None:
    """The forecast that --forecast asks for. Raises ValueError or TplabError."""
    if given.forecast is None:
        return None
    if cluster is None:
        raise ValueError("--forecast needs the hardware: give --cluster, too")
    row = dict(pair.partition("=")[::2] for pair in given.forecast.replace(",", " ").split())
    if not row or not all(row.values()):
        raise ValueError(f"--forecast is {given.forecast!r}; give columns of a table of plans, as {_FORECAST}")
    axes = {name: str(size) for name, size in mesh.shape.items() if name in AXES}
    if sentences := unread(row):
        raise ValueError(f"--forecast: {sentences[0]}")
    return forecast_row({"gpus": str(mesh.size), **axes, **row}, cluster)[1]


def _refuse(error: Exception) -> int:
    """Say what is wrong with the command. Returns the exit code."""
    print(f"tplab.torchrun: {error}", file=sys.stderr)
    return 2


def _explain(error: TplabError) -> None:
    """Say what went wrong and, if a rank raised an error, the lines of the script that led there."""
    cause = error.__cause__
    if isinstance(error, RankError) and cause is not None:
        ours = str(Path(__file__).parent)
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if not frame.filename.startswith(ours)]
        sys.stderr.write("".join(traceback.format_list(frames)))
    print(f"tplab.torchrun: {type(error).__name__}: {error}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(note, file=sys.stderr)


if __name__ == "__main__":
    ended(main)
