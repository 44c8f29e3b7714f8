"""A checkpoint: the arrays of a model and its optimizer, saved by the ranks of one mesh, read by those of any other.

    step-00000050/
        index.json                      the model's sizes; every array, and which file has which part of it; checksums
        rank-0-of-8.safetensors         what rank 0 has written: its part of each array, under the array's name

A part is a box of the whole array, or a range of a box's numbers in order, which is how ZeRO cuts. Names are those of
the whole model, in either framework, so JAX can load what torch has saved. Every number is written once.

A checkpoint is first written to a temporary folder, step-00000050.partial, flushed to disk, and then renamed. So a save
that was interrupted because the program was killed is never mistaken for a complete one, and earlier checkpoints are
left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tplab.errors import CheckpointError, ShapeError
from tplab.models.gpt import GPTConfig

Arrays = dict[str, np.ndarray]

STATES = ("exp_avg", "exp_avg_sq")
"""AdamW's states of every parameter, with torch's names: "exp_avg.norm.weight" belongs to "model.norm.weight"."""


@dataclass(frozen=True)
class Part:
    """Where the numbers that a rank writes are in the whole array.

    shape         of the whole array
    start, size   of the box: its first element, and its size in each dim
    begin, end    which numbers of the box, read row by row
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...], held: range | None = None):
        """The whole box, or the range of it that is held."""
        held = range(int(np.prod(size))) if held is None else held
        return cls(shape, start, size, held.start, held.stop)


class Owned(NamedTuple):
    """An array that a rank has to write."""

    part: Part
    array: np.ndarray


def begin(folder: str | Path, step: int) -> Path:
    """The folder that a checkpoint is written into. Called by one rank, before any rank writes.

    Raises FileExistsError if the step was already saved: a complete checkpoint is never overwritten.
    """
    done = _path(folder, step)
    if done.exists():
        raise FileExistsError(f"{done} is there already; resume from it, or give another folder")
    partial = partial_path(folder, step)
    shutil.rmtree(partial, ignore_errors=True)  # left by a save that was killed
    partial.mkdir(parents=True)
    return partial


def write(partial: Path, rank: int, num_ranks: int, owned: Mapping[str, Owned]) -> None:
    """Write what a rank owns."""
    from safetensors.numpy import save_file

    name = f"rank-{rank}-of-{num_ranks}"
    file = partial / f"{name}.safetensors"
    save_file({key: np.ascontiguousarray(array) for key, (_, array) in owned.items()}, str(file))
    _sync(file)
    parts = {key: asdict(part) for key, (part, _) in owned.items()}
    _write(partial / f"{name}.json", json.dumps({"file": of_file(file), "parts": parts}))


def finish(partial: Path, step: int, num_ranks: int, config: GPTConfig) -> None:
    """Write the index, and give the folder its final name. Called by one rank, when all ranks have written."""
    arrays, files = _arrays(partial, num_ranks)
    index = {"step": step, "num_ranks": num_ranks, "model": _model(config), "arrays": arrays, "files": files}
    _write(partial / INDEX, json.dumps(index | {"checksum": _digest(index)}, indent=1))
    _sync(partial)
    os.replace(partial, partial.with_suffix(""))
    _sync(partial.parent)


def partial_path(folder: str | Path, step: int) -> Path:
    """Where a checkpoint is while it is being written."""
    return Path(folder) / f"step-{step:08}.partial"


