"""Run the lab as in a page's worker, in a process that can do no more than a browser; started by test_pyodide.py.

    python like_a_browser.py FOLDER      questions as JSON on stdin, answers as JSON on stdout

FOLDER has the unpacked zip. There are no widgets, no pictures, no frameworks, no threads, no processes and no files.
Integers have 32 bits, as on wasm32: both NumPy's default, and the indices that it accepts.
"""

import _thread
import base64
import importlib
import importlib.abc
import json
import sys
from types import ModuleType

import numpy as np

MISSING = {"anywidget", "ipywidgets", "traitlets", "PIL", "matplotlib", "IPython", "torch", "jax", "ortools"}
INDEX_OF = {"bincount": 0, "repeat": 1}
"""NumPy's functions that refuse unsafe indices -> the position of that argument."""


class NotThere(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"no module named {name!r} in a browser", name=name)


class NumPy32(ModuleType):
    """NumPy as on a machine with 32-bit addresses."""

    def __getattr__(self, name):
        if name in ("intp", "int_"):
            return np.int32
        found = getattr(np, name)
        return found if isinstance(found, type) or not callable(found) else Function(name, found)


class Function:
    """One of its functions. Integers are int32, unless int64 was requested."""

    def __init__(self, name, function):
        self.name, self.function = name, function

    def __call__(self, *args, **kwargs):
        if self.name in INDEX_OF and getattr(args[INDEX_OF[self.name]], "dtype", None) == np.int64:
            raise TypeError(f"{self.name}: cannot cast from int64 to int32 according to the rule 'safe'")
        made = self.function(*args, **kwargs)
        asked_for = any(one is np.int64 for one in (*args, kwargs.get("dtype"))) or "out" in kwargs
        return made if asked_for else shorter(made)

    def __getattr__(self, name):  # np.maximum.reduceat
        return Function(f"{self.name}.{name}", getattr(self.function, name))


def shorter(value):
    if isinstance(value, tuple):
        return tuple(map(shorter, value))
    if isinstance(value, np.ndarray) and value.dtype == np.int64:
        if value.size and (value.max() > 2**31 - 1 or value.min() < -(2**31)):
            raise OverflowError("a whole number does not fit into 32 bits")
        return value.astype(np.int32)
    return value


def refuse(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "socket.connect"):
        raise RuntimeError(f"{event} in a browser")
    is_data = "/measured/" in str(args[0])  # of tplab, in the zip
    if event == "open" and not is_data and not str(args[0]).endswith((".py", ".pyc", ".so")):
        raise RuntimeError(f"open({args[0]!r}) in a browser")


def start_no_thread(*args, **kwargs):
    raise RuntimeError("can't start new thread")


def main():
    asked = json.load(sys.stdin)
    numpy32 = NumPy32("numpy")
    numpy32.__path__ = np.__path__
    sys.modules["numpy"] = numpy32
    sys.meta_path.insert(0, NotThere())
    sys.path.insert(0, sys.argv[1])
    _thread.start_new_thread = start_no_thread
    sys.addaudithook(refuse)
    Workbench = importlib.import_module(f"tplab.widgets.{asked['room']}.workbench").Workbench

    sys.modules["numpy"] = np  # for NumPy's own imports; tplab has the other one
    bench = Workbench(asked["first"])
    answers = []
    for question in asked["questions"]:
        text, board = bench.reply(json.dumps(question))
        answers.append([json.loads(text), base64.b64encode(board).decode()])
    read = sorted(
        module.__file__ for name, module in sys.modules.items() if name.startswith("tplab.") and module.__file__
    )
    index = str(bench.schedule.offsets.dtype) if asked["room"] == "schedule" else ""
    json.dump({"answers": answers, "read": read, "index": index}, sys.stdout)


if __name__ == "__main__":
    main()
