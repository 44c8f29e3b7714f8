"""A model runs with a trial: another result of an all_reduce, the other kind of gather, other scores in a softmax, a
copy_to at a module's input, an all_reduce of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tplab.checking.proofs import AVERAGED, LEFT_OUT, SAME, SUMMED, Reduction
from tplab.checking.trail import reached
from tplab.mesh import Axis
from tplab.torch.comm.autograd import Landed
from tplab.torch.comm.collectives import all_reduce
from tplab.torch.comm.regions import copy_to
from tplab.torch.ranks.program import is_program
from tplab.torch.ranks.rank import Call, Pending, this_rank


class Tried:
    """While it is open, a rank's model runs with the changes of `Trial.at`.

    found    the all_reduces that the program has called in lines of its own, in the order of calls
    softmaxes   a context that records, and changes, softmaxes
    gathers  those that are not used as their kind requires, after a backward pass: (op, shape of the result)
    """

    def __init__(self, model: nn.Module, at: Mapping[str, Any]):
        self.at, self.found, self.gathers = at, list[Reduction](), list[tuple[str, tuple[int, ...]]]()
        self.softmaxes, self._model, self._open = Softmaxes(at.get("scores")), model, ExitStack()

    def __enter__(self) -> Tried:
        self.rank: Any = this_rank()
        self._do, self._begin = self.rank.do, self.rank.begin
        self.rank.do, self.rank.begin = self.do, self.begin
        modules, (names, axes) = dict(self._model.named_modules()), self.at.get("entrance", ((), ()))
        for name in names:
            hook = modules[name].register_forward_pre_hook(lambda _, args: _entered(args, lambda x: copy_to(x, axes)))
            self._open.callback(hook.remove)
        if "given" in self.at:
            name, over, part = self.at["given"]
            change = partial(_left, axes=over, added=part)
            self._open.callback(modules[name].register_forward_pre_hook(lambda _, args: _entered(args, change)).remove)
        if "exit" in self.at:
            name, axes, added = self.at["exit"]
            self._open.callback(modules[name].register_forward_hook(lambda *args: _left(args[-1], axes, added)).remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._open.close()
        del self.rank.do, self.rank.begin

    # --- all_reduces -------------------------------------------------------------------------------------------------

    def do(self, call: Call, x: Tensor, *more: Any) -> Tensor:
        how = self._noted(call)
        return self._do(call, x, *more) if how is None else self._changed(how, call, x)

    def begin(self, call: Call, x: Tensor) -> Pending:
        how = self._noted(call)
        return self._begin(call, x) if how is None else Landed(self._changed(how, call, x))

    def _noted(self, call: Call) -> str | None:
        """Return what to try on this call."""
        frame = self.rank.lines.frame()
        if call.op != "all_reduce" or not is_program(frame.f_code.co_filename):
            return None
        one = Reduction(call.reduction, call.place.label, self.rank.lines.text(frame))
        self.found.append(one)
        return self.at.get("reductions", {}).get(one)

    def _changed(self, how: str, call: Call, x: Tensor) -> Tensor:
        rank, num_ranks = self.rank, len(call.place.group)
        total = self._do(rank.call("all_reduce", call.axis, ("sum",)), x)
        if how == SUMMED:
            return total
        if how not in (LEFT_OUT, AVERAGED):
            return total * num_ranks
        gap = (total - num_ranks * x).abs().amax() if x.numel() else x.new_zeros(())
        is_same = bool(self._do(rank.call("all_reduce", call.axis, ("max",)), gap) <= SAME * total.abs().amax())
        return total / num_ranks if is_same == (how == LEFT_OUT) else total

    # --- gathers -----------------------------------------------------------------------------------------------------

    def before_backward(self, loss: Tensor) -> None:
        """Let gathers that are not used as their kind requires pass gradients back as the other kind does. All ranks
        should use the result of `gather_from` alike, and each continues with its piece of the gradient; each may use
        that of `all_gather` in its own way, and all gradients are added up."""
        known: list[Any] = [loss.grad_fn] * ("gathers" in self.at and loss.grad_fn is not None)
        for node in reached(known, lambda node: [other for other, _ in node.next_functions if other is not None]):
            call: Any = getattr(getattr(node, "exchange", None), "call", None)
            if type(node).__name__ == "_GatherBackward":
                node.register_prehook(partial(self._pass_on, "gather_from", node.axis))
            elif type(node).__name__ in ("_BlockingBackward", "_WaitBackward") and call.op == "all_gather":
                node.register_prehook(partial(self._pass_on, "all_gather", call.axis))

    @torch.no_grad()
    def _pass_on(self, op: str, axis: Axis, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        (dy,) = grads
        num_ranks, total = len(this_rank().place(axis).group), all_reduce(dy, axis)
        gap, size = (all_reduce(x.abs().max(), axis, "max") for x in (total - num_ranks * dy, total))
        is_same = bool(gap <= SAME * size)
        if num_ranks == 1 or is_same == (op == "gather_from"):
            return None
        self.gathers.append((op, tuple(dy.shape)))
        return (dy / num_ranks,) if is_same else (total,)


class Softmaxes(TorchFunctionMode):
    """Records the inputs of softmaxes, and whether anything is multiplied by a softmax's weights whose rows add up to
    2, 3, .. instead of 1.

    change   a factor for all scores, or the axes over which they are added up
    """

    SOFTMAXES = {torch.softmax, F.softmax, Tensor.softmax}
    PRODUCTS = {torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
    MOST = 32

    def __init__(self, change: float | tuple[str, ...] | None):
        super().__init__()
        self.scores, self.row_sum, self._change = list[Tensor](), 0, change

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.SOFTMAXES:
            x = self._taken(args[0] if args else kwargs.pop("input"))
            return func(x, *args[1:], **kwargs)
        if func is F.scaled_dot_product_attention and (self._change is not None or len(self.scores) < self.MOST):
            scores, value = _scores(*args, **kwargs)
            scores = self._taken(scores)
            return func(*args, **kwargs) if self._change is None else scores.softmax(-1) @ value
        for x in args if func in self.PRODUCTS and not self.row_sum else ():
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and x.numel() and bool((x >= 0).all()):
                sums = x.detach().sum(-1)
                count = round(float(sums.flatten()[0]))
                if count > 1 and bool(((sums - count).abs() < 1e-3 * count).all()) and x.shape[-1] > 1:
                    self.row_sum = count
        return func(*args, **kwargs)

    def _taken(self, scores: Tensor) -> Tensor:
        if len(self.scores) < self.MOST:
            self.scores.append(scores.detach())
        if self._change is None:
            return scores
        return all_reduce(scores, self._change) if isinstance(self._change, tuple) else scores * self._change


def _scores(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the input of the softmax in torch's scaled_dot_product_attention, and the values for its weights."""
    if enable_gqa:
        count = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(count, -3), value.repeat_interleave(count, -3)
    found = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).tril()
    if attn_mask is None:
        return found, value
    is_mask = attn_mask.dtype == torch.bool
    return found.masked_fill(~attn_mask, -torch.inf) if is_mask else found + attn_mask, value


def _entered(args: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """Return a module's arguments, with the first floating-point tensor changed."""
    place = next((place for place, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()), len(args))
    return (*args[:place], *map(change, args[place : place + 1]), *args[place + 1 :])


def _left(output: Any, axes: tuple[str, ...], added: Any) -> Any:
    """Return a module's output, or its input, added up over ranks without each rank's own addend."""
    if not isinstance(output, Tensor):
        return output
    added = torch.as_tensor(added).to(output)
    return all_reduce(output - added, axes) + added