def load(folder: str | Path, step: int, names: Iterable[str] | None = None, *, is_checked: bool = False) -> Arrays:
    """The whole arrays of a checkpoint: name -> array.

    names        only these
    is_checked   whether `beginning` has compared the files with their checksums, which takes reading all of them

    Raises FileNotFoundError if there is no such checkpoint, CheckpointError if a file of it is damaged, and ShapeError
    if parts of an array are missing.
    """
    path = _path(folder, step)
    if not path.exists():
        there = ", ".join(sorted(p.name for p in Path(folder).glob("step-*"))) or "no checkpoint"
        raise FileNotFoundError(f"{folder} has no checkpoint of step {step}, but {there}")
    index = read_index(path)
    arrays: Arrays = {}
    missing: dict[str, int] = {}
    for file, parts in _by_file(path, index["arrays"], names).items():
        if not is_checked:
            check_files(path, index, [file])
        for name, part, array in _read(path, file, parts):
            whole = arrays.setdefault(name, np.zeros(part.shape, array.dtype))
            _put(whole, part, array)
            missing[name] = missing.get(name, whole.size) - array.size
    for name, count in missing.items():
        if count:
            raise ShapeError(f"{count} numbers of {name!r} are in no file of {path}; save the checkpoint again")
    return arrays


def beginning(folder: str | Path | None, resume: bool, config: GPTConfig) -> int:
    """How many steps have been done: those of the newest checkpoint, if training resumes from there.

    Raises FileExistsError if there are already checkpoints and training does not resume, ValueError if it resumes but
    the checkpoint is of another model, and CheckpointError if the newest one is damaged: it names the newest that is
    not. Where there is nothing to resume from, it prints that training begins at step 0.
    """
    steps = [] if folder is None else _steps(folder)
    if steps and not resume:
        raise FileExistsError(
            f"{folder} has a checkpoint of step {steps[-1]} already; resume=True goes on from there, or give another "
            "folder"
        )
    if folder is None or not steps:
        if resume:
            there = "no folder was given" if folder is None else f"{folder} has no complete checkpoint"
            print(f"resume=True, but {there}: training begins at step 0", flush=True)
        return 0
    step = steps[-1]
    try:
        index = _checked(folder, step)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_way_out(folder, steps)}") from None
    saved, wanted = index.get("model", {}), _model(config)
    unlike = [name for name in wanted if saved.get(name) != wanted[name]]
    if unlike:
        there, here = (", ".join(f"{name} {sizes.get(name)!r}" for name in unlike) for sizes in (saved, wanted))
        raise ValueError(
            f"the checkpoint of step {step} in {folder} is of a model with {there}, and this one has {here}; train "
            "that model on, or give another folder"
        )
    return step


def _steps(folder: str | Path) -> list[int]:
    """The steps that were saved, damaged ones included, in order."""
    found = [re.fullmatch(r"step-(\d+)", path.name) for path in Path(folder).glob("step-*")]
    return sorted(int(match[1]) for match in found if match)


def _checked(folder: str | Path, step: int) -> dict[str, Any]:
    """The index of a checkpoint that is whole. Raises CheckpointError for one that is not."""
    path = _path(folder, step)
    index = read_index(path)
    files = _by_file(path, index["arrays"])
    check_files(path, index, files)
    return index


def _way_out(folder: str | Path, steps: list[int]) -> str:
    """Advice for the error message if the last of these steps is damaged."""
    *older, newest = steps
    for step in reversed(older):
        try:
            _checked(folder, step)
        except CheckpointError:
            continue
        others = [_path(folder, other).name for other in steps if other > step]
        return f"Step {step} is whole: to go on from there, delete {' and '.join(others)}"
    return (
        f"No other step is whole: restore {_path(folder, newest).name} from a copy, or give another folder to begin at "
        "step 0"
    )


def _model(config: GPTConfig) -> dict[str, Any]:
    """The configuration that must equal a checkpoint's, as stored in a file. Dropout, how experts are balanced and the
    initial weights may differ, but not whether routers have a bias."""
    sizes: dict[str, Any] = asdict(config)
    sizes |= {"hidden": config.hidden_width, "num_kv_heads": config.num_kv_heads or config.num_heads}
    if config.experts is not None:
        about = {k: v for k, v in sizes["experts"].items() if k not in ("balance", "over")}
        sizes["experts"] = about | {"bias_rate": bool(about["bias_rate"])}
    return json.loads(json.dumps({k: v for k, v in sizes.items() if k not in ("dropout", "deviation")}))


