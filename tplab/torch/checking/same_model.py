"""`same_model`: does a training script train the same model on many ranks as on one?"""

from __future__ import annotations

import io
import logging
import re
import shlex
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tplab.checking.diagnosis import Diagnosis
from tplab.checking.recording import Seen
from tplab.checking.repairs import Repair, proven
from tplab.checking.same_model import SameModel, cannot_tell, could_not_run
from tplab.checking.samples import seeds_by_rank
from tplab.checking.seen_samples import NeedsSamples
from tplab.checking.starts import NeedsWeights, lost
from tplab.checking.trail import Trails
from tplab.errors import CrossedOrderWarning, DeadlockError, RankError, TplabError
from tplab.mesh import Mesh
from tplab.torch.checking.handed import Handed, NotEnough
from tplab.torch.checking.names import FLAT
from tplab.torch.checking.plan import Plan
from tplab.torch.checking.sums import OtherSums
from tplab.torch.checking.watch import Watch
from tplab.torch.distributed.process import Processes
from tplab.torch.run import run
from tplab.torch.scripts import Cell, Script, run_cell

Program = Callable[..., Any]


def same_model(
    script: str | Path | Cell | Program,
    args: Sequence[Any] = (),
    *,
    ranks: int | None = None,
    mesh: Mesh | None = None,
    reference: int | None = None,
    reference_args: Sequence[Any] | None = None,
    steps: int = 3,
    module: bool = False,
    seed: int = 0,
    device: str | None = None,
    resume: Sequence[Any] | None = None,
) -> SameModel:
    """Whether a training script trains the same model on many ranks as on one: `same_model("train.py", ranks=4)`.

    It runs the script on simulated ranks, and again on one rank, for a few steps of its optimizer, and compares in the
    order of a step: the weights at the start, the samples, the loss where a backward pass begins, every gradient before
    it is clipped, the norm it is clipped by, settings and states of the optimizer, the parameters after the step,
    buffers, and what the script prints. What is first wrong is said with its factor and its line. A cause is stated if
    the script, run again with the repair in place, was right.

    script     a file that is written for torchrun, unchanged; or a function, which is called with `args` on each rank,
               where torch.distributed is initialised
    args       the script's own arguments
    ranks      how many ranks; or give `mesh`, for programs that use tplab's axes: the reference's has the same ones
    reference  how many ranks the reference has (None: one)
    reference_args   are added to its arguments, as ["--batch-size", "32"]; of an option that is given twice, argparse
               takes the last
    steps      after so many steps each rank ends, where the next forward pass would begin
    module     whether `script` is the name of a module, as in `python -m`
    seed       of every rank's random numbers
    device     "cpu": every mention of cuda in the script means the CPU
    resume     arguments with which the script begins from its own checkpoint, as ["--resume", "last.pt"]. Then it runs
               until `steps` on the reference's ranks (None: as many), is started again with these on `ranks`, and its
               next steps are compared with those of a run on the reference's ranks that goes on

    Dropout draws its masks and drops nothing. If ranks draw their own data from seeds of their own, the reference is
    given that data; if they begin with other weights than the reference, but agree among themselves, it is given those.
    Optimizers are those of torch.optim and subclasses of theirs. Nothing that the script prints is shown.
    cost    the script on all ranks once, and on the reference's once; once more where rounding must be told from a
            fault. Copies are kept once
    Raises ValueError for arguments that make no sense. Whatever the script does is in the report.
    """
    if (ranks is None) == (mesh is None):
        raise ValueError("give either ranks=4 or mesh=Mesh(dp=2, tp=2)")
    mesh = mesh or Mesh(world=ranks)  # type: ignore[arg-type]
    reference = reference or (1 if resume is None else mesh.size)
    if steps < 1 or not 1 <= reference <= mesh.size:
        raise ValueError(
            f"steps is {steps} and reference is {reference}; both are at least 1, and it has no more ranks"
        )
    alone = mesh if reference == mesh.size else _first_axis(mesh, reference)
    theirs = _Runs(alone, [*args, *(reference_args or ())])
    doctor = _Doctor(script, _Runs(mesh, [*args]), theirs, module, steps, seed, device)
    return doctor.compared() if resume is None else doctor.resumed([*resume])


