"""Every private name of torch that tplab uses: its purpose, and why no public name serves it.

torch makes no promise about them: a new version may rename them. All were tried on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import _random
import ctypes
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_C: Any = torch._C

# --- nested structures ------------------------------------------------------------------------------------------------

pytree = _pytree
"""Lists, tuples and dicts of tensors, flattened and rebuilt. torch has no public name for it."""

# --- torch.compile ----------------------------------------------------------------------------------------------------

_eval_frame = _C._dynamo.eval_frame
_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def not_compiled(function: FunctionType) -> None:
    """Make torch.compile run `function`, and what it calls, uncompiled: the graph breaks there.

    Which ranks communicate is decided while the program runs, so no graph can contain it. This is the same as
    torch.compiler.disable, but without a wrapper at each call, and without importing torch._dynamo, which takes seconds
    and 100 MB.
    """
    _eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "tplab's functions and layers run as they are"  # type: ignore[attr-defined]


# --- operations as they are dispatched --------------------------------------------------------------------------------


class DispatchMode(TorchDispatchMode):
    """Sees every operation of a thread. torch documents it, but in a module with a private name."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch would import torch._dynamo, for its own version of not_compiled

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        not_compiled(cls.__torch_dispatch__)


HigherOrder = HigherOrderOperator
"""An operation that takes functions, such as flex_attention: a mode that `supports_higher_order_operators` sees it."""


def parts_of(func: HigherOrderOperator) -> Callable[..., Any]:
    """Such an operation as a function of plain operations."""
    return func.py_kernels[_C.DispatchKey.CompositeExplicitAutograd]


dispatch_modes = _get_current_dispatch_mode_stack
"""The active modes, innermost last."""
no_dispatch = _C._DisableTorchDispatch
"""`with no_dispatch():` no mode sees what tplab itself does, which is not an operation of the program."""
num_modes = _C._len_torch_dispatch_stack


def put_modes(stack: Sequence[Any]) -> None:
    """Make these the active modes, innermost last: a mode may be put below those of the program."""
    while num_modes():
        _C._pop_torch_dispatch_stack(None)
    for mode in stack:
        _C._push_on_torch_dispatch_stack(mode)


# --- autograd ---------------------------------------------------------------------------------------------------------

graph_task: Callable[[], int] = _C._current_graph_task_id
"""The number of the backward pass that this thread is in; -1 outside of one."""
transform = _C._functorch.peek_interpreter_stack
"""The transformation of torch.func (grad, vmap, ...) whose function this thread runs; None outside of one."""
without_transforms = _C._DisableFuncTorch
"""`with without_transforms():` computations are not part of the function that is transformed."""


def untransformed(x: Tensor) -> Tensor:
    """A tensor outside torch.func's transformations: under vmap, all samples along dim 0."""
    while _C._functorch.is_functorch_wrapped_tensor(x):
        dim = _C._functorch.maybe_get_bdim(x)
        x = _C._functorch.get_unwrapped(x)
        x = x if dim <= 0 else x.movedim(dim, 0)
    return x


forward_level: Callable[[], int] = partial(getattr, torch.autograd.forward_ad, "_current_level")
"""How deep the process is in forward-mode differentiation; -1 outside of it."""


def phase() -> str:
    """ "backward" where this thread is in a backward pass, else "forward"."""
    return "forward" if graph_task() == -1 else "backward"


saved_hooks: Callable[[bool], Any] = _C._autograd._top_saved_tensors_default_hooks
"""The innermost hooks on saved tensors: torch calls only these, so new hooks have to pass on to them."""
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that a tensor is a view of; None if it is no view."""
version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor has been written to: with it autograd checks that a saved tensor is unchanged."""
metadata_of: Callable[[torch.autograd.graph.Node], Sequence[Any]] = attrgetter("_input_metadata")
"""Shape, dtype and device of each gradient that a graph node receives."""
post_accumulate_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], None]] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)
"""The hooks of register_post_accumulate_grad_hook: torch calls them only where it accumulates itself."""

SAVED = "_saved_"
"""The prefix of the names of what a graph node has saved, such as `_saved_self`; torch documents them."""


KinetoEvent = _C._autograd._KinetoEvent
"""One event of torch's profiler. Its methods grow with torch's versions: typed_metadata is new in 2.14."""


