"""A launcher: a process that starts others by fork, so that slow imports happen only once."""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

from tplab.errors import TplabError
from tplab.spare import scratch_file

LAST_WORDS = 4000
"""Bytes of a process's last output that an error repeats after the process has ended."""

_BOOTSTRAP = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import runpy
runpy.run_path(sys.argv[2])["serve"](sys.argv)"""


class Launcher:
    """The process that starts workers, as seen from the process that wants them.

    entry      "module:function", called in each worker as function(arguments, fds)
    preload    modules that are imported before the first fork, if the system allows a fork after that

    The launcher is a fresh interpreter without the caller's threads: forking a process in which JAX or OpenMP has
    started threads can hang. Workers end with the launcher, the launcher with its caller, and processes that a worker
    has started with the worker.
    """

    def __init__(self, entry: str, preload: Sequence[str] = ()):
        self._control, theirs = Pipe()
        self.words = scratch_file()
        control = str(theirs.fileno())
        command = [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), __file__, control, entry, *preload]
        # NumPy's BLAS would start threads on import, and they do not survive a fork
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.words,
            stderr=self.words,
        )
        theirs.close()
        self._lock = threading.RLock()
        self._ended: dict[int, int] = {}
        self._is_gone = False

    def fileno(self) -> int:
        """For select: readable when a worker has ended."""
        return self._control.fileno()

    @property
    def is_alive(self) -> bool:
        return not self._is_gone and self._process.poll() is None

    def start(self, arguments: dict[str, Any], fds: Sequence[int], words: int) -> int:
        """Start a worker with these file descriptors; its stdout and stderr go to `words`. Returns its process id."""
        with self._lock:
            try:
                self._control.send(("start", arguments, 1 + len(fds)))
                send_fds(self._control, [words, *fds])
                while not self._is_gone:
                    if (pid := self._read(None)) is not None:
                        return pid
            except BaseException as error:
                self._is_gone = True  # after Ctrl-C too: the next message would be taken for the rest of this one
                if not isinstance(error, OSError):
                    raise
        raise TplabError(
            "the process that starts the ranks' processes ended"
            + (f"; it said:\n{said}" if (said := text_of(self.words, LAST_WORDS).strip()) else " without a word")
        )

    def ended(self, pid: int, within_seconds: float = 0.0) -> int | None:
        """How the worker `pid` ended, as a status of `os.waitpid`; None while it is running."""
        deadline = time.monotonic() + within_seconds
        with self._lock:
            while pid not in self._ended and not self._is_gone:
                left = max(0.0, deadline - time.monotonic())
                self._read(left)
                if not left:
                    break
            # workers do not outlive their launcher
            return self._ended.get(pid, signal.SIGKILL if self._is_gone else None)

    def kill(self, pids: Sequence[int]) -> None:
        """End these workers at once, whatever they are doing."""
        if pids and not self._is_gone:
            try:
                with self._lock:
                    self._control.send(("kill", list(pids), 0))
            except OSError:
                self._is_gone = True

    def close(self) -> None:
        """End the launcher and every worker that is left."""
        self._is_gone = True
        self._control.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self.words)

    def forget(self) -> None:
        """Drop the launcher in a copy of this process (after a fork), to which it does not belong."""
        self._is_gone = True
        self._control.close()
        self._process.returncode = 0  # the copy must not wait for it

    def _read(self, timeout: float | None) -> int | None:
        """Read a message of the launcher, if there is one. Returns the worker that it has started, if it says so, and
        records which workers have ended."""
        if not self._control.poll(timeout):
            return None
        try:
            started, ended = self._control.recv()
        except (EOFError, OSError):
            self._is_gone = True
            return None
        self._ended.update(ended)
        return started


def send_fds(to: Connection, fds: Sequence[int]) -> None:
    """Send file descriptors. No answer is awaited, as multiprocessing does on macOS: another thread might read it."""
    with _socket(to) as way:
        socket.send_fds(way, [b"f"], fds)


def receive_fds(source: Connection, count: int) -> list[int]:
    """The file descriptors that the other side sends next. Raises EOFError if it is gone, and OSError if this process
    may not open so many files."""
    with _socket(source) as way:
        data, fds, *_ = socket.recv_fds(way, 1, count)
    if not data:
        raise EOFError
    if len(fds) < count:
        raise OSError("file descriptors were lost on their way: too many files are open")
    return fds


def _socket(connection: Connection) -> socket.socket:
    found = socket.socket(fileno=os.dup(connection.fileno()))
    found.setblocking(True)  # whatever the program's own setdefaulttimeout: both share this setting
    return found


def text_of(fd: int, last_bytes: int | None = None) -> str:
    """The contents of a scratch file, or the end of it."""
    size = os.fstat(fd).st_size
    start = 0 if last_bytes is None else max(0, size - last_bytes)
    return os.pread(fd, size - start, start).decode(errors="replace")


# --- in the launcher's own process -----------------------------------------------------------------------------------


def serve(argv: Sequence[str]) -> None:
    """Start workers on request until the caller is gone, then end them all."""
    _, _, _, control_fd, entry, *preload = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group: the caller decides
    if sys.platform == "linux":  # elsewhere, system libraries do not survive a fork after their first use
        for name in preload:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # keeps the garbage collector of workers from writing to the shared memory
    control = Connection(int(control_fd))
    bell, ringer = socket.socketpair()
    ringer.setblocking(False)
    bell.setblocking(False)
    signal.set_wakeup_fd(ringer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([control, bell], [], [])
        try:
            if bell in ready:
                bell.recv(4096)
                if ended := _reap(children):
                    control.send((None, ended))
            if control in ready:
                what, about, num_fds = control.recv()
                fds = receive_fds(control, num_fds) if num_fds else []
                if what == "kill":
                    for pid in children.intersection(about):
                        _kill(pid)
                    continue
                ours, pid = os.getpid(), os.fork()
                if not pid:
                    for mine in (control, bell, ringer):
                        mine.close()
                    _work(entry, about, fds, ours)
                os.setpgid(pid, pid)
                children.add(pid)
                control.send((pid, []))
                for fd in fds:
                    os.close(fd)
        except (EOFError, ConnectionError):
            for pid in children:
                _kill(pid)
            os._exit(0)


def _kill(pid: int) -> None:
    """End a worker and everything that it has started: they are one process group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _reap(children: set[int]) -> list[tuple[int, int]]:
    ended = []
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            ended.append((pid, status))
            _kill(pid)
    return ended


def _work(entry: str, arguments: dict[str, Any], fds: list[int], launcher: int) -> NoReturn:
    """Run a worker, from its first moment to its last."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)  # on both sides of the fork, as either may be first
        die_with(launcher)
        words, *rest = fds
        os.dup2(words, 1)
        os.dup2(words, 2)
        os.close(words)
        module, _, name = entry.partition(":")
        getattr(importlib.import_module(module), name)(arguments, rest)
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)  # sys.stderr may be a program's by now
    finally:
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
        os._exit(status)


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends (on Linux; elsewhere this does nothing)."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
    if os.getppid() != parent:  # it has already ended
        os._exit(1)
