"""What the simulated ranks of one run have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tplab.cost.cluster import Cluster
from tplab.mesh import Mesh
from tplab.torch.ranks.chronicle import Chronicle
from tplab.torch.ranks.inherited import inherited_state
from tplab.torch.ranks.meeting import Group
from tplab.torch.ranks.rank import Lines
from tplab.torch.ranks.values import VALUES_UP_TO, values_of


class World:
    """The mesh, the groups that meet on it, and the chronicle of what happens.

    is_timed           whether the ranks' own computing is timed
    num_left_to_keep   the number of messages whose values will still be kept
    inherited          makes the context that a rank's thread needs
    fuses_attention    whether its modelled clock is that of a chip that computes attention in one kernel
    stream             the caller's stream on the GPU that the ranks share, on which they all begin; None elsewhere
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        title: str,
        cluster: Cluster | None,
        is_timed: bool,
        seed: int,
        keep_values: int,
        device: torch.device | None,
    ):
        self.mesh, self.cluster, self.is_timed, self.seed, self.device = mesh, cluster, is_timed, seed, device
        self.fuses_attention = cluster is not None and not is_timed and cluster.chip.fuses_attention
        self.num_left_to_keep = keep_values
        self.chronicle = Chronicle(mesh, title, cluster, "measured" if is_timed else "modelled")
        self.members: list[Any] = []  # the rank of each lane
        self.lines = Lines()
        self.groups: dict[tuple[int, ...], Group] = {}
        self.inherited = inherited_state(device)
        self.stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None

    def values(self, x: Tensor) -> np.ndarray | None:
        """The values of `x`, if it is small and not too many have been kept."""
        if x.numel() > VALUES_UP_TO or self.num_left_to_keep <= 0:
            return None
        self.num_left_to_keep -= 1
        return values_of(x)
