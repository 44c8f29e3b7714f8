"""The mesh of a run as a DeviceMesh of torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplab.errors import OutsideRunError
from tplab.torch.ranks.rank import this_rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def device_mesh(device_type: str | None = None) -> DeviceMesh:
    """The mesh of this run as a `DeviceMesh` whose dims have the names of the axes, for FSDP2, DTensor and the like.

    device_type   by default the run's: "cuda" in run(..., device="cuda"), otherwise "cpu", even for meta. FSDP2 moves
                  parameters there

    Every rank must call it, because DeviceMesh makes all dims' process groups. Another call returns the same mesh.
    Raises OutsideRunError outside `run(..., distributed=True)`.
    """
    from torch.distributed import device_mesh as home
    from torch.distributed import distributed_c10d as c10d

    from tplab.torch.distributed.groups import Groups

    mesh, groups = this_rank().mesh, c10d._world
    if not isinstance(groups, Groups):
        raise OutsideRunError(
            "device_mesh works inside run(..., distributed=True), where the world of torch.distributed is the mesh"
        )
    if device_type is None:
        place = groups.member.world.device
        device_type = "cpu" if place is None or place.type == "meta" else place.type
    found = groups.meshes.get(device_type)
    if found is None:
        shape = tuple(mesh.shape.values())
        found = home.init_device_mesh(device_type, shape, mesh_dim_names=mesh.axis_names)
        groups.meshes[device_type] = found
    return found
