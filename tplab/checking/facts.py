"""What is known about one step of the ranks and of the reference, and the queries that all comparisons share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tplab.checking.causes import Sizes
from tplab.checking.gaps import gaps
from tplab.checking.observed import deals, in_step
from tplab.checking.places import Index, Place, find_places, is_number
from tplab.checking.recording import Seen, Sent, Step, idle
from tplab.checking.reference import Reference
from tplab.checking.repairs import Groups, Hypothesis, Repair
from tplab.checking.same_model import Finding, Row, What
from tplab.checking.samples import seeds_by_rank
from tplab.checking.source import Source
from tplab.checking.trails import Trails

Found = Iterator[Row | Finding]
"""What a comparison yields: rows for what it has compared, and findings for faults."""


FINE = 6e-5
"""The precision of the trails' values if no side computes in less than float32."""


class NothingToTell(Exception):
    """The two runs cannot be compared any further. The message says why, and how to make them comparable."""


class Facts:
    """The recordings of the ranks and of their reference.

    ours      the recording of each rank
    places    the part of the reference's parameters that each rank holds; idle: the same for copies that are `idle`
    number    the number of the step under comparison
    copies    groups of ranks that saw the same samples in it; is_padded: whether each microbatch is padded
    suspects  names of gradients that are wrong, perhaps as a consequence of others
    trails    every operation of the step, if it was recorded; wants_trails: whether a comparison asked for them
    """

    def __init__(self, ours: Sequence[Seen], reference: Reference, trails: Trails | None = None):
        self.ours, self.reference, self._trails = ours, reference, trails
        self.wants_trails = False
        if trails is not None and reference.epsilon < 1e-6:
            trails.precision = FINE
        known = find_places(ours, reference.weights, reference.gradients(0))
        parts = {at: (place.name, place.index) for at, place in known.items()}
        self.idle = {at: known[at] for at in idle(ours, parts)}
        self.places = {at: place for at, place in known.items() if at not in self.idle}
        self.number = 0
        self.suspects = set[str]()
        self.copies: Sequence[tuple[int, ...]] = ()
        self.is_padded = False
        self.source = Source({text: place for seen in ours for text, place in seen.places.items()})

    @property
    def trails(self) -> Trails | None:
        return self._trails if self._trails is not None and self._trails.step == self.number else None

    @property
    def mine(self) -> list[Step]:
        return [seen.steps[self.number] for seen in self.ours]

    @property
    def theirs(self) -> list[Step]:
        return self.reference.steps(self.number)

    @property
    def goes_on(self) -> bool:
        """Whether the reference continues its run, and the ranks were restarted from its checkpoint."""
        return self.reference.seen[0].states is not None

    @property
    def num_ranks(self) -> int:
        return len(self.ours)

    def holders(self, name: str) -> Iterator[tuple[int, str, Place]]:
        """Yield the ranks that hold a parameter of the reference, or a part of it, with their names for it."""
        for (rank, mine), place in self.places.items():
            if place.name == name:
                yield rank, mine, place

    def cut(self, whole: Mapping[Any, np.ndarray]) -> Iterator[tuple[Any, int, Any, np.ndarray, Place]]:
        """Yield each rank's parts of the reference's tensors by parameter name, or by name and key: this name, the
        rank, its own name, the part and its place. A tensor of another shape than its parameter is not cut."""
        for at, x in whole.items():
            name, *key = at if isinstance(at, tuple) else (at,)
            for rank, mine, place in self.holders(name):
                part = place.take(x) if x.shape == self.reference.weights[name].shape else x
                yield at, rank, (mine, *key) if key else mine, part, place

    def pieces(self, kind: str, whole: Mapping[Any, np.ndarray]) -> Iterator[tuple[Any, int, Any, Any, Any, Place]]:
        """Yield the same beside the ranks' own tensors of a `kind` in the step: the reference's name, the rank, its own
        name, its tensor, the expected one, and the place."""
        for at, rank, own, want, place in self.cut(whole):
            piece = getattr(self.mine[rank], kind).get(own)
            if piece is not None and piece.values.shape == want.shape:
                yield at, rank, own, piece.values, want.astype(np.float64), place

    def dealt(self, whole: Mapping[Any, np.ndarray]) -> dict[tuple[int, Any], np.ndarray]:
        """Return these parts, by rank and its own name."""
        return {(rank, own): part for _, rank, own, part, _ in self.cut(whole)}

    def deals(
        self, names: Sequence[str], orders: int | None = 1
    ) -> Iterator[tuple[dict[tuple[int, str], np.ndarray], Groups]]:
        """Yield each way to distribute parameters over ranks in parts as large as theirs: the part of each rank, by its
        names, and the groups of ranks that get the same part."""
        held, whole = {name: [*self.holders(name)] for name in names}, self.reference.weights
        ways = [deals(whole[name], self.ours[rank].weights[mine].values.shape, self.num_ranks, orders)
                for name, ((rank, mine, _), *_) in held.items()]  # fmt: skip
        for parts in in_step(ways):
            groups: dict[bytes, list[int]] = {}
            for rank, x in parts[0].items():
                groups.setdefault(x.tobytes(), []).append(rank)
            mine = {(rank, own): part[rank] for name, part in zip(names, parts) for rank, own, _ in held[name]}
            yield mine, tuple(map(tuple, groups.values()))

    def are_parts(self, *ranks: int) -> bool:
        """Return whether these ranks hold the same parameters, and different parts of at least one of them."""
        held, *others = ({p.name: p for (at, _), p in self.places.items() if at == rank} for rank in ranks)
        return all(
            held.keys() == other.keys() and any(held[name].index != other[name].index for name in held)
            for other in others
        )

    @property
    def on_no_rank(self) -> list[str]:
        """The parameters that the reference uses and no rank is known to hold a part of."""
        known, seen = {place.name for place in self.places.values()}, self.reference.seen
        lost = [name for name in self.reference.weights if name not in known and not is_number(name)]
        return [name for name in lost if any(one.computes_with(name) for one in seen)]

    @property
    def unplaced(self) -> list[str]:
        """The ranks' parameters that were matched with none of the reference's."""
        held = [(rank, name) for rank, seen in enumerate(self.ours) for name in seen.weights]
        known = self.places | self.idle
        return list(dict.fromkeys(name for rank, name in held if (rank, name) not in known and not is_number(name)))

    def groups(self, name: str) -> dict[Index, list[int]]:
        """Return the ranks that hold each part of a parameter of the reference."""
        found: dict[Index, list[int]] = {}
        for rank, _, place in self.holders(name):
            found.setdefault(place.index, []).append(rank)
        return found

    def holds_differ(self, name: str, ranks: Sequence[int]) -> bool:
        """Return whether these ranks hold different parts of a parameter."""
        return sum(bool({*group} & {*ranks}) for group in self.groups(name).values()) > 1

    def line(self, key: str) -> str:
        """Return the line for a key in the step, preferably of a rank that has a loss; "" for none."""
        steps = sorted(self.mine, key=lambda step: not step.losses)
        return next((step.lines[key] for step in steps if key in step.lines), "")

    def line_of_script(self, key: str) -> str:
        """Return the line for a key at any time of the run; "" for none."""
        return next((seen.lines[key] for seen in self.ours if key in seen.lines), "")

    def line_of_value(self) -> str:
        """Return the line of the first operation of the forward pass with a wrong result; "" if it is not known."""
        self.wants_trails = True
        op = self.trails.first_wrong() if self.trails else None
        return op.line if op is not None else ""

    def line_of_gradient(self, name: str) -> str:
        """Return the line of the operation that makes the gradient of a parameter wrong; "" if it is not known."""
        self.wants_trails = True
        held = {rank: mine for rank, mine, _ in self.holders(name)}
        return self.trails.line_of_gradient(held, name) if self.trails and held else ""

    def line_of_data(self) -> str:
        """Return the line that creates the loader of the samples, else the line that draws them; "" for none. Weights
        are drawn only in the first step, so the later steps show the line that draws samples."""
        if loader := self.line("loader"):
            return loader
        steps = [step for seen in self.ours for step in seen.steps[max(self.number, 1) :] if step.has_stepped]
        return next((step.lines["drawn"] for step in steps if "drawn" in step.lines), "")

    def sent(self, *moments: str, rank: int | None = None) -> list[Sent]:
        steps = self.mine if rank is None else [self.mine[rank]]
        return [sent for step in steps for sent in step.sent if sent.moment in moments]

    def sums_of_numbers(self) -> list[str]:
        """Return the lines that add up single numbers over ranks between backward pass and step, the last one first."""
        return [sent.where for sent in reversed(self.sent("reduction")) if sent.size == 1]

    def line_of_norm(self) -> str:
        """Return the line that makes the norm of gradients wrong: that of the sum over ranks if all parameters have
        equally many copies, else that of the rank's own part. "" if neither was seen."""
        parts = [list(self.groups(name).values()) for name in self.reference.weights]
        counts = {sum(map(len, groups)) / len(groups) for groups in parts if groups}
        sums, own = self.sums_of_numbers(), self.line("norm")
        return (sums[0] if sums and ((len(counts) == 1 and counts != {1.0}) or not own) else own) or ""

    @property
    def scaled(self) -> list[tuple[str, float]]:
        """The lines at which the script multiplies gradients, and the factors."""
        return [at for step in self.mine for at in step.scaled]

    def losses(self) -> list[float]:
        """Return the loss of each rank that has one, summed over its microbatches."""
        return [sum(value for value, _ in step.losses) for step in self.mine if step.losses]

    @property
    def is_loss_off(self) -> bool:
        """Whether neither the mean of the ranks' losses nor their sum is the reference's."""
        has, want = self.losses(), self.reference.loss(self.number)
        slack = self.reference.slack_of_loss(self.number)
        slack = max(slack, self.reference.epsilon)  # a loss that is always 0 is no evidence
        return bool(has and want and min(abs(np.mean(has) - want), abs(sum(has) - want)) > slack)

    def times_loss(self) -> float | None:
        """Return the mean loss of the ranks divided by the reference's; None if either was not seen."""
        has, want = self.losses(), self.reference.loss(self.number)
        return float(np.mean(has)) / want if has and want else None

    @property
    def of_one_seed(self) -> list[Repair]:
        """The repair that sets rank 0's seed on every rank, if ranks set different seeds."""
        if (found := seeds_by_rank(self.ours)) is None:
            return []
        (seed, *_), line = found
        return [Repair("seed", f"the seed {seed} on every rank at {line}", line, values={"seed": seed})]

    @property
    def sizes(self) -> Sizes:
        groups = {size for seen in self.ours for size in seen.groups} | {len(self.copies)} | set(map(len, self.copies))
        return Sizes(self.num_ranks, sorted(groups, reverse=True), max(len(step.parts) for step in self.mine))

    # --- rows and findings ------------------------------------------------------------------------------------------

    def row(self, what: What, ok: bool | None, words: str, count: int = 0) -> Row:
        return Row(what, self.number, ok, words, count=count)

    def fault(
        self, what: What, words: str, where: str, *, names: Iterable[str] = (), values: tuple[str, str] = ("", ""),
        ranks: Collection[int] = (), lines: Sequence[str] = (), hypotheses: Iterable[Hypothesis] = (), **more: Any,
    ) -> Finding:  # fmt: skip
        """Return a finding in this step for all tensors that have the fault. Ranks are listed only if they are not all;
        `values` are the actual and the expected value; `more` are fields of `Finding`."""
        name, *others = (*names,) or ("",)
        ranks = tuple(sorted(ranks)) if len(ranks) < self.num_ranks else ()
        all_lines = tuple(dict.fromkeys(line for line in (where, *lines) if line))
        got, want = values
        return Finding(
            what, name, self.number, words, where=where, got=got, want=want, ranks=ranks, others=tuple(others),
            lines=all_lines, hypotheses=tuple(hypotheses), **more,
        )  # fmt: skip


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether arrays are equal up to the rounding of float32."""
    if a is b:
        return True
    size = np.abs(b, dtype=np.float64)
    return a.shape == b.shape and bool((gaps(a, b) <= 1e-6 * size + 1e-7 * size.max(initial=0)).all())
