"""The lines of a training step that its wrong results may come from, as its jaxpr has them."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import jax

from tplab.checking.same_model import What
from tplab.checking.verdict import EPSILON
from tplab.jax.private import scan_sizes
from tplab.jax.tracing.exchange import EXCHANGES
from tplab.jax.tracing.jaxprs import equations_of, frames_of, inside, is_transposed, opened, own_frames
from tplab.jax.tracing.typed import faults_of
from tplab.lines import line_text
from tplab.mesh import Mesh

Frame = tuple[str, int]


class Lines:
    """What the jaxpr of `step(*args)` says.

    dtype      the least exact one in which it computes
    draws, draws_alone   the shapes of the random numbers that it draws, and that the reference does
    has_ranks  whether it has a shard_map; is_checked: one that checks varying axes
    faults     what the types of its tensors forbid
    """

    def __init__(self, step: Callable[..., Any], args: Sequence[Any], mesh: Mesh):
        self.mesh = mesh  # tplab's
        jaxpr = jax.make_jaxpr(step)(*args).jaxpr
        shapes = jax.eval_shape(step, *args)
        dtypes = {str(v.aval.dtype) for eqn, _ in equations_of(jaxpr) for v in eqn.outvars if hasattr(v.aval, "dtype")}
        self.dtype = max(dtypes & EPSILON.keys(), key=list(EPSILON).index, default="float32")
        mapped = [eqn for eqn, _ in equations_of(jaxpr) if eqn.primitive.name == "shard_map"]
        self.has_ranks = bool(mapped)
        self.draws = self.draws_alone = _draws_of(jaxpr)
        self.is_checked = any(eqn.params.get("check_vma", False) for eqn in mapped)
        self.faults = [fault for eqn in mapped for fault in faults_of(eqn, mesh)]
        self.body, outvars = _body(jaxpr)
        is_compared = [jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact) for leaf in jax.tree.leaves(shapes)]
        self.outvars = [v for v, is_float in zip(outvars, is_compared, strict=True) if is_float]

    def compare(self, reference: Callable[..., Any], args: Sequence[Any]) -> None:
        """Note what the step on the reference's mesh draws."""
        self.draws_alone = _draws_of(jax.make_jaxpr(reference)(*args).jaxpr)

    def needs(self, place: int, others: Iterable[int]) -> bool:
        """Whether a result is computed from one of the others."""
        wanted = {self.outvars[other] for other in others if not hasattr(self.outvars[other], "val")}
        start = self.outvars[place]
        return any(v in wanted for eqn in self._behind(start) for v in eqn.invars if not hasattr(v, "val"))

    def blamed(self, place: int, what: What, kind: str, factor: float | None) -> tuple[str, str, str]:
        """The line at fault, the usual cause in words, and what it is called in `causes`; "" where nothing is known."""
        if self.faults and kind != "own":
            fault = self.faults[0]
            return fault.where, f"{fault.words}; {fault.way_out}", "backward" if what == "gradient" else "loss"
        chain = list(self._behind(self.outvars[place]))
        sends = list(self._collectives(chain))
        if what == "norm":
            words = (
                "the norm is that of each device's own gradient: gradients are to be reduced before they are clipped"
            )
            return self._at(chain[:1], self.body), words, "norm"
        if kind == "own":
            if what in ("loss", "log"):
                words = (
                    "each device has its own samples' loss, but out_specs call it replicated, and the first one is read"
                )
                return self._return_of(chain), f"{words}; pmean makes it the same", "log"
            words = "nothing reduces it over the devices: each has its own part; a psum or pmean is missing after it"
            return self._outermost(chain), words, "backward"
        if (scan := next((eqn for eqn in chain if _forgets(eqn)), None)) is not None and factor is None:
            words = "a scan over microbatches returns the last one's gradient, which is only a part of their sum"
            inner = opened(scan.params["jaxpr"])[0]
            return self._return_of(inner.eqns[-1:], inner), words, "microbatches"
        if not self._is_count(factor) and self.draws != self.draws_alone and (draw := self._draw(chain)) is not None:
            words = (
                "random numbers are drawn inside the shard_map, for a part of the batch on each device: one device "
                "draws others for the whole, and with the same key on all devices they all draw the same; draw them "
                "for the whole batch outside, and let in_specs cut them, or compare without"
            )
            return draw, words, ""
        if factor is not None and factor > 1:
            sums = [one for one in sends if _is_sum(one[0], one[1], self.mesh)]
            words = (
                "a psum where a mean is meant, or one whose backward pass sums the same gradient again: twice in all"
            )
            if sums and self.is_checked and is_transposed(sums[0][0]):
                words = (
                    "with check_vma, jax.grad itself adds up the gradients of what is the same on all devices: they "
                    "are the sum of what each device's own loss gives, and a pmean of them changes nothing; take the "
                    "pmean of the loss inside of the function that is differentiated"
                )
                return self._outermost([sums[0][0]], sums[0][1]), words, "twice"
            if sums:
                return self._line(*sums[0]), words, "loss" if what == "loss" else "twice"
        if factor is None and what == "gradient" and (stopped := self._stopped()) is not None:
            words = "what other devices have given counts as a constant, so that its part of the gradient is lost"
            return stopped, words, "backward"
        if what in ("parameters", "optimizer") and factor is not None:
            words = (
                "the step adds this many times what it should: the learning rate, or the gradient that it is "
                "multiplied with, is scaled by a number of devices"
            )
            return self._at(chain[:1], self.body), words, "loss"
        if hops := [one for one in sends if EXCHANGES[one[0].primitive.name].op in ("ppermute", "ring_shift")]:
            words = (
                "pieces go from device to device here: see that each of R pieces is used once, its own included, which "
                "takes R - 1 hops on R devices, and that positions and labels are those of where a piece came from"
            )
            return self._line(*hops[0]), words, ""
        if sends:
            axes = " and ".join(map(repr, EXCHANGES[sends[0][0].primitive.name].names(sends[0][0].params)))
            words = (
                f"over {axes}, parts are combined that are not alike: means over unequally many tokens, shards of a "
                "parameter, or, in the forward pass, positions or labels that are not those of each part"
            )
            return self._line(*sends[0]), words, "means"
        return self._at(chain[:1], self.body), "", ""

    # --- equations -----------------------------------------------------------------------------------------------

    def _behind(self, variable: Any) -> Iterator[Any]:
        """The equations of the body that a variable is computed from, the last one first."""
        wanted = {variable} if not hasattr(variable, "val") else set()
        for eqn in reversed(self.body.eqns):
            if not wanted.isdisjoint(eqn.outvars):
                wanted.update(v for v in eqn.invars if not hasattr(v, "val"))
                yield eqn

    def _collectives(self, chain: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        for eqn in chain:
            if eqn.primitive.name in EXCHANGES:
                yield eqn, self.body
            for inner in inside(eqn):
                for one, jaxpr in reversed(list(equations_of(inner))):
                    if one.primitive.name in EXCHANGES:
                        yield one, jaxpr

    def _stopped(self) -> str | None:
        """The line at which what a collective has made counts as a constant."""
        for eqn, jaxpr in equations_of(self.body):
            if eqn.primitive.name == "stop_gradient":
                sources = [one for one in jaxpr.eqns if eqn.invars[0] in one.outvars]
                if any(one.primitive.name in EXCHANGES for one in sources):
                    return self._line(eqn, jaxpr)
        return None

    def _draw(self, chain: Iterable[Any]) -> str | None:
        """The line at which random numbers are drawn."""
        for eqn in chain:
            within = [(eqn, self.body), *(found for inner in inside(eqn) for found in equations_of(inner))]
            drawn = [one for one in within if one[0].primitive.name in _DRAWS]
            if line := next((line for one in [*drawn, within[0]] if drawn and (line := self._line(*one))), ""):
                return line
        return None

    def _is_count(self, factor: float | None) -> bool:
        """Whether a factor is a number of devices, or one over it."""
        counts = [count for count in (self.mesh.size, *self.mesh.shape.values()) if count > 1]
        return factor is not None and any(abs(factor * power - 1) < 1e-2 for n in counts for power in (n, 1 / n))

    def _line(self, eqn: Any, jaxpr: Any) -> str:
        frames = own_frames(frames_of(eqn, jaxpr))
        return line_text(*frames[0]) if frames else ""

    def _at(self, chain: Sequence[Any], jaxpr: Any) -> str:
        return next((line for eqn in chain if (line := self._line(eqn, jaxpr))), "")

    def _outermost(self, chain: Sequence[Any], jaxpr: Any = None) -> str:
        """The step's own line, from which all was called that has made this."""
        frames = next((found for eqn in chain if (found := frames_of(eqn, jaxpr or self.body))), ())
        return line_text(*frames[-1]) if frames else ""

    def _return_of(self, chain: Sequence[Any], jaxpr: Any = None) -> str:
        """The last return of the function that the step's own line is in."""
        frames = next((found for eqn in chain if (found := frames_of(eqn, jaxpr or self.body))), ())
        if not frames:
            return ""
        file, line = frames[0] if jaxpr is not None else frames[-1]
        around = None
        for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
            if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
                around = node
        ends = [node.lineno for node in (around.body if around else []) if isinstance(node, ast.Return)]
        return line_text(file, ends[-1] if ends else line)


_DRAWS = ("random_bits", "threefry2x32")


def _draws_of(jaxpr: Any) -> list[tuple[int, ...]]:
    return sorted(eqn.outvars[0].aval.shape for eqn, _ in equations_of(jaxpr) if eqn.primitive.name in _DRAWS)


def _body(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr in which the results are made, inside of jit and shard_map, and its outputs."""
    outvars = jaxpr.outvars
    while jaxpr.eqns and jaxpr.eqns[-1].primitive.name in ("jit", "pjit", "shard_map"):
        last: Any = jaxpr.eqns[-1]
        inner: Any = next(inside(last))
        if not all(hasattr(v, "val") or v in last.outvars for v in outvars):
            break
        outvars = [v if hasattr(v, "val") else inner.outvars[last.outvars.index(v)] for v in outvars]
        jaxpr = inner
    return jaxpr, outvars


def _forgets(eqn: Any) -> bool:
    """Whether a scan carries an array from round to round without reading it."""
    if eqn.primitive.name != "scan":
        return False
    body, (first, num_carry) = opened(eqn.params["jaxpr"])[0], scan_sizes(eqn.params)
    used = {v for v in body.outvars if not hasattr(v, "val")}
    for one in reversed(body.eqns):
        if not used.isdisjoint(one.outvars):
            used.update(v for v in one.invars if not hasattr(v, "val"))
    return any(v not in used and v.aval.shape for v in body.invars[first : first + num_carry])


def _is_sum(eqn: Any, jaxpr: Any, mesh: Mesh) -> bool:
    """Whether it is a psum, and not one that the program divides by the number of devices."""
    exchange = EXCHANGES[eqn.primitive.name]
    if exchange.combines != "sum" or exchange.op != "all_reduce":
        return False
    count = prod(mesh.shape[name] for name in exchange.names(eqn.params))
    users = [one for one in jaxpr.eqns if any(v in one.invars for v in eqn.outvars)]
    divided = [one for one in users if one.primitive.name == "div" and getattr(one.invars[1], "val", None) == count]
    return not (users and len(divided) == len(users))
