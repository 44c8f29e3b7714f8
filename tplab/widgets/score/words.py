"""A trace in words: a title line, and one sentence per round, made from its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tplab.comm import ROWS
from tplab.mesh import ranks_of
from tplab.trace.groups import kinds
from tplab.trace.trace import Trace
from tplab.units import bytes_text, counted, plain, range_text, time_text
from tplab.widgets.score.score import COLLECTIVE, COMPUTE, SEND, Score

_RESULTS = {"sum": "sum", "mean": "mean", "max": "maximum", "min": "minimum", "product": "product"}


def about(score: Score) -> str:
    """The text after the title: "8 ranks (data=2, model=4), over model, 4 KiB pieces"."""
    mesh, bars = score.trace.mesh, score.bars
    parts = [counted(mesh.size, "rank")]
    if len(mesh.axis_names) > 1:
        parts.append(" × ".join(f"{name} {size}" for name, size in mesh.shape.items()))
    names = kinds(score.trace)
    if names:
        is_axis = len(mesh.axis_names) == 1 and names.keys() <= set(mesh.axis_names)
        parts.append(("axis " if is_axis else "over ") + _few(list(dict.fromkeys(names.values()))))
    sizes = bars["bytes"][bars["kind"] == SEND]
    if score.is_pipeline:
        parts.append(_microbatches(score))
    if len(sizes) and sizes.max() > 0:
        alike = " per message" if score.is_pipeline or score.shows_numbers else " pieces"
        parts.append(range_text(sizes.tolist()) + (alike if sizes.min() == sizes.max() else " per message"))
    return " · ".join(parts)


def _microbatches(score: Score) -> str:
    return counted(len({item.piece for item in score.items}), "microbatch")


def clock(trace: Trace) -> str:
    """The clock: "modelled · h100, data sheet", "modelled · unit times", "measured"."""
    if trace.unit == "steps":
        return f"{trace.clock} · unit times"
    return f"{trace.clock} · {trace.place}" if trace.cluster else trace.clock


def warning(trace: Trace) -> str:
    """The first of the trace's warnings, and the number of others; "" without any."""
    more = len(trace.warnings) - 1
    others = f" (and {counted(more, 'more warning')}, in trace.warnings)" if more > 0 else ""
    return f"Warning: {trace.warnings[0]}.{others}" if trace.warnings else ""


def summary(score: Score, verb: str = "Animation") -> str:
    """One plain sentence, the same for the same trace; it has no measured times."""
    trace = score.trace
    steps = counted(score.num_steps, "step")
    if score.is_pipeline:
        steps = f"{_microbatches(score)}, {steps}"
    total = score.total_sent.tolist()
    sent = f"each rank sends {range_text(total)}" if max(total) > 0 else "nothing is sent"
    said = clock(trace).replace(" · ", ", ")
    return f"{verb} of {trace.title or 'a program'} on {trace.mesh}: {steps}, {sent} ({said})."


def busy(score: Score) -> np.ndarray:
    """The share of the makespan for which each rank computes."""
    return score.trace.busy() / (score.trace.makespan or 1.0)


def facts(score: Score, critical: np.ndarray | None = None) -> list[tuple[str, str, str]]:
    """The figures of a timeline: (what, figure, note). critical: the bars of the critical path, in order."""
    bars, unit = score.bars, score.trace.unit
    steps = "" if unit == "s" else "step" if score.trace.makespan == 1 else "steps"
    found = [("makespan", time_text(score.trace.makespan, unit), steps)]
    if score.computes:
        shares = 100 * busy(score)
        found.append(("busy", f"{range_text(shares.round(1).tolist(), plain)}%", "of the makespan, per rank"))
        found.append(("idle", f"{plain(round(100 - float(shares.mean()), 1))}%", "of all ranks' time"))
    if critical is not None and len(critical):
        spent = (bars["end"] - bars["start"])[critical]
        computing = spent[bars["kind"][critical] == COMPUTE].sum() / (spent.sum() or 1.0)
        number, noun = counted(len(critical), "bar").split()
        found.append(("critical path", number, f"{noun}, {plain(round(100 * computing))}% of it computing"))
    return found


def sentences(score: Score) -> list[str]:
    """What happens at position 0 and in each round."""
    bars = score.bars
    if score.is_pipeline:
        return ["no rank computes yet", *(_of_pipeline(score, index) for index in range(score.num_steps))]
    talk = np.flatnonzero(np.isin(bars["kind"], (SEND, COLLECTIVE)) & (bars["step"] >= 0))
    by_round = np.argsort(bars["step"][talk], kind="stable")
    bounds = np.searchsorted(bars["step"][talk][by_round], np.arange(score.num_steps + 1))
    texts = [_before(score)]
    news = _News(score)
    for index in range(score.num_steps):
        rows = talk[by_round[bounds[index] : bounds[index + 1]]]
        begin, end = score.times[index], score.times[index + 1]
        texts.append(news.sentence(rows) + _computing(score, rows, float(begin), float(end)))
    return texts


