"""The names of groups in a trace, for a program with a DeviceMesh of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tplab.mesh import APART, DIM, Mesh, label_of, mesh_of_dims


class Dims:
    """The groups that the ranks of one run have made, and their names in the program.

    A group that is an axis of the run's mesh has the axis's name. Any other group is named after its dim if it belongs
    to a DeviceMesh, otherwise after its ranks.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._groups: dict[tuple[str, tuple[int, ...]], str] = {}  # its name, its ranks -> its label

    def label(self, about: str, ranks: Sequence[int]) -> str:
        """A group's name in the trace; `about` is its name in the program."""
        key = about, tuple(ranks)
        if key not in self._groups:
            label = label_of(ranks, self._mesh)
            is_unnamed = label.startswith(APART) and about.startswith(DIM)
            self._groups[key] = about.removeprefix(DIM) if is_unnamed else label
        return self._groups[key]

    def named(self) -> tuple[Mesh, Mapping[str, str]] | None:
        """The program's own mesh, and each label's meaning on it; None if it has none, or the run's mesh has names."""
        own = mesh_of_dims(self._groups, self._mesh.size) if self._mesh.axis_names == ("world",) else None
        if own is None:
            return None
        labels: dict[str, set[str]] = {}
        for (_, ranks), label in self._groups.items():
            labels.setdefault(label, set()).add(label_of(ranks, own))
        names = {label: found.pop() for label, found in labels.items() if len(found) == 1}
        return own, {label: name for label, name in names.items() if not name.startswith(APART)}
