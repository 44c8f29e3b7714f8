"""Dropout masks of all ranks, compared: equal where they hold the same tensor, different where they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tplab.checking.recording import Drawn, are_pieces, checksum, compared, mark
from tplab.checking.report import Row
from tplab.mesh import Mesh
from tplab.torch.checking.pieces import array_of
from tplab.torch.layers.dropout import dropout
from tplab.torch.private import local_of

DROPOUTS = {F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, dropout}


class MaskWatch(TorchFunctionMode):
    """Records every dropout of one forward pass, whether in a module, a function or an attention."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.seen = list[Drawn]()
        self._inside: list[str] = []
        self._hooks = [
            hook
            for name, module in model.named_modules()
            for hook in (
                module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name)),
                module.register_forward_hook(lambda *_: self._leave()),
            )
        ]

    def _leave(self) -> None:
        self._inside.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            state = checksum(
                array_of(torch.get_rng_state())
            )  # the mask is not visible: the generator's state identifies it
            query = args[0] if args else kwargs["query"]
            y = func(*args, **kwargs)
            if p:
                self._note(query, state)
            return y
        y = func(*args, **kwargs)
        if func in DROPOUTS:
            x = args[0] if args else kwargs.get("input", kwargs.get("x"))
            if isinstance(x, Tensor) and y is not x:
                kept = (y != 0) | (x == 0)
                if not bool(kept.all()):
                    self._note(x, checksum(array_of(kept)))
        return y

    def _note(self, x: Tensor, mask: int) -> None:
        given, size = mark(array_of(x)), x.numel() if local_of(x) is x else 0
        self.seen.append(Drawn(self._inside[-1] if self._inside else "", given, mask, size))

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        for hook in self._hooks:
            hook.remove()


def mask_rows(per_rank: Sequence[Sequence[Drawn]], whole: Sequence[Drawn], mesh: Mesh) -> list[Row]:
    """Return a row for each dropout, up to the first that is wrong: later differences follow from it.

    whole   the reference's masks
    """
    rows: list[Row] = []
    if len({len(seen) for seen in per_rank}) > 1:
        counts = ", ".join(str(len(seen)) for seen in per_rank)
        return [_row("number of dropouts", f"ranks drop {counts} times; each must drop equally often")]
    for turn, calls in enumerate(zip(*per_rank)):
        theirs = whole[turn : turn + 1] if len(whole) == len(per_rank[0]) else ()
        is_one = are_pieces(calls, theirs) if theirs else all(a.size != calls[0].size for a in whole)
        for one, other in combinations(mesh.ranks, 2):
            how, wrong = compared(calls[one], calls[other]), ""
            if how == "two":
                wrong = (
                    f"different dropout: ranks {one} and {other} hold the same tensor and drop other elements of it, "
                    "as with a generator of each rank's own outside of the parallel regions; "
                    "tplab.torch.dropout(x, p) draws one mask"
                )
            elif how and is_one:
                wrong = (
                    f"the same mask inside: ranks {one} and {other} hold different activations and drop the same "
                    "places, as with one generator; tplab.torch.dropout(x, p, axis=...) draws one mask per rank"
                )
            if wrong:
                return [*rows, _row(calls[0].where or "dropout", wrong)]
        rows.append(_row(calls[0].where or "dropout"))
    return rows


def _row(name: str, wrong: str = "") -> Row:
    words = wrong or "the same mask where ranks hold the same, different ones where they do not"
    return Row("dropout", name, (), "", not wrong, 0.0, 0.0, words, "dropout" if wrong else "")
