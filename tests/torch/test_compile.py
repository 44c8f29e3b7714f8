"""torch.compile around programs that communicate: the collectives run as they are, and the answer is the same."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import tplab.torch as tt
from tplab import Mesh
from tplab.errors import RankError
from tplab.torch import ColumnParallelLinear, ParallelMLP, RowParallelLinear, run


class Own(nn.Module):
    """A module of the user's own, made of tplab's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = ColumnParallelLinear(4, 8, "tp"), RowParallelLinear(8, 4, "tp")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def asynchronous(x: Tensor) -> Tensor:
    flight = tt.start(tt.ring_shift, x * 2, "tp")
    return x.sin() + flight.wait()


MADE = {
    "all_reduce": lambda: lambda x: tt.all_reduce(x * 2, "tp") + 1,
    "ring_shift": lambda: lambda x: tt.ring_shift(x * 2, "tp") + tt.axis_index("tp"),
    "start": lambda: asynchronous,
    "ring_all_gather": lambda: lambda x: torch.cat(tt.ring_all_gather(x * 2, "tp")) + 1,
    "region": lambda: lambda x: tt.reduce_from(tt.copy_to(x, "tp").sin() * 2, "tp") + tt.axis_size("tp"),
    "overlapped": lambda: lambda x: tt.all_gather_matmul(x.sin(), torch.ones(4, 8), "tp").cos(),
    "dropout": lambda: lambda x: tt.dropout(x * 2, 0.5) + 1,
    "ParallelMLP": lambda: ParallelMLP(4, 8, "tp"),
    "a module of its own": Own,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch._dynamo reads it
@pytest.mark.parametrize(
    "backend, options", [("eager", {}), ("aot_eager", {"keep_values": 0}), ("eager", {"cluster": "h100"})]
)
def test_what_is_compiled_gives_the_same_output_and_gradient(backend: str, options: dict):
    """Followed operation by operation, not followed, and on a modelled clock."""

    def program(is_compiled: bool) -> list[Tensor]:
        found = []
        for name, make in MADE.items():
            function = make()
            if is_compiled:
                function = torch.compile(function, backend=backend)
            for _ in range(2):
                x = torch.arange(12.0).reshape(1, 3, 4).requires_grad_()
                y = function(x)
                y.square().sum().backward()
                assert x.grad is not None, name
                found += [y.detach(), x.grad]
        return found

    torch.compiler.reset()
    want = run(program, Mesh(tp=2), False).per_rank
    for got, expected in zip(run(program, Mesh(tp=2), True, **options).per_rank, want, strict=True):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_the_program_around_a_collective_is_compiled():
    """Before it and after it: two graphs on each rank."""
    graphs = []

    def backend(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append([node.name for node in module.graph.nodes if node.op.startswith("call_")])
        return module

    def program() -> Tensor:
        return torch.compile(lambda x: (tt.all_reduce(x * 2, "tp") + 1).sin(), backend=backend)(torch.ones(2))

    run(program, Mesh(tp=1))
    assert graphs == [["mul"], ["add", "sin"]]


def test_one_graph_for_all_of_it_is_refused_with_the_reason():
    def program() -> None:
        torch.compile(lambda x: tt.all_reduce(x, "tp"), backend="eager", fullgraph=True)(torch.ones(2))

    with pytest.raises(RankError, match="tplab's functions and layers run as they are"):
        run(program, Mesh(tp=1))


def test_a_program_that_compiles_nothing_does_not_pay_for_it():
    program = (
        "import sys, torch; from tplab import Mesh; import tplab.torch as tt;"
        "tt.run(lambda: tt.all_reduce(torch.ones(2), 'tp'), Mesh(tp=2), cluster='h100');"
        "live = tt.LiveBytes(); live.__enter__(); torch.ones(2) + 1; live.__exit__(None, None, None);"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
