"""Packages may be installed anywhere: each rank has its own copy of the program's modules, and of nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tplab.torch import launch
from tplab.torch.ranks.program import is_program

ROOT = Path(__file__).parents[3]
SITE = Path(sysconfig.get_path("purelib"))
PYTHON = Path(sys.base_prefix) / "bin" / Path(sys.executable).name
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"

SCRIPT = """\
import filelock, networkx, numpy, torch.distributed as dist
from numpy.testing import assert_allclose
from own import part, state

dist.init_process_group("gloo")
state.rank = dist.get_rank()
dist.barrier()
assert state.rank == dist.get_rank() == part.rank()
assert numpy.dtypes.BoolDType and numpy.random.rand(2).shape == (2,)
found = [None] * 2
dist.all_gather_object(found, [id(module) for module in (numpy, filelock, networkx, state)])
(*shared, mine), (*same, others) = found
assert shared == same and mine != others, found
print("imported once:", numpy.__file__)
"""


def in_user_site(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    site = tmp_path / "lib" / VERSION / "site-packages"
    site.parent.mkdir(parents=True)
    site.symlink_to(SITE)
    return PYTHON, {"PYTHONUSERBASE": str(tmp_path)}


def in_another_environment(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A .pth file names it."""
    venv.create(tmp_path / "env", symlinks=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(SITE)
    (tmp_path / "env" / "lib" / VERSION / "site-packages" / "others.pth").write_text(f"{elsewhere}\n{ROOT}\n")
    return tmp_path / "env" / "bin" / "python", {}


def on_pythonpath(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    packages = tmp_path / "packages"
    packages.symlink_to(SITE)
    return PYTHON, {"PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}


@pytest.mark.parametrize("where", [in_user_site, in_another_environment, on_pythonpath])
def test_packages_are_shared_wherever_they_are(where, tmp_path: Path):
    folder = tmp_path / "project"
    (folder / "own").mkdir(parents=True)
    (folder / "own" / "__init__.py").touch()
    (folder / "own" / "state.py").write_text("rank = -1\n")
    (folder / "own" / "part.py").write_text("from own import state\n\ndef rank():\n    return state.rank\n")
    (folder / "train.py").write_text(SCRIPT)
    python, variables = where(tmp_path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    command = [python, "-m", "tplab.torchrun", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=folder, env={**kept, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"imported once: {tmp_path}") == 2


def test_what_pip_has_put_into_a_folder_is_no_program(tmp_path: Path, monkeypatch):
    """Beside it may be the user's own files."""
    (tmp_path / "theirs-1.0.dist-info").mkdir()
    (tmp_path / "theirs-1.0.dist-info" / "RECORD").write_text(
        "theirs/__init__.py,,\nalone.py,,\ntheirs-1.0.dist-info/RECORD,,\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, expected in (("theirs/a/b.py", False), ("alone.py", False), ("mine.py", True), ("theirs_too/c.py", True)):
        assert is_program(str(tmp_path / name)) is expected, name


@pytest.mark.parametrize(
    "name, expected",
    [
        ("/usr/lib/python3/dist-packages/numpy/linalg.py", False),
        ("/srv/me/.local/lib/python3.12/site-packages/einops/einops.py", False),
        ("/srv/conda/envs/train/lib/python3.11/site-packages/wandb/sdk.py", False),
        ("/srv/me/project/.venv/lib/python3.11/site-packages/torch/nn.py", False),
        ("/srv/me/project/train.py", True),
        ("/srv/me/site-packages.py", True),
        ("<string>", True),
    ],
)
def test_where_packages_are(name: str, expected: bool):
    assert is_program(name) is expected


def test_a_package_under_development_is_each_ranks_own(tmp_path: Path, monkeypatch):
    """A folder on PYTHONPATH, or one installed with pip's --editable, may keep process groups in a module's globals. A
    package with compiled parts cannot be imported twice, so ranks share it, unless it is the script's own."""
    source, script = tmp_path / "src", tmp_path / "examples" / "train.py"
    for name in ("plain", "compiled"):
        (source / name).mkdir(parents=True)
        (source / name / "__init__.py").write_text("rank = -1\n")
    (source / "compiled" / f"fast{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    script.parent.mkdir()
    script.write_text(
        "import os, compiled, plain, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "compiled.rank = plain.rank = dist.get_rank()\n"
        "dist.barrier()\n"
        "found = plain.rank, compiled.rank\n"
    )
    monkeypatch.syspath_prepend(str(source))
    assert [names["found"] for names in launch(script, ranks=2).per_rank] == [(0, 1), (1, 1)]
    for name in ("plain", "compiled"):
        sys.modules.pop(name, None)
