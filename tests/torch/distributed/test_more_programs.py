"""More of what people build from torch.distributed, on simulated ranks: each gives what one device gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.torch.distributed.test_programs import X, Y, loss_of, mine, mlp, whole
from tplab import Mesh
from tplab.torch import device_mesh, run

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


def close(got: Tensor, want: Tensor, rtol: float = 1e-12) -> None:
    """Equal up to the order in which float64 numbers are added up, unless `rtol` says more."""
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-2 * rtol)


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    model = mlp()
    loss_of(model, X, Y).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


# --- FSDP2 -----------------------------------------------------------------------------------------------------------


def sharded(mesh: Any, **options: Any) -> nn.Module:
    """The model with every layer a unit of FSDP2."""
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_fsdp_in_mixed_precision(num_ranks: int, expected):
    """Computed in float32, gradients added up in float64: right to what float32 has."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    x, y = X.repeat(3, 1), Y.repeat(3, 1)  # 24 rows, which any of these numbers of ranks can share

    def program() -> list[Tensor]:
        policy = MixedPrecisionPolicy(torch.float32, torch.float64, torch.float64)
        model = sharded(device_mesh(), mp_policy=policy)
        loss_of(model, mine(x), mine(y)).backward()
        return whole(model)

    out = run(program, Mesh(dp=num_ranks), distributed=True)
    for grads in out.per_rank:
        for got, want in zip(grads, expected, strict=True):
            close(got, want, rtol=1e-5)
    if num_ranks > 1:
        sent = {(event.op, event.dtype) for event in out.trace.events if event.kind == "collective"}
        assert ("all_gather", "float32") in sent and ("reduce_scatter", "float64") in sent


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_fsdp_with_gradient_clipping(num_ranks: int, expected):
    def program() -> tuple[Tensor, list[Tensor]]:
        model = sharded(device_mesh())
        loss_of(model, mine(X), mine(Y)).backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return norm.full_tensor(), whole(model)

    norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in expected]))
    for got_norm, grads in run(program, Mesh(dp=num_ranks), distributed=True).per_rank:
        close(got_norm, norm)
        for got, want in zip(grads, expected, strict=True):
            close(got, want * 0.01 / (norm + 1e-6))


def test_fsdp_hybrid_on_a_mesh_of_two_axes(expected):
    """Replicated over the first axis, sharded over the second; the trace has the names of both."""

    def program() -> list[Tensor]:
        model = sharded(device_mesh())
        loss_of(model, mine(X), mine(Y)).backward()
        return whole(model)

    out = run(program, Mesh(dp=2, tp=2), distributed=True)
    for grads in out.per_rank:
        for got, want in zip(grads, expected, strict=True):
            close(got, want)
    sent = {(event.op, event.axis) for event in out.trace.events if event.kind == "collective"}
    assert sent >= {("all_gather", "tp"), ("reduce_scatter", "tp"), ("all_reduce", "dp")}


def test_state_dict_of_fsdp():
    def program() -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return dict(get_model_state_dict(sharded(device_mesh()), options=StateDictOptions(full_state_dict=True)))

    out = run(program, Mesh(dp=2), distributed=True)
    for states in out.per_rank:
        for name, want in mlp().state_dict().items():
            close(states[name], want)


def test_fsdp_over_one_axis_and_tensor_parallelism_over_the_other(expected):
    def program() -> list[Tensor]:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        model, mesh = mlp(), device_mesh()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        part = mesh["dp"].get_local_rank()
        loss_of(model, X.chunk(2)[part], Y.chunk(2)[part]).backward()
        return whole(model)

    for grads in run(program, Mesh(dp=2, tp=2), distributed=True).per_rank:
        for got, want in zip(grads, expected, strict=True):
            close(got, want)


def test_a_checkpoint_is_loaded_on_another_mesh(tmp_path):
    def save() -> None:
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        checkpoint.save(get_model_state_dict(sharded(device_mesh())), checkpoint_id=tmp_path)

    def load() -> list[Any]:
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

        model = sharded(device_mesh())
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        states = get_model_state_dict(model)
        checkpoint.load(states, checkpoint_id=tmp_path)
        set_model_state_dict(model, states)
        return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]

    run(save, Mesh(dp=2), distributed=True)
    for parameters in run(load, Mesh(dp=3), distributed=True).per_rank:
        for got, want in zip(parameters, mlp().parameters(), strict=True):
            close(got, want.detach())


# --- tensor parallelism ----------------------------------------------------------------------------------------------


