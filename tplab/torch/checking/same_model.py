"""`same_model`: does a training script train the same model on many ranks as on one?"""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tplab.checking.diagnosis import Diagnosis
from tplab.checking.recording import Seen
from tplab.checking.repairs import Repair, proven
from tplab.checking.same_model import SameModel, cannot_tell
from tplab.checking.samples import seeds_by_rank
from tplab.checking.seen_samples import NeedsSamples
from tplab.checking.starts import NeedsWeights
from tplab.checking.trails import Trails
from tplab.mesh import Mesh
from tplab.torch.checking.handed import Handed
from tplab.torch.checking.names import FLAT
from tplab.torch.checking.runs import NothingToLearn, NotRun, Runs
from tplab.torch.checking.watch import Watch
from tplab.torch.scripts import Cell

Program = Callable[..., Any]
ONE_RANK = "one rank alone shares no work: give more ranks, for example --nproc-per-node 2"


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
    """Check that a training script trains the same model on many ranks as on one: `same_model("train.py", ranks=4)`.

    It runs the script on simulated ranks, and again on one rank, for a few steps of its optimizer, and compares in the
    order of a step: the weights at the start, the samples, the loss where a backward pass begins, every gradient before
    it is clipped, the norm it is clipped by, settings and states of the optimizer, the parameters after the step,
    buffers, and what the script prints. It reports what is first wrong, with its factor and its line. A cause is stated
    if the script, run again with the repair in place, was right.

    script     a file that is written for torchrun, unchanged; or a function, which is called with `args` on each rank
               with torch.distributed initialised
    args       the script's own arguments
    ranks      how many ranks; or give `mesh`, for programs that use tplab's axes: the reference's has the same ones
    reference  how many ranks the reference has (None: one)
    reference_args   are added to its arguments, as ["--batch-size", "32"]; argparse takes the last of repeated options
    steps      after this many steps each rank ends, before the next forward pass
    module     whether `script` is the name of a module, as in `python -m`
    seed       of every rank's random numbers
    device     "cpu": every mention of cuda in the script means the CPU
    resume     arguments with which the script begins from its own checkpoint, as ["--resume", "last.pt"]. Then it runs
               until `steps` on the reference's ranks (None: as many), is started again with these on `ranks`, and its
               next steps are compared with those of a run on the reference's ranks that goes on

    Dropout draws its masks and drops nothing. If ranks draw data from seeds of their own, the reference is given that
    data; if they begin with other weights than the reference, but agree among themselves, it is given those weights.
    Optimizers are those of torch.optim and their subclasses. Nothing that the script prints is shown.
    cost    the script on all ranks once, and on the reference's once; once more if rounding must be told from a fault.
            Copies are stored once
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
    ours = Runs(script, args, mesh, module, steps, seed=seed, device=device, num_gpus=None)
    alone = mesh if reference == mesh.size else _first_axis(mesh, reference)
    doctor = _Doctor(ours, ours.on(alone, reference_args or ()))
    return doctor.compared() if resume is None else doctor.resumed(resume)


class _Doctor:
    """Compares the recording of a script on many ranks with that of its reference."""

    def __init__(self, ours: Runs, theirs: Runs):
        self.ours, self.theirs, self.notes = ours, theirs, list[str]()

    @property
    def about(self) -> str:
        return f"{self.ours.name} on {self.ours}, compared with {self.theirs}"

    def compared(self) -> SameModel:
        try:
            ours = self._on_gpus_or_cpu()
            if self.ours.mesh.size == 1:
                raise NothingToLearn(ONE_RANK)
            if any(FLAT in one.kinds for one in ours):
                raise NothingToLearn(
                    "FullyShardedDataParallel (FSDP1) keeps all parameters of a module in one flat tensor, and the "
                    "gradients of each cannot be told apart: use fully_shard (FSDP2), or compare the script with "
                    "DistributedDataParallel instead"
                )
            if unfilled := [name for one in ours for name in one.unfilled]:
                more = f" and {len(set(unfilled)) - 1} more" if len(set(unfilled)) > 1 else ""
                raise NothingToLearn(
                    f"nothing has filled {unfilled[0]}{more} before training begins: to_empty at "
                    f"{ours[0].lines['empty']} leaves in parameters whatever was in memory (nn.Module.reset_parameters "
                    "fills those of one module, and not those of the modules in it)"
                )
            with _threads(ours):
                theirs = self._reference()
            return self._diagnosed(ours, theirs)
        except NotRun as error:
            return error.report(self.about)
        except (ImportError, OSError, SyntaxError):  # there is no such script, or it is not one
            raise
        except Exception as error:  # of the doctor itself: the script's errors are NotRun by now
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(at.filename).name}:{at.lineno}"
            return cannot_tell(f"the doctor failed at {where}: {type(error).__name__}: {error}", about=self.about)

    def resumed(self, resume: Sequence[Any]) -> SameModel:
        """Compare the steps after a restart with those of a run that goes on."""
        steps, restarted = self.ours.steps, self.ours.on(self.ours.mesh, resume)
        how = f"started again with {shlex.join(map(str, resume))!r} after {steps} steps"
        about = f"{self.ours.name} on {self.ours}, {how}, compared with {self.theirs} that go on"
        try:
            if self.ours.mesh.size == 1:
                raise NothingToLearn(ONE_RANK)
            theirs = self._later()

            def again(**how: Any) -> Watch:
                self.theirs.seen()  # writes the script's checkpoint
                return restarted.watched(**how)

            def diagnosed(ours: list[Seen], *more: Any, **how: Any) -> Diagnosis:
                return Diagnosis(ours, theirs, *more, about=about, notes=self.notes, **how)

            report = diagnosed(ours := again().seen).report()
            if _is_certain(report):
                return report
            other = self._later(parts=self.ours.mesh.size)
            judged = diagnosed(ours, other)
            report, step = judged.report(), judged.facts.number
            if judged.facts.wants_trails:  # of the first rank, beside the same rank of the run that goes on
                whole = self.theirs.watched(traced=steps + step).trails[0]
                trails = Trails([again(traced=step).trails[0]], whole, step, sets_up=True)
                report = diagnosed(ours, other, trails=trails).report()
            return _proven(report, lambda fix: diagnosed(again(repairs=fix).seen, other).report(), can_trace=False)
        except NotRun as error:
            return error.report(about)

    def _later(self, **how: Any) -> list[Seen]:
        """Return the recordings of twice as many steps, without the first half."""
        steps = self.theirs.steps
        found = self.theirs.seen(steps=2 * steps, **how)
        if found[0].num_steps <= steps:
            raise NothingToLearn(f"on {self.theirs} the script ends after {steps} steps, but it should go on")
        return [
            replace(one, weights=last.parameters, buffers=last.buffers, states=last.states, steps=one.steps[steps:])
            for one in found
            for last in [one.steps[steps - 1]]
        ]

    def _on_gpus_or_cpu(self) -> list[Seen]:
        """Return the recordings of the ranks. If they look for GPUs and this machine has none, cuda means the CPU."""
        options = self.ours.options
        try:
            return self.ours.seen()
        except NotRun as error:
            if not error.is_for_want_of_gpus or options["device"] is not None or torch.cuda.is_available():
                raise
        options["device"] = "cpu"
        self.notes.append("this machine has no GPU, and the script looks for one, so cuda meant the CPU (--device cpu)")
        return self.ours.seen()

    def _reference(self) -> list[Seen]:
        """Return the recordings of the reference. If it finds too few GPUs, it finds as many as the ranks; if it cannot
        run on one rank, it has the fewest that it can run on."""
        options, num_ranks = self.ours.options, self.ours.mesh.size
        try:
            return self.theirs.seen()
        except NotRun as error:
            first = error
        if first.is_for_want_of_gpus and options["device"] == "cpu":
            options["num_gpus"] = num_ranks
            try:
                found = self.theirs.seen()
                self.notes.append(
                    f"the reference found {num_ranks} GPUs, as the ranks did, because with fewer it does not train"
                )
                return found
            except NotRun as error:
                first = error
        for size in range(2, num_ranks if self.theirs.mesh.size == 1 else 0):
            if num_ranks % size == 0:
                more = self.theirs.on(_first_axis(self.ours.mesh, size))
                with suppress(NotRun):
                    found = more.seen()
                    self.notes.append(f"the reference has {size} ranks, because {first}")
                    self.theirs = more
                    return found
        raise first

    def _diagnosed(self, ours: list[Seen], first: list[Seen]) -> SameModel:
        """Return the report. The reference is given the ranks' weights or samples if necessary."""
        handed, given = Handed(ours), dict[str, Any]()
        for _ in range(3):
            theirs = first
            if given:
                with _threads(ours):
                    theirs = self.theirs.seen(**given)
            diagnosis = partial(Diagnosis, about=self.about, notes=self.notes, handed=given.get("handed"))
            try:
                report = diagnosis(ours, theirs).report(may_ask=True)
                if _is_certain(report):
                    return report
                with _threads(ours):
                    again = self.theirs.seen(**given, parts=self.ours.mesh.size)
                judged = diagnosis(ours, theirs, again)
                report = judged.report()
                if judged.facts.wants_trails and self.theirs.mesh.size == 1:
                    samples = {"handed": handed} if handed.regroups else {}
                    step = report.first.step if report.first is not None else judged.facts.number
                    trails = self._trails(step, given | samples)
                    report = diagnosis(ours, theirs, again, trails=trails).report()
                return _proven(report, partial(self._mended, diagnosis, (theirs, again), given))
            except NeedsWeights as needs:
                given["weights"] = needs.weights
                self.notes.append(
                    "the reference was given the weights that the ranks begin with, because it draws others"
                )
            except NeedsSamples as needs:
                if not handed.fits:
                    return cannot_tell(str(needs), about=self.about)
                given["handed"], handed.why = handed, str(needs)
                handed.is_drawn = needs.are_drawn and handed.can_be_drawn
                is_own = handed.is_drawn or seeds_by_rank(ours) is not None
                how = "each of them draws its own" if is_own else "it draws in another order"
                self.notes.append(f"the reference was given the samples that the ranks drew, because {how}")
        return cannot_tell("the reference does not take the weights and samples of the ranks", about=self.about)

    def _mended(
        self, diagnosis: Callable[..., Diagnosis], known: Any, given: dict[str, Any], repairs: Sequence[Repair],
        step: int | None = None,
    ) -> SameModel:  # fmt: skip
        """Return the report of another run with these repairs. known: the recordings of the reference without them,
        twice; step: the step of which every operation is to be recorded"""
        mine, theirs = ([one for one in repairs if one.of_reference == of_reference] for of_reference in (False, True))
        traced = next((one.times for one in mine if one.kind == "put"), None)
        seen = self.ours.seen(repairs=mine, traced=traced)
        if theirs:
            known = (self.theirs.seen(**given, repairs=theirs),) * 2
        trails = None if step is None else self._trails(step, given, mine)
        return diagnosis(seen, *known, trails=trails).report()

    def _trails(self, step: int, given: dict[str, Any], repairs: Sequence[Repair] = ()) -> Trails:
        """Return every operation of one step, from new runs of both sides up to there."""
        ours = self.ours.watched(traced=step, repairs=repairs).trails
        try:
            theirs = self.theirs.watched(**given, traced=step).trails
        except NotRun:  # it does not accept them
            theirs = self.theirs.watched(weights=given.get("weights"), traced=step).trails
        return Trails([ours[rank] for rank in self.ours.mesh.ranks], theirs[0], step)


