"""Programs that say cuda, on a machine without GPUs: refused with the way out, or run on the CPU, and right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab import Mesh
from tplab.errors import RankError
from tplab.torch import launch, run
from tplab.torch.distributed.cuda import advice

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without GPUs"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]

NUM_RANKS = 4
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))


MODEL = """
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
"""

DDP_SCRIPT = (
    MODEL
    + """
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

def main(data):
    assert torch.cuda.is_available() and dist.is_nccl_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    assert torch.cuda.current_device() == local_rank and torch.cuda.device_count() == 4
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    dist.init_process_group("nccl", device_id=torch.device(f"cuda:{local_rank}"))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler, pin_memory=True)
    model = mlp().cuda(local_rank)
    model = DDP(model, device_ids=[local_rank], output_device=local_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after_first_step = None
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.to(local_rank, non_blocking=True)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if after_first_step is None:
                after_first_step = [value.cpu() for value in model.module.state_dict().values()]
    dist.barrier(device_ids=[local_rank])
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return [value.cpu() for value in model.module.state_dict().values()], after_first_step

data = TensorDataset(*torch.load("DATA", map_location="cuda:0"))
weights, after_first_step = main(data)
"""
)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script, and the data that it reads."""
    monkeypatch.chdir(tmp_path)
    torch.save((X, Y), tmp_path / "DATA")

    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


def test_ddp_as_in_the_tutorial(script):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after = []
    for _ in range(2):
        for step in range(2):  # rank r has every fourth sample, two at a time
            rows = slice(8 * step, 8 * (step + 1))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(X[rows]), Y[rows]).backward()
            optimizer.step()
            after.append([value.clone() for value in model.state_dict().values()])
    out = launch(script(DDP_SCRIPT), ranks=NUM_RANKS, device="cpu", cluster="h100")
    for got in out.per_rank:
        torch.testing.assert_close(got["weights"], after[-1])
        torch.testing.assert_close(got["after_first_step"], after[0])  # .cpu() was a copy, as from a GPU
    assert out.mapped is not None and out.mapped in repr(out)
    assert not torch.backends.cudnn.benchmark and not torch.backends.cuda.matmul.allow_tf32


def test_fsdp_2_on_a_mesh_of_cuda(script):
    text = (
        MODEL
        + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank % torch.cuda.device_count())
device = torch.device("cuda", torch.cuda.current_device())
mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("dp",))
model = mlp().to(device)
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
x, y = (z.chunk(world_size)[rank] for z in torch.load("DATA", map_location={"cuda:0": f"cuda:{rank}"}))
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.nvtx.range("forward"):
    loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
end.record()
torch.cuda.synchronize()
milliseconds = start.elapsed_time(end)
loss.backward()
norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
grads = [p.grad.full_tensor() for p in model.parameters()]
used = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties(device).total_memory
"""
    )
    model = mlp()
    nn.functional.mse_loss(model(X), Y).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    out = launch(script(text), ranks=NUM_RANKS, device="cpu", cluster="h100")
    for got in out.per_rank:
        torch.testing.assert_close(got["grads"], grads)
        torch.testing.assert_close(got["norm"], nn.utils.get_total_norm(grads))
        assert 0 < got["milliseconds"] < 1  # on the modelled clock
    assert "its memory was not counted" in (out.mapped or "")


def test_mixed_precision_with_autocast_and_a_scaler(script):
    text = (
        MODEL
        + """