class _NotRun(Exception):
    """A script that fails, or hangs; the text says why, and `way_out` what may help."""

    way_out = ""

    @property
    def is_for_want_of_gpus(self) -> bool:
        return bool(re.search("gpu|cuda|nvidia|accelerator", str(self), re.IGNORECASE))

    def report(self, about: str) -> SameModel:
        return could_not_run(f"{self}{self.way_out}", about=about)


class _NothingToTell(_NotRun):
    """A run from which nothing can be learnt, though it went well."""

    def report(self, about: str) -> SameModel:
        return cannot_tell(str(self), about=about)


class _Runs(NamedTuple):
    """The mesh on which the script runs, and its arguments."""

    mesh: Mesh
    args: list[Any]

    def __str__(self) -> str:
        return f"{self.mesh.size} rank{'s' * (self.mesh.size > 1)}"


class _Doctor:
    """ours, theirs: how the script and its reference run."""

    def __init__(
        self, script: Any, ours: _Runs, theirs: _Runs, module: bool, steps: int, seed: int, device: str | None
    ):
        self.script, self.ours, self.theirs, self.module, self.steps = script, ours, theirs, module, steps
        self.options: dict[str, Any] = {"seed": seed, "device": device, "num_gpus": None}
        self.notes: list[str] = []
        self.name = "the cell" if isinstance(script, Cell) else getattr(script, "__name__", "") or Path(script).name

    def compared(self) -> SameModel:
        about = f"{self.name} on {self.ours}, compared with {self.theirs}"
        try:
            ours = self._on_gpus_or_cpu()
            if self.ours.mesh.size == 1:
                raise _NothingToTell("one rank alone shares no work: give more ranks, for example --nproc-per-node 2")
            if any(FLAT in one.kinds for one in ours):
                raise _NothingToTell(
                    "FullyShardedDataParallel (FSDP1) keeps all parameters of a module in one flat tensor, and the "
                    "gradients of each cannot be told apart: use fully_shard (FSDP2), or compare the script with "
                    "DistributedDataParallel instead"
                )
            if unfilled := [name for one in ours for name in one.unfilled]:
                more = f" and {len(set(unfilled)) - 1} more" if len(set(unfilled)) > 1 else ""
                raise _NothingToTell(
                    f"nothing has filled {unfilled[0]}{more} before training begins: to_empty at "
                    f"{ours[0].lines['empty']} leaves in parameters whatever was in memory (nn.Module.reset_parameters "
                    "fills those of one module, and not those of the modules in it)"
                )
            handed = Handed(ours)
            with _threads(ours):
                theirs = self._reference()
            about = f"{self.name} on {self.ours}, compared with {self.theirs}"
            return self._diagnosed(about, ours, theirs, handed if handed.fits else None)
        except _NotRun as error:
            return error.report(about)
        except (ImportError, OSError, SyntaxError):  # there is no such script, or it is none
            raise
        except Exception as error:  # of the doctor itself: what the script raises is a _NotRun by now
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(at.filename).name}:{at.lineno}"
            return cannot_tell(f"the doctor failed at {where}: {type(error).__name__}: {error}", about=about)

    def resumed(self, resume: list[Any]) -> SameModel:
        """The steps after a restart, compared with those of a run that goes on."""
        how = f"started again with {shlex.join(map(str, resume))!r} after {self.steps} steps"
        about = f"{self.name} on {self.ours}, {how}, compared with {self.theirs} that go on"
        try:
            if self.ours.mesh.size == 1:
                raise _NothingToTell("one rank alone shares no work: give more ranks, for example --nproc-per-node 2")
            theirs = self._later()

            def again(repairs: Sequence[Repair] = ()) -> list[Seen]:
                self.seen(self.theirs)  # the script leaves its checkpoint
                return self.seen(_Runs(self.ours.mesh, [*self.ours.args, *resume]), repairs=repairs)

            def diagnosed(ours: list[Seen], other: list[Seen] | None = None) -> SameModel:
                diagnosis = Diagnosis(ours, theirs, other, about=about, notes=self.notes)
                if findings := list(lost(diagnosis.facts)):
                    return SameModel([], findings, notes=self.notes, about=about)  # type: ignore[arg-type]
                return diagnosis.report()

            report = diagnosed(ours := again())
            if _is_certain(report):
                return report
            other = self._later(parts=self.ours.mesh.size)
            return _proven(diagnosed(ours, other), lambda repairs: diagnosed(again(repairs), other))
        except _NotRun as error:
            return error.report(about)

    def _later(self, **options: Any) -> list[Seen]:
        """What is seen of twice as many steps, but for the first half."""
        found = self.seen(self.theirs, steps=2 * self.steps, **options)
        if found[0].num_steps <= self.steps:
            raise _NothingToTell(f"on {self.theirs} the script ends after {self.steps} steps, but it should go on")
        return [
            replace(
                one, weights=last.parameters, buffers=last.buffers, states=last.states, steps=one.steps[self.steps :]
            )
            for one in found
            for last in [one.steps[self.steps - 1]]
        ]

    def _proven(self, report: SameModel, diagnosed: Callable[..., SameModel], weights: Any, feed: Any) -> SameModel:
        """The causes of faults, each of which was repaired in another run."""

        def again(repairs: Sequence[Repair]) -> SameModel:
            ours = [one for one in repairs if not one.of_reference]
            theirs = [one for one in repairs if one.of_reference]
            traced = next((one.times for one in ours if one.kind == "put"), None)
            seen = self.seen(self.ours, repairs=ours, traced=traced)
            whole = self.seen(self.theirs, weights=weights, handed=feed, repairs=theirs) if theirs else None
            return diagnosed(seen, whole)

        return _proven(report, again)

    def _on_gpus_or_cpu(self) -> list[Seen]:
        """What is seen of the ranks. Where they look for GPUs and this machine has none, cuda means the CPU."""
        try:
            return self.seen(self.ours)
        except _NotRun as error:
            if not error.is_for_want_of_gpus or self.options["device"] is not None or torch.cuda.is_available():
                raise
        self.options["device"] = "cpu"
        self.notes.append("this machine has no GPU, and the script looks for one, so cuda meant the CPU (--device cpu)")
        return self.seen(self.ours)

    def _reference(self) -> list[Seen]:
        """What is seen of the reference. Where it finds too few GPUs, it finds as many as the ranks; where it cannot
        run on one rank, it has as few as it can run on."""
        mesh, (alone, args) = self.ours.mesh, self.theirs
        try:
            return self.seen(self.theirs)
        except _NotRun as error:
            first = error
        if first.is_for_want_of_gpus and self.options["device"] == "cpu":
            self.options["num_gpus"] = mesh.size
            try:
                found = self.seen(self.theirs)
                self.notes.append(
                    f"the reference found {mesh.size} GPUs, as the ranks did, because with fewer it does not train"
                )
                return found
            except _NotRun as error:
                first = error
        for size in range(2, mesh.size if alone.size == 1 else 0):
            if mesh.size % size == 0:
                more = _Runs(_first_axis(mesh, size), args)
                with suppress(_NotRun):
                    found = self.seen(more)
                    self.theirs = more
                    self.notes.append(f"the reference has {size} ranks, because {first}")
                    return found
        raise first

    def _diagnosed(self, about: str, ours: list[Seen], first: list[Seen], handed: Handed | None) -> SameModel:
        weights: Mapping[str, np.ndarray] | None = None
        notes, is_fed, why = self.notes, False, ""
        for _ in range(3):
            feed = handed if is_fed else None
            theirs = first
            if is_fed or weights is not None:
                with _threads(ours):
                    theirs = self.seen(self.theirs, weights=weights, handed=feed, why=why)
            diagnosis = partial(Diagnosis, about=about, notes=notes, is_fed=is_fed)
            try:
                diagnosis(ours, theirs).ask()
                report = diagnosis(ours, theirs).report()
                if _is_certain(report):
                    return report
                with _threads(ours):
                    again = self.seen(self.theirs, weights=weights, handed=feed, parts=self.ours.mesh.size)
                judged = diagnosis(ours, theirs, again)
                report = judged.report()
                if judged.facts.wants_trails and self.theirs.mesh.size == 1:
                    given = handed if handed is not None and handed.regroups else feed
                    trails = self._trails(judged.facts.number, weights, given)
                    report = diagnosis(ours, theirs, again, trails=trails).report()

                def diagnosed(
                    seen: list[Seen], whole: list[Seen] | None, of: Any = diagnosis, known: Any = (theirs, again)
                ) -> SameModel:
                    return of(seen, *(known if whole is None else (whole, whole))).report()

                return self._proven(report, diagnosed, weights, feed)
            except NeedsWeights as needs:
                weights = needs.weights
                notes.append("the reference was given the weights that the ranks begin with, because it draws others")
            except NeedsSamples as needs:
                if handed is None:
                    return cannot_tell(str(needs), about=about)
                is_fed, why, handed.is_drawn = True, str(needs), needs.are_drawn and handed.can_be_drawn
                is_own = handed.is_drawn or seeds_by_rank(ours) is not None
                how = "each of them draws its own" if is_own else "it draws in another order"
                notes.append(f"the reference was given the samples that the ranks drew, because {how}")
        return cannot_tell("the reference does not take the weights and samples of the ranks", about=about)

    def _trails(self, step: int, weights: Any, handed: Handed | None) -> Trails:
        """Every operation of one step, from another run of both up to there."""
        ours = self.watched(self.ours, traced=step).trails
        try:
            theirs = self.watched(self.theirs, weights=weights, handed=handed, traced=step).trails
        except _NotRun:  # it does not take them
            theirs = self.watched(self.theirs, weights=weights, traced=step).trails
        return Trails([ours[rank] for rank in range(self.ours.mesh.size)], theirs[0])

    def seen(self, *args: Any, **options: Any) -> list[Seen]:
        """What `watched` has seen of each rank."""
        return self.watched(*args, **options).seen

    def watched(
        self, runs: _Runs, *, weights: Mapping[str, np.ndarray] | None = None, handed: Handed | None = None,
        why: str = "", parts: int = 0, traced: int | None = None, repairs: Sequence[Repair] = (),
        steps: int | None = None,
    ) -> Watch:  # fmt: skip
        """The script is run so. why: samples are handed over. parts: sums are added up in so many
        parts, and weights and samples are off in their last digit, if not 0. traced: the step of which every
        operation is recorded. Raises _NotRun."""
        feed = None if handed is None else handed.again()
        steps = steps or (self.steps if traced is None else traced + 1)
        plan = Plan(steps, feed, weights, nudges=parts > 0, traced=traced, repairs=tuple(repairs))
        watch = Watch(runs.mesh.size, plan)

        @contextmanager
        def around() -> Iterator[None]:
            with watch.around(), OtherSums(parts) if parts > 1 else nullcontext():
                yield

        try:
            with watch, _in_silence():
                self._run(*runs, around)
            if feed is not None and traced is None:
                feed.check_end()
        except DeadlockError as error:
            if watch.stopped and not watch.has_enough:
                counts = ", ".join(f"rank {rank}: {seen.num_steps}" for rank, seen in enumerate(watch.seen))
                raise _NothingToTell(f"the {runs} make different numbers of steps ({counts})") from error
            if not watch.has_enough:
                raise _NotRun(f"on {runs} the script hangs: {error}") from error
        except NotEnough as error:
            raise _NothingToTell(f"{why}; {error}") from error
        except TplabError as error:
            if isinstance(error.__cause__, NotEnough):
                raise _NothingToTell(f"{why}; {error.__cause__}") from error
            failure = _NotRun(f"on {runs} the script fails: {_shortened(error, self.options['device'])}")
            if runs.mesh.size == 1:
                failure.way_out = (
                    "; the reference may need other arguments, or more ranks: --reference-args, --reference"
                )
            raise failure from error
        counts = {rank: seen.num_steps for rank, seen in enumerate(watch.seen)}
        if not any(counts.values()):
            line = next((one.lines["skipped"] for one in watch.seen if "skipped" in one.lines), "")
            prints = [text for seen in watch.seen for step in seen.steps for text, _ in step.prints if text.strip()]
            raise _NothingToTell(
                f"on {runs} no step of an optimizer was seen: the script must call step() of a "
                "torch.optim.Optimizer"
                + (f"; it ended, and the last thing it printed was {prints[-1].strip()!r}" if prints else "")
                + (f". All updates were skipped at {line}: gradients were not finite (NaN, or inf)" if line else "")
            )
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"rank {rank}: {count}" for rank, count in counts.items())
            raise _NothingToTell(f"ranks end after different numbers of steps ({listed})")
        return watch

    def _run(self, mesh: Mesh, args: list[Any], around: Any) -> None:
        options = {name: value for name, value in self.options.items() if value is not None}
        if isinstance(self.script, str | Path):
            Script(self.script, [str(arg) for arg in args], module=self.module).run(mesh, around=around, **options)
            return
        if isinstance(self.script, Cell):
            run_cell(*self.script, mesh, around=around, **options)
            return
        function = self.script

        def program(*given: Any) -> None:
            with around():
                function(*given)

        program.__name__ = self.name
        processes = Processes(mesh, options["seed"], num_gpus=options.pop("num_gpus", None))
        run(program, mesh, *args, on="simulated", distributed=processes, **options)


