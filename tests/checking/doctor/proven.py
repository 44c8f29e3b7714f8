"""Proofs about scripts that are not repeated while no text that they depend on has changed.

`test_scripts` and `test_jax_steps` prove the claims about the scripts that judge the doctor, without the doctor. Each
proof is recorded in proven.txt, as a hash of the script, of the claims about it, and of the code that compares the two.
A missing proof is made, and so is every proof with another Python or other versions of the packages.

The scripts run on tplab's simulated ranks, which no hash includes. Therefore the first proof of each kind is always
made, and so are those of scripts that import tplab. `python -m tests.checking.doctor.proven` makes and records missing
proofs.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import version
from inspect import getsource
from pathlib import Path
from typing import Any, NamedTuple

import pytest

RECORD = Path(__file__).with_name("proven.txt")
PACKAGES = ("torch", "jax", "numpy", "transformers", "accelerate")
"""The packages that run the scripts. With other versions of them, every proof is made."""
IMPORTS_TPLAB = re.compile(r"^\s*(from|import) tplab\b", re.MULTILINE)


class Proof(NamedTuple):
    """A proof about each row, and the texts on which it depends, the script first."""

    prove: Callable[[Any], None]
    rows: Sequence[Any]
    name: Callable[[Any], str]
    texts: Callable[[Any], Iterable[str]]

    def is_needed(self, row: Any) -> bool:
        """Whether the proof must be made now."""
        return (
            row is self.rows[0]
            or bool(IMPORTS_TPLAB.search(next(iter(self.texts(row)))))
            or self.hash_of(row) not in written_down()
        )

    def hash_of(self, row: Any) -> str:
        parts = [source_of(self.prove), *self.texts(row)]
        return hashlib.sha256(b"".join(hashlib.sha256(part.encode()).digest() for part in parts)).hexdigest()[:24]

    def line_of(self, row: Any) -> str:
        return f"{self.hash_of(row)} {self.prove.__name__} {self.name(row)}"


PROOFS: list[Proof] = []
source_of: Callable[[Any], str] = cache(getsource)


def proven_of_each(rows: Sequence[Any], name: Callable[[Any], str], texts: Callable[[Any], Iterable[str]]) -> Any:
    """A test of each row that runs only once while it and these texts stay the same. Its argument is the row."""

    def decorate(prove: Callable[[Any], None]) -> Callable[[Any], None]:
        proof = Proof(prove, rows, name, texts)
        PROOFS.append(proof)

        @pytest.mark.parametrize("row", rows, ids=name)
        @wraps(prove)
        def test(row: Any) -> None:
            if proof.is_needed(row):
                prove(row)

        return test

    return decorate


@cache
def versions() -> str:
    versions = (f"{package}=={version(package).partition('+')[0]}" for package in PACKAGES)
    return " ".join([f"python=={'.'.join(platform.python_version_tuple()[:2])}", *versions])


@cache
def written_down() -> frozenset[str]:
    """The hashes of the proofs that were made with these versions."""
    lines = RECORD.read_text(encoding="utf8").splitlines() if RECORD.exists() else [""]
    return frozenset(line.split()[0] for line in lines[1:]) if lines[0] == versions() else frozenset()


def main() -> None:
    for module in ("test_scripts", "test_jax_steps"):
        import_module(f"tests.checking.doctor.{module}")
    lines = {proof.line_of(row): (proof, row) for proof in PROOFS for row in proof.rows}
    known = {line for line in lines if line.split()[0] in written_down()}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for line, (proof, row) in lines.items():
            if line not in known:
                print(line, flush=True)
                proof.prove(row)
                known.add(line)
                write_down(known)
        os.chdir(RECORD.parent)
    write_down(known)


def write_down(lines: Iterable[str]) -> None:
    ordered = [versions(), *sorted(lines, key=lambda line: line.split()[1:])]
    RECORD.write_text("".join(f"{line}\n" for line in ordered), encoding="utf8")


if __name__ == "__main__":
    from tests.checking.doctor import proven  # the module instance whose list the tests fill

    proven.main()
