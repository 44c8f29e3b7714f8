"""Run scripts under torchrun, each plain and recorded, and write whether their results are equal.

    torchrun --nproc-per-node 2 driver.py FOLDER PORTS ddp.py fsdp.py ...

Each run has its own port for the rendezvous: a shared store would still have the addresses of the previous run.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from tplab.torch.record import start

folder, scripts = Path(sys.argv[1]), [Path(name) for name in sys.argv[3:]]
ports = iter(sys.argv[2].split(","))
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def outcome_of(script: Path) -> tuple[list[Any], list[str]]:
    os.environ["MASTER_PORT"] = next(ports)
    made = runpy.run_path(str(script), run_name="__main__")
    return made["RESULT"], made.get("ERRORS", [])


for script in scripts:
    plain, errors = outcome_of(script)
    recording = start(folder / script.stem)
    recorded, errors_recorded = outcome_of(script)
    recording.stop()
    same = [torch.equal(one, other) for one, other in zip(plain, recorded, strict=True)]
    same += [one == other for one, other in zip(errors, errors_recorded, strict=True)]
    with (folder / script.stem / "same").open("a") as file:
        file.write(f"{len(same)} {all(same)}\n")
