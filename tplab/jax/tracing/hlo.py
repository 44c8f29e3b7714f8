"""A parser for the text of a compiled HLO module: its computations and their instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np

from tplab.comm import ROWS
from tplab.errors import TraceError
from tplab.jax.tracing.jaxprs import line_of_frames

Groups = tuple[tuple[int, ...], ...]

COLLECTIVES = {row.hlo: row.name for row in ROWS.values() if row.hlo} | {"ragged-all-to-all": "all_to_all"}
"""XLA's name -> tplab's."""

BRANCHES = "true_computation", "false_computation", "branch_computations"
"""The attributes of a conditional."""


class Array(NamedTuple):
    """An array, as described by its type. `bits` is the size of an element if several share a byte, otherwise 0."""

    dtype: str
    shape: tuple[int, ...]
    bits: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        try:
            return jax.numpy.dtype(self.dtype).itemsize
        except TypeError:  # a type that NumPy does not have
            return 1

    @property
    def num_bytes(self) -> int:
        return -(-self.size * self.bits // 8) if self.bits else self.size * self.itemsize

    @property
    def units(self) -> tuple[int, int]:
        """(number of units in which it is sent, bytes of each): elements, or bytes that several elements share."""
        return (self.num_bytes, 1) if self.bits else (self.size, self.itemsize)


class Instruction:
    """One line of a computation of a module: %name = kind op(%operands), attributes.

    operands, users   the instructions whose results it takes, and those that take its own, in its computation
    written           its dtype in the program, once that is known
    """

    def __init__(self, module: Module, computation: str, begun: re.Match[str]):
        line, start = begun.string, begun.end()
        end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
        rest = line[end:].lstrip()
        begin = rest.index("(")
        stop = _closing(rest, begin)
        self.module, self.computation, self.name, self.is_root = module, computation, begun[2], bool(begun[1])
        self.kind, self.op = line[start:end], rest[:begin]
        self.given, self.attributes = rest[begin + 1 : stop - 1], rest[stop:]
        self.operands: list[Instruction] = []
        self.users: list[Instruction] = []
        self.written = ""

    @cached_property
    def arrays(self) -> list[Array]:
        """The arrays that it returns: "(f32[8,4]{1,0}, s4[6]{0:E(4)})" -> float32 [8, 4], int4 [6] of 4 bits each."""
        found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\](?:\{[^{}]*\bE\((\d+)\)[^{}]*\})?", self.kind)
        return [Array(dtype_of(name), _numbers(dims), int(bits or 0)) for name, dims, bits in found]

    @property
    def collective(self) -> str | None:
        """tplab's name of the collective that it is or starts; None for anything else."""
        return COLLECTIVES.get(self.op.removesuffix("-start"))

    @property
    def is_start(self) -> bool:
        return self.op.endswith("-start")

    @property
    def is_end(self) -> bool:
        """Whether it ends, or moves on, what a start has begun."""
        return self.op.endswith(("-done", "-update"))

    @property
    def origin(self) -> str:
        """Its origin in the program, as a path of JAX's names: "jit(f)/shard_map/psum"."""
        return re.sub(r"\\(.)", r"\1", self._found(r'op_name="((?:[^"\\]|\\.)*)"'))

    @cached_property
    def primitive(self) -> str:
        """The last name of the origin: JAX's name of the operation. "" if XLA merged several different ones."""
        _, merged, several = self.origin.rpartition("/(")  # "jit(f)/(jvp()/dot_general:jvp()/reduce_sum)"
        paths = several[:-1].split(":") if merged and several.endswith(")") else [self.origin]
        names = {re.sub(r"\.\d+$", "", path.rpartition("/")[2]) for path in paths}
        return names.pop() if len(names) == 1 else ""

    @property
    def phase(self) -> str:
        """ "backward" if it was made by a transposition, otherwise "forward"; "" if XLA does not record its origin."""
        return "" if not self.origin else "backward" if "transpose(" in self.origin else "forward"

    @property
    def index(self) -> int:
        """The index of a get-tuple-element."""
        return int(self._found(r"\bindex=(\d+)") or 0)

    @property
    def trip_count(self) -> int | None:
        """How often a loop runs, if XLA knows it."""
        count = self._found(r'"known_trip_count":\{"n":"(\d+)"\}')
        return int(count) if count else None

    def called(self, *names: str) -> list[str]:
        """The computations that these attributes name."""
        wanted = "|".join(names)
        listed = re.findall(rf"\b(?:{wanted})=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes)
        return [name.strip().lstrip("%") for several, one in listed for name in (several or one).split(",")]

    def dims(self, name: str) -> tuple[int, ...]:
        """The dims that an attribute lists: lhs_contracting_dims={1}."""
        return _numbers(self._found(rf"\b{name}=\{{([\d,]*)\}}"))

    @cached_property
    def groups(self) -> Groups:
        """The ranks of each group; the pairs (from, to) of a permutation; () for all ranks together.

            {{0,1},{2,3}}                             as written
            [2,2]<=[4], [2,2]<=[2,2]T(1,0)            0 to 3 in two rows of two; in the second form transposed first
            mesh['a'=2,'b'=4] {'b'}                   along axes of a mesh, whose ranks may be in another order
            mesh['a'=8], device_ids=([2,4]T(1,0)) {'a':(2)2}    along a part of an axis: 8 is 2 x 2 x 2

        Raises TraceError for any other notation.
        """
        listed = re.search(r'(?:replica_groups|source_target_pairs)="?\{([\d,{} ]*)\}(?=[,"} ]|$)', self.attributes)
        if listed:
            return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
        rows = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", self.attributes)
        if rows:
            return tuple(tuple(row) for row in iota(rows[2]).reshape(_numbers(rows[1])).tolist())
        named = re.search(
            r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([\d,]+|\[[\d,]+\](?:T\([\d,]+\))?)\))? \{([^}]*)\}",
            self.attributes,
        )
        if named:
            return _along_axes(*named.groups())
        if found := re.search(r"replica_groups=(.{1,60})", self.attributes):
            raise TraceError(
                f"XLA wrote the groups of {self.name} in a way that tplab does not know: {found[1]}\n"
                f"The spellings of JAX 0.7 to 0.10 are known, and this is JAX {jax.__version__}: use one of those"
            )
        return ()

    def _found(self, pattern: str) -> str:
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""


