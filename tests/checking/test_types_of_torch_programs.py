"""run(types=True) in torch, of programs as people write them: right ones have no fault, and wrong ones a true one."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tplab import Mesh, P
from tplab.checking.types import Type
from tplab.torch import all_gather, launch, run

MEAN = dist.ReduceOp.AVG


def types_of(program):
    """On two ranks that share a batch x [8, 4], with w [4, 3] on both."""
    x, w = torch.randn(8, 4), torch.randn(4, 3).requires_grad_()
    return run(program, Mesh(dp=2), x, w, in_specs=(P("dp"), P()), distributed=True, types=True).types


def loss_of(x, w):
    (x @ w).square().mean().backward()


def test_the_shape_of_a_norm_is_not_that_of_its_statistics():
    def program(x, w):
        h = F.layer_norm(x, (4,))
        m, s = torch.var_mean(x @ w, 1)
        return all_gather(h, "dp", 0), m, s

    types = types_of(program)
    assert types.of("h").shape == (4, 4) and types.of("h").types == {"dp": Type("V", 0)}
    assert types.of("m, s").shape == (4,)


@pytest.mark.parametrize("trains", [True, False])
def test_a_batch_norm_needs_the_whole_batch_while_it_trains(trains):
    def program(x, w):
        mean, var = torch.zeros(3), torch.ones(3)
        y = F.batch_norm(x @ w, mean, var, training=trains)
        return y.tanh()

    types = types_of(program)
    assert types.of("y").shape == (4, 3)
    assert [fault.words[:31] for fault in types.faults] == ["batch_norm needs all of dim 0, "] * trains
    assert trains or types.of("y").types == {"dp": Type("V", 0)}


def averaged(x, w):
    loss_of(x, w)
    dist.all_reduce(w.grad, op=MEAN)
    return w.grad.pow(2).sum().sqrt()


def averaged_later(x, w):
    loss_of(x, w)
    work = dist.all_reduce(w.grad, op=MEAN, async_op=True)
    assert work is not None
    work.wait()
    return torch.nn.utils.clip_grad_norm_([w], 0.1)


def in_one_bucket(x, w):
    loss_of(x, w)
    flat = torch.cat([w.grad.flatten()])
    dist.all_reduce(flat)
    w.grad = (flat / dist.get_world_size()).view(4, 3)
    return w.grad.pow(2).sum()


def in_a_main_gradient(x, w):
    """The gradient is added to a view of a buffer; the sum is of the buffer, and w.grad stays as it was."""
    buffer = torch.zeros(12)
    main = buffer.view(4, 3)
    loss_of(x, w)
    main.add_(w.grad)
    buffer /= dist.get_world_size()
    dist.all_reduce(buffer)
    return main.pow(2).sum()


@pytest.mark.parametrize("program", [averaged, averaged_later, in_one_bucket, in_a_main_gradient])
def test_a_sum_made_in_place_leaves_no_fault(program):
    types = types_of(program)
    assert types.faults == [] and types.results[0].types == {"dp": Type("I")}


def test_the_buffer_keeps_its_shape():
    assert types_of(in_a_main_gradient).of("buffer").shape == (12,)


def test_an_update_by_a_gradient_that_nobody_adds_up_is_one_fault():
    def program(x, w):
        loss_of(x, w)
        with torch.no_grad():
            w -= 0.1 * w.grad
        return w

    (fault,) = types_of(program).faults
    assert fault.op == "gradient" and fault.words.startswith("w is the same on every rank of 'dp'")


def test_an_operation_has_the_name_that_people_know():
    def program(x, w):
        return torch.softmax((x @ w).T, -1)

    (fault,) = types_of(program).faults
    assert fault.words.startswith("softmax needs all of dim 1")


FSDP = """
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
fully_shard(net)
opt = torch.optim.SGD(net.parameters(), 0.1)
net(torch.randn(8, 4).chunk(2)[dist.get_rank()]).square().mean().backward()
norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1).full_tensor()
opt.step()
"""

PLAIN = """
import torch
from torch import nn
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
norm = nn.LayerNorm(4)
opt = torch.optim.SGD(norm.parameters(), 0.1)
x = torch.randn(8, 4).chunk(2)[dist.get_rank()]
norm(x).pow(4).mean().backward()
opt.step()
"""


def test_a_script_with_fsdp_and_its_norm(tmp_path):
    """Gathered weights give their memory back, and DTensors have none: their numbers cannot be looked at."""
    (tmp_path / "train.py").write_text(FSDP)
    types = launch(tmp_path / "train.py", ranks=2, types=True).types
    assert types is not None and types.faults == [] and types.of("norm").shape == ()


def test_a_parameter_of_a_script_has_its_modules_name(tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    types = launch(tmp_path / "train.py", ranks=2, types=True).types
    assert types is not None
    assert [one.name for one in types.gradients] == ["LayerNorm.weight [4]", "LayerNorm.bias [4]"]
    (fault,) = types.faults
    assert fault.words.startswith("LayerNorm.weight [4] is the same on every rank")
    assert "all_reduce(the gradient" in fault.way_out


LAST_ONE_ALONE = """
import torch
from torch import nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
net = DDP(nn.Linear(4, 3))
opt = torch.optim.SGD(net.parameters(), 0.1)
for micro in range(2):
    net.require_backward_grad_sync = {condition}
    x = torch.randn(8, 4).chunk(2)[dist.get_rank()]
    net(x).square().mean().backward()
opt.step()
"""


@pytest.mark.parametrize("is_right", [True, False])
def test_what_ddp_sends_around_is_the_same_on_every_rank(tmp_path, is_right):
    """Rank 0 copies nothing when DDP broadcasts its weights, and the other ranks do."""
    (tmp_path / "train.py").write_text(LAST_ONE_ALONE.format(condition="micro == 1" if is_right else "micro == 0"))
    types = launch(tmp_path / "train.py", ranks=2, types=True).types
    assert types is not None
    found = [(fault.op, fault.words.split(" is the same")[0]) for fault in types.faults]
    assert found == [("gradient", "Linear.weight [3, 4]")] * (not is_right)


@pytest.mark.parametrize("square", [lambda y: y.square(), lambda y: y**2, lambda y: y.pow(3)])
def test_a_square_is_called_one(square):
    def program(x, w):
        return square(x.T @ x)

    (fault,) = types_of(program).faults
    assert fault.words.startswith("pow of" if square(2 * torch.ones(())) == 8 else "square of"), fault.words
