"""Proofs are made once: again if anything has changed that they depend on, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checking.doctor import proven, test_jax_steps, test_scripts
from tests.checking.doctor.expected import WRONG
from tests.checking.doctor.proven import PROOFS, versions, written_down

assert test_jax_steps  # whose proofs are in the list, too


def test_most_proofs_are_written_down():
    """Otherwise every run makes them again, which takes minutes."""
    if not written_down():
        pytest.skip("with other versions of the packages, every proof is made")
    hashes = [proof.hash_of(row) for proof in PROOFS for row in proof.rows]
    missing = [one for one in hashes if one not in written_down()]
    assert len(hashes) == len(set(hashes)) > 100
    assert len(missing) < len(hashes) / 4, "to write them down: python -m tests.checking.doctor.proven"


@pytest.fixture
def record(tmp_path: Path, monkeypatch):
    """A record of its own. What was read of it is forgotten afterwards, whatever happens."""
    monkeypatch.setattr(proven, "RECORD", tmp_path / "proven.txt")
    monkeypatch.setattr(proven, "PROOFS", [])
    written_down.cache_clear()
    yield proven.RECORD
    written_down.cache_clear()


@pytest.mark.parametrize(
    ("row", "header", "written", "script", "is_made"),
    [
        ("y", "", "a script", "a script", False),
        ("z", "", "a script", "a script", True),
        ("y", "torch==1.0", "a script", "a script", True),
        ("y", "", "a script", "another script", True),
        ("x", "", "a script", "a script", True),
        ("y", "", "from tplab.torch import run", "from tplab.torch import run", True),
    ],
    ids=["as it was", "not written down", "other versions", "another script", "the first of its kind", "of tplab"],
)
def test_a_proof_is_made_if_it_may_be_another(
    row: str, header: str, written: str, script: str, is_made: bool, record: Path
):
    made, texts = list[str](), [written]

    def prove(row: str) -> None:
        made.append(row)

    test = proven.proven_of_each(["x", "y", "z"], str, lambda row: [*texts, row])(prove)
    (proof,) = proven.PROOFS
    record.write_text("\n".join([header or versions(), proof.line_of("x"), proof.line_of("y")]))
    texts[0] = script
    test(row)
    assert made == [row] * is_made


def test_python_and_its_packages_are_among_the_versions():
    assert [one.partition("==")[0] for one in versions().split()] == ["python", *proven.PACKAGES]


@pytest.mark.parametrize("changed", ["nothing", "the script", "its claim", "what a claim says", "how it is compared"])
def test_a_hash_is_of_the_script_and_of_what_is_claimed(changed: str, monkeypatch, tmp_path: Path):
    proof = next(one for one in PROOFS if one.rows is WRONG)
    row, other = WRONG[:2]
    before, claims, source_of = proof.hash_of(row), dict(test_scripts.claims()), test_scripts.source_of
    assert "class Wrong:" in claims[""] and row.script not in claims[""]
    script = test_scripts.text_of(row) + "print()\n" * (changed == "the script")
    (tmp_path / f"{row.script}.py").write_text(script)
    claims |= {row.script: claims[other.script]} if changed == "its claim" else {}
    claims |= {"": claims[""] + "x = 1"} if changed == "what a claim says" else {}
    more = "x = 1" * (changed == "how it is compared")
    monkeypatch.setattr(test_scripts, "FOLDER", tmp_path)
    monkeypatch.setattr(test_scripts, "claims", lambda: claims)
    monkeypatch.setattr(test_scripts, "source_of", lambda one: source_of(one) + more)
    assert (proof.hash_of(row) == before) == (changed == "nothing")
