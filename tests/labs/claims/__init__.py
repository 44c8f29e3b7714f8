"""The labs' sentences about speed and memory, and the rows or the model with which each must agree.

There is one file per covered lab, with its name without the number. Its CLAIMS are entries, in the order of the lab. To
cover another lab, add its file with an empty tuple: the tests then list the sentences that need an entry.
"""

from importlib import import_module
from pathlib import Path

from labs.source import build
from tests.labs.entries import Entry

_FILES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))

LABS: dict[str, tuple[Entry, ...]] = {
    lab: import_module(f"{__name__}.{file}").CLAIMS for lab in build.names() if (file := lab[3:]) in _FILES
}
"""lab -> the entries of all its sentences about speed and memory."""