def _path(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step-{step:08}"


def _by_file(
    path: Path, arrays: Mapping[str, Any], names: Iterable[str] | None = None
) -> dict[str, list[tuple[str, Part]]]:
    """file -> the parts of arrays that it has. Raises FileNotFoundError for a name that no array has."""
    files: dict[str, list[tuple[str, Part]]] = {}
    for name in arrays if names is None else names:
        if name not in arrays:
            raise FileNotFoundError(
                f"the checkpoint of step {int(path.name[5:])} in {path.parent} has no array {name!r}"
            )
        for part in arrays[name]:
            files.setdefault(part["file"], []).append((name, Part(**part["part"])))
    return files


def _read(path: Path, file: str, parts: Iterable[tuple[str, Part]]) -> Iterator[tuple[str, Part, np.ndarray]]:
    """The parts that a file has. Raises CheckpointError if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path / file, framework="np") as opened:
            for name, part in parts:
                array = opened.get_tensor(name)
                if array.size != part.end - part.begin:
                    raise ValueError(
                        f"{array.size:,} numbers of {name!r}, where the index says {part.end - part.begin:,}"
                    )
                yield name, part, array
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, file, f"cannot be read ({error})") from None


def _arrays(partial: Path, num_ranks: int) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Every array -> the files that have parts of it; and every file -> its checksum."""
    arrays: dict[str, list[dict[str, Any]]] = {}
    files: dict[str, Any] = {}
    for rank in range(num_ranks):
        name = f"rank-{rank}-of-{num_ranks}"
        written = json.loads((partial / f"{name}.json").read_text())
        files[f"{name}.safetensors"] = written["file"]
        for key, part in written["parts"].items():
            arrays.setdefault(key, []).append({"file": f"{name}.safetensors", "part": part})
        (partial / f"{name}.json").unlink()
    return arrays, files


def _put(whole: np.ndarray, part: Part, array: np.ndarray) -> None:
    box = tuple(slice(start, start + size) for start, size in zip(part.start, part.size))
    if array.size == np.prod(part.size):
        whole[box] = array.reshape(part.size)
        return
    flat = whole[box].reshape(-1)  # a copy, if the box has several dims
    flat[part.begin : part.end] = array.reshape(-1)
    whole[box] = flat.reshape(part.size)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder to sync it
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- checksums --------------------------------------------------------------------------------------------------------


INDEX = "index.json"


def of_file(path: Path) -> dict[str, Any]:
    """The index's entry for a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_index(path: Path) -> dict[str, Any]:
    """The index of the checkpoint in the folder `path`. Raises CheckpointError if it is missing or damaged."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except OSError as error:
        raise damaged(path, INDEX, "is missing" if isinstance(error, FileNotFoundError) else f"{error}") from None
    except (ValueError, RecursionError):
        raise damaged(path, INDEX, "is no whole JSON text; it was cut short or changed") from None
    told = index.pop("checksum", None) if isinstance(index, dict) else None
    if not isinstance(index, dict) or not isinstance(index.get("arrays"), dict):
        raise damaged(path, INDEX, "does not list any arrays")
    if told != _digest(index):
        raise damaged(path, INDEX, "has changed since it was written")
    return index


def check_files(path: Path, index: Mapping[str, Any], files: Iterable[str] | None = None) -> None:
    """Raise CheckpointError if one of these files, or any file of the checkpoint, is not as it was written."""
    about: Mapping[str, Any] = index["files"]
    for name in about if files is None else files:
        if not (path / name).is_file():
            raise damaged(path, name, "is missing")
        size = (path / name).stat().st_size
        if size != about[name]["bytes"]:
            raise damaged(path, name, f"has {size:,} of {about[name]['bytes']:,} bytes")
        if of_file(path / name) != about[name]:
            raise damaged(path, name, "has changed since it was written")


def damaged(path: Path, file: str, how: str) -> CheckpointError:
    """The error that names the step and the file."""
    step = path.name.removeprefix("step-").lstrip("0") or "0"
    return CheckpointError(f"the checkpoint of step {step} in {path.parent} is damaged: {file} {how}")


def _digest(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
