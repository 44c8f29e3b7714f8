"""The modelled clock's time of a program, on clusters of the chip on which it is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tplab import Mesh, cost
from tplab.torch import run

ALONE = Mesh(tp=1)
CHIPS = ("a100", "h200", "h100", "b300", "b200")


class Seconds(NamedTuple):
    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


class Clusters(NamedTuple):
    """The forecast and the data sheet of a chip, by the clusters' names."""

    forecast: str
    sheet: str

    @classmethod
    def here(cls) -> Clusters:
        """The clusters of this machine's chip, or of an H100 if tplab has none."""
        name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
        chip = next((chip for chip in CHIPS if chip in name and f"{chip}-measured" in cost.NAMED), "h100")
        return cls(f"{chip}-measured", chip)


def modelled(program: Callable[..., Any], args: Sequence[Any], cluster: str, device: str) -> Seconds:
    """The modelled time of the program on one simulated rank. With device "meta" its tensors have no numbers."""
    trace = run(program, ALONE, *args, cluster=cluster, device=device, keep_values=0).trace
    takes = {"forward": 0.0, "backward": 0.0}
    for event in trace.events:
        if event.kind == "compute":
            takes["backward" if event.phase == "backward" else "forward"] += event.end - event.start
    return Seconds(**takes)