def _proven(report: SameModel, again: Callable[..., SameModel], can_trace: bool = True) -> SameModel:
    """Return the report with proven causes. again: the report of another run with these repairs, which may fail"""

    def or_none(*how: Any) -> SameModel | None:
        try:
            return again(*how)
        except (NotRun, NeedsWeights, NeedsSamples):
            return None

    return proven(report, or_none, or_none if can_trace else None)


def _is_certain(report: SameModel) -> bool:
    """Return whether a second run of the reference, which only allows more rounding, would change nothing: the models
    are the same, or numbers are not finite. A loss that seems to be scaled may only be rounded."""
    if report.first is not None:
        return report.first.is_not_finite
    return report.verdict == "cannot tell" or all(row.ok for row in report.rows if row.what == "loss")


@contextmanager
def _threads(ours: Sequence[Seen]) -> Iterator[None]:
    """Compute in one thread if the layers are small: several threads would mostly wait for one another."""
    before, size = torch.get_num_threads(), sum(piece.values.size for piece in ours[0].weights.values())
    torch.set_num_threads(1 if size < SMALL_MODEL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SMALL_MODEL = 5_000_000
"""The most parameters of a model that computes in one thread."""


def _first_axis(mesh: Mesh, size: int) -> Mesh:
    """Return the mesh with `size` ranks along its first axis, and one along all others."""
    return Mesh(**{axis: size if n == 0 else 1 for n, axis in enumerate(mesh.axis_names)})
