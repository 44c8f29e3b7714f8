"""An unchanged script of Hugging Face's accelerate, data parallel on simulated ranks: it trains as one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tplab.torch import launch

pytest.importorskip("accelerate", reason="accelerate is not installed")
from accelerate import PartialState

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SCRIPT = """\
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--accumulate", type=int)
args = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
set_seed(0)
data = TensorDataset(*torch.load("data.pt"))
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
loader = DataLoader(data, batch_size=args.batch)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

losses, num_rows = [], 0
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        num_rows += len(accelerator.gather_for_metrics(x))
    accelerator.print(f"epoch {epoch} is over")

rank = accelerator.process_index
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
accelerator.end_training()
"""
ROWS = 16


def on_one_device(x: Tensor, y: Tensor, batch: int, accumulate: int, num_ranks: int) -> tuple[list[float], nn.Module]:
    """The same training with the batches of all ranks in one; accelerate steps a schedule once for each rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    losses = []
    for _ in range(2):
        for number, (rows, targets) in enumerate(zip(x.split(batch), y.split(batch), strict=True), 1):
            loss = nn.functional.mse_loss(model(rows), targets)
            (loss / accumulate).backward()
            if number % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                for _ in range(num_ranks):
                    schedule.step()
            losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("num_ranks, accumulate, on", [(4, 1, "mapped"), (2, 2, "cpu")])
def test_accelerate(
    num_ranks: int, accumulate: int, on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """With the GPUs that it finds mapped to the CPU, and as `accelerate launch --cpu` runs it."""
    monkeypatch.chdir(tmp_path)
    if on == "cpu":
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (tmp_path / "train.py").write_text(SCRIPT)
    x, y = (torch.randn(ROWS, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for size in (6, 4))
    torch.save([x, y], "data.pt")
    notebook, num_threads = dict(PartialState._shared_state), torch.get_num_threads()
    out = launch(
        "train.py",
        ["--batch", "2", "--accumulate", str(accumulate)],
        ranks=num_ranks,
        device="cpu" if on == "mapped" else None,
    )
    losses, model = on_one_device(x, y, 2 * num_ranks, accumulate, num_ranks)
    assert [made["rank"] for made in out.per_rank] == [*range(num_ranks)]
    for made in out.per_rank:
        torch.testing.assert_close(made["losses"], losses, rtol=1e-12, atol=0)
        assert made["num_rows"] == 2 * ROWS
    saved = torch.load("model.pt")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-10, atol=1e-12)  # Adam divides by the root of a square
    assert capsys.readouterr().out == "".join(f"[rank 0] epoch {epoch} is over\n" for epoch in (0, 1))

    num_steps, num_bytes = len(losses) // accumulate, 8 * sum(p.numel() for p in model.parameters())
    assert out.trace.bytes_sent(op="all_reduce") == num_steps * 2 * (num_ranks - 1) * num_bytes
    assert (PartialState._shared_state, torch.get_num_threads()) == (notebook, num_threads)
