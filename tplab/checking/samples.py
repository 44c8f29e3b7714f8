"""Whether ranks together saw the samples that the reference saw, and equally often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tplab.checking.gaps import gap, largest
from tplab.checking.recording import Seen, Step, checksum
from tplab.units import ranks_text

Rows = Counter[int]


@dataclass(frozen=True)
class Samples:
    """The result of comparing samples.

    kind    "same"; "nothing" was seen; "duplicates", "repeats" (on one rank), "missing" (fewer than the reference's),
            "more" (as from a larger batch), "other"
    words   the same as a sentence
    copies  groups of ranks that saw the same samples
    factor  the number of samples on all ranks together, divided by the reference's
    is_padded   whether the lengths of rows differ because each microbatch is padded to its longest
    """

    kind: str
    words: str
    copies: tuple[tuple[int, ...], ...] = ()
    factor: float | None = None
    ranks: tuple[int, ...] = ()
    is_padded: bool = False

    @property
    def ok(self) -> bool:
        return self.kind in ("same", "nothing")


def compare_samples(ours: Sequence[Step], theirs: Sequence[Step]) -> Samples:
    """Compare the inputs of the ranks' models in one step with those of the reference's."""
    mine = {rank: found for rank, step in enumerate(ours) if (found := _of(step))}
    whole = _union([found for step in theirs if (found := _of(step))])
    if not mine or not whole:
        return Samples("nothing", "no data was seen on its way into the model")
    slots = min(len(whole), *(len(found) for found in mine.values()))
    groups: dict[Any, list[int]] = {}  # by all of their inputs: masks of ones are the same everywhere
    for rank, found in mine.items():
        groups.setdefault(tuple(checksum(x) for slot in found[:slots] for x in slot), []).append(rank)
    copies = tuple(map(tuple, groups.values()))
    results = [
        _compare({rank: found[slot] for rank, found in mine.items()}, whole[slot], copies) for slot in range(slots)
    ]
    if padded := next((found for found in results if found.is_padded), None):  # then the lengths of masks differ, too
        even = [
            len({x.shape[1:] for found in (*mine.values(), whole) for x in found[slot]}) == 1 for slot in range(slots)
        ]
        results = [padded, *(found for found, is_even in zip(results, even) if is_even)]
    if results[0].ok and len(_rows(whole[0])) > 1:  # other inputs, such as a mask, may be cut in another way
        return results[0]
    return next((found for found in results if not found.ok), results[0])


def on_several(ours: Sequence[Seen], theirs: Seen) -> int:
    """Return how many samples several ranks see in any of the steps, if neither a rank nor the reference sees one
    twice; 0 for so few that it may be chance, as with samples that are drawn again and again."""
    each = [sum((_rows(_of(step)[0]) for step in seen.steps if step.samples), Counter()) for seen in (*ours, theirs)]
    *mine, _ = distinct = {tuple(sorted(rows.items())): rows for rows in each}.values()
    count = sum(count > 1 for count in sum(mine, Counter()).values())
    return count if count > 2 and all(max(rows.values(), default=0) < 2 for rows in distinct) else 0


def _of(step: Step) -> list[list[np.ndarray]]:
    """Return, for each tensor that a model is called with, those of all microbatches."""
    if not step.samples:
        return []
    count = min(len(data) for data in step.samples)
    size = len(next(iter(step.samples[0].values())))
    slots = [[list(data.values())[slot] for data in step.samples] for slot in range(count)]
    return [slot for slot in slots if all(x.ndim and len(x) == size for x in slot[:1])] or slots[:1]


def _union(found: Sequence[list[list[np.ndarray]]]) -> list[list[np.ndarray]]:
    """Return the data of all ranks of the reference; ranks that saw the same count once."""
    if len(found) < 2:
        return found[0] if found else []
    distinct = {tuple(checksum(x) for x in slots[0]): slots for slots in found}
    return [[x for slots in distinct.values() for x in slots[slot]] for slot in range(len(found[0]))]


def _compare(
    mine: Mapping[int, Sequence[np.ndarray]], whole: Sequence[np.ndarray], copies: tuple[tuple[int, ...], ...]
) -> Samples:
    """Compare one of the tensors. copies: groups of ranks that saw the same samples."""
    num_dims, padded = whole[0].ndim, _as_padded(mine, whole)
    is_like = all(x.shape[1:] == whole[0].shape[1:] for found in mine.values() for x in found)
    is_cut = num_dims > 1 and not is_like and padded is None
    rows = padded or {rank: _elements(found) if is_cut else _rows(found) for rank, found in mine.items()}
    wanted = _elements(whole) if is_cut else _rows(whole)
    if is_cut and all(_are_columns(found, whole) for found in mine.values()):
        words = f"all {len(_rows(whole))} samples, of which each of {len(mine)} ranks has some columns"
        return Samples("same", words, (tuple(mine),))
    if all(found.keys() == wanted.keys() for found in rows.values()) and all(map(_is_even, [*rows.values(), wanted])):
        wanted = Counter({*wanted})  # once, as where each of several experts is called
        rows = dict.fromkeys(rows, wanted)
    if all(found == wanted for found in rows.values()):
        copies = (tuple(mine),)  # another input may be cut, as the keys are that a whole query attends to
    total = sum((rows[group[0]] for group in copies), Counter())
    noun, count = "token" if is_cut else "sample", wanted.total()
    if total == wanted:
        words = f"all {count} {noun}s, each on {_part(copies, count, noun)}"
        return Samples("same", words, copies, is_padded=padded is not None)
    if not total - wanted:
        return _too_few(rows, wanted, copies, noun)
    strangers = Counter({row: n for row, n in total.items() if row not in wanted})
    if strangers and total.total() != wanted.total() and not wanted - total:
        times = total.total() / wanted.total()
        words = f"{total.total()} {noun}s on {len(rows)} ranks, and {wanted.total()} in the reference, among them"
        return Samples("more", words, copies, times)
    if not strangers:
        doubled = total - wanted
        are_shared = any(sum(row in rows[group[0]] for group in copies) > 1 for row in doubled)
        where = "on several ranks, which see different data otherwise" if are_shared else "on one rank once too often"
        lost = f"; {missing.total()} are on none" if (missing := wanted - total) else ""
        words = f"{doubled.total()} of the {count} {noun}s are {where}{lost}"
        return Samples("duplicates" if are_shared else "repeats", words, copies, total.total() / count)
    words = f"{strangers.total()} of {total.total()} {noun}s are not among the reference's {count}"
    return Samples("other", words, copies, total.total() / count)


def _is_even(rows: Rows) -> bool:
    """Return whether all rows were seen equally often."""
    return len({*rows.values()}) == 1


def _as_padded(mine: Mapping[int, Sequence[np.ndarray]], whole: Sequence[np.ndarray]) -> dict[int, Rows] | None:
    """Return rows of tokens that are padded to the longest of their microbatch, each as the reference has it; None if
    their lengths differ for another reason."""
    every = [*whole, *(x for found in mine.values() for x in found)]
    if any(x.ndim != 2 or x.dtype.kind not in "iu" for x in every) or len({x.shape[1] for x in every}) < 2:
        return None
    shortest, is_known = min(x.shape[1] for x in every), False
    known: dict[int, list[np.ndarray]] = {}
    for row in (row for x in whole for row in x):
        known.setdefault(checksum(row[:shortest]), []).append(row)
    found: dict[int, Rows] = {rank: Counter() for rank in mine}
    taken: Rows = Counter()
    for rank, arrays in mine.items():
        for row in (row for x in arrays for row in x):
            like = known.get(checksum(row[:shortest]), [])
            padded = [checksum(other) for other in like if _are_but_for_padding(row, other)]
            is_known = is_known or bool(padded)
            padded = padded or [checksum(other) for other in like if _are_but_for_the_last(row, other)]
            if not padded:
                return None
            chosen = min(padded, key=taken.__getitem__)  # an input and its target may be one row, padded in two ways
            found[rank][chosen] += 1
            taken[chosen] += 1
    return found if is_known else None


def _are_but_for_the_last(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether the longer of two rows has one more number, and padding: where inputs are all numbers but the
    last, the longest row of a microbatch loses its last number, and shorter ones lose padding."""
    a, b = sorted((a, b), key=len)
    return len(a) < len(b) and _are_but_for_padding(b[: len(a) + 1], b) and np.array_equal(a, b[: len(a)])


def _are_but_for_padding(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether the longer of two rows is the other one followed by repetitions of one number. A row of this
    number alone has no padding: it may be a mask of ones, whose parts are shorter."""
    a, b = sorted((a, b), key=len)
    rest = b[len(a) :]
    return np.array_equal(a, b[: len(a)]) and bool((rest == rest[:1]).all() and (not len(rest) or (b != rest[0]).any()))


def _too_few(rows: Mapping[int, Rows], wanted: Rows, copies: tuple[tuple[int, ...], ...], noun: str) -> Samples:
    total = sum((rows[group[0]] for group in copies), Counter())
    share, count = total.total(), wanted.total()
    factor = share / count
    if len(copies) == 1 and len(rows) > 1:
        words = f"{ranks_text(copies[0])} all have the same {share} of the reference's {count} {noun}s"
        return Samples("duplicates", words, copies, factor)
    doubled = [group for group in copies if len(group) > 1]
    if doubled:
        words = f"{ranks_text(doubled[0])} have the same {noun}s; {count - share} of the {count} are on no rank"
        return Samples("duplicates", words, copies, factor, doubled[0])
    return Samples("missing", f"{count - share} of the reference's {count} {noun}s are on no rank", copies, factor)


def _part(copies: Collection[tuple[int, ...]], count: int, noun: str) -> str:
    if len(copies) == 1:
        (ranks,) = copies
        return "the one rank" if len(ranks) == 1 else f"each of {len(ranks)} ranks"
    return f"one of {len(copies)} ranks" if all(len(group) == 1 for group in copies) else f"one of {len(copies)} groups"


def _are_columns(found: Sequence[np.ndarray], whole: Sequence[np.ndarray]) -> bool:
    """Return whether these are some columns of all samples, the input of a layer whose weight is cut along them."""
    pairs = list(zip(found, whole)) if len(found) == len(whole) else []
    return bool(pairs) and all(
        x.dtype.kind == "f"
        and x.shape[:-1] == w.shape[:-1]
        and 0 < x.shape[-1] < w.shape[-1]
        and any(
            gap(x, w[..., start : start + x.shape[-1]]) <= 1e-5 * largest(w)
            for start in range(w.shape[-1] - x.shape[-1] + 1)
        )
        for x, w in pairs
    )


def _rows(arrays: Sequence[np.ndarray]) -> Rows:
    return Counter(checksum(row) for x in arrays for row in (x if x.ndim else x[None]))


def _elements(arrays: Sequence[np.ndarray]) -> Rows:
    """Return the elements, or vectors along the last dim, and their counts: rows along the first may be cut."""
    found: Rows = Counter()
    for x in arrays:
        if x.dtype.kind in "iub":
            values, counts = np.unique(x, return_counts=True)
            found.update(dict(zip(values.tolist(), counts.tolist())))
        else:
            found.update(checksum(row) for row in x.reshape(-1, x.shape[-1]))
    return found


def advice(ours: Sequence[Seen], found: Samples) -> str:
    """Return how to let the reference see the same samples."""
    first = ours[0]
    if seeds := seeds_by_rank(ours):
        values, line = seeds
        return (
            f"the ranks draw their own data, from the seeds {', '.join(map(str, values))} set at {line}: draw the "
            "whole batch from one seed and cut it, or pass arguments that do so"
        )
    if found.factor == 1:
        return (
            "they read as many, so they draw in different orders, as where a library seeds the shuffle on several "
            "ranks only: shuffle by a seed of the script's own, with DataLoader(..., generator=torch.Generator()"
            ".manual_seed(0)), or not at all for this comparison"
        )
    samples = [x for step in first.steps[:1] for data in step.samples[:1] for x in data.values()]
    batch = len(samples[0]) if samples else 0
    times = len(found.copies)
    for name, value in first.options.items():
        if isinstance(value, int) and not isinstance(value, bool) and value == batch and "batch" in name.lower():
            flag = "--" + (name if "per_device" in name else name.replace("_", "-"))
            return f"give the reference the whole batch: --reference-args '{flag} {batch * times}'"
    return (
        f"each of {times} ranks has {batch} samples in a microbatch, so the reference needs {batch * times}: pass the "
        "argument that sets the size of its batch with --reference-args, or let the script divide a global batch"
    )


def seeds_by_rank(ours: Sequence[Seen]) -> tuple[tuple[int, ...], str] | None:
    """Return the different seeds that ranks set at the same line, and the line; the last such line."""
    return _unlike([seen.seeds for seen in ours])


def samplers_by_rank(ours: Sequence[Seen]) -> tuple[tuple[int, ...], str] | None:
    """Return the same for the seeds of samplers that should each give a rank its part of one order."""
    return _unlike([seen.samplers for seen in ours])


def _unlike(lists: Sequence[Sequence[tuple[int, str]]]) -> tuple[tuple[int, ...], str] | None:
    for turn in reversed(range(min(map(len, lists), default=0))):
        pairs = [one[turn] for one in lists]
        if len({line for _, line in pairs}) == 1 and len({seed for seed, _ in pairs}) > 1:
            return tuple(seed for seed, _ in pairs), pairs[0][1]
    return None
