"""`python -m tplab.torchrun --nproc-per-node 8 train.py`: a script that was written for torchrun, on simulated ranks.

The flags are torchrun's. What only real processes need (rendezvous, ports, restarts) is accepted and has no effect.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from tplab.errors import RankError, TplabError
from tplab.mesh import Mesh

_ONLY_REAL = ("node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "master-addr", "master-port",
              "max-restarts", "monitor-interval", "start-method", "role", "log-dir", "tee", "redirects",
              "local-addr", "local-ranks-filter", "event-log-handler", "logs-specs")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if the script ran to its end on every rank."""
    given = _parser().parse_args(arguments)
    try:
        mesh, num_nodes = _mesh(given)
    except (ValueError, TplabError) as error:
        print(f"tplab.torchrun: {error}", file=sys.stderr)
        return 2
    if not given.module and not Path(given.script).is_file():
        print(f"tplab.torchrun: there is no file {given.script}", file=sys.stderr)
        return 2
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # `python -m` has put it there, where a file can have the name of a module that torch imports
    from tplab.torch.scripts import launch
    from tplab.trace import summary, to_perfetto

    try:
        out = launch(
            given.script, given.args, mesh=mesh, module=given.module, num_nodes=num_nodes, cluster=given.cluster,
            clock=given.clock, seed=given.seed, device=given.device, count_memory=True,
        )  # fmt: skip
    except KeyboardInterrupt:
        print("tplab.torchrun: interrupted", file=sys.stderr)
        return 130
    except TplabError as error:
        _explain(error)
        return 1
    print("\n" + summary(out.trace, out.peaks))
    if out.mapped:
        print("\n" + out.mapped)
    if given.trace:
        Path(given.trace).write_text(out.trace.to_json(), encoding="utf8")
        print(f"\nthe trace is in {given.trace}; Trace.from_json reads it")
    if given.perfetto:
        to_perfetto(out.trace, given.perfetto)
        print(f"\n{given.perfetto} opens in ui.perfetto.dev")
    if given.html:
        from tplab.widgets import to_html

        to_html(out.trace, given.html)
        print(f"\n{given.html} shows the run in any browser")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tplab.torchrun",
        description="Run a script that was written for torchrun on simulated ranks, and say what it sent.",
    )
    add = parser.add_argument
    add("--nproc-per-node", "--nproc_per_node", default="1", metavar="N", help="simulated ranks per node")
    add("--nnodes", default="1", metavar="N", help="how many nodes")
    add("--mesh", metavar="dp=2,tp=4", help="names for groups of ranks, used in what is shown")
    add("--cluster", metavar="h100", help="whose computing and links the modelled clock takes")
    add("--clock", choices=("modelled", "measured"), help="measured: the ranks' computing is timed on this machine")
    add("--seed", type=int, default=0, help="of the random numbers that each rank begins with")
    add("--device", metavar="cpu", help="cpu: run a script that asks for GPUs on the CPU")
    add("--trace", metavar="run.json", help="write the trace")
    add("--perfetto", metavar="run.perfetto.json", help="write the trace for ui.perfetto.dev")
    add("--html", metavar="run.html", help="write a page that plays the run in any browser")
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    add("--standalone", action="store_true", help=argparse.SUPPRESS)
    for name in _ONLY_REAL:
        add(f"--{name}", f"--{name.replace('-', '_')}", help=argparse.SUPPRESS)
    add("script", help="the script, or the module with -m")
    add("args", nargs=argparse.REMAINDER, help="what the script is given")
    return parser


def _mesh(given: argparse.Namespace) -> tuple[Mesh, int]:
    """The mesh to run on and the number of nodes. Raises ValueError."""
    num_nodes = _whole(str(given.nnodes).rpartition(":")[2], "--nnodes")
    per_node = _whole(given.nproc_per_node, "--nproc-per-node")
    if given.mesh is None:
        return Mesh(world=per_node * num_nodes), num_nodes
    axes = {}
    for axis in given.mesh.split(","):
        name, equals, size = axis.partition("=")
        if not equals:
            raise ValueError(f"--mesh {given.mesh}: write each axis as name=size, as in dp=2,tp=4")
        axes[name.strip()] = _whole(size, "--mesh")
    mesh = Mesh(**axes)
    if per_node != 1 and mesh.size != per_node * num_nodes:
        raise ValueError(
            f"--mesh {given.mesh} has {mesh.size} ranks, and --nproc-per-node {per_node} on {num_nodes} "
            f"node{'s' * (num_nodes > 1)} are {per_node * num_nodes}; leave --nproc-per-node out, or make them agree"
        )
    return mesh, num_nodes


def _whole(text: str, flag: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{flag} is {text!r}; give a number, 1 or more: of simulated ranks there can be any number")
    return int(text)


def _explain(error: TplabError) -> None:
    """What went wrong; of what a rank raised also the lines of the script that led there."""
    cause = error.__cause__
    if isinstance(error, RankError) and cause is not None:
        ours = str(Path(__file__).parent)
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if not frame.filename.startswith(ours)]
        sys.stderr.write("".join(traceback.format_list(frames)))
    print(f"tplab.torchrun: {type(error).__name__}: {error}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(note, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
