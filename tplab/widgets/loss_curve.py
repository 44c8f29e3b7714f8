"""`LossCurve(steps)`: draws the loss of a model while it trains, beside that of an earlier run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from tplab.widgets.curves import Curves, figure_of
from tplab.widgets.paper.palette import DIM, HUES, INK

SECONDS_BETWEEN = 0.5
"""The least time between drawings, so that drawing takes at most a tenth of the time from training."""


class Progress(Protocol):
    """A training run's report after a step: see `tplab.training.progress`."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def held_out(self) -> float | None: ...
    @property
    def seconds_left(self) -> float | None: ...


class LossCurve(Curves):
    """A card that draws while a model trains: display it, then pass it to `train`.

        curve = LossCurve(steps=100)
        display(curve)
        train(config, text, mesh, Recipe(100), show=curve)

    steps      how many steps there will be: the width of the picture
    beside     the losses of an earlier run, drawn dotted, and a label for them
    sentence   a description of the picture, for places where none is shown
    """

    def __init__(
        self,
        steps: int,
        *,
        title: str = "Loss",
        about: str = "",
        sentence: str = "The loss while a model trains.",
        beside: tuple[str, Sequence[float]] | None = None,
    ):
        self.steps, self.beside = steps, beside
        self.losses: dict[int, float] = {}
        self.held_out: dict[int, float] = {}
        self._left: float | None = None
        self._next = 0.0
        self._of_what = about
        super().__init__(title, about, sentence, self._figure(), lambda step: f"step {step:.0f}")

    def __call__(self, progress: Progress) -> None:
        """Add a step to the picture. It is redrawn at most twice a second, and after the last step."""
        self.losses[progress.step] = progress.loss
        if progress.held_out is not None:
            self.held_out[progress.step] = progress.held_out
        self._left = progress.seconds_left
        began = time.monotonic()
        if progress.step >= self.steps or began >= self._next:
            self.draw()
            now = time.monotonic()
            self._next = now + max(SECONDS_BETWEEN, 9 * (now - began))

    def draw(self) -> None:
        """Draw all steps so far."""
        about = self._of_what
        self.figure = self._figure()
        vars(self).pop("_picture", None)  # the previous picture
        done = max(self.losses, default=0)
        place = f"step {done} of {self.steps}"
        if self._left is not None and self._left >= 1:
            place += f", about {self._left:.0f} s left"
        self.about = f"{about} · {place}" if about else place
        self.redraw()

    def _figure(self) -> Any:
        figure, (ax,) = figure_of([""], "steps", is_log=False)
        if self.beside is not None:
            name, losses = self.beside
            ax.plot(range(1, len(losses) + 1), losses, color=INK, lw=1.2, ls=(0, (1, 2)), zorder=4, label=name)
        ax.plot(list(self.losses), list(self.losses.values()), color=HUES[0], lw=2, zorder=3, label="loss")
        if self.held_out:
            ax.plot(*zip(*self.held_out.items()), "o", color=HUES[1], ms=6, zorder=5, label="on held-out text")
        ax.set_xlim(0, max(self.steps, 1))
        ax.set_ylabel("nats per byte", color=DIM, fontsize=9)
        return figure
