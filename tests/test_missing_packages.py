"""Without torch, or without JAX, the half of tplab that needs it says what to install; the other half works."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import tplab
from tplab.__main__ import main

COMMANDS = ("torchrun", "doctor", "record", "merge", "forecast", "measure")


def imported(module: str, *, without: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules['{without}'] = None\nimport {module}"
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("module", ["tplab.torch", "tplab.torch.layers.linear"])
def test_without_torch(module: str):
    last = imported(module, without="torch").stderr.splitlines()[-1]
    assert last == (
        "tplab.errors.MissingPackageError: tplab.torch needs torch, which is not installed; "
        "to install it: pip install 'tplab[torch] @ git+https://github.com/tplab/tplab'"
    )


@pytest.mark.parametrize("module", ["tplab.jax", "tplab.jax.layers.linear"])
def test_without_jax(module: str):
    last = imported(module, without="jax").stderr.splitlines()[-1]
    assert last == (
        "tplab.errors.MissingPackageError: tplab.jax needs jax, which is not installed; "
        "to install it: pip install 'tplab[jax] @ git+https://github.com/tplab/tplab'"
    )


@pytest.mark.parametrize("module, without", [("tplab.jax", "torch"), ("tplab.torch", "jax")])
def test_one_half_works_without_the_other(module: str, without: str):
    assert imported(module, without=without).stderr == ""


def test_run_says_where_it_is():
    with pytest.raises(ImportError, match=r"^run is in tplab.torch or tplab.jax: the import is the switch"):
        from tplab import run  # noqa: F401  # pyright: ignore
    import tplab

    assert not hasattr(tplab, "runs") and not hasattr(tplab, "run") and getattr(tplab, "launch", None) is None
    with pytest.raises(AttributeError, match=r"^train is in tplab.torch or tplab.jax"):
        tplab.train  # type: ignore[attr-defined]  # noqa: B018


def test_the_package_as_a_command_lists_the_commands():
    done = subprocess.run([sys.executable, "-W", "error", "-m", "tplab"], capture_output=True, text=True)
    named = set(re.findall(r"-m (tplab\.\w+)", done.stdout))
    assert (done.returncode, done.stderr) == (0, "")
    assert named == {f"tplab.{command}" for command in COMMANDS}
    assert all(find_spec(name) for name in named)


def test_a_mistyped_command_is_an_error(capsys: pytest.CaptureFixture[str]):
    for arguments, said in [
        (["torchrn", "train.py"], "there is no command 'torchrn'; did you mean torchrun?"),
        (["xyz"], "there is no command 'xyz'; there are torchrun, doctor, record, merge, forecast, measure"),
        (["tplab.doctor"], "tplab.doctor is started as python -m tplab.doctor"),
        (["--hlp"], "unrecognized arguments: --hlp; did you mean --help? (--help lists the flags)"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert (ended.value.code, capsys.readouterr().err) == (2, f"tplab: {said}\n")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_says_its_version(command: str):
    name = f"tplab.{command}" if command else "tplab"
    done = subprocess.run([sys.executable, "-m", name, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tplab {tplab.__version__}\n", "")


@pytest.mark.parametrize("command", ["torchrun", "doctor", "record"])
def test_a_command_that_needs_torch_says_so_in_one_sentence(command: str, tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    flags = [] if command == "record" else ["--nproc-per-node", "2"]
    code = (
        f"import runpy, sys; sys.modules['torch'] = None; sys.argv[1:] = {[*flags, str(tmp_path / 'train.py')]}\n"
        f"runpy.run_module('tplab.{command}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"tplab.{command}: tplab.torch needs torch, which is not installed; to install it: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_framework(command: str):
    code = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['jax'] = None; sys.argv[1:] = ['--help']\n"
        f"runpy.run_module('tplab.{command}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "usage:" in done.stdout
