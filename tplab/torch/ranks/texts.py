"""Errors of ranks in words: the same for simulated ranks and for processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tplab.errors import CollectiveMismatchError, DeadlockError, RankError, TplabError
from tplab.mesh import Mesh
from tplab.torch.ranks.rank import MESSAGES, Call, call_text
from tplab.units import ranks_text

CallKey = tuple[str, str, tuple[Any, ...]]
"""A collective as its `Call.key`."""

HAS_RETURNED = "has returned"
AGAIN = ", again and again,"
"""Describes a rank that sleeps and looks again."""
_THE_SAME = "every rank of a group must call the same collectives in the same order"
_OF_A_RUN = (RankError, DeadlockError, CollectiveMismatchError)


def side_text(key: CallKey, dtype: str, shape: Iterable[int], where: str) -> str:
    """A rank's call of a collective: its arguments and its line."""
    what = "" if key[0] == "barrier" else f" of {dtype} {list(shape)}"
    return f"{call_text(*key)}{what} at {where}"


def waits_text(key: CallKey, where: str, missing: Sequence[int], is_message: bool) -> str:
    """What a stuck rank does: it waits for the `missing` ranks, or for a message from one."""
    return f"waits in {call_text(*key)} at {where} for {'a message from ' * is_message}{ranks_text(missing)}"


def raised(rank: int, error: BaseException, kind: str, text: str, line: str | None, mesh: Mesh) -> TplabError:
    """The error for what a rank raised, with the rank's number. tplab's own errors only get a note, except those of
    another run inside the rank's program.

    kind, text   of the exception; `line`: the program's line that raised it
    """
    at = f" at {line}" if line else ""
    if isinstance(error, TplabError) and not isinstance(error, _OF_A_RUN):
        error.add_note(f"on rank {rank} {mesh.coordinates(rank)}{at}")
        return error
    found = RankError(f"rank {rank} raised {kind}{at}{text and f': {text}'}", rank)
    found.__cause__ = error
    return found


def while_handling(rank: int, error: BaseException, line: str, calls: str) -> str:
    """The sentence about an error that a rank raised at `line` and is still handling while it calls something else."""
    return f"rank {rank} raised {type(error).__name__} at {line}: {error}, and calls {calls} while handling it;"


def behind(held: Sequence[tuple[int, str]], error: TplabError) -> TplabError:
    """A mismatch or a deadlock after the errors that ranks still handle: for each, the rank and its
    `while_handling`."""
    return RankError("\n".join([*(said for _, said in held), str(error)]), held[0][0]) if held else error


def mismatch(
    number: int, label: str, group: Sequence[int], sides: Iterable[tuple[int, str]]
) -> CollectiveMismatchError:
    """The error for ranks that differ in the collective number `number`.

    sides   the ranks that differ, each with its `side_text`
    """
    lines = "\n".join(f"  rank {rank}: {side}" for rank, side in sorted(sides))
    return CollectiveMismatchError(
        f"collective number {number + 1} over axis {label!r} is not the same on all of ranks "
        f"{', '.join(map(str, group))}:\n{lines}\n{_THE_SAME}, with the same shapes and dtypes"
    )


def unmet(
    key: CallKey | None, number: int, rank: int, where: str | None, absent: Sequence[int]
) -> CollectiveMismatchError:
    """The error for a collective that `rank` has called and the `absent` ranks of its group never call.

    key      the collective, `where` it was called; None if no longer known
    number   how many collectives its group had before
    """
    called = f"rank {rank} called" + (f" at {where}" if where else "")
    if key is not None and key[0] in MESSAGES:
        (other,) = (op for op in MESSAGES if op != key[0])
        return CollectiveMismatchError(
            f"{call_text(*key)}, which {called}, meets no {other}: {ranks_text(absent)} returned without calling it;\n"
            "the k-th send to a rank meets the k-th receive there, so there must be as many of both"
        )
    about = f" over axis {key[1]!r}, {call_text(*key)}," if key is not None else ""
    return CollectiveMismatchError(
        f"collective number {number + 1}{about} which {called}:\n  {ranks_text(absent)} returned without calling it\n"
        f"{_THE_SAME}"
    )


def no_room(call: Call, index: int, sent: Sequence[int], said: Callable[[int], str]) -> CollectiveMismatchError | None:
    """The error if the rank at `index` has room for pieces of other sizes than are `sent` to it, one from each
    position; None if they fit. `said` returns a position's `side_text`."""
    takes, place = call.takes or (), call.place
    wrong = [at for at, sizes in enumerate(zip(takes, sent, strict=False)) if len({*sizes}) > 1]
    if not wrong:
        return None
    sides = "\n".join(f"  rank {place.group[at]}: {said(at)}" for at in sorted({index, wrong[0]}))
    return CollectiveMismatchError(
        f"{call.op} over {place.label!r}: the outputs of rank {place.group[index]} have sizes {list(takes)}, one for "
        f"each rank, but the ranks send it {[*sent]}:\n{sides}\n"
        "what a rank has room for must be as large as what is sent to it"
    )


def deadlock(doing: Mapping[int, str], ops: Sequence[str]) -> DeadlockError:
    """The error for a deadlock, which says what every rank does.

    doing   rank -> its `waits_text`, or that it has returned
    ops     the operations that ranks wait in
    """
    if any(AGAIN in text for text in doing.values()):
        rule = "a rank that sleeps and looks again waits for something that no other rank will do"
    elif ops and set(ops) <= set(MESSAGES):
        rule = "a receive waits for its send: at least one of these ranks must send first"
        if "send" in ops:
            rule = "a send waits for its receive, and a receive for its send: the order must be the same on both ranks"
    else:
        rule = f"{_THE_SAME}, and none may return before the others"
    return DeadlockError(
        "\n".join(["no rank can go on:", *(f"  rank {rank} {it}" for rank, it in doing.items()), rule])
    )
