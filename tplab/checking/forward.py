"""The forward pass: the line at which it goes wrong, and possible causes there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from tplab.checking.causes import thread
from tplab.checking.facts import Facts, same
from tplab.checking.gaps import gap, largest
from tplab.checking.repairs import Groups, Hypothesis, Repair
from tplab.checking.same_model import named
from tplab.checking.sends import lines_of_reduction, over, partitions
from tplab.checking.trail import Op
from tplab.checking.trails import Trails
from tplab.units import plain, ranks_text

MOST_FAULTS = 4

COMBINED: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda parts: parts.mean(0),
    "sum": lambda parts: parts.sum(0),
    "maximum": lambda parts: parts.max(0),
    "logsumexp": lambda parts: np.logaddexp.reduce(parts, axis=0),
    "root of the sum of squares": lambda parts: np.sqrt(np.square(parts).sum(0)),
    "first rank's value": lambda parts: parts[0],
    "last rank's value": lambda parts: parts[-1],
}
"""The ways in which the ranks' results for their parts may combine to the result for the whole."""


def of_forward(facts: Facts, line: str) -> Iterator[Hypothesis]:
    """Yield hypotheses about the line at which the forward pass goes wrong."""
    yield from in_order(facts, forward=True)
    trails = facts.trails
    if trails is None or not line:
        return
    if (op := trails.first_wrong()) is not None and op.line == line:
        yield from _by_another_number(facts, trails, op)
        yield from _of_parts(facts, trails, op)
        yield from _of_another_rank(facts, trails, op)
    yield from _of_other_parts(facts, line, trails.parameters_of(op) if op is not None and op.line == line else ())
    yield from _of_targets(facts, trails)
    if facts.goes_on:  # only operations of the first rank are known then
        return
    limits, sums = trails.suspects
    for one in limits:
        yield from _in_its_place(facts, trails, one, is_first=trails.has_right_inputs(one))
    yield from _of_faults(facts, trails)
    for one in sums:
        yield from _in_its_place(facts, trails, one, is_first=False)
    yield from of_reads(facts, trails)


def _of_other_parts(facts: Facts, line: str, used: Collection[str]) -> Iterator[Hypothesis]:
    """Yield parameters of which ranks hold other parts than they need. Several ranks share each part of one that has
    fewer parts than others: neighbours, where it should be every second rank, or vice versa. A parameter that the wrong
    operation uses, by its name on the ranks, may be several fused ones."""
    size, groups = facts.num_ranks, {name: facts.groups(name) for name in facts.reference.weights}
    own = {place.name for (_, mine), place in facts.places.items() if mine in used}
    found: dict[Groups, list[str]] = {}
    for name, parts in groups.items() if any(len(parts) == size for parts in groups.values()) else ():
        are_dealt = len(parts) > 1 and sum(map(len, parts.values())) == size and size % len(parts) == 0
        if are_dealt and (len(parts) < size or name in own):
            found.setdefault(tuple(sorted(map(tuple, parts.values()))), []).append(name)
    for way, names in found.items():
        is_fused = len(way) == size
        for values, other in facts.deals(names, None if is_fused else 1):
            if all(same(x, facts.ours[rank].weights[mine].values) for (rank, mine), x in values.items()):
                continue
            have, need = (" and ".join(map(ranks_text, some)) for some in (way, other))
            cause = (
                f"{have} have the same part of {named(names)}, and what it is used with is cut so that {need} need "
                "the same, as where heads of queries share a head of keys and values: choose the part by rank // "
                "(ranks per part) in place of rank % parts, or the other way round"
            )
            words = f"{named(names)} dealt so that {need} have the same part"
            if is_fused:
                cause = (
                    f"{named(names)} is cut into other parts than what follows needs, as where several matrices are "
                    "fused in one (gate and up; query, key and value) and a rank needs its part of each: cut each of "
                    "them, then join the rank's parts"
                )
                words = f"{named(names)} cut so that rank 0 has {_pieces(next(iter(values.values())), facts, names[0])}"
            mine = tuple(dict.fromkeys(mine for _, mine in values))
            also = [Repair("gradients", words, at, mine, other, "sum") for at in lines_of_reduction(facts, names)[:1]]
            repair, where = Repair("weights", words, values=values), line if is_fused else facts.line("forward")
            if is_fused or other != way:
                yield Hypothesis(repair, cause, where, also=(*also,) if not is_fused else ())


