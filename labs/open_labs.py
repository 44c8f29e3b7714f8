"""Open the labs in JupyterLab, as copies of your own: a pull then never meets a lab that you have run.

    python labs/open_labs.py [option of JupyterLab ...]

The copies are in my_labs/, beside labs/, so that links and pictures lead to the same places. A lab that is newer than
your copy replaces it as long as you have changed no cell; otherwise yours stays, and a line says so. Looking at a lab
or running it is no change: its outputs can be made again.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST = "00_first_look.ipynb"
RECORD = ".as_copied.json"


def copy_labs(labs: Path, mine: Path) -> list[str]:
    """Bring `mine` up to date without losing a change; return the names of the copies that stay behind their lab."""
    record = mine / RECORD
    mine.mkdir(exist_ok=True)
    copied: dict[str, list[str]] = json.loads(record.read_text(encoding="utf8")) if record.exists() else {}
    behind = []
    for lab in sorted(labs.glob("*.ipynb")):
        copy, newest, before = mine / lab.name, _digests(lab), copied.get(lab.name)
        if copy.exists():
            if before == newest:
                continue  # also what was run in it stays
            if _digests(copy)[0] not in ((before or newest)[0], newest[0]):
                behind.append(lab.name)
                continue
        shutil.copyfile(lab, copy)
        copied[lab.name] = newest
    shutil.copytree(labs / "images", mine / "images", dirs_exist_ok=True)
    record.write_text(json.dumps(copied, indent=1), encoding="utf8")
    return behind


def _digests(file: Path) -> list[str]:
    """Of what is written in a notebook's cells, and of the whole file. JupyterLab completes the metadata of a notebook
    that it only shows."""
    data = written = file.read_bytes()
    try:
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(data)["cells"]]
        written = json.dumps(cells).encode()
    except (ValueError, KeyError, TypeError):
        pass  # it is no longer a notebook
    return [hashlib.sha256(part).hexdigest() for part in (written, data)]


def main(options: list[str]) -> None:
    from jupyterlab.labapp import LabApp

    os.chdir(ROOT)
    settings = [str(ROOT / "labs" / "jupyter"), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(settings)  # a saved lab shows its widgets without a kernel
    for name in copy_labs(Path("labs"), Path("my_labs")):
        print(f"my_labs/{name} has your changes and stays as it is; rename it to get the newer labs/{name} beside it")
    LabApp.launch_instance([f"--ServerApp.root_dir={ROOT}", *options, f"my_labs/{FIRST}"])  # links lead to docs/ too


if __name__ == "__main__":
    main(sys.argv[1:])
