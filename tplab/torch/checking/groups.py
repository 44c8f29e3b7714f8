"""Stand-ins for what sends, in torch.distributed and in tplab, and for what keeps gradients from being sent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tplab.torch.checking.watched import Watched
from tplab.torch.data.parallel import DataParallel
from tplab.torch.distributed.group import Group
from tplab.torch.distributed.work import Taken
from tplab.torch.ranks.rank import Call
from tplab.torch.ranks.simulated import SimulatedRank

StandIn = tuple[Any, str, Callable[[Any], Any]]
"""An object, the name of a function of it, and what makes the stand-in of that function."""


class Groups:
    """here   the rank whose program the running thread runs, while it is watched"""

    def __init__(self, here: Callable[[], Watched | None]):
        self._here, self._has_fsdp = here, False

    def table(self) -> Iterator[StandIn]:
        yield Group, "_run", self._collective
        yield Group, "__init__", self._join
        yield SimulatedRank, "do", self._of_tplab
        yield SimulatedRank, "begin", self._of_tplab
        yield DistributedDataParallel, "no_sync", self._no_sync
        yield DistributedDataParallel, "__setattr__", self._set
        yield DataParallel, "no_sync", self._no_sync

    def _collective(self, original: Any) -> Any:
        """One of torch.distributed: its tensors are still the script's own."""

        def watched(group: Group, /, call: Any, put: Any, opts: Any, take: Any) -> Any:
            rank = self._here()
            if rank is None or rank.is_looking:
                return original(group, call, put, opts, take)
            is_open = opts is None or opts.asyncOp
            rank.send(call, put if isinstance(put, Tensor) else next(iter(put), None), is_open)

            def run(take: Any) -> Any:
                return original(group, call, put, opts, take)

            with rank.calls(SimulatedRank):
                return rank.mending.collective(run, call, put, take, Taken)

        return watched

    def _of_tplab(self, original: Any) -> Any:
        """One of tplab's own. Single messages are not seen, as those of torch.distributed."""

        def watched(member: SimulatedRank, /, call: Call, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            rank = self._here()
            is_seen = rank is not None and not rank.is_looking and SimulatedRank not in rank.inside
            if rank is not None and is_seen and len(call.place.group) > 1:
                rank.seen.has_sent = True
            if rank is not None and is_seen and call.op not in ("send", "receive"):
                rank.send(call, x)
                return rank.mending.of_tplab(lambda y: original(member, call, y, *args, **kwargs), call, x)
            return original(member, call, x, *args, **kwargs)

        return watched

    def _join(self, original: Any) -> Any:
        def watched(group: Group, /, member: Any, ranks: Sequence[int], *args: Any, **kwargs: Any) -> None:
            if (rank := self._here()) is not None:
                rank.seen.groups.add(len(ranks))
                rank.seen.members.add(tuple(ranks))
            original(group, member, ranks, *args, **kwargs)

        return watched

    # --- what keeps gradients from being added up over ranks ---------------------------------------------------------

    def _no_sync(self, original: Any) -> Any:
        def watched(module: Any, /) -> Any:
            if (rank := self._here()) is not None:
                rank.keep_apart()
                if rank.mending.syncs:
                    return nullcontext()
            return original(module)

        return watched

    def _set(self, original: Any) -> Any:
        def watched(module: Any, name: str, value: Any, /) -> None:
            is_off = name == "require_backward_grad_sync" and value is False
            if is_off and (rank := self._here()) is not None and sys._getframe(1).f_code.co_name != "no_sync":
                rank.keep_apart()
                value = rank.mending.syncs
            original(module, name, value)

        return watched

    def of_fsdp(self) -> Iterator[StandIn]:
        """Once, and only where the script has imported it, which takes long."""
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and not self._has_fsdp:
            self._has_fsdp = True
            yield fsdp.FSDPModule, "set_requires_gradient_sync", self._require_sync

    def _require_sync(self, original: Any) -> Any:
        def watched(module: Any, /, requires_gradient_sync: bool, *args: Any, **kwargs: Any) -> None:
            if not requires_gradient_sync and (rank := self._here()) is not None:
                rank.keep_apart()
                requires_gradient_sync = rank.mending.syncs
            original(module, requires_gradient_sync, *args, **kwargs)

        return watched