def language_model() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = [nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 8)]
    return nn.Sequential(*layers).double(), torch.randn(2, 4, 6, dtype=torch.float64), torch.randint(0, 8, (8,))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_sequence_parallelism_and_a_parallel_loss(num_ranks: int):
    def program() -> tuple[Tensor, list[Tensor]]:
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            SequenceParallel,
            loss_parallel,
            parallelize_module,
        )

        model, x, targets = language_model()
        parallelize_module(
            model,
            device_mesh(),
            {
                "0": SequenceParallel(),
                "1": ColwiseParallel(input_layouts=Shard(1)),
                "2": RowwiseParallel(output_layouts=Shard(1)),
                "3": SequenceParallel(),
                "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
            },
        )
        with loss_parallel():
            loss: Any = nn.functional.cross_entropy(model(mine_of_the_sequence(x)).flatten(0, 1), targets)
            loss.backward()
        return loss.full_tensor().detach(), whole(model)

    def mine_of_the_sequence(x: Tensor) -> Tensor:
        return x.chunk(num_ranks, 1)[dist.get_rank()]

    model, x, targets = language_model()
    want = nn.functional.cross_entropy(model(x).flatten(0, 1), targets)
    want.backward()
    for loss, grads in run(program, Mesh(tp=num_ranks), distributed=True).per_rank:
        close(loss, want.detach())
        for got, p in zip(grads, model.parameters(), strict=True):
            assert p.grad is not None
            close(got, p.grad)


class CopyToRegion(torch.autograd.Function):
    """Megatron's f, as it is printed everywhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dist.all_reduce(dy)
        return dy


class ReduceFromRegion(torch.autograd.Function):
    """Megatron's g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_megatrons_f_and_g(num_ranks: int):
    generator = torch.Generator().manual_seed(2)
    w, v = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((6, 12), (12, 4)))

    def program() -> list[Tensor | None]:
        rank = dist.get_rank()
        x = X.clone().requires_grad_()
        mine_of_w = w.chunk(num_ranks, 1)[rank].clone().requires_grad_()
        mine_of_v = v.chunk(num_ranks, 0)[rank].clone().requires_grad_()
        y: Any = ReduceFromRegion.apply(torch.tanh(CopyToRegion.apply(x) @ mine_of_w) @ mine_of_v)  # type: ignore
        ((y - Y) ** 2).mean().backward()
        return [x.grad, mine_of_w.grad, mine_of_v.grad]

    out = run(program, Mesh(tp=num_ranks), distributed=True)
    x, whole_w, whole_v = (tensor.clone().requires_grad_() for tensor in (X, w, v))
    ((torch.tanh(x @ whole_w) @ whole_v - Y) ** 2).mean().backward()
    assert x.grad is not None and whole_w.grad is not None and whole_v.grad is not None
    for rank, (of_x, of_w, of_v) in enumerate(out.per_rank):
        close(of_x, x.grad)
        close(of_w, whole_w.grad.chunk(num_ranks, 1)[rank])
        close(of_v, whole_v.grad.chunk(num_ranks, 0)[rank])
    sent = sum(event.bytes for event in out.trace.events if event.kind == "collective")
    assert sent == 2 * (num_ranks - 1) * 8 * (8 * 4 + 8 * 6)  # one all_reduce of y, one of dx, over all ranks


def test_a_thread_of_a_rank_finds_its_groups():
    """transformers loads and shards weights in threads."""

    def program() -> int:
        from concurrent.futures import ThreadPoolExecutor

        mesh = device_mesh()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: dist.get_rank(mesh.get_group("tp"))).result()

    assert run(program, Mesh(dp=2, tp=2), distributed=True).per_rank == [0, 1, 0, 1]


