"""Workers start by fork, tell how they ended, and never outlive their launcher or whoever wants them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tplab.errors import TplabError
from tplab.torch.processes.launcher import Launcher, scratch_file, text_of

ROOT = Path(__file__).parents[2]


def work(arguments, fds):
    """What the workers of these tests do: as `arguments` say."""
    print("hello", flush=True)
    if "write" in arguments:
        os.write(fds[0], arguments["write"].encode())
    if "raises" in arguments:
        raise ValueError("lost")
    if "helper" in arguments:
        helper = subprocess.Popen(["sleep", "600"])
        os.write(fds[0], str(helper.pid).encode())
    if "sleep" in arguments:
        time.sleep(arguments["sleep"])


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)  # where the launcher finds this file
    made = Launcher("tests.torch.test_launcher:work")
    yield made
    made.close()


def test_workers(launcher):
    words, read_end, write_end = scratch_file(), *os.pipe()
    pids = [launcher.start({"write": "x"}, [write_end], words) for _ in range(3)]
    assert len({*pids, os.getpid()}) == 4
    assert [launcher.ended(pid, 100) for pid in pids] == [0, 0, 0]
    assert os.read(read_end, 10) == b"xxx" and text_of(words) == "hello\n" * 3
    failed = launcher.start({"raises": True}, [], words)
    assert os.waitstatus_to_exitcode(launcher.ended(failed, 100)) == 1
    assert "ValueError: lost" in text_of(words)
    sleeper = launcher.start({"sleep": 600}, [], words)
    assert launcher.ended(sleeper) is None
    launcher.kill([sleeper])
    assert os.waitstatus_to_exitcode(launcher.ended(sleeper, 100)) == -signal.SIGKILL
    for fd in (words, read_end, write_end):
        os.close(fd)


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_worker_has_started_ends_with_it(launcher, killed):
    words, read_end, write_end = scratch_file(), *os.pipe()
    pid = launcher.start({"helper": True, "sleep": 600 if killed else 0}, [write_end], words)
    helper = int(os.read(read_end, 20))
    if killed:
        launcher.kill([pid])
    assert launcher.ended(pid, 100) is not None and is_gone(helper)
    for fd in (words, read_end, write_end):
        os.close(fd)


def test_a_launcher_that_is_gone(launcher):
    words = scratch_file()
    sleeper = launcher.start({"sleep": 600}, [], words)
    os.kill(launcher._process.pid, signal.SIGKILL)
    assert launcher.ended(sleeper, 100) is not None and not launcher.is_alive
    assert is_gone(sleeper)
    with pytest.raises(TplabError, match="ended"):
        launcher.start({}, [], words)
    os.close(words)


def test_an_interrupt_while_a_worker_starts(launcher, monkeypatch):
    def interrupted(timeout):
        raise KeyboardInterrupt

    words = scratch_file()
    monkeypatch.setattr(launcher, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launcher.start({}, [], words)
    assert not launcher.is_alive  # the answer on its way is of no other worker
    os.close(words)


def test_a_launcher_that_cannot_start():
    made, words = Launcher("tests.torch.test_launcher:work", ["no_such_module"]), scratch_file()
    with pytest.raises(TplabError, match="No module named 'no_such_module'"):
        made.start({}, [], words)
    made.close()
    os.close(words)


@pytest.mark.parametrize("how", ["returns", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_workers_end_with_whoever_wants_them(how):
    script = textwrap.dedent(f"""
        import os
        from tplab.torch.processes.launcher import Launcher, scratch_file
        launcher = Launcher("tests.torch.test_launcher:work")
        print(launcher.start({{"sleep": 600}}, [], scratch_file()), launcher._process.pid, flush=True)
        {"" if how == "returns" else how}
    """)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2 and all(is_gone(pid) for pid in pids)


def is_gone(pid, within_seconds=60):
    """Whether the process is no more; one that has ended and was not asked after counts as gone."""
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False
