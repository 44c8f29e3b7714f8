"""Training as people write it: a folder of modules with groups in their globals, and a loop that profiles, saves,
polls and logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tplab.torch import launch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

GROUPS = """\
import os
import torch.distributed as dist

manager = None

class Manager:
    '''Data outermost, then stages, then tensors.'''

    def __init__(self, dp, pp, tp):
        rank = dist.get_rank()
        grid = [[[(d * pp + p) * tp + t for t in range(tp)] for p in range(pp)] for d in range(dp)]
        self.dp_rank, rest = divmod(rank, pp * tp)
        self.pp_rank, self.tp_rank = divmod(rest, tp)
        self.tp = self.of([grid[d][p] for d in range(dp) for p in range(pp)])
        self.dp = self.of([[grid[d][p][t] for d in range(dp)] for p in range(pp) for t in range(tp)])
        self.pp = self.of([[grid[d][p][t] for p in range(pp)] for d in range(dp) for t in range(tp)])
        ranks = dist.get_process_group_ranks(self.pp)
        self.before = ranks[self.pp_rank - 1] if self.pp_rank else None
        self.after = ranks[self.pp_rank + 1] if self.pp_rank + 1 < pp else None

    def of(self, lists):
        return dist.new_subgroups_by_enumeration(lists)[0]

def setup(*sizes):
    global manager
    manager = Manager(*sizes)
"""

LAYERS = """\
import torch
import torch.distributed as dist
from torch import nn
from lib import groups

class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        dist.all_reduce(dy, group=groups.manager.tp)
        return dy

class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x, group=groups.manager.tp)
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy

class MLP(nn.Module):
    '''One of two halves of the hidden units is this rank's.'''

    def __init__(self, up, down):
        super().__init__()
        size, rank = dist.get_world_size(groups.manager.tp), groups.manager.tp_rank
        self.up = nn.Parameter(up.chunk(size, 1)[rank].clone())
        self.down = nn.Parameter(down.chunk(size, 0)[rank].clone())

    def forward(self, x):
        return x + Summed.apply(torch.tanh(Copied.apply(x) @ self.up) @ self.down)
"""

TRAIN = """\
import argparse, contextlib, json, os, time
import torch
import torch.distributed as dist
from lib import groups
from lib.layers import MLP

def passed_on(x, to):
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to)])
    for one in work:
        one.wait()

def taken(like, source):
    x = torch.empty_like(like, requires_grad=False)
    for one in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, source)]):
        one.wait()
    return x

def main():
    parser = argparse.ArgumentParser()
    for name in ("dp", "pp", "tp", "steps"):
        parser.add_argument("--" + name, type=int)
    parser.add_argument("--out")
    args = parser.parse_args()
    assert dict(os.environ)["LOCAL_RANK"] == os.environ["RANK"]
    dist.init_process_group(backend="gloo", init_method="env://")
    groups.setup(args.dp, args.pp, args.tp)
    m, rank = groups.manager, dist.get_rank()

    data = os.path.join(args.out, "data.pt")
    if rank == 0:  # prepares the data; the others wait for the file
        generator = torch.Generator().manual_seed(0)
        torch.save([torch.randn(8, 6, generator=generator) for _ in range(args.steps)], data + ".part")
        os.rename(data + ".part", data)
    while not os.path.exists(data):
        time.sleep(0.002)
    batches = torch.load(data)

    torch.manual_seed(1)
    weights = [(torch.randn(6, 8) / 3, torch.randn(8, 6) / 3) for _ in range(args.pp)]
    model = MLP(*weights[m.pp_rank])
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    log = open(os.path.join(args.out, f"log.{os.getpid()}.jsonl"), "w")
    plan = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    profiled = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=plan,
        on_trace_ready=lambda p: p.export_chrome_trace(os.path.join(args.out, f"trace.{rank}.json")))
    with profiled:
        for step, whole in enumerate(batches):
            loss = torch.zeros(())
            for x in whole.chunk(args.dp)[m.dp_rank].chunk(2):
                if m.before is not None:
                    x = taken(x, m.before).requires_grad_()
                y = model(x)
                if m.after is not None:
                    passed_on(y.detach(), m.after)
                    y.backward(taken(y, m.after))
                else:
                    part = y.square().mean() / 2
                    part.backward()
                    loss += part.detach()
                if m.before is not None:
                    passed_on(x.grad, m.before)
            works = [dist.all_reduce(p.grad, group=m.dp, async_op=True) for p in model.parameters()]
            for work, p in zip(works, model.parameters()):
                work.wait()
                p.grad /= args.dp
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss, group=m.dp)
            dist.broadcast(loss, dist.get_process_group_ranks(m.pp)[-1], group=m.pp)
            print(json.dumps({"step": step, "loss": loss.item() / args.dp}), file=log, flush=True)
            if step == 1:  # saves, and goes on from what was saved
                path = os.path.join(args.out, f"model.{m.pp_rank}.{m.tp_rank}.pt")
                if m.dp_rank == 0:
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
                dist.barrier()
                saved = torch.load(path)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            profiled.step()
    log.close()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def losses(num_stages: int, num_steps: int) -> list[float]:
    """The same on one device."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(8, 6, generator=generator) for _ in range(num_steps)]
    torch.manual_seed(1)
    weights = [(torch.randn(6, 8) / 3, torch.randn(8, 6) / 3) for _ in range(num_stages)]
    parameters = [nn.Parameter(w) for pair in weights for w in pair]
    optimizer, found = torch.optim.AdamW(parameters, 0.01), list[float]()
    for x in batches:
        for up, down in zip(parameters[::2], parameters[1::2], strict=True):
            x = x + torch.tanh(x @ up) @ down
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("dp, pp, tp", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_a_loop_in_three_dimensions(dp: int, pp: int, tp: int, tmp_path: Path):
    (tmp_path / "lib").mkdir()
    for name, text in (("lib/__init__", ""), ("lib/groups", GROUPS), ("lib/layers", LAYERS), ("train", TRAIN)):
        (tmp_path / f"{name}.py").write_text(text)
    flags = {"dp": dp, "pp": pp, "tp": tp, "steps": 4, "out": tmp_path}
    size = dp * pp * tp
    given = [f"--{flag}={value}" for flag, value in flags.items()]
    launch(tmp_path / "train.py", given, ranks=size)
    logs = sorted(tmp_path.glob("log.*.jsonl"))
    assert len(logs) == size
    for log in logs:  # the additions are in another order
        found = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
        assert found == pytest.approx(losses(pp, 4), rel=1e-5)
    for rank in range(size):
        read = json.loads((tmp_path / f"trace.{rank}.json").read_text())
        names = [event["name"] for event in read["traceEvents"]]
        assert "ProfilerStep#2" in names and "Optimizer.step#AdamW.step" in names
        assert size == 1 or "gloo:all_reduce" in names  # a single rank has torch's own profiler
        assert pp == 1 or {"gloo:send", "gloo:recv"} <= set(names)
