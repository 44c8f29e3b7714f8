"""Programs that use `cuda`, on the CPU: while their ranks run, every mention of cuda means the CPU.

A mode maps tensors, modules and devices: it sees every call of torch that a rank makes. Attributes that are not such
calls are replaced while ranks run. Copies from one device to another remain copies, so that a program that keeps its
best weights with `.cpu()` still does.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from tplab.torch.distributed.attention import (
    cpu_kernels,
    flex_attention_on_cpu,
    gpu_kernels_on_cpu,
    tables_with_attention,
)
from tplab.torch.distributed.batch_norm import sync_batch_norm_on_cpu
from tplab.torch.distributed.cuda_calls import CPU, CudaCalls, is_cuda, is_torchs
from tplab.torch.distributed.devices import Devices
from tplab.torch.distributed.replaced import Replaced, Value
from tplab.torch.private import CONTEXT_PARALLEL, DTENSOR, FLEX_ATTENTION, dtensor_dispatcher, no_torch_function
from tplab.torch.ranks.rank import this_rank
from tplab.torch.ranks.simulated import SimulatedRank


class CudaOnCpu(Replaced):
    """The CPU instead of GPUs, for the duration of a run.

    num_gpus   how many GPUs programs find
    lines      the program's lines that mention cuda, in the order in which they ran
    """

    def __init__(self, num_gpus: int):
        self.lines: dict[str, None] = {}
        self._devices = Devices(num_gpus, CPU)
        super().__init__([*self._answers(), *self._changed()])
        self._not_imported = {
            _FSDP: self._change_fsdp,
            CONTEXT_PARALLEL: self._change_attention,
            DTENSOR: self._change_dtensor,
            FLEX_ATTENTION: lambda module: self.values.extend(flex_attention_on_cpu(module)),
        }
        self._change_imported()
        self._settings: list[Any] = []

    def put(self) -> None:
        self._settings = [getattr(home, name) for home, name in _SETTINGS]
        sys.meta_path.insert(0, self)
        super().put()

    def take_back(self) -> None:
        """Restore torch. May be called again if Ctrl-C has interrupted it."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        super().take_back()
        for (home, name), value in zip(_SETTINGS, self._settings, strict=True):
            if getattr(home, name) != value:
                setattr(home, name, value)

    def mode(self) -> TorchFunctionMode:
        """The mode for one rank's thread."""
        return CudaCalls(self.note)

    def note(self) -> None:
        """Note that the program mentions cuda here."""
        rank = this_rank()
        assert isinstance(rank, SimulatedRank)
        self.lines[rank.world.lines.here()] = None

    def sentence(self) -> str | None:
        """What was mapped, as a sentence; None if the program did not mention cuda."""
        if not self.lines:
            return None
        first, more = list(self.lines)[:_MOST_LINES], len(self.lines) - _MOST_LINES
        at = "; ".join(first) + (f"; and {more} more lines" if more > 1 else "; and 1 more line" if more == 1 else "")
        asked = ", and its memory was not counted: torch.cuda returns 0"
        return f"cuda was mapped to the cpu at {at}{asked if self._devices.was_asked_for_memory else ''}"

    # --- modules of torch that the program is the first to import ------------------------------------------------

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Called by `import`. torch's modules are loaded unchanged, because the notebook will have what they keep."""
        spec = PathFinder.find_spec(name, path) if name.startswith("torch.") else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with self._as_always():
                execute(module)

        spec.loader.exec_module = exec_module
        return spec

    @contextmanager
    def _as_always(self) -> Iterator[None]:
        """A context in which torch is unchanged; does nothing inside another import, or after the run."""
        if not self.is_there:
            yield
            return
        super().take_back()
        try:
            with no_torch_function():
                yield
        finally:
            self._change_imported()
            super().put()

    # --- attributes that are replaced while ranks run ------------------------------------------------------------

    def _change_imported(self) -> None:
        """Change modules that are slow to import, once the program has imported them. A change may import another."""
        while name := next((name for name in self._not_imported if name in sys.modules), None):
            self._not_imported.pop(name)(sys.modules[name])

    def _change_fsdp(self, module: ModuleType) -> None:
        fsdp = module.FullyShardedDataParallel
        self.values.append((fsdp, "__init__", self._with(fsdp.__init__, _sharded_on_cpu)))

    def _change_attention(self, module: ModuleType) -> None:
        if hasattr(module, "custom_ops"):  # other versions of torch may call it differently
            self.values.append((module, "custom_ops", {**module.custom_ops, **cpu_kernels(module)}))

    def _change_dtensor(self, module: ModuleType) -> None:
        if (dispatcher := dtensor_dispatcher()) is not None:
            propagator = dispatcher.sharding_propagator
            self.values.extend((propagator, name, table) for name, table in tables_with_attention(propagator).items())

    def _answers(self) -> list[Value]:
        """What torch.cuda and torch.accelerator return."""
        return [
            (home, name, value if isinstance(value, type) else self._answer(value, _TO_TORCH.get(name)))
            for home, values in self._devices.answers()
            for name, value in values.items()
            if hasattr(home, name)
        ]

    def _answer(self, function: Callable[..., Any], to_torch: Any) -> Callable[..., Any]:
        """The function for programs; torch itself still sees no GPU, and does what it does on the CPU."""

        def answer(*args: Any, **kwargs: Any) -> Any:
            if is_torchs(sys._getframe(1)):
                return to_torch
            self.note()
            return function(*args, **kwargs)

        return answer

    def _changed(self) -> list[Value]:
        """Functions with a device argument that a mode does not see."""
        changes: list[tuple[Any, str, Callable[[dict[str, Any]], bool]]] = [
            (torch.autocast, "__init__", _autocast_on_cpu),
            (torch.amp.GradScaler, "__init__", partial(_named, name="device", default="cuda")),
            (torch.amp, "custom_fwd", partial(_named, name="device_type")),
            (torch.amp, "custom_bwd", partial(_named, name="device_type")),
            (DeviceMesh, "__init__", partial(_named, name="device_type")),
            (DistributedDataParallel, "__init__", partial(_left_out, names=("device_ids", "output_device"))),
            (DataLoader, "__init__", partial(_left_out, names=("pin_memory", "pin_memory_device"))),
            (torch, "load", _loaded_to_cpu),
        ]
        mine = [(home, name, self._with(getattr(home, name), change)) for home, name, change in changes]
        for name in ("custom_fwd", "custom_bwd"):
            mapped = next(value for home, found, value in mine if home is torch.amp and found == name)
            mine.append((torch.cuda.amp, name, partial(mapped, device_type="cuda")))
        for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
            mine.append((torch, name, _of_cpu(getattr(torch, name))))
        mine += [(home, "is_nccl_available", lambda: True) for home in (dist, c10d)]
        return [
            *mine,
            *sync_batch_norm_on_cpu(),
            gpu_kernels_on_cpu(self.note),
            (torch, "Generator", _Generator),
            (Tensor, "record_stream", lambda x, stream: None),
            (torch, "compile", _not_compiled),
            (nn.Module, "compile", lambda module, *args, **kwargs: None),
        ]

    def _with(self, function: Callable[..., Any], change: Callable[[dict[str, Any]], bool]) -> Callable[..., Any]:
        """`function` with its arguments changed first; `change` says whether they mention cuda."""
        signature = inspect.signature(function)

        @wraps(function)
        def changed(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # which says what is wrong
            if change(bound.arguments):
                self.note()
            return function(*bound.args, **bound.kwargs)

        return changed


_MOST_LINES = 3
_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_TO_TORCH = {"is_available": False, "device_count": 0}
_SETTINGS: list[tuple[Any, str]] = [
    *((torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    (torch.backends.cuda.matmul, "allow_tf32"),
]
"""GPU settings that programs change for the whole process."""


# --- arguments --------------------------------------------------------------------------------------------------------


def _named(given: dict[str, Any], name: str, default: Any = None) -> bool:
    """Map a kind of device, such as "cuda"."""
    if not is_cuda(given.get(name, default)):
        return False
    given[name] = "cpu"
    return True


def _left_out(given: dict[str, Any], names: tuple[str, ...]) -> bool:
    """Remove arguments that are for GPUs only."""
    return bool([name for name in names if given.pop(name, None)])


def _autocast_on_cpu(given: dict[str, Any]) -> bool:
    """Map the device. On GPUs the default dtype is float16, and it stays so."""
    is_mapped = _named(given, "device_type")
    if is_mapped and given.get("dtype") is None:
        given["dtype"] = torch.float16
    return is_mapped


def _sharded_on_cpu(given: dict[str, Any]) -> bool:
    """FullyShardedDataParallel looks for a GPU if none is given."""
    given["device_id"] = CPU
    return True


def _loaded_to_cpu(given: dict[str, Any]) -> bool:
    """Load to the CPU, even what was saved on a GPU. Only a program that asks for "meta" gets no data."""
    place = given.get("map_location")
    if str(place) != "meta":
        given["map_location"] = "cpu"
    return is_cuda(place) or isinstance(place, dict)


def _of_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a kind of device, with the CPU instead of GPUs. The default kind is a GPU."""

    @wraps(function)
    def of_cpu(device_type: Any = "cuda", *args: Any) -> Any:
        return function("cpu" if is_cuda(device_type) else device_type, *args)

    return of_cpu


def _not_compiled(model: Any = None, **_: Any) -> Any:
    """Replaces torch.compile, which cannot see through the mapping: the program runs uncompiled."""
    return model if model is not None else lambda function: function


class _IsGenerator(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, _TorchsGenerator)

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _TorchsGenerator(CPU if is_cuda(device) else device)


_TorchsGenerator = torch.Generator


class _Generator(metaclass=_IsGenerator):
    """torch.Generator, whose device may be a GPU."""


# --- programs that are not mapped -------------------------------------------------------------------------------------


def advice(error: BaseException, is_mapped: bool) -> str | None:
    """Advice for a program that has failed because there is no GPU, or too few; None for other errors."""
    way_out = 'device="cpu" (on the command line, --device cpu) runs the program on the CPU, with every mention of cuda'
    count = torch.cuda.device_count()
    if count and "invalid device ordinal" in str(error):
        have = "1 GPU" if count == 1 else f"{count} GPUs"
        return f"this machine has {have}, and the rank asked for another; {way_out} mapped to it"
    if torch.cuda.is_available() or not _is_for_want_of_a_gpu(error):
        return None
    if is_mapped:
        return 'device="cpu" maps cuda to the CPU, and this use of it has no counterpart there'
    return f"this machine has no GPU; {way_out} mapped to it"


_ASKS = re.compile(r"\b(is_available|is_nccl_available|device_count)\(")


def _is_for_want_of_a_gpu(error: BaseException) -> bool:
    """Whether the error mentions GPUs, or comes from torch.cuda or from a line that asks which GPUs there are.

    A line with another mistake may also mention cuda, so that alone proves nothing.
    """
    if any(word in f"{type(error).__name__} {error}".lower() for word in ("cuda", "nvidia", "gpu", "accelerator")):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    if Path(frames[-1].filename).parent == Path(torch.cuda.__file__).parent:
        return not isinstance(error, LookupError)
    return isinstance(error, AssertionError | ZeroDivisionError) and bool(_ASKS.search(frames[-1].line or ""))