def _of_pipeline(score: Score, step: int) -> str:
    """What the ranks run in a step of a pipeline, and what is sent."""
    bars = score.bars
    begin, end = float(score.times[step]), float(score.times[step + 1])
    near = 1e-9 * (end - begin)
    running = (bars["start"] < end - near) & (bars["end"] > begin + near)
    runs = [f"rank {bars['rank'][row]} runs {score.op_names[bars['op'][row]]}"
            for row in np.flatnonzero(running & (bars["kind"] == COMPUTE)).tolist()]  # fmt: skip
    sent = [f"{'activations' if bars['flow'][row] == 1 else 'gradients'} of {score.items[bars['item'][row]].text} "
            f"to rank {bars['peer'][row]}"
            for row in np.flatnonzero(running & (bars["kind"] == SEND) & (bars["flow"] > 0)).tolist()]  # fmt: skip
    ops = {score.ops[op] for op in bars["op"][running & (bars["kind"] == COLLECTIVE)].tolist()}
    parts = [_few(runs) or "no rank computes", f"on their way: {_few(sent)}" if sent else "", ", ".join(sorted(ops))]
    return "; ".join(part for part in parts if part)


def _few(texts: list[str], most: int = 4) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def _before(score: Score) -> str:
    own = score.holds["state"] == 1
    first = own & (score.holds["time"] <= score.times[0])
    counts = set(np.bincount(score.holds["rank"][first], minlength=score.trace.mesh.size).tolist())
    if not first.any():
        return "nothing has been sent yet"
    if counts == {1}:
        return f"every rank holds its own {'number' if score.shows_numbers else 'piece'}"
    if len(counts) == 1:
        return f"every rank holds its own part of {counts.pop()} pieces"
    return "each rank holds its own pieces"


_JOINED = {
    "sum": ("sum", "adds", "add", "to"),
    "max": ("maximum", "compares", "compare", "with"),
    "min": ("minimum", "compares", "compare", "with"),
    "product": ("product", "multiplies", "multiply", "with"),
    "": ("result", "joins", "join", "with"),
}
"""How ranks combine their parts -> the result, the verb in singular and plural, and its preposition."""