def _of_targets(facts: Facts, trails: Trails) -> Iterator[Hypothesis]:
    """Yield repairs for losses whose targets are not the rank's part of the reference's. Targets that number the
    samples mean that samples are compared with one another, and each rank compares only its own."""
    wholes = {number: [x for x, _, _ in step.targets] for number, step in enumerate(facts.reference.seen[0].steps)}
    parts = [(x, whole[rank * x.size : (rank + 1) * x.size], x.size * facts.num_ranks == whole.size)
             for rank, step in enumerate(facts.mine)
             for (x, _, _), whole in zip(step.targets, wholes[facts.number]) if x.ndim == 1]  # fmt: skip
    if all(np.array_equal(x, want) for x, want, _ in parts) or not all(fits for *_, fits in parts):
        return
    each, order = tuple((rank,) for rank in range(facts.num_ranks)), trails.order_of_samples()
    cause = "the loss does not compare with the rank's part of the reference's targets"
    words, where = "the rank's part of the reference's targets", facts.line("label") or facts.mine[0].targets[0][2]
    if are_numbers := all(np.array_equal(x, np.arange(x.size)) for x, _, _ in parts):
        cause += ": labels that number samples go on from the rank's first sample, and do not begin anew on each rank"
    elif order != sorted(order):
        cause += ": targets are not in the order in which ranks hold samples, or tokens, as where a sequence is cut in "
        cause += "another order than its labels"
        wholes = {number: [x[order] if len(x) == len(order) else x for x in some] for number, some in wholes.items()}
    if lines := trails.products_of_parts() if are_numbers else []:
        cause = (
            "each rank compares its samples with its own alone, and the reference with all of the batch: gather what "
            "they are compared with from all ranks, with gradients, and count labels on from the rank's first sample"
        )
        words, where = f"the samples of all ranks to compare with, and their labels, at {' and '.join(lines)}", lines[0]
    repair, *also = (Repair("gather", words, line, groups=each, values=wholes) for line in lines or ("",))
    yield Hypothesis(repair, cause, where, also=tuple(also))


def of_value(facts: Facts, made: np.ndarray | None) -> tuple[str, list[Hypothesis]]:
    """Return the line where a value that all steps end with goes wrong, "" if it is not known, and hypotheses."""
    facts.wants_trails = True
    if (trails := facts.trails) is None or made is None or (op := trails.first_wrong(made)) is None:
        return "", []
    ways = _of_parts(facts, trails, op, made), _by_another_number(facts, trails, op), _of_faults(facts, trails, made)
    return op.line, [*itertools.chain(*ways)]


def of_reads(facts: Facts, trails: Trails) -> Iterator[Hypothesis]:
    """Yield the first number that the program reads and goes on with, if it is not the reference's."""
    for read in trails.reads()[:1] if not facts.goes_on else []:
        for maker in trails.makers_of(read):
            yield from _of_parts(facts, trails, maker, read.values[0])
        for told, values in trails.wanted(read):
            words = f"the reference's number where {read.line} reads one"
            cause = f"the number that this line reads, and that the program goes on with, is wrong: {told}"
            given = {(key, 0): pieces for key, pieces in values.items()}
            yield Hypothesis(Repair("put", words, read.line, values=given, times=facts.number), cause, read.line)


def _of_parts(facts: Facts, trails: Trails, op: Op, made: np.ndarray | None = None) -> Iterator[Hypothesis]:
    """Yield reductions that the script leaves out: a wrong operation returns, or takes, each rank's part of the
    reference's tensor, and their sum or mean is right. made: see `Trails.first_wrong`"""
    for ops in [op], *trails.parts_in(op, made):
        values = [_parts_of(facts, trails, one) for one in ops]
        known = set[Groups]()
        for way, how in itertools.product(partitions(facts) if all(values) else (), COMBINED):
            with np.errstate(invalid="ignore"):  # of what is not finite
                totals = [(COMBINED[how](np.stack([held[rank] for rank in group])), want)
                          for held, want in filter(None, values) for group in way]  # fmt: skip
            if any(gap(total, want) > 1e-5 * largest(want) for total, want in totals):
                continue
            if how.endswith("value") and (made is not None or totals[0][1].size == 1):
                continue  # one number may be right by chance, and what one rank draws is no part
            if way in known:
                continue  # where only one rank has a value, its maximum is its sum
            known.add(way)
            those, line = over(facts, way), ops[0].line
            late = trails.sums_after(ops) if how == "sum" else []
            if how.endswith("value"):
                cause = f"ranks compute different values here, and the {how} is the reference's: all need that one"
            else:
                lacks = f"{late[0]} sums only what is computed from it" if late else f"nothing takes that {how}"
                cause = f"each rank computes this from its own part alone: the {how} of it over {those} is the "
                cause += f"reference's, and {lacks}"
            words = f"the {how} over {those} of what {' and '.join(dict.fromkeys(one.line for one in ops))} computes"
            factors = [1.0]
            if any(one.arrived for one in ops):  # each rank may have the gradient of its part of the loss, or of all
                factors.append(1 / len(way[0]))
            if any({*way[0]} <= {*group} for group in facts.copies):
                factors.reverse()
            means = [Repair("scale", f"the mean in place of the sum at {at}", at, by=1 / len(way[0])) for at in late]
            for by, more in itertools.product(factors, ([], means) if means else ([],)):
                told = words if by == 1 else f"{words}, and the mean of the gradients that come back to it"
                told = ", and ".join([told, *(one.words for one in more)])  # a later sum may be of what is then alike
                repair, *also = (Repair("cast", told, at, (name,), way, how, by=by)
                                 for at, name in dict.fromkeys(one.key[:2] for one in ops))  # fmt: skip
                yield Hypothesis(repair, cause, line, also=(*also, *more))


