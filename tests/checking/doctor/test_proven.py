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


def test_a_proof_is_made_again_if_its_texts_have_changed(tmp_path: Path, monkeypatch):
    made, texts = [], ["a script"]
    record = tmp_path / "proven.txt"
    monkeypatch.setattr(proven, "RECORD", record)
    monkeypatch.setattr(proven, "PROOFS", [])

    def prove(row: str) -> None:
        made.append(row)

    test = proven.proven_of_each(["x", "y"], str, lambda row: [row, *texts])(prove)
    (proof,) = proven.PROOFS
    written = proof.line_of("x")
    for header, row, is_made in [
        (versions(), "x", False),
        (versions(), "y", True),
        ("torch==1.0", "x", True),
    ]:
        record.write_text(f"{header}\n{written}\n")
        written_down.cache_clear()
        made.clear()
        test(row)
        assert (made == [row]) == is_made
    record.write_text(f"{versions()}\n{written}\n")
    written_down.cache_clear()
    texts[0] = "another script"
    made.clear()
    test("x")
    assert made == ["x"]
    written_down.cache_clear()


def test_a_hash_is_of_the_script_and_of_what_is_claimed(monkeypatch, tmp_path: Path):
    proof = next(one for one in PROOFS if one.rows is WRONG)
    row, other = WRONG[:2]
    before = proof.hash_of(row)
    (tmp_path / f"{row.script}.py").write_text(test_scripts.text_of(row))
    monkeypatch.setattr(test_scripts, "FOLDER", tmp_path)
    assert proof.hash_of(row) == before
    (tmp_path / f"{row.script}.py").write_text(test_scripts.text_of(row) + "print()\n")
    assert proof.hash_of(row) != before
    monkeypatch.undo()
    claims = test_scripts.claims()
    monkeypatch.setattr(test_scripts, "claims", lambda: claims | {row.script: claims[other.script]})
    assert proof.hash_of(row) != before