def test_a_checkpoint_that_a_thread_saves(tmp_path):
    """Its collectives are called in a thread, while the rank waits for that."""

    def program() -> Tensor:
        import torch.distributed.checkpoint as checkpoint

        model = sharded(device_mesh())
        future: Any = checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=tmp_path)
        future.result()
        kept = [p.full_tensor().detach().clone() for p in model.parameters()]  # type: ignore[union-attr]
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        state = model.state_dict()
        checkpoint.load({"model": state}, checkpoint_id=tmp_path)
        loaded = [p.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
        return torch.tensor([torch.equal(one, other) for one, other in zip(kept, loaded, strict=True)])

    for same in run(program, Mesh(dp=2), distributed=True).per_rank:
        assert same.all()


def test_transformers_with_a_plan_of_its_own(tmp_path):
    """The spelling that all supported versions share: 5.15 refuses `tp_plan="auto"`, and later ones deprecate it."""
    transformers = pytest.importorskip("transformers", minversion="5.15")
    from transformers.distributed import DistributedConfig

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(tmp_path)
    tokens = torch.arange(8)[None]
    want = model(tokens, labels=tokens)

    def program() -> tuple[Tensor, Tensor]:
        how = DistributedConfig(tp_size=2)
        part = transformers.LlamaForCausalLM.from_pretrained(tmp_path, distributed_config=how)
        out = part(tokens, labels=tokens)
        out.loss.backward()
        return out.logits.detach(), out.loss.detach()

    out = run(program, Mesh(tp=2), distributed=True)
    for logits, loss in out.per_rank:
        torch.testing.assert_close(logits, want.logits.detach())  # in float32, added up in another order
        torch.testing.assert_close(loss, want.loss.detach())
    assert ("all_reduce", "tp") in {(event.op, event.axis) for event in out.trace.events}


# --- pipelines -------------------------------------------------------------------------------------------------------

ONE_STAGE, LOOP, V = "one stage", "loop", "v"
SCHEDULES = [
    ("ScheduleGPipe", ONE_STAGE), ("Schedule1F1B", ONE_STAGE), ("ScheduleInterleaved1F1B", LOOP),
    ("ScheduleLoopedBFS", LOOP), ("ScheduleInterleavedZeroBubble", LOOP), ("ScheduleZBVZeroBubble", V),
    ("ScheduleDualPipeV", V),
]  # fmt: skip


def stages(count: int) -> list[nn.Sequential]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(count)]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("name", "shape"), SCHEDULES, ids=lambda value: str(value))
def test_every_schedule_of_torch(name: str, shape: str, num_ranks: int):
    total = num_ranks if shape == ONE_STAGE else 2 * num_ranks
    num_microbatches = 8

    def program() -> dict[int, list[Tensor | None]]:
        from torch.distributed.pipelining import PipelineStage, schedules

        rank = dist.get_rank()
        second = {ONE_STAGE: [], LOOP: [rank + num_ranks], V: [total - 1 - rank]}[shape]
        numbers, parts = [rank, *second], stages(total)
        mine_of_them: Any = [PipelineStage(parts[i], i, total, torch.device("cpu")) for i in numbers]
        kind = getattr(schedules, name)
        given = mine_of_them[0] if shape == ONE_STAGE else mine_of_them
        schedule = kind(given, num_microbatches, loss_fn=lambda y, target: ((y - target) ** 2).mean())
        schedule.step(*([X] if 0 in numbers else []), **({"target": X.flip(0)} if total - 1 in numbers else {}))
        return {i: [p.grad for p in parts[i].parameters()] for i in numbers}

    out = run(program, Mesh(pp=num_ranks), distributed=True, cluster="h100")
    parts = stages(total)
    ((nn.Sequential(*parts)(X) - X.flip(0)) ** 2).mean().backward()
    for grads in out.per_rank:
        for number, stage in grads.items():
            for got, p in zip(stage, parts[number].parameters(), strict=True):
                assert p.grad is not None
                close(got, p.grad)
    # each microbatch is one row of 6 numbers, sent on by all stages but the last, and its gradient sent back
    between = 2 * (total - 1 - (shape == V)) * num_microbatches * 6 * 8
    assert (
        sum(event.bytes for event in out.trace.events if event.kind == "send" and event.dtype == "float64") == between
    )


# --- the same bits every time ----------------------------------------------------------------------------------------


def test_twenty_runs_with_dropout_give_the_same_bits():
    def program() -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 4)).double()
        torch.manual_seed(dist.get_rank())
        model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=1e-3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, mine(X), mine(Y)).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    outs = [run(program, Mesh(dp=4), distributed=True, cluster="h100") for _ in range(20)]
    bits = {tuple(p.numpy().tobytes() for p in parameters) for out in outs for parameters in out.per_rank}
    assert len(bits) == 1  # of every run, and of every rank
    events = {tuple((e.rank, e.kind, e.op, e.start, e.end, e.bytes) for e in out.trace.events) for out in outs}
    assert len(events) == 1


def test_a_script_may_end_with_a_sharded_state_dict(tmp_path, capsys):
    """Its tensors are FSDP 1's, whose methods ask torch.distributed for the rank, and now the ranks have ended."""
    from tplab.torch import launch

    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType\n"
        "dist.init_process_group('gloo')\n"
        "model = FSDP(torch.nn.Linear(4, 4), device_id=torch.device('cpu'))\n"
        "FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)\n"
        "states = model.state_dict()\n"
        "print(sorted(states))\n"
    )
    launch(script, mesh=Mesh(dp=2))
    assert "[rank 1] ['bias', 'weight']" in capsys.readouterr().out