def _parts_of(facts: Facts, trails: Trails, op: Op) -> tuple[dict[int, np.ndarray], np.ndarray] | None:
    """Return each rank's value and the reference's; None if the shapes differ, or all ranks have the same value."""
    there, theirs = trails.ops_of(op.key)
    held, want = {rank: one.values[0] for rank, one in there.items() if one.values}, theirs and theirs.at(None)
    if want is None or len(held) < facts.num_ranks or want.dtype.kind != "f":
        return None
    is_whole = any(x.shape != want.shape for x in held.values())
    is_whole = is_whole or all(gap(x, held[0]) <= 1e-5 * largest(want) for x in held.values())
    return None if is_whole else (held, want)


def _by_another_number(facts: Facts, trails: Trails, op: Op) -> Iterator[Hypothesis]:
    """Yield the repair of a line by whose numbers all ranks multiply, while the reference multiplies by others."""
    if not (pairs := trails.numbers_at(op)):
        return
    was, wants = (" and ".join(map(plain, some)) for some in zip(*pairs))
    cause = f"this line multiplies by {was}, and in the reference by {wants}: the number comes from what a rank has, "
    cause += "where that of the whole is meant, or the other way round"
    if facts.goes_on:
        cause = (
            f"this line multiplies by {was}, and in the run that goes on by {wants}: the number comes from what was "
        )
        cause += "not restored when the script was started again, or not as it was, such as a count of steps"
    words = f"multiplication by {wants} in place of {was} at {op.line}"
    repair, *also = (Repair("factor", words, op.line, was=has, by=want) for has, want in pairs)
    yield Hypothesis(repair, cause, op.line, also=tuple(also))


def _of_another_rank(facts: Facts, trails: Trails, op: Op) -> Iterator[Hypothesis]:
    """Yield inputs of an operation that are another rank's part of the reference's tensor."""
    for place, pieces in trails.wanted_by(op):
        made = op.given[place][1] or op.line
        has = (
            ", ".join(
                f"rank {rank} has that of rank {of}" for rank, of in trails.mistaken(op.key, place, pieces[op.key])
            )
            or "all ranks together have all of it, in another order"
        )
        cause = f"what is made here is not the rank's part of the reference's: {has}"
        cause += f"; {op.line} takes it together with what is the rank's part"
        words = f"the rank's own part of what {made} makes, where {op.line} takes it"
        values = {(key, place): each for key, each in pieces.items()}
        yield Hypothesis(Repair("put", words, op.line, values=values, times=facts.number), cause, made)


def _pieces(part: np.ndarray, facts: Facts, name: str) -> str:
    """Return the indices along a dim of a parameter that a part of it has, in words."""
    whole = facts.reference.weights[name]
    dim = next(dim for dim, size in enumerate(part.shape) if size < whole.shape[dim])
    rows = [np.abs(np.moveaxis(whole, dim, 0) - row).reshape(whole.shape[dim], -1).sum(1).argmin()
            for row in np.moveaxis(part, dim, 0)]  # fmt: skip
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return f"{' and '.join(f'{run[0]} to {run[-1]}' for run in runs)} of its {whole.shape[dim]} places along dim {dim}"


