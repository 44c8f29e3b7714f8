"""What the labs say about speed and memory, and the rows or the model that each sentence must agree with.

One file for each lab that is covered, of the same name without the number: its CLAIMS are entries, in the order of the
lab. To cover one more lab, add its file with an empty tuple: the tests then list the sentences that need an entry.
"""

from importlib import import_module
from pathlib import Path

from labs.source import build
from tests.labs.entries import Entry

_FILES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))

LABS: dict[str, tuple[Entry, ...]] = {
    lab: import_module(f"{__name__}.{file}").CLAIMS for lab in build.names() if (file := lab[3:]) in _FILES
}
"""The labs all of whose sentences about speed and memory have an entry, and these."""
