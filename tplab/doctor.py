"""`python -m tplab.doctor --nproc-per-node 4 train.py`: does the script train the same model on 4 ranks as on one?"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tplab.commands import behind, leave_working_directory_out, mesh_of, whole
from tplab.parser import Parser, ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 for the same model, 1 for another one or log, 2 if it could not run, 3 if runs do not tell."""
    given = _parser().parse_args(arguments)
    try:
        leave_working_directory_out()
        if given.mesh is None and given.nproc_per_node is None:
            said = f", before the script: {said}" if (said := behind(given.script, given.args)) else ""
            raise ValueError(f"give --nproc-per-node 4, or --mesh dp=2,tp=2{said}")
        mesh = mesh_of(given.nproc_per_node, given.mesh)
        reference = None if given.reference is None else whole(given.reference, "--reference")
        if mesh.size == 1 and reference is None and given.resume is None:
            raise ValueError("1 rank compared with 1 rank says nothing; give --nproc-per-node 2 or more")
        steps = whole(given.steps, "--steps")
        if not given.module and not Path(given.script).is_file():
            raise FileNotFoundError(f"there is no script {given.script}")
        if given.html and not Path(given.html).parent.is_dir():
            raise FileNotFoundError(f"--html {given.html}: there is no folder {Path(given.html).parent}")
        from tplab.torch.checking.same_model import same_model

        report = same_model(
            given.script,
            given.args,
            mesh=mesh,
            reference=reference,
            reference_args=shlex.split(given.reference_args),
            steps=steps,
            module=given.module,
            seed=given.seed,
            device=given.device,
            resume=None if given.resume is None else shlex.split(given.resume),
        )
    except KeyboardInterrupt:
        print("tplab.doctor: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, SyntaxError, ImportError) as error:
        print(f"tplab.doctor: {error}", file=sys.stderr)
        return 2
    print(report)
    if given.html:
        Path(given.html).write_text(_PAGE.format(report.about, report._repr_html_()), encoding="utf8")
        print(f"\nopen {given.html} in a browser")
    return report.exit_code


_PAGE = '<!doctype html><meta charset="utf8"><title>{}</title><body style="margin: 2em">{}</body>\n'


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tplab.doctor",
        description="Run a training script on simulated ranks, and again on one rank, and say what is first wrong: "
        "the quantity, the factor, the line, and its cause. Exit code: 0 for the same model, 1 for another one or "
        "another log, 2 if the script could not run, 3 if the two runs do not tell.",
    )
    add = parser.add_argument
    add("--nproc-per-node", "--nproc_per_node", metavar="N", help="simulated ranks, or gpu, cpu, auto; or give --mesh")
    add("--mesh", metavar="dp=2,tp=2", help="axes of the mesh, for programs that use tplab's")
    add("--reference", metavar="N", help="ranks of the run to compare with (default: 1; with --resume, as many)")
    add("--reference-args", default="", metavar="'--batch-size 32'", help="added to the reference's arguments")
    add("--resume", metavar="'--resume last.pt'", help="begin again from the script's checkpoint, and compare")
    add("--steps", default="3", metavar="N", help="steps of the optimizer (default: 3)")
    add("--seed", type=int, default=0, metavar="N", help="seed of every rank's random numbers (default: 0)")
    add("--device", metavar="cpu", help="cpu: run a script that asks for GPUs on the CPU")
    add("--html", metavar="report.html", help="also write the report as a page")
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    add("script", help="the script, or with -m the name of a module")
    add("args", nargs=argparse.REMAINDER, help="the script's own arguments").required = False
    return parser


if __name__ == "__main__":
    ended(main)
