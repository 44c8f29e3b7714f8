"""Damaged checkpoints: whatever is wrong with one, the error names its step and file, and the newest that is whole."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tplab.errors import CheckpointError
from tplab.models.gpt import GPTConfig
from tplab.training import checkpoint
from tplab.training.checkpoint import Owned, Part

CONFIG = GPTConfig(32, 16, 2, 2, 8)
WHOLE = np.arange(24.0).reshape(4, 6)
FILES = ["rank-0-of-2.safetensors", "rank-1-of-2.safetensors"]


def save(folder: Path, step: int) -> Path:
    """Two ranks that save two arrays, half of each."""
    partial = checkpoint.begin(folder, step)
    for rank in range(2):
        part = Part.of((4, 6), (2 * rank, 0), (2, 6))
        piece = WHOLE[2 * rank : 2 * rank + 2] + step
        checkpoint.write(partial, rank, 2, {"model.w": Owned(part, piece), "model.v": Owned(part, -piece)})
    checkpoint.finish(partial, step, 2, CONFIG)
    return folder / f"step-{step:08}"


def resume(folder: Path) -> int:
    return checkpoint.beginning(folder, True, CONFIG)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path, place: int = -3, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


DAMAGES = {
    "a cut file": (lambda path: cut(path / FILES[1]), r"rank-1-of-2.safetensors has [\d,]+ of [\d,]+ bytes"),
    "a flipped bit": (lambda path: flip(path / FILES[0]), "rank-0-of-2.safetensors has changed since it was written"),
    "a missing file": (lambda path: (path / FILES[0]).unlink(), "rank-0-of-2.safetensors is missing"),
    "an empty file": (lambda path: (path / FILES[0]).write_bytes(b""), "rank-0-of-2.safetensors has 0 of"),
    "another step's file": (
        lambda path: shutil.copy(path.parent / "step-00000002" / FILES[0], path / FILES[0]),
        "rank-0-of-2.safetensors has changed since it was written",
    ),
    "a cut index": (lambda path: cut(path / "index.json"), "index.json is no whole JSON text"),
    "a missing index": (lambda path: (path / "index.json").unlink(), "index.json is missing"),
    "an empty index": (lambda path: (path / "index.json").write_text("{}"), "index.json does not list any arrays"),
    "a list": (lambda path: (path / "index.json").write_text("[]"), "index.json does not list any arrays"),
    "brackets": (lambda path: (path / "index.json").write_text("[" * 100_000), "index.json is no whole JSON text"),
    "a changed index": (
        lambda path: (path / "index.json").write_text(
            (path / "index.json").read_text().replace('"end": 12', '"end": 6')
        ),
        "index.json has changed since it was written",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_named_and_the_newest_whole_one_offered(tmp_path, damage):
    how, words = DAMAGES[damage]
    for step in (2, 3, 4, 5):
        save(tmp_path, step)
    assert resume(tmp_path) == 5
    cut(tmp_path / "step-00000004" / FILES[0])
    how(tmp_path / "step-00000005")
    offer = "Step 3 is whole: .* delete step-00000004 and step-00000005"
    told = rf"the checkpoint of step 5 in .* is damaged: {words}.*\. {offer}"
    with pytest.raises(CheckpointError, match=told):
        resume(tmp_path)
    with pytest.raises(CheckpointError, match=f"of step 5 in .*: {words}"):
        checkpoint.load(tmp_path, 5)
    for step in (4, 5):
        shutil.rmtree(tmp_path / f"step-{step:08}")
    assert resume(tmp_path) == 3
    np.testing.assert_array_equal(checkpoint.load(tmp_path, 3)["model.w"], WHOLE + 3)


@pytest.mark.parametrize("damage", DAMAGES)
def test_training_never_begins_again_because_the_only_step_is_damaged(tmp_path, damage):
    if damage == "another step's file":
        save(tmp_path / "other", 2).rename(tmp_path / "step-00000002")
    path = save(tmp_path, 7)
    DAMAGES[damage][0](path)
    shutil.rmtree(tmp_path / "step-00000002", ignore_errors=True)
    with pytest.raises(
        CheckpointError, match=r"step 7 .*No other step is whole: restore step-00000007 from a copy, or"
    ):
        resume(tmp_path)
    with pytest.raises(FileExistsError, match="has a checkpoint of step 7 already"):
        checkpoint.beginning(tmp_path, False, CONFIG)


def test_where_there_is_nothing_to_resume_from_it_says_so(tmp_path, capsys):
    (tmp_path / "step-00000002.partial").mkdir()
    for folder in (tmp_path, tmp_path / "none"):
        assert resume(folder) == 0
        assert (
            capsys.readouterr().out
            == f"resume=True, but {folder} has no complete checkpoint: training begins at step 0\n"
        )
    assert checkpoint.beginning(tmp_path, False, CONFIG) == 0
    assert capsys.readouterr().out == ""


def test_no_flipped_bit_and_no_cut_goes_unseen(tmp_path):
    """Either the error names the file, or what is loaded is what was saved (a space became a tab)."""
    path, draw = save(tmp_path, 1), random.Random(0)
    for file in ("index.json", *FILES):
        whole = (path / file).read_bytes()
        for _ in range(150):
            if draw.random() < 0.3:
                (path / file).write_bytes(whole[: draw.randrange(len(whole))])
            else:
                flip(path / file, draw.randrange(len(whole)), draw.randrange(8))
            told = outcome(tmp_path)
            assert told == "loads" or told.startswith(f"the checkpoint of step 1 in {tmp_path} is damaged: {file} ")
            (path / file).write_bytes(whole)
    assert resume(tmp_path) == 1


def outcome(folder: Path) -> str:
    try:
        assert resume(folder) == 1
        np.testing.assert_array_equal(checkpoint.load(folder, 1)["model.v"], -WHOLE - 1)
    except CheckpointError as error:
        return str(error)
    return "loads"
