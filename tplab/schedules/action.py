"""An action: one thing one rank does in a pipeline schedule."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tplab.errors import ScheduleError
from tplab.mesh import whole_or_none

KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "UNSHARD", "RESHARD", "STEP")
"""The kinds of actions; the names are those of torch's text form, and STEP is the optimizer's.

F            forward of one microbatch through one stage
B            its full backward (I and W at once)
I            the gradient of the stage's input; the zero-bubble papers call this B
W            the gradient of the stage's weights
SEND_F       send a stage's output to the next stage           RECV_F   receive it there
SEND_B       send the gradient of a stage's input back         RECV_B   receive it there
REDUCE_GRAD  sum a stage's gradients over the data-parallel ranks, once all its microbatches are done
UNSHARD      gather a stage's sharded weights                  RESHARD  free them again
STEP         the rank's optimizer step
"""
CODE = {kind: code for code, kind in enumerate(KINDS)}
F, B, I, W = range(4)
COMPUTE = (F, B, I, W)
MESSAGES = tuple(CODE[kind] for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"))

LARGEST = 2**31 - 1
"""The largest number that a stage or a microbatch may have: columns have 32 bits."""

_TEXT = re.compile(rf"(\d*)({'|'.join(sorted(KINDS, key=len, reverse=True))})(\d*)")


@dataclass(frozen=True, slots=True)
class Action:
    """`kind` (one of KINDS) on `stage` for `microbatch`; -1 where there is none, as in a STEP.

    joined   runs overlapped with the action before it in its rank's row: for example a forward and a backward of two
             microbatches at once, as in DualPipe. An executor that cannot overlap them runs one after the other.
    """

    kind: str
    stage: int = -1
    microbatch: int = -1
    joined: bool = False

    def __post_init__(self):
        if self.kind not in CODE:
            raise ScheduleError(f"an action's kind is one of {', '.join(KINDS)}, not {self.kind!r}")
        for name, number in (("stage", self.stage), ("microbatch", self.microbatch)):
            if type(number) is not int or not -1 <= number <= LARGEST:
                whole = whole_or_none(number)
                if whole is None or not -1 <= whole <= LARGEST:
                    raise ScheduleError(
                        f"an action has {name} {number!r}; it must be a whole number from 0 to {LARGEST:,} (-1: none)"
                    )
                object.__setattr__(self, name, whole)

    def __str__(self) -> str:
        """Torch's text: "2F0" is the forward of microbatch 0 through stage 2."""
        return f"{_number(self.stage)}{self.kind}{_number(self.microbatch)}"

    @property
    def label(self) -> str:
        """The text without its stage: "F0"."""
        return f"{self.kind}{_number(self.microbatch)}"

    @property
    def is_compute(self) -> bool:
        return CODE[self.kind] in COMPUTE

    def alone(self) -> Action:
        """The same action, joined to nothing."""
        return replace(self, joined=False)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read "2F0", "3SEND_F1", "0REDUCE_GRAD" or "STEP". Raises ScheduleError."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            shown = text if len(text) <= 100 else f"{text[:100]}..."
            raise ScheduleError(f"{shown!r} is not an action; write stage, kind, microbatch, such as 2F0 or 3SEND_F1")
        stage, kind, microbatch = match.groups()
        return cls(kind, _read("stage", stage), _read("microbatch", microbatch))


def _read(name: str, digits: str) -> int:
    """The number; -1 if there are no digits. Python refuses to read thousands of them."""
    significant = digits.lstrip("0")
    if len(significant) > len(str(LARGEST)):
        raise ScheduleError(
            f"an action has {name} {significant[:10]}..., a number of {len(significant):,} digits; it must be a whole "
            f"number from 0 to {LARGEST:,}"
        )
    return int(significant or "0") if digits else -1


def in_words(action: Action) -> str:
    """ "F3 of stage 2", for messages."""
    return action.label if action.stage < 0 else f"{action.label} of stage {action.stage}"


def _number(value: int) -> str:
    return "" if value < 0 else str(value)
