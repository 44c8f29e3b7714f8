"""check_parallel and a GPT whose sequence ranks share: right in each scheme and layout; and mistakes people made."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tplab.torch as lab
from tests.sequence.counted import next_tokens
from tplab import Mesh, P
from tplab.sequence import LAYOUTS, LayoutName, TokenLayout
from tplab.torch import GPT, GPTConfig, average_gradients, axis_size, check_parallel
from tplab.torch.ranks.rank import this_rank

CONFIG = GPTConfig(32, 16, 1, 4, context=24)
IDS = torch.randint(0, 32, (2, 24), generator=torch.Generator().manual_seed(0))
TARGETS = torch.from_numpy(next_tokens(IDS.numpy(), (20, 4)))  # two of them do not count, and not on every rank


class Whole(nn.Module):
    """The loss of the unsharded model, from tokens in the order of the ranks."""

    def __init__(self, tokens: TokenLayout):
        super().__init__()
        self.gpt, self.tokens = GPT(CONFIG), tokens

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.gpt.loss(self.tokens.restore(ids), self.tokens.restore(targets))


class Shared(nn.Module):
    """The loss of each rank's tokens; `mistake` is what somebody got wrong."""

    def __init__(self, whole: GPT, mistake: str, about: dict[str, Any]):
        super().__init__()
        self.gpt, self.mistake = GPT(CONFIG, context_axis="cp", **about), mistake
        state = lab.split_state(whole.state_dict(), lab.gpt_specs(CONFIG), this_rank().mesh)
        self.gpt.load_state_dict(state[this_rank().rank])
        if mistake == "positions are not re-ordered":
            self.gpt.parts = replace(self.gpt.parts, layout="contiguous")

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        if self.mistake == "labels are shifted after the cut":
            targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
        loss = self.gpt.loss(ids, targets)
        if self.mistake == "a mean of means":
            counted = (targets != -100).sum()
            loss = loss * (lab.all_reduce(counted, "cp") / axis_size("cp")) / counted
        return loss * axis_size("cp") if self.mistake == "times cp" else loss


def report(mesh: Mesh, layout: LayoutName = "zigzag", mistake="", averages=True, **about):
    tokens = TokenLayout(layout, 24, mesh.axis_size("cp"))

    return check_parallel(
        lambda whole: Shared(whole.gpt, mistake, {"layout": layout, **about}).double(),
        lambda: Whole(tokens).double(),
        mesh=mesh,
        inputs=(tokens.arrange(IDS), tokens.arrange(TARGETS)),
        in_specs=P(None, "cp"),
        specs={f"gpt.{name}": spec for name, spec in lab.gpt_specs(CONFIG).items()},
        after_backward=(lambda model: average_gradients(model, "cp")) if averages else None,
    )


@pytest.mark.parametrize(("scheme", "layout"), [*zip(("ring", "gather", "head"), LAYOUTS), ("ring", "zigzag")])
def test_every_scheme_trains_the_whole_model(scheme, layout):
    assert report(Mesh(cp=4, tp=1), layout, scheme=scheme).ok


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mesh", [Mesh(cp=2, tp=2), Mesh(tp=4, cp=3)], ids=str)
def test_beside_tensor_and_sequence_parallelism(mesh, sequence_parallel):
    found = report(mesh, sequence_parallel=sequence_parallel)
    assert found.ok, found


@pytest.mark.parametrize(
    "mistake", ["labels are shifted after the cut", "positions are not re-ordered", "a mean of means", "times cp"]
)
def test_published_mistakes_are_seen(mistake):
    found = report(Mesh(cp=2, tp=1), mistake=mistake)
    assert not found.ok, mistake


def test_gradients_that_were_not_averaged_name_the_axis():
    found = report(Mesh(cp=2, tp=1), averages=False)
    assert not found.ok
    assert "'cp'" in str(found)
