"""Run cells as a page's worker does, in a process without frameworks; started by test_cells.py.

    python cells_like_a_browser.py FOLDER      numbers and cells as JSON on stdin, the messages of each on stdout

FOLDER has the site's tplab, and cells.py.
"""

import importlib.util
import json
import sys
from pathlib import Path

import like_a_browser

like_a_browser.MISSING = {"torch", "jax", "transformers", "ortools"}


def main():
    folder, out = Path(sys.argv[1]), sys.stdout
    sys.meta_path.insert(0, like_a_browser.NotThere())
    sys.path.insert(0, str(folder))
    said = []
    cells = importlib.import_module("cells").Cells(lambda text, buffers: said[-1].append(json.loads(text)))
    for number, source in json.load(sys.stdin):
        said.append([])
        cells.run(number, source)
    assert Path(str(sys.modules["tplab"].__file__)).is_relative_to(folder)
    json.dump(said, out)


if __name__ == "__main__":
    main()
