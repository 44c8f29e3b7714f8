"""The runs of a script on some ranks: each is watched for a few steps of its optimizer, or fails with a reason."""

from __future__ import annotations

import copy
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from tplab.checking.recording import Seen, unequal_steps
from tplab.checking.repairs import Repair
from tplab.checking.same_model import SameModel, cannot_tell, could_not_run
from tplab.errors import CrossedOrderWarning, DeadlockError, RankError, TplabError
from tplab.mesh import Mesh
from tplab.torch.checking.handed import Handed, NotEnough, Plan
from tplab.torch.checking.sums import OtherSums
from tplab.torch.checking.watch import Watch
from tplab.torch.distributed.process import Processes
from tplab.torch.run import run
from tplab.torch.scripts import Cell, Script, run_cell


class NotRun(Exception):
    """A script that fails, or hangs; the message says why, and `way_out` what may help."""

    way_out = ""

    @property
    def is_for_want_of_gpus(self) -> bool:
        return bool(re.search("gpu|cuda|nvidia|accelerator", str(self), re.IGNORECASE))

    def report(self, about: str) -> SameModel:
        return could_not_run(f"{self}{self.way_out}", about=about)


class NothingToLearn(NotRun):
    """A run that succeeded but gives no answer."""

    def report(self, about: str) -> SameModel:
        return cannot_tell(str(self), about=about)


class Runs:
    """A script on the ranks of a mesh; `str()` is their number.

    options  of every run: the `seed`, the `device` that cuda means, the `num_gpus` that it finds. `on` shares them
    """

    def __init__(self, script: Any, args: Sequence[Any], mesh: Mesh, module: bool, steps: int, **options: Any):
        self.script, self.args, self.mesh, self.module, self.steps = script, [*args], mesh, module, steps
        self.options = options
        self.name = "the cell" if isinstance(script, Cell) else getattr(script, "__name__", "") or Path(script).name

    def __str__(self) -> str:
        return f"{self.mesh.size} rank{'s' * (self.mesh.size > 1)}"

    def on(self, mesh: Mesh, args: Sequence[Any] = ()) -> Runs:
        """Return the same script on other ranks, with these arguments added."""
        other = copy.copy(self)
        other.mesh, other.args = mesh, [*self.args, *args]
        return other

    def seen(self, **how: Any) -> list[Seen]:
        """Return the recordings of `watched`."""
        return self.watched(**how).seen

    def watched(
        self, *, weights: Mapping[str, np.ndarray] | None = None, handed: Handed | None = None, parts: int = 0,
        traced: int | None = None, repairs: Sequence[Repair] = (), steps: int | None = None,
    ) -> Watch:  # fmt: skip
        """Run the script and return its watch. parts: if not 0, sums are added up in this many parts, and weights and
        samples are off in their last digit. traced: the step of which every operation is recorded. Raises NotRun."""
        dealt = [Handed(one.values["seen"], one.groups) for one in repairs if one.kind == "samples"]
        handed = dealt[-1] if dealt else handed
        feed = None if handed is None else handed.again(self.mesh.size)
        steps = steps or (self.steps if traced is None else traced + 1)
        plan = Plan(steps, feed, weights, nudges=parts > 0, traced=traced, repairs=tuple(repairs))
        watch = Watch(self.mesh.size, plan)

        @contextmanager
        def around() -> Iterator[None]:
            with watch.around(), OtherSums(parts) if parts > 1 else nullcontext():
                yield

        try:
            with watch, _in_silence():
                self._run(around)
            if feed is not None and traced is None:
                feed.check_end()
        except DeadlockError as error:
            if watch.stopped and not watch.has_enough:
                counts = unequal_steps(watch.seen)
                raise NothingToLearn(f"the {self} make different numbers of steps ({counts})") from error
            if not watch.has_enough:
                raise NotRun(f"on {self} the script hangs: {error}") from error
        except (NotEnough, TplabError) as error:
            if isinstance(cause := error.__cause__ or error, NotEnough):
                raise NothingToLearn(f"{feed and feed.why}; {cause}") from error
            failure = NotRun(f"on {self} the script fails: {_shortened(error, self.options['device'])}")
            if self.mesh.size == 1:
                way_out = "; the reference may need other arguments, or more ranks: --reference-args, --reference"
                failure.way_out = way_out
            raise failure from error
        if not any(seen.num_steps for seen in watch.seen):
            line = next((one.lines["skipped"] for one in watch.seen if "skipped" in one.lines), "")
            prints = [text for seen in watch.seen for step in seen.steps for text, _ in step.prints if text.strip()]
            raise NothingToLearn(
                f"on {self} no step of an optimizer was seen: the script must call step() of a "
                "torch.optim.Optimizer, or write to its model's parameters in place"
                + (f"; it ended, and the last thing it printed was {prints[-1].strip()!r}" if prints else "")
                + (f". All updates were skipped at {line}: gradients were not finite (NaN, or inf)" if line else "")
            )
        if counts := unequal_steps(watch.seen):
            raise NothingToLearn(f"ranks end after different numbers of steps ({counts})")
        return watch

    def _run(self, around: Any) -> None:
        options = {name: value for name, value in self.options.items() if value is not None}
        if isinstance(self.script, str | Path):
            script = Script(self.script, [str(arg) for arg in self.args], module=self.module)
            script.run(self.mesh, around=around, **options)
            return
        if isinstance(self.script, Cell):
            run_cell(*self.script, self.mesh, around=around, **options)
            return
        function = self.script

        def program(*given: Any) -> None:
            with around():
                function(*given)

        program.__name__ = self.name
        processes = Processes(self.mesh, options["seed"], num_gpus=options.pop("num_gpus", None))
        run(program, self.mesh, *self.args, on="simulated", distributed=processes, **options)


@contextmanager
def _in_silence() -> Iterator[None]:
    """Hide what the script prints, warns of and logs, and restore the loggers' handlers."""
    handlers = logging.root.handlers[:]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", CrossedOrderWarning)
        try:
            yield
        finally:
            logging.root.handlers[:] = handlers


def _shortened(error: Exception, device: str | None) -> str:
    """Return a rank's error with torch's first sentence; the rest repeats its arguments. If cuda means the CPU, leave
    out advice about GPUs."""
    text, cause = str(error), error.__cause__
    if not isinstance(error, RankError) or cause is None or not (whole := str(cause)):
        return text
    first = re.split(r"(?<=[.!?])\s|\n", whole.strip(), maxsplit=1)[0]
    before, _, after = text.partition(whole)
    return before + (first if len(first) <= 300 else f"{first[:300]} ...") + (after if device is None else "")