def _proven(report: SameModel, again: Callable[[Sequence[Repair]], SameModel]) -> SameModel:
    """The same with proven causes. again: the report of another run with these repairs, which may fail"""

    def or_none(repairs: Sequence[Repair]) -> SameModel | None:
        try:
            return again(repairs)
        except (_NotRun, NeedsWeights, NeedsSamples):
            return None

    return proven(report, or_none)


def _is_certain(report: SameModel) -> bool:
    """Whether it is the same model although only the least rounding was allowed: another run could only allow more. A
    loss that seems to be scaled may only be rounded. What is not finite is so in any order of summation."""
    if report.first is not None:
        return report.first.is_not_finite
    return report.verdict == "cannot tell" or all(row.ok for row in report.rows if row.what == "loss")


@contextmanager
def _threads(ours: Sequence[Seen]) -> Iterator[None]:
    """One rank whose layers are small computes in one thread: several would mostly wait for each other."""
    before, size = torch.get_num_threads(), sum(piece.values.size for piece in ours[0].weights.values())
    torch.set_num_threads(1 if size < SMALL_MODEL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SMALL_MODEL = 5_000_000
"""Up to so many parameters a model computes in one thread."""


@contextmanager
def _in_silence() -> Iterator[None]:
    """What the script prints, warns of and logs is not shown, and the loggers' handlers stay as they are."""
    handlers = logging.root.handlers[:]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", CrossedOrderWarning)
        try:
            yield
        finally:
            logging.root.handlers[:] = handlers


def _shortened(error: TplabError, device: str | None) -> str:
    """What a rank raised, with torch's first sentence; the rest repeats its arguments. On the CPU in place of GPUs, no
    advice about them."""
    text, cause = str(error), error.__cause__
    if not isinstance(error, RankError) or cause is None or not (whole := str(cause)):
        return text
    first = re.split(r"(?<=[.!?])\s|\n", whole.strip(), maxsplit=1)[0]
    before, _, after = text.partition(whole)
    return before + (first if len(first) <= 300 else f"{first[:300]} ...") + (after if device is None else "")


def _first_axis(mesh: Mesh, size: int) -> Mesh:
    """The mesh with as many ranks along its first axis, and one along all others."""
    return Mesh(**{axis: size if n == 0 else 1 for n, axis in enumerate(mesh.axis_names)})