def _of_faults(facts: Facts, trails: Trails, made: np.ndarray | None = None) -> Iterator[Hypothesis]:
    """Yield the operations that may be at fault, each with the reference's values in place of its result: if what comes
    after it is then right, the fault is there. made: see `Trails.first_wrong`"""
    most = 0 if facts.goes_on else MOST_FAULTS  # only the first rank's operations are known after a restart
    for first, op in itertools.islice(trails.faults(made), most):
        yield from _in_its_place(facts, trails, op, first, in_forward=made is None)


def _in_its_place(
    facts: Facts, trails: Trails, op: Op, first: Op | None = None, is_first: bool = True, in_forward: bool = True
) -> Iterator[Hypothesis]:
    """Yield the repair that replaces an operation's result by the reference's. first: the operation at fault, if that
    is another one; is_first: whether its inputs are right"""
    first = first or op
    is_alike, many = trails.can_be_cut(first), op.values[0].size > 1  # to put the loss itself would prove nothing
    inputs = "what this line computes is"
    if is_first:
        parts = ", or parts that add up to the right ones," * trails.takes_parts(first)
        inputs = f"the computed tensors that go into this line are right{parts} and its result is"
    if not is_alike:
        called = f" in the function called at {first.lines[1]}" if len(first.lines) > 1 else ""
        inputs = f"{trails.why_not_cut(first)}{called}, and what {op.line} makes of it is"
    for words, values in trails.wanted(op):
        by = "" if first.line == op.line else f" from what {first.line} computes"
        repair = Repair("put", f"the reference's values in place of what {op.line} computes{by}", op.line,
                        values=values, times=facts.number)  # fmt: skip
        told = next(trails.wanted(first), (words,))[0] if is_alike and first is not op else words
        cause = f"{'in the forward pass, ' * in_forward}{inputs} wrong: {told}{_too_much(facts, trails, values)}"
        if not is_alike and first.line != op.line:
            cause += ". The fault is at one of the two lines, or between them"
        yield Hypothesis(repair, cause, first.line, is_forward=is_first and (many or not in_forward))


def _too_much(facts: Facts, trails: Trails, values: Mapping[Any, Mapping[int, np.ndarray]]) -> str:
    """Return words for a parameter, or a value that all ranks compute alike, that was added once too often."""
    key, rank = next(iter(values)), facts.num_ranks - 1
    got = trails.ops_of(key)[0][rank].values[0]
    with np.errstate(invalid="ignore"):  # masks may be infinite
        more = np.nan_to_num(got.astype(np.float64) - values[key][rank], posinf=0.0, neginf=0.0)
    vectors = {name: x for name, x in facts.reference.parameters(facts.number - 1).items() if x.ndim == 1}
    for name, x in (vectors | trails.alike(more.shape)).items():
        if not more.ndim or x.shape not in (more.shape, more.shape[-1:]) or not x.any() or not np.isfinite(x).all():
            continue
        times = float((more * x).sum() / (x.astype(np.float64) ** 2).sum() / (more.size / x.size))
        is_count = name in vectors or abs(times - round(times)) < 1e-3
        if is_count and abs(times) > 1e-3 and np.abs(more - times * x).max() <= 1e-4 * np.abs(got).max():
            many = "" if abs(times - 1) < 1e-3 else f"{plain(times)} times "
            return f"; it is the right value plus {many}{name}"
    return ""


def in_order(facts: Facts, *, forward: bool) -> list[Hypothesis]:
    """Return hypotheses about collectives that were given non-contiguous tensors. forward: in the forward pass only"""
    given = {(at, *about) for seen in facts.ours for at, about in seen.strided.items()}
    strided = sorted(one for one in given if not forward or not one[2])
    found = []
    for some in [[one] for one in strided] + [strided] * (len(strided) > 1):
        those, is_one = " and ".join(f"{op} at {line}" for line, op, _ in some), len(some) == 1
        words = f"{those} {'takes' if is_one else 'take'} the elements of tensors in the program's order"
        cause = (
            f"{those} {'is' if is_one else 'are'} given a tensor that is not contiguous, and gloo takes its elements "
            "as they are in memory, in another order than the program's (nccl refuses it): pass x.contiguous(), and "
            "receive into a contiguous tensor. In a backward pass it is a gradient that is not contiguous"
        )
        theirs = {line for seen in facts.reference.seen for line in seen.strided}
        runs = (False, True)[: 1 + any(line in theirs for line, *_ in some)]
        repair, *also = (Repair("order", words, line, of_reference=of) for of in runs for line, *_ in some)
        where = "" if some[0][2] else some[0][0]
        found.append(Hypothesis(repair, cause, where, thread("strided"), also=tuple(also)))
    return found
