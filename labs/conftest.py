"""nbval runs every lab. What its widgets show is kept, so that `make site` need not run it again, and shows the same as
if it had."""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest
from nbval.plugin import IPyNbCell, IPyNbFile

from website import states


class Listener:
    """Hears what a lab's kernel says of its widgets, and notes what each cell shows."""

    def __init__(self, lab: IPyNbFile):
        self.traits: dict[str, dict[str, Any]] = {}
        self.packed: dict[str, dict[str, str]] = {}
        self.found: dict[str, list[states.Output]] = {}
        self.file = states.file_of(lab.path.stem)
        self._next_message = lab.get_kernel_message
        lab.get_kernel_message = self.next_message
        # Cells are counted as Jupyter counts them, so that what names a line of a cell names its number too.
        assert lab.kernel
        lab.kernel.kc.execute = partial(self.counted, lab.kernel.kc.execute)

    @staticmethod
    def counted(execute: Callable[..., str], *args: Any, **options: Any) -> str:
        return execute(*args, **{**options, "store_history": True})

    def next_message(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        message = self._next_message(*args, **kwargs)
        if message["msg_type"] in ("comm_open", "comm_msg") and "state" in message["content"]["data"]:
            model, data = message["content"]["comm_id"], message["content"]["data"]
            self.traits.setdefault(model, {}).update(data["state"])
            packed = [base64.b64encode(buffer).decode() for buffer in message["buffers"]]
            names = [path[0] for path in data.get("buffer_paths", [])]
            self.packed.setdefault(model, {}).update(zip(names, packed))
        return message


LISTENER = pytest.StashKey[Listener]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    if not isinstance(item, IPyNbCell):
        return (yield)
    lab = item.parent
    if LISTENER not in lab.stash:
        lab.stash[LISTENER] = Listener(lab)
    listener = lab.stash[LISTENER]
    result = yield
    listener.found[item.cell.id] = states.outputs_of(item.test_outputs or [], listener.traits, listener.packed)
    if listener.found.keys() >= {cell.id for cell in lab.nb.cells if cell.cell_type == "code"}:
        states.keep(listener.file, listener.found)
    return result
