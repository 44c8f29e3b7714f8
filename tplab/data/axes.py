"""The axes along which ranks have different data: those that cut parameters, and those that replicate the pieces."""

from __future__ import annotations

from tplab.errors import MeshError
from tplab.mesh import Axis, Mesh


def data_axes(
    mesh: Mesh, axis: Axis, replicate_axis: Axis | None = None, reshard_axis: Axis | None = None
) -> tuple[str, ...]:
    """The names in `axis` and `replicate_axis`.

    axis             along which parameters are cut into pieces
    replicate_axis   along which the pieces are replicated
    reshard_axis     along which second pieces are cut, as given to `reshard_after_forward`: a part of `axis`, since
                     ranks along other axes may have other parameters
    Raises MeshError if they do not fit together.
    """
    names = mesh.names(axis)
    if reshard_axis is not None and not set(mesh.names(reshard_axis)) <= set(names):
        raise MeshError(
            f"reshard_after_forward is {reshard_axis!r}, and axis is {axis!r}: it must name axes that are part of "
            "axis, as in axis=('node', 'gpu'), reshard_after_forward='gpu', or be True or False"
        )
    if replicate_axis is None:
        return names
    copies = mesh.names(replicate_axis)
    if not set(copies).isdisjoint(names):
        raise MeshError(
            f"replicate_axis is {replicate_axis!r}, and axis is {axis!r}: pieces have copies along axes that are not "
            "in axis, as in axis='gpu', replicate_axis='node', or none at all"
        )
    return names + copies