class _News:
    """Describes rounds in order, and remembers what each rank received in the previous round."""

    def __init__(self, score: Score):
        self.score = score
        self.received: dict[int, dict[int, frozenset[int]]] = {}  # rank -> item -> contributors
        who, codes = score.trace.codes("contributors")
        self.members = [frozenset(who[code]) for code in codes[score.bars["row"]]]
        self.kinds = kinds(score.trace)
        self.all_joint = score.bars["row"][(score.bars["kind"] == COLLECTIVE) & (score.bars["item"] >= 0)]
        self.full = [max(map(len, item.pools), default=0) for item in score.items]

    def sentence(self, rows: np.ndarray) -> str:
        bars = self.score.bars
        sends, joint = rows[bars["kind"][rows] == SEND], rows[bars["kind"][rows] == COLLECTIVE]
        parts = [self._sends(sends.tolist())] if len(sends) else []
        for op in dict.fromkeys(bars["op"][joint].tolist()):
            parts.append(self._together(self.score.ops[op], joint[bars["op"][joint] == op]))
        received: dict[int, dict[int, frozenset[int]]] = {}
        for row in sends.tolist():
            received.setdefault(int(bars["peer"][row]), {})[int(bars["item"][row])] = self.members[row]
        self.received = received
        return "; ".join(parts) or "nothing is sent"

    def _sends(self, rows: list[int]) -> str:
        bars, mesh = self.score.bars, self.score.trace.mesh
        senders = Counter(bars["rank"][rows].tolist())
        if len(rows) <= 2 and mesh.size > 2:
            one = [f"rank {bars['rank'][row]} sends {self._name(row)} to rank {bars['peer'][row]}" for row in rows]
            return " and ".join(one)
        who = "every rank" if len(senders) == mesh.size else f"{len(senders)} ranks"
        if len(senders) == 1 < mesh.size:
            who = f"rank {next(iter(senders))}"
        did, to = {self._did(row) for row in rows}, self._direction(rows)
        if len(did) > 1:
            return f"{len(rows)} messages, from {who} to {to}"
        if did == {"version"}:
            return self._versions(who, to, rows)
        piece = "pieces" if max(senders.values()) > 1 else "piece"
        result, joins, join, joint = _JOINED[self._how([row for row in rows if bars["item"][row] >= 0])]
        if who != "every rank" and len(senders) > 1:
            send, pass_on, joins, its, it = "send", "pass on", join, "their", "they have"
        else:
            send, pass_on, its, it = "sends", "passes on", "its", "it has"
        results = result + "s" * (piece == "pieces")
        return {
            "own": f"{who} {send} {its} own {piece} to {to}",
            "passed": f"{who} {pass_on} the {piece} {it} just received",
            "finished": f"{who} {pass_on} the finished {results} just received",
            "added": f"{who} {joins} {its} own part {joint} what {it} just received, and {send} the {results} on",
            "complete": f"{who} {joins} the last missing part, and {send} the finished {results} on",
            "other": f"{len(rows)} messages, from {who} to {to}",
            "unknown": f"{len(rows)} messages, from {who} to {to}; whose data they carry is not known",
        }[did.pop()]

    def _versions(self, who: str, to: str, rows: list[int]) -> str:
        """Ranks that each send their own, growing version of a variable."""
        items = {self.score.items[int(self.score.bars["item"][row])] for row in rows}
        numbers = {len(self.members[row]) for row in rows}
        send, its = ("sends", "its") if who.startswith(("every", "rank")) else ("send", "their")
        name = items.pop().text if len(items) == 1 else "version"
        if numbers == {1}:
            return f"{who} {send} {its} own {name} to {to}"
        if len(numbers) > 1:
            return f"{who} {send} {its} {name} to {to}"
        result = _JOINED[self._how(rows)][0]
        return f"{who} {send} {its} {result} of {numbers.pop()} ranks' parts to {to}"

    def _how(self, rows: list[int]) -> str:
        hows = {self.score.items[int(self.score.bars["item"][row])].how for row in rows}
        return hows.pop() if len(hows) == 1 else ""

    def _did(self, row: int) -> str:
        """The kind of a send, compared with what its rank received in the previous round."""
        bars = self.score.bars
        rank, item, members = int(bars["rank"][row]), int(bars["item"][row]), self.members[row]
        came = self.received.get(rank, {}).get(item)
        if item < 0:
            return "unknown"
        if self.score.items[item].origin < 0:
            return "version"
        if came is None:
            is_own = members <= {rank} or self.score.items[item].origin == rank
            return "own" if is_own else "other"
        whole = len(members) == self.full[item] > 1
        if came == members:
            return "finished" if whole else "passed"
        return ("complete" if whole else "added") if came < members else "other"

    def _name(self, row: int) -> str:
        """The name of a message. A sum does not have the name of one of its terms."""
        item = int(self.score.bars["item"][row])
        if item < 0:
            return bytes_text(int(self.score.bars["bytes"][row]))
        made, number = self.score.items[item], len(self.members[row])
        if number < 2 or not made.how:
            return made.text
        result = _JOINED[made.how][0]
        return f"the finished {result}" if number == self.full[item] else f"the {result} of {number} ranks' parts"

    def _direction(self, rows: list[int]) -> str:
        """The direction of a round's messages, as shifts along their axis, or among the ranks of their group."""
        bars, mesh = self.score.bars, self.score.trace.mesh
        names_of, codes = self.score.trace.codes("axis")
        shifts, pairs, sizes = set(), set(), set()
        for row in rows:
            rank, peer = int(bars["rank"][row]), int(bars["peer"][row])
            pairs.add((rank, peer))
            label = names_of[codes[bars["row"][row]]]
            members = self._members(label, rank)
            if rank not in members or peer not in members:
                return "others"
            size = len(members)
            shift = (members.index(peer) - members.index(rank)) % size
            shifts.add((label, shift - size if shift > size // 2 and size > 2 else shift))
            sizes.add(size)
        if len(pairs) > 1 == len({peer for _, peer in pairs}):
            return f"rank {next(iter(pairs))[1]}"
        over = {axis for axis, _ in shifts}
        along = f" along {next(iter(over))}" if len(mesh.axis_names) > 1 and len(over) == 1 else ""
        if all(map(ranks_of, over)):
            along = " in the group"
        hops = {shift for _, shift in shifts}
        known = {(1,): "the next rank", (-1,): "the rank before", (-1, 1): "both neighbours"}
        if hops == {1} and sizes == {2}:
            return "the other rank" + along
        # Each rank sends once, to the rank that it receives from.
        in_pairs = len({rank for rank, _ in pairs}) == len(rows) and {(peer, rank) for rank, peer in pairs} == pairs
        away = max(map(abs, hops))
        if in_pairs and all(abs(hop) == away for hop in hops):
            return f"its partner, {away} place{'s' * (away > 1)} away" + along
        found = known.get(tuple(sorted(hops)))
        far = f"the rank {away} places {'on' if max(hops) > 0 else 'back'}"
        return (found or (far if len(hops) == 1 else "others")) + along

    def _members(self, label: str | None, rank: int) -> Sequence[int]:
        """The ranks of `rank`'s group with this label; () if the label does not determine them."""
        mesh, names = self.score.trace.mesh, tuple((label or "").split(","))
        if label and set(names) <= set(mesh.axis_names):
            return mesh.group(rank, names)
        return ranks_of(label or "")

    def _together(self, op: str, rows: np.ndarray) -> str:
        mesh, groups = self.score.trace.mesh, self.score.groups
        distinct = {groups[code] for code in self.score.bars["group"][rows].tolist()}
        size = max(map(len, distinct), default=0)
        labels, places = self.score.trace.codes("axis")
        met = [labels[place] for place in dict.fromkeys(places[self.score.bars["row"][rows]].tolist())]
        over = met[0] if len(met) == 1 else _few(list(dict.fromkeys(self.kinds[label] for label in met if label)))
        one = len(distinct) == 1
        group = f"a group of {size}" if not one else f"the {size}" if size == mesh.size else f"one group of {size}"
        if len(set(map(len, distinct))) > 1:
            group = "each group"
        reductions, codes = self.score.trace.codes("reduction")
        hows = {reductions[code] for code in codes[self.score.bars["row"][rows]].tolist()}
        result = _RESULTS.get(hows.pop() if len(hows) == 1 else "", "combination")
        words = ROWS[op].words if op in ROWS else ""
        text = (words or "the ranks of {group} work together").format(group=group, result=result)
        before = {len(self.members[row]) for row in rows.tolist()}
        beyond = f", which then has data of {before.pop()} ranks" if len(before) == 1 and max(before) > size else ""
        return f"{op}{f' over {over}' if over else ''}{self._tensor(rows)}: {text}{beyond}"

    def _tensor(self, rows: np.ndarray) -> str:
        """The input of each rank to a collective, if the program's collectives differ in type."""
        if len(np.unique(self.score.trace.codes("dtype")[1][self.all_joint])) < 2:
            return ""
        events = self.score.trace.events_at(self.score.bars["row"][rows])
        kinds = {f" of {event.dtype} {list(event.shape)}" for event in events}
        return kinds.pop() if len(kinds) == 1 else ""


def _computing(score: Score, rows: np.ndarray, begin: float, end: float) -> str:
    """The computation during the messages, or before them."""
    bars = score.bars
    work = np.flatnonzero(
        (bars["kind"] == COMPUTE) & (bars["end"] > bars["start"]) & (bars["start"] < end) & (bars["end"] > begin)
    )
    if not len(work):
        return ""
    spent = Counter()
    for op, time in zip(bars["op"][work].tolist(), (bars["end"] - bars["start"])[work].tolist()):
        spent[score.op_names[op]] += time
    names = ", ".join(name for name, _ in spent.most_common(2)) + (" ..." if len(spent) > 2 else "")
    if not len(rows):
        return f"; the ranks compute ({names})"
    first, last = float(bars["start"][rows].min()), float(bars["end"][rows].max())
    beside = bool(((bars["start"][work] < last) & (bars["end"][work] > first)).any())
    before = bool((bars["end"][work] <= first).any())
    workers, senders = set(bars["rank"][work].tolist()), set(bars["rank"][rows].tolist())
    size = score.trace.mesh.size
    count = len(workers)
    verb = "compute" if 1 < count < size else "computes"
    if workers != senders:
        who = f"rank {min(workers)}" if count == 1 else "every rank" if count == size else f"{count} ranks"
        return f"; {'meanwhile' if beside else 'before,' if before else 'then'} {who} {verb} ({names})"
    if beside:
        return f", and {verb} meanwhile ({names})"
    return f", after computing ({names})" if before else f", and then {verb} ({names})"


def sent_text(score: Score, time: float) -> str:
    """The amount sent: "sent so far: 8 KiB of 12 KiB per rank"."""
    bars, total = score.bars, score.total_sent.tolist()
    sent = np.bincount(bars["rank"], np.where(bars["end"] <= time, bars["bytes"], 0), len(total)).tolist()
    if max(total) == 0:
        return ""
    return f"sent so far: {range_text(sent)} of {range_text(total)} per rank"