dist.init_process_group(backend="nccl")
rank = dist.get_rank()
torch.cuda.manual_seed_all(0)
model = DDP(mlp().to(f"cuda:{rank}"), device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scaler = torch.amp.GradScaler("cuda")
x, y = (z.cuda().chunk(dist.get_world_size())[rank] for z in torch.load("DATA", map_location="cuda"))
for _ in range(3):
    with torch.autocast("cuda"):
        out = model(x)
        assert out.dtype is torch.float16 and torch.is_autocast_enabled("cuda")
        loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
weights = list(model.module.state_dict().values())
scale = scaler.get_scale()
"""
    )
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), Y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    out = launch(script(text), ranks=NUM_RANKS, device="cpu")
    for got in out.per_rank:
        # three steps of 1e-2; what float16 rounds of a gradient can turn Adam's step of a tiny one
        torch.testing.assert_close(got["weights"], list(model.state_dict().values()), rtol=0, atol=3e-3)
        assert got["scale"] == 65536.0  # no gradient was infinite


@pytest.mark.parametrize("device_id", ["torch.cuda.current_device()", 'torch.device("cuda", local_rank)', "None"])
def test_fsdp_1(script, device_id):
    text = (
        MODEL
        + f"""
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
dist.init_process_group("cpu:gloo,cuda:nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = FSDP(mlp().cuda(), use_orig_params=True, device_id={device_id})
scaler = ShardedGradScaler()
x, y = (z.chunk(dist.get_world_size())[local_rank] for z in torch.load("DATA"))
scaler.scale(nn.functional.mse_loss(model(x.cuda()), y.cuda())).backward()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scaler.unscale_(optimizer)
with FSDP.summon_full_params(model, with_grads=True):
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
"""
    )
    model = mlp()
    nn.functional.mse_loss(model(X), Y).backward()
    out = launch(script(text), ranks=NUM_RANKS, device="cpu")
    for got in out.per_rank:
        torch.testing.assert_close(got["grads"], [p.grad for p in model.parameters()])


def test_every_way_to_name_a_gpu():
    def program() -> None:
        cuda = torch.device("cuda", 1)
        assert cuda == torch.device("cuda") == torch.device("cuda:3") == torch.device(0) and cuda.type == "cpu"
        x = torch.ones(2, device="cuda")
        generator = torch.Generator(device="cuda").manual_seed(0)
        for y in (
            x.cuda(),
            x.cuda(1),
            x.to("cuda"),
            x.to(0),
            x.to(device="cuda:1", dtype=torch.half),
            x.to(cuda, torch.half),
            torch.zeros_like(x, device=cuda),
            x.new_zeros(3, device=0),
            torch.tensor([1], device="cuda"),
            x.pin_memory(),
            torch.empty(3, pin_memory=True),
            torch.arange(3, device=torch.cuda.current_device()),
            x.type("torch.cuda.DoubleTensor"),
            getattr(torch.cuda, "FloatTensor")([1.0]),  # noqa: B009  # for pyright
            torch.randn(3, device="cuda", generator=generator),
        ):
            assert y.device.type == "cpu"
        assert isinstance(torch.default_generator, torch.Generator)
        for module in (
            nn.Linear(2, 2).cuda(),
            nn.Linear(2, 2).to("cuda"),
            nn.Linear(2, 2).to(0, torch.half),
            nn.Linear(2, 2).to(device=cuda),
            nn.Linear(2, 2, device="cuda"),
        ):
            assert module.weight.device.type == "cpu" and module.weight.is_leaf
        torch.set_default_device("cuda")
        assert torch.ones(1).device.type == "cpu" and torch.get_default_device().type == "cpu"
        with torch.device("cuda"), torch.cuda.device(1):
            assert nn.Linear(2, 2).weight.device.type == "cpu"
        assert torch.accelerator.current_accelerator() == cuda and torch.accelerator.device_count() == 2
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        x.record_stream(side)  # type: ignore[arg-type]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        assert torch.cuda.is_bf16_supported() and torch.cuda.memory_allocated() == 0 and torch.cuda.get_device_name()

    run(program, Mesh(dp=2), distributed=True, device="cpu")


def test_copies_between_the_devices_stay_copies():
    def program() -> list[float]:
        here = torch.zeros(1)
        there = [here.cuda(), here.to("cuda"), here.to(torch.device("cuda")), here.to(device=0)]
        for x in there:
            x += 1
        back = [there[0].cpu(), there[0].to("cpu"), there[0].to(torch.device("cpu"))]
        there[0] += 1
        parameter = nn.Parameter(torch.ones(1, device="cuda"))
        (parameter.to("cuda") * 3).sum().backward()
        assert parameter.grad is not None  # it is there already, so it stays what it is
        return [here.item(), *(x.item() for x in back), parameter.grad.item()]

    out = run(program, Mesh(dp=1), distributed=True, device="cpu")
    assert out.per_rank[0] == [0.0, 1.0, 1.0, 1.0, 3.0]


def test_the_result_says_which_lines_were_mapped(script):
    text = "import torch\nx = torch.zeros(2)\n\ny = x.cuda()\nz = torch.ones(2, device='cuda')\n"
    out = launch(script(text), ranks=2, device="cpu")
    assert out.mapped == "cuda was mapped to the cpu at train.py:4; train.py:5"
    assert repr(out).endswith("; cuda was mapped to the cpu at train.py:4; train.py:5")
    many = launch(script(text + "z = z.cuda()\n" * 4), ranks=2, device="cpu")
    assert many.mapped == "cuda was mapped to the cpu at train.py:4; train.py:5; train.py:6; and 3 more lines"
    assert launch(script("import torch\n"), ranks=2, device="cpu").mapped is None


def test_memory_is_told_where_it_is_counted(script):
    text = """
import torch
x = torch.zeros(1000, device="cuda")
y = torch.zeros(3000, device="cuda")
del y
before, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
torch.cuda.reset_peak_memory_stats()
z = torch.zeros(500, device="cuda")
since = torch.cuda.max_memory_allocated()
"""
    out = launch(script(text), ranks=1, device="cpu", count_memory=True)
    got = out.per_rank[0]
    assert (got["before"], got["most"], got["since"], out.peaks) == (4000, 16000, 6000, [16000])
    assert "memory" not in (out.mapped or "")


def test_a_compiled_program_runs_as_it_is(script):
    text = """
import torch
model = torch.nn.Linear(2, 2).cuda()
model.compile()
y = torch.compile(model, mode="max-autotune")(torch.ones(1, 2, device="cuda"))

@torch.compile
def doubled(x):
    return 2 * x

@torch.compile(fullgraph=True)
def tripled(x):
    return 3 * x

z = doubled(y) + tripled(y)
"""
    got = launch(script(text), ranks=1, device="cpu").per_rank[0]
    torch.testing.assert_close(got["z"], 5 * got["y"])


PRISTINE = """
import sys
import torch
from tplab.torch import launch
assert "torch.distributed.fsdp" not in sys.modules
launch(sys.argv[1], ranks=2, device="cpu")
import torch.distributed.fsdp.fully_sharded_data_parallel as fsdp
import torch._dynamo.device_interface as home
assert "__wrapped__" not in vars(fsdp.FullyShardedDataParallel.__init__)
assert home.CudaInterface.Stream is torch.cuda.Stream, home.CudaInterface.Stream
print("as it was")
"""


def test_modules_that_a_program_imports_first_keep_nothing(script):
    """In a process of its own, as here they have been imported."""
    path = script("import torch._dynamo.device_interface\nimport torch.distributed.fsdp\n")
    done = subprocess.run([sys.executable, "-c", PRISTINE, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout == "as it was\n", done.stderr


def state() -> list[object]:
    """What a notebook has of what is mapped."""
    homes = (
        torch,
        torch.cuda,
        torch.accelerator,
        torch.amp,
        torch.autocast,
        torch.amp.GradScaler,
        Tensor,
        dist,
        nn.parallel.DistributedDataParallel,
        torch.utils.data.DataLoader,
    )
    return [*(dict(vars(home)) for home in homes), torch.backends.cudnn.deterministic]


@pytest.mark.parametrize("fails", [False, True])
def test_the_notebooks_torch_is_as_it_was(fails):
    def program() -> None:
        torch.backends.cudnn.deterministic = True
        x = torch.ones(1).cuda()
        dist.all_reduce(x)
        if fails and dist.get_rank() == 1:
            raise ValueError("on purpose")
        dist.barrier()

    before = state()
    if fails:
        with pytest.raises(RankError, match="on purpose"):
            run(program, Mesh(dp=2), distributed=True, device="cpu")
    else:
        run(program, Mesh(dp=2), distributed=True, device="cpu")
    assert state() == before
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1).cuda()


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.ones(2, device='cuda')",
        "model = torch.nn.Linear(2, 2).to('cuda')",
        "torch.cuda.set_device(0)",
        "torch.cuda.set_device(rank % torch.cuda.device_count())",
        "assert torch.cuda.is_available()",
        "import sys; sys.exit('this needs CUDA')",
        "x = torch.ones(2).cuda()",
    ],
)
def test_without_device_the_way_out_is_named(script, line):
    with pytest.raises(RankError, match=r'device="cpu".*--device cpu') as error:
        launch(script(f"import torch\nrank = 0\n{line}\n"), ranks=2)
    if "exit" not in line:
        assert "rank 0 raised" in str(error.value) and "at train.py:3: " in str(error.value)


def test_with_too_few_gpus_the_way_out_is_named(monkeypatch):
    error = RuntimeError("CUDA error: invalid device ordinal")
    for count, have in ((1, "1 GPU"), (4, "4 GPUs")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        text = advice(error, False)
        assert text is not None and text.startswith(f"this machine has {have}, and the rank asked for another")
        assert 'device="cpu" (on the command line, --device cpu)' in text


def test_a_program_that_asks_first_runs_without_a_gpu(script):
    text = "import torch\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\nx = torch.ones(2, device=device)\n"
    assert launch(script(text), ranks=2).mapped is None


def test_other_errors_are_what_they_were(script):
    with pytest.raises(RankError, match=r"ZeroDivisionError at train.py:1: (division|integer|float)[a-z ]* zero$"):
        launch(script("x = 1 / 0\n"), ranks=2)


@pytest.mark.parametrize(
    "line",
    ["x = torch.ones(2) @ torch.ones(3)  # on cuda", "assert 1 == 2, 'cuda'[9:]", "n = {'cuda': 0}; 1 // n['cuda']"],
)
def test_a_mistake_in_a_line_that_mentions_cuda_is_not_for_want_of_a_gpu(script, line):
    with pytest.raises(RankError) as error:
        launch(script(f"import torch\n{line}\n"), ranks=2)
    assert "--device" not in str(error.value)


def test_a_device_that_a_node_does_not_have():
    def program() -> None:
        torch.cuda.set_device(2)

    with pytest.raises(RankError, match=r"set_device\(2\).* 2 devices here, .* 0 to 1; LOCAL_RANK"):
        run(program, Mesh(dp=2), distributed=True, device="cpu")


def test_what_has_no_counterpart_is_said_to_have_none():
    def program() -> None:
        torch.cuda.CUDAGraph()

    with pytest.raises(RankError, match="no counterpart"):
        run(program, Mesh(dp=2), distributed=True, device="cpu")
