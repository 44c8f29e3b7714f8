"""The rooms of the package: frameworks where they belong, no arrow up, no circle, sizes and public names that are held.

docs/design.md draws the floors and has the sizes.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf8")
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tplab").rglob("*.py"))

# What others wrote and each part may not import. Labs and the checks of their exercises may import anything.
TORCH, JAX, WIDGETS = {"torch"}, {"jax", "jaxlib", "optax", "flax"}, {"anywidget", "ipywidgets", "traitlets"}
FORBIDDEN = {"torch": JAX | WIDGETS, "jax": TORCH | WIDGETS, "widgets": TORCH | JAX, "exercises": set[str]()}
CORE = TORCH | JAX | WIDGETS


def module_of(file: Path) -> str:
    """tplab/trace/event.py -> "tplab.trace.event", and a package's __init__.py -> the package."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def imports(source: str, file: Path) -> Iterator[str]:
    """All that `source` imports, also inside functions and for type checkers, as "package.module.name"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = file.parts[: len(file.parts) - node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


SOURCES = {file: (ROOT / file).read_text(encoding="utf8") for file in FILES}
MODULES = {module_of(file): file for file in FILES}
PACKAGES = {module_of(file): dict[str, str]() for file in FILES if file.name == "__init__.py"}
for package, names in PACKAGES.items():  # what a package hands on, and the module it has it from
    names.update((name.rpartition(".")[2], name) for name in imports(SOURCES[MODULES[package]], MODULES[package]))


def source_of(name: str) -> str:
    """The module that a name is imported from, where a package hands it on too; "" where it is not tplab's."""
    if name in MODULES:
        return name
    package, _, last = name.rpartition(".")
    if package in PACKAGES and last in PACKAGES[package]:
        return source_of(PACKAGES[package][last])
    return source_of(package) if package.startswith("tplab") else ""


def imported(source: str, file: Path) -> set[str]:
    """The modules of tplab that a module needs."""
    return {found for name in imports(source, file) if (found := source_of(name))} - {"tplab", module_of(file)}


# ------------------------------------------------------------------------------------------------------- frameworks


def frameworks(source: str, file: Path) -> set[str]:
    """What `source` imports of others that its part of the package must not need."""
    banned = FORBIDDEN.get(file.parts[1], CORE)
    return {name.split(".")[0] for name in imports(source, file)} & banned


def test_frameworks_are_imported_only_where_they_belong():
    assert {str(file): found for file in FILES if (found := frameworks(SOURCES[file], file))} == {}


def test_import_tplab_loads_no_framework_and_no_numpy():
    code = "import sys, tplab; print(sorted({'torch', 'jax', 'anywidget', 'matplotlib', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ----------------------------------------------------------------------------------------------------------- floors


def drawn_floors() -> dict[str, dict[str, int]]:
    """Folder -> {room: its floor}, as docs/design.md draws them: the highest floor first."""
    drawing = re.search(r"^## Floors\n.*?^```\n(.*?)^```$", DESIGN, re.MULTILINE | re.DOTALL)
    assert drawing
    floors: dict[str, list[list[str]]] = {}
    for line in drawing[1].splitlines():
        if line.startswith(" "):
            floors[list(floors)[-1]].append(line.split())
        else:
            floors[line.strip()] = []
    return {
        folder: {room: level for level, rooms in enumerate(reversed(rows)) for room in rooms}
        for folder, rows in floors.items()
    }


FLOORS = drawn_floors()


def rooms_of(module: str) -> list[tuple[str, str]]:
    """ "tplab.torch.ranks.turns" -> [("tplab", "torch"), ("tplab/torch", "ranks")]: folders drawn, and rooms."""
    parts = module.split(".")
    pairs = [("/".join(parts[:place]), parts[place]) for place in range(1, len(parts))]
    return [(folder, room) for folder, room in pairs if folder in FLOORS]


def arrows_up(source: str, file: Path) -> set[str]:
    """The modules that `source` imports from its own floor, or from a higher one, and that are not in its room."""
    here = rooms_of(module_of(file))
    found = set()
    for module in imported(source, file):
        for (folder, room), (other_folder, other) in zip(here, [*rooms_of(module), ("", "")]):
            if (folder, room) == (other_folder, other):
                continue
            if folder != other_folder or FLOORS[folder][room] <= FLOORS[folder][other]:
                found.add(module)
            break
    return found


def test_every_room_is_on_a_floor():
    rooms = {pair for module in MODULES if module != "tplab" for pair in rooms_of(module)}
    assert rooms == {(folder, room) for folder, floors in FLOORS.items() for room in floors}


