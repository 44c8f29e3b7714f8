"""Whether a checkpoint is as it was written: the size and the SHA-256 of every file, and of the index itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tplab.errors import CheckpointError

INDEX = "index.json"


def of_file(path: Path) -> dict[str, Any]:
    """What the index says about a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def sealed(index: Mapping[str, Any]) -> dict[str, Any]:
    """The index with a checksum of all that it says."""
    return {**index, "checksum": _digest(index)}


def read_index(path: Path) -> dict[str, Any]:
    """The index of the checkpoint in the folder `path`. Raises CheckpointError if it is missing or damaged.

    An index from before there were checksums has none, and says nothing about files.
    """
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except OSError as error:
        raise damaged(path, INDEX, "is missing" if isinstance(error, FileNotFoundError) else f"{error}") from None
    except (ValueError, RecursionError):
        raise damaged(path, INDEX, "is no whole JSON text; it was cut short or changed") from None
    told = index.pop("checksum", None) if isinstance(index, dict) else None
    if not isinstance(index, dict) or not isinstance(index.get("arrays"), dict):
        raise damaged(path, INDEX, "does not list any arrays")
    if told != _digest(index) and (told is not None or "files" in index):
        raise damaged(path, INDEX, "has changed since it was written")
    return index


def check_files(path: Path, index: Mapping[str, Any], files: Iterable[str] | None = None) -> None:
    """Raise CheckpointError if one of these files, or any file of the checkpoint, is not as it was written."""
    about: Mapping[str, Any] = index.get("files", {})
    for name in about if files is None else files:
        if not (path / name).is_file():
            raise damaged(path, name, "is missing")
        if name not in about:
            continue  # from before there were checksums
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