class Module:
    """A compiled program, the same on every rank.

    computations   name -> instructions, in the order in which they run
    entry          the name of the main computation
    name           the function's name, as given to jit
    num_ranks      how many ranks run it
    donated        the numbers of the parameters whose memory it may reuse for results
    """

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        name, made, current = "", dict[str, Instruction](), list[Instruction]()
        for line in re.sub(r"/\*index=\d+\*/", "", text).splitlines():
            if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
                name, made = header[2], {}
                current = self.computations[name] = []
                self.entry = name if header[1] else self.entry
            elif begun := re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line):
                one = made[begun[2]] = Instruction(self, name, begun)
                current.append(one)
                one.operands = [made[operand] for operand in re.findall(r"%([\w.\-]+)", one.given) if operand in made]
                for operand in one.operands:
                    operand.users.append(one)
        self.name = re.sub(r"^HloModule (?:jit_|pmap_)?([^, ]*).*", r"\1", text.partition("\n")[0]).strip("_")
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
        self.num_ranks = math.prod(map(int, counts))
        self.donated = set(map(int, re.findall(r"\((\d+), \{[\d,]*\}, (?:may|must)-alias\)", text.partition("\n")[0])))
        self._tables = {name: _table(text, name) for name in ("FileNames", "FileLocations", "StackFrames")}
        self._lines: dict[str, str] = {}

    def root(self, computation: str) -> Instruction:
        """The instruction whose result a computation returns."""
        ones = self.computations[computation]
        return next((one for one in ones if one.is_root), ones[-1])

    def parameters(self, computation: str, numbers: Sequence[int]) -> list[Instruction]:
        """The parameters of a computation that have these numbers."""
        ones = self.computations[computation]
        return [one for one in ones if one.op == "parameter" and int(one.given) in numbers]

    @cached_property
    def callers(self) -> dict[str, Instruction]:
        """Computation -> the first instruction that calls it, as a fusion, a call, a loop or a conditional."""
        names = "calls", "to_apply", "condition", "body", "called_computations", *BRANCHES
        found: dict[str, Instruction] = {}
        for one in (one for ones in self.computations.values() for one in ones):
            for inner in one.called(*names):
                found.setdefault(inner, one)
        return found

    def groups(self, one: Instruction) -> Groups:
        """The groups of a collective, or the pairs of a permutation. Without any, all ranks are one group."""
        everyone = (tuple(range(self.num_ranks)),)
        # with a channel and without global ids, groups are of replicas, with all partitions of each
        is_of_replicas = "channel_id=" in one.attributes and "use_global_device_ids=true" not in one.attributes
        return everyone if not one.groups or (is_of_replicas and one.groups == ((0,),)) else one.groups

    def calls(self, one: Instruction) -> list[str]:
        """The computations that an instruction runs inline: those of a call, of an async start, and of a fusion around
        a collective."""
        called = one.called("to_apply", "calls", "called_computations")
        if one.op in ("call", "async-start"):
            return called[:1]
        if one.op in ("fusion", "custom-call"):
            return [name for name in called if any(inner.collective for inner in self.computations.get(name, ()))]
        return []

    def reduction(self, one: Instruction) -> str:
        """How a collective combines the ranks' inputs: "sum", "max", ...; "" if it does not."""
        if one.collective is None or not ROWS[one.collective].combines:
            return ""
        roots = (inner for name in one.called("to_apply") for inner in self.computations.get(name, ()) if inner.is_root)
        return next((_REDUCTIONS.get(root.op, "") for root in roots), "")

    def where(self, one: Instruction) -> str:
        """The line of the user's program that it comes from; "" if XLA does not record it."""
        frame = one._found(r"stack_frame_id=(\d+)")
        if frame:
            if frame not in self._lines:
                self._lines[frame] = line_of_frames(self._frames(frame))
            return self._lines[frame]
        name, line = one._found(r'source_file="([^"]*)"'), one._found(r"source_line=(\d+)")
        return line_of_frames([(name, int(line))]) if name and line else ""

    def _frames(self, number: str) -> list[tuple[str, int]]:
        """The file and line of a frame, of its caller, and so on."""
        frames = self._tables["StackFrames"]
        shift = int(frames.get("1", {}).get("parent_frame_id") == "1")  # XLA counts a frame's parent from 1
        found: list[tuple[str, int]] = []
        while (entry := frames.get(number)) is not None and len(found) < len(frames):
            place = self._tables["FileLocations"].get(entry.get("file_location_id", ""), {})
            if name := self._tables["FileNames"].get(place.get("file_name_id", ""), {}).get(""):
                found.append((name, int(place.get("line", 0))))
            number = str(int(entry.get("parent_frame_id", 0)) - shift)
        return found


_REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min", "multiply": "product"}


def _closing(text: str, begin: int) -> int:
    """The position after the bracket that closes the one at `begin`."""
    depth = 0
    for place in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place + 1
    return len(text)


def iota(text: str) -> np.ndarray:
    """Permuted numbers from 0 on: "[2,4]T(1,0)" is 0, 4, 1, 5, 2, 6, 3, 7."""
    sizes, _, order = text.partition("T")
    shape = _numbers(sizes.strip("[]"))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return (numbers.transpose(_numbers(order.strip("()"))) if order else numbers).ravel()


def _along_axes(mesh: str, devices: str | None, axes: str) -> Groups:
    """The groups along axes of a mesh, or parts of axes: for 8 = 2 x 2 x 2, 'a':(2)2 is the middle factor."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", mesh)}
    parts = [re.fullmatch(r"'?([^':]+)'?(?::\((\d+)\)(\d+))?", part.strip()) for part in axes.split(",") if part]
    taken: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for part in filter(None, parts):
        taken[part[1]].append((int(part[2] or 1), int(part[3] or sizes[part[1]])))
    shape: list[int] = []
    places: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        before = 1
        for start, length in sorted(taken[name]):  # [.. skipped, taken, ..]
            places[name, start] = len(shape) + 1
            shape += [start // before, length]
            before = start * length
        shape.append(size // before)
    ids = np.arange(math.prod(sizes.values()))
    if devices is not None:
        ids = iota(devices) if devices.startswith("[") else np.array(_numbers(devices))
    inner = [places[part[1], int(part[2] or 1)] for part in parts if part]
    outer = [dim for dim in range(len(shape)) if dim not in inner]
    length = math.prod(shape[dim] for dim in inner)
    return tuple(tuple(row) for row in ids.reshape(shape).transpose(outer + inner).reshape(-1, length).tolist())


def _table(text: str, name: str) -> dict[str, dict[str, str]]:
    """A table in the module's header: number -> the fields of the line; "": a line that is a name."""
    match = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    rows = match[1].splitlines() if match else []
    parts = (row.partition(" ") for row in rows)
    return {number: dict(re.findall(r"(\w+)=(\d+)", rest)) | {"": rest.strip('"')} for number, _, rest in parts}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def dtype_of(name: str) -> str:
    """NumPy's name for a type named by XLA."""
    if name == "pred":
        return "bool"
    if name.startswith("f8"):
        return f"float8_{name[2:]}"
    kinds = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
    return re.sub(r"^(bf|f|s|u|c)(?=\d)", lambda match: kinds[match[1]], name)