def test_no_arrow_points_up():
    assert {str(file): found for file in FILES
            if file.name != "__init__.py" and (found := arrows_up(SOURCES[file], file))} == {}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("tplab/mesh.py", "import torch"),
        ("tplab/mesh.py", "def f():\n    from tplab.widgets import animate"),
        ("tplab/mesh.py", "from . import torch"),
        ("tplab/mesh.py", "from tplab.sharding import P"),
        ("tplab/lines.py", "from tplab.mesh import Mesh"),
        ("tplab/cost/clock.py", "from tplab import trace"),
        ("tplab/trace/event.py", "if TYPE_CHECKING:\n    from tplab.schedules import Schedule"),
        ("tplab/schedules/rules/streams.py", "from ... import jax"),
        ("tplab/torch/ranks/rank.py", "import jax.numpy as jnp"),
        ("tplab/torch/ranks/rank.py", "from ..comm.rings import ring_all_gather"),
        ("tplab/torch/layers/linear.py", "from tplab.torch import run"),
        ("tplab/torch/layers/linear.py", "import tplab.torch"),
        ("tplab/jax/comm/rings.py", "from tplab.torch.comm import rings"),
        ("tplab/widgets/animate.py", "from tplab import torch"),
    ],
)
def test_an_arrow_up_is_seen(file: str, source: str):
    assert arrows_up(source, Path(file)) or frameworks(source, Path(file))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("tplab/torch/comm/rings.py", "import torch\nfrom ...mesh import Mesh\nfrom . import collectives"),
        ("tplab/jax/run.py", "import jax\nfrom tplab import Mesh\nfrom tplab.trace import Trace"),
        ("tplab/widgets/animate.py", "import anywidget\nfrom tplab.trace import Trace"),
        ("tplab/pipeline/balance.py", "from .partition import Partition\nfrom ..schedules import Costs"),
        ("tplab/exercises/overlap.py", "import jax\nfrom tplab.torch import run"),
    ],
)
def test_an_arrow_down_is_left_alone(file: str, source: str):
    assert not arrows_up(source, Path(file)) and not frameworks(source, Path(file))


# ---------------------------------------------------------------------------------------------------------- circles


def circle(needs: Mapping[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, the first of them again at the end; [] where there are none."""
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_one_another_in_a_circle():
    needs = {module_of(file): imported(SOURCES[file], file) for file in FILES if file.name != "__init__.py"}
    assert circle(needs) == []


def test_a_circle_is_seen():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"d"}}) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


# ---------------------------------------------------------------------------------------------------------- ratchets


COUNTED = [path for path in (ROOT / "tplab").rglob("*") if path.suffix in {".py", ".js", ".css"}]


def rooms_with_sizes() -> Iterator[tuple[str, list[Path], int]]:
    """The rows of the tables in docs/design.md: the rooms' names, their files and folders, and their lines at most."""
    tables = DESIGN.partition("## Floors")[0].split("| room | lines, at most |")[1:]
    for table, homes in zip(tables, (("",), ("torch", "jax")), strict=True):
        for names, size in re.findall(r"^\| (`[^|]+) \| ([\d,]+) \|", table, re.MULTILINE):
            paths = [
                ROOT / "tplab" / home / name.rstrip("/") for name in re.findall(r"`([\w/]+)`", names) for home in homes
            ]
            found = [path for one in paths for path in (one, one.with_suffix(".py")) if path.exists()]
            yield names, found, int(size.replace(",", ""))


def lines_in(paths: list[Path]) -> int:
    files = [file for file in COUNTED if any(file == path or path in file.parents for path in paths)]
    return sum(len(file.read_text(encoding="utf8").splitlines()) for file in files)


def test_every_file_is_in_one_room_with_a_size():
    listed = [path for _, paths, _ in rooms_with_sizes() for path in paths]
    doors = [ROOT / "tplab" / home / "__init__.py" for home in ("", "torch", "jax")]  # what is public
    outside = {file: [path for path in listed if file == path or path in file.parents] for file in COUNTED}
    assert {str(file.relative_to(ROOT)): rooms for file, rooms in outside.items()
            if len(rooms) != 1 and file not in doors} == {}  # fmt: skip


def test_no_room_has_grown():
    """Whoever needs more lines changes the number in docs/design.md in the same commit, and says why."""
    sizes = [(names, lines_in(paths), most) for names, paths, most in rooms_with_sizes()]
    assert [f"{names}: {lines:,} lines, at most {most:,}" for names, lines, most in sizes if lines > most] == []


def test_public_names_are_frozen():
    """A public name is a promise: tests/public_names.txt changes in the commit that adds or drops one."""
    found = set()
    for package, file in MODULES.items():
        for node in ast.parse(SOURCES[file]).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found |= {f"{package}.{name}" for name in ast.literal_eval(node.value)}
    frozen = set((ROOT / "tests" / "public_names.txt").read_text(encoding="utf8").split())
    assert (sorted(found - frozen), sorted(frozen - found)) == ([], []), "new names, and names that are gone"