class ThreadProfiler:
    """The events of one thread, from the recorder that torch's profiler had before Kineto."""

    @staticmethod
    def start(profile: Any) -> None:
        """Record what a `torch.autograd.profiler.profile` asks for. Raises RuntimeError if this thread does already."""
        config: Any = torch.autograd.ProfilerConfig
        settings = profile.record_shapes, profile.profile_memory, profile.with_stack, profile.with_flops
        state = torch.autograd.ProfilerState.CPU
        torch.autograd._enable_profiler_legacy(config(state, *settings, False, profile.experimental_config))

    @staticmethod
    def stop() -> Sequence[Any]:
        """What was recorded, in order."""
        return [record for records in torch.autograd._disable_profiler_legacy() for record in records]


# --- devices ----------------------------------------------------------------------------------------------------------

no_torch_function = _C.DisableTorchFunction
"""`with no_torch_function():` no mode sees the calls of torch; torch documents it for subclasses."""
parse_to: Callable[..., Any] = _C._nn._parse_to
"""How Module.to parses its arguments: called once for a module, before that moves one tensor after another."""

# If a CUDA build finds no GPU, the first fake tensor (of DTensor, FSDP2, torch.compile) puts a stand-in for the GPU in
# a process-wide table. In torch 2.11 this stand-in ends with its thread, and the next use crashes. So it must belong to
# this thread, which imports tplab, and not to a rank's.
if torch.cuda.device_count() == 0:
    _C._ensureCUDADeviceGuardSet()

# --- memory -----------------------------------------------------------------------------------------------------------

storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Distinguishes a storage from all others that exist, without an address that would be read."""


lazy_copy: Callable[[Tensor], Tensor] = torch._lazy_clone  # type: ignore[attr-defined]
"""A copy of a tensor that shares its memory until one of the two is written to. From then on `x` itself is lazy too.
Only for memory that nothing but torch points to: torch does not know of NumPy's arrays, for example."""
is_lazy: Callable[[Tensor], bool] = _C._is_cow_tensor
"""Whether a tensor, or its base, is such a copy or has such copies."""


