"""A script that is watched finds torch as it is without the doctor: names, signatures, states, transformations."""

from __future__ import annotations

import importlib
import inspect
import pickle
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tplab import Mesh
from tplab.torch import run, same_model
from tplab.torch.checking.groups import require_sync
from tplab.torch.checking.names import Names
from tplab.torch.checking.stand_ins import StandIns
from tplab.torch.checking.trail import Recorder
from tplab.torch.private import CONTEXT_PARALLEL

pytestmark = pytest.mark.filterwarnings("ignore")


def samples(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Those of this rank."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)
    return x.chunk(dist.get_world_size())[dist.get_rank()], y.chunk(dist.get_world_size())[dist.get_rank()]


def start() -> nn.Module:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def resumed() -> None:
    """After two steps, the states of fresh objects come from a file."""
    saved = None
    model = start()
    for step in range(4):
        if step in (0, 2):
            ddp = DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            if saved is not None:
                for one, state in zip((optimizer, schedule), pickle.loads(saved), strict=True):
                    one.load_state_dict(state)
        x, y = samples(step)
        F.mse_loss(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5 ** (step + 1)
        saved = pickle.dumps([optimizer.state_dict(), schedule.state_dict()])


def on_a_gpu() -> None:
    model = DistributedDataParallel(start().to("cuda"), device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = samples(step)
        loss = F.mse_loss(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def gradient_of_each_sample(is_summed: bool = True) -> None:
    """Each is clipped by itself."""
    model = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(model, parameters, (x,))
        return F.mse_loss(out * 1.5 + torch.detach(input=out), y)

    for step in range(3):
        x, y = samples(step)
        detached = {name: p.detach() for name, p in model.named_parameters()}
        each = vmap(grad(loss), in_dims=(None, 0, 0))(detached, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        for name, p in model.named_parameters():
            total = torch.einsum("n...,n->...", each[name], (0.5 / norms).clamp(max=1.0))
            if is_summed:
                dist.all_reduce(total)
            p.grad = total / 8
        optimizer.step()


def by_keyword() -> None:
    """As libraries call torch: every argument has its name, and the names are torch's."""

    class Named(nn.Module):
        def __init__(self, inside: nn.Module):
            super().__init__()
            self.inside = inside

        def forward(self, module: Tensor) -> Tensor:
            return F.dropout(input=self.inside(module), p=0.5)

    random.seed(a=0)
    np.random.seed(seed=0)  # noqa: NPY002
    torch.manual_seed(seed=0)
    model = DistributedDataParallel(module=Named(start()), broadcast_buffers=False)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer=optimizer, step_size=1)
    for step in range(3):
        x, y = samples(step)
        optimizer.zero_grad(set_to_none=True)
        F.mse_loss(input=model(module=x), target=y).backward(gradient=None)
        nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0)
        optimizer.step(closure=None)
        schedule.step()


def gathers_by_keyword() -> None:
    model = DistributedDataParallel(start())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = samples(step)
        h = model(x)
        parts = [torch.empty_like(h) for _ in range(dist.get_world_size())]
        dist.group.WORLD.allgather(outputs=[parts], inputs=[h], opts=SimpleNamespace(asyncOp=False))  # type: ignore[union-attr]
        optimizer.zero_grad()
        F.mse_loss(h, y).backward()
        assert all(torch.linalg.vector_norm(x=p.grad) > 0 for p in model.parameters())
        optimizer.step()


def squares_by_keyword() -> None:
    """The loss is multiplied by the number of ranks."""
    model = DistributedDataParallel(start())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = samples(step)
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * dist.get_world_size()).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.square(input=x).any() for x in gradients)
        optimizer.step()


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.dropout, self.embed, self.qkv, self.out = dropout, nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(8, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.out(o.transpose(1, 2).flatten(2))


def attention_with_dropout() -> None:
    start()
    model = DistributedDataParallel(Attention(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens = torch.randint(9, (8, 6), generator=torch.Generator().manual_seed(step))
        tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        loss = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def context_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = Attention().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        tokens = torch.randint(9, (2, 17), generator=torch.Generator().manual_seed(step)).cuda()
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        optimizer.zero_grad()
        if mesh.size() == 1:
            F.cross_entropy(model(inputs).transpose(1, 2), labels).backward()
        else:
            with context_parallel(mesh, buffers=[inputs, labels], buffer_seq_dims=[1, 1]):
                F.cross_entropy(model(inputs).transpose(1, 2), labels).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()


@pytest.mark.parametrize(
    "script", [resumed, on_a_gpu, gradient_of_each_sample, by_keyword, gathers_by_keyword, context_parallel]
)
def test_right_scripts_run_and_are_not_blamed(script):
    report = same_model(script, ranks=2, device="cpu")
    assert report.verdict == "same", str(report)


def test_squares_of_gradients_may_be_taken_by_keyword():
    first = same_model(squares_by_keyword, ranks=2).first
    assert first is not None and first.what == "loss" and first.proof, str(first)


def test_an_operation_that_takes_another_value_runs_once():
    """Otherwise what it writes in place is written twice, and what it draws is drawn again."""
    ran, five = list[float](), torch.full((2,), 5.0)

    def added(func: Callable[..., Tensor], args: tuple[Tensor, ...], kwargs: Mapping[str, Any]) -> Tensor:
        ran.append(float(args[1][0]))
        return func(*args, **kwargs)

    def program() -> None:
        key, total = None, torch.zeros(2)
        for _ in range(2):
            recorder = Recorder(Names(), lambda: True, {(key, 1): five})
            recorder.call(Tensor.add_, (total, torch.ones(2)), {}, added)
            (op,) = recorder.trail.ops
            key = op.key
        assert total.tolist() == [6, 6]

    run(program, Mesh(world=1))
    assert ran == [1, 5]


def test_stand_ins_take_the_arguments_of_what_they_stand_for_by_name():
    fsdp = importlib.import_module("torch.distributed.fsdp")
    rows = [*StandIns(lambda: None).table(), (fsdp.FSDPModule, "set_requires_gradient_sync", require_sync)]
    for owner, name, act in rows:
        original = getattr(owner, name)
        try:
            theirs = list(inspect.signature(original).parameters)
        except ValueError:  # it is written in C++
            continue
        _, _, *mine = inspect.signature(act).parameters.values()  # without the rank, and what it stands for
        named = [(i, one.name) for i, one in enumerate(mine) if one.kind is one.POSITIONAL_OR_KEYWORD]
        assert all(theirs[i] == one for i, one in named), f"{owner.__name__}.{name}: {named} are {theirs}"
    assert len(rows) > 40


def test_gradients_that_torch_func_makes_are_compared():
    first = same_model(gradient_of_each_sample, [False], ranks=2).first
    assert first is not None and first.what == "gradient"


def test_attention_drops_nothing_where_context_parallel_was_imported():
    """torch's module replaces attention, and ranks swap what it has replaced."""
    importlib.import_module(CONTEXT_PARALLEL)
    before = F.scaled_dot_product_attention
    report = same_model(attention_with_dropout, ranks=2)
    assert report.verdict == "same", str(report)
    assert F.scaled_dot_product_attention is before