def local_of(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, outside any graph; any other tensor as it is."""
    return getattr(x, "_local_tensor", x)


def start_of(x: Any) -> tuple[int, ...]:
    """The position of the first element of this rank's part of a DTensor in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(map(int, compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1]))


CLIP = "_clip_grads_with_norm_"
"""The function that clip_grad_norm_ calls with the norm of all gradients, by its name in torch.nn.utils.clip_grad."""


def at_end_of_backward(function: Callable[[], Any]) -> None:
    """Call `function` at the end of this thread's current backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


# --- torch.distributed ------------------------------------------------------------------------------------------------


DTENSOR = "torch.distributed.tensor._api"
"""The module of DTensor."""


def dtensor_dispatcher() -> Any:
    """The dispatcher of DTensor's operations, with the handlers of loss_parallel; None if not imported."""
    home = getattr(sys.modules.get(DTENSOR), "DTensor", None)
    return getattr(home, "_op_dispatcher", None)


CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"
"""The module of torch's ring attention. Its table `custom_ops` has a handler for each kernel."""


FLEX_ATTENTION = "torch.nn.attention.flex_attention"
_KERNELS = [name for name in ("flash", "mem_efficient", "math", "cudnn") if hasattr(_C, f"_set_sdp_use_{name}")]
_KERNELS_ARE_USED = [getattr(_C, f"_get_{name}_sdp_enabled") for name in _KERNELS]
_USE_KERNELS = [getattr(_C, f"_set_sdp_use_{name}") for name in _KERNELS]


class AttentionKernels:
    """Which kernels `scaled_dot_product_attention` may use. torch.backends.cuda has a separate function for each."""

    @property
    def are_used(self) -> tuple[bool, ...]:
        return tuple(is_used() for is_used in _KERNELS_ARE_USED)

    @are_used.setter
    def are_used(self, kernels: tuple[bool, ...]) -> None:
        for use, is_used in zip(_USE_KERNELS, kernels, strict=True):
            use(is_used)


attention_kernels = AttentionKernels()


class PythonRandom:
    """The state of one of Python's random generators, as the bytes of its memory and `gauss_next`.

    Ranks swap it at every turn, and `getstate` would make 625 numbers each time: half the time of a turn.
    """

    def __init__(self, generator: Any):
        self._generator = generator
        start = object.__basicsize__  # the header of every object
        memory = ctypes.c_char * (_random.Random.__basicsize__ - start)
        self._memory = memory.from_address(id(generator) + start)

    def get(self) -> tuple[bytes, float | None]:
        return self._memory.raw, self._generator.gauss_next

    def set(self, state: tuple[bytes, float | None]) -> None:
        self._memory.raw, self._generator.gauss_next = state

    state = property(get, set)


python_random = PythonRandom(random._inst)  # type: ignore[attr-defined]
"""The generator behind `random.random()` and the like."""


class Slot(NamedTuple):
    """An attribute that exists once per process, though every rank of a program for torch.distributed needs its own.

    module   it is there once the program has imported this
    path     from the module to the attribute
    begin    (the object that has the attribute, the notebook's value, or None if it had not imported the module) ->
             what a rank begins with
    """

    module: str
    path: str
    begin: Callable[[Any, Any], Any] = lambda home, before: before


def _handlers(dispatcher: Any, before: Any) -> dict[Any, Any]:
    return type(dispatcher)()._custom_op_handlers if before is None else dict(before)


_FUNCTIONS, _MODULES = "torch.nn.functional", "torch.nn.modules.module"
SLOTS = [
    # the locks of modules that are being imported: a rank that communicates meanwhile must not keep others from theirs
    Slot("importlib._bootstrap", "_module_locks", lambda *_: {}),
    # DTensor's generator, and its operations' handlers, which loss_parallel changes temporarily
    Slot("torch.distributed.tensor._random", "_rng_tracker", lambda *_: None),
    Slot(DTENSOR, "DTensor._op_dispatcher._custom_op_handlers", _handlers),
    # what context_parallel has replaced, by what, and its options
    Slot(_FUNCTIONS, "scaled_dot_product_attention"),
    Slot(CONTEXT_PARALLEL, "_replaced_functions", lambda *_: {}),
    Slot(CONTEXT_PARALLEL, "_cp_options.__dict__", lambda options, _: vars(type(options)())),
    # the state of Hugging Face's accelerate, and the timings of torch's FSDP
    *(
        Slot("accelerate.state", f"{kind}._shared_state", lambda home, _: type(home._shared_state)())
        for kind in ("PartialState", "AcceleratorState", "GradientState")
    ),
    Slot("torch.distributed.fsdp._debug_utils", "SimpleProfiler.profiling", lambda home, _: type(home.profiling)()),
    # the hooks for all modules, as `register_module_forward_hook` registers them: each rank begins with the notebook's
    *(
        Slot(_MODULES, name, lambda _, before: copy(before))
        for name in vars(torch.nn.modules.module) if name.startswith("_global_")
    ),
    Slot(__name__, "attention_kernels.are_used"),
]  # fmt: skip


c10d_C: Any = _C._distributed_c10d
"""The parts of torch.distributed: the base class of works, and the table of process groups by name."""


def backend_of(group: Any, device: torch.device) -> Any:
    """The backend of a process group, for sending without the group's wrappers, which are not made for threads."""
    return group._get_backend(device)


@contextmanager
def at_once(backend: Any) -> Iterator[None]:
    """A context in which the sends and receives of a process group's backend begin together; they are over when it
    ends: on a GPU, for its current stream."""
    backend._start_coalescing()
    yield
    work = backend._end_coalescing()
    if work is not None:
        work.wait()


def premul_factor(op: Any) -> Any:
    """The factor of a ReduceOp.PREMUL_SUM: a number or a tensor. Only pickling reveals it."""
    return op.__getstate__()[1]


def group_tables() -> dict[Any, dict[int, int]]:
    """For each process group, rank in the world -> rank in the group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_group_ranks


# --- attention --------------------------------------------------------------------------------------------------------

sdpa_choice: Callable[..., int] = torch._fused_sdp_choice
"""The kernel that scaled_dot_product_attention would use on the CPU for these arguments: 0 none, 1 flash attention."""
flash_on_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""q, k, v -> o and log-sum-exp. scaled_dot_product_attention uses it on the CPU, but does not return both."""
flash_on_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Its dq, dk and dv, from q, k, v, o and log-sum-exp."""
flash_on_gpu: Any = torch.ops.aten._scaled_dot_product_flash_attention
"""The same on GPUs; o and log-sum-exp are the first two results. The width of heads is a multiple of 8."""


def flash_on_gpu_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Its dq, dk and dv. All sequences of the batch have the same length, so no lengths are given. Without dropout, the
    random state is not read."""
    state = q.new_zeros(2, dtype=torch.int64)
    sizes = None, None, q.shape[2], k.shape[2]
    backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return backward(do, q, k, v, o, lse, *sizes, 0.0, is_causal, state, state, scale=scale)
