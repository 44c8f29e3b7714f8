"""Each sentence of the labs about speed and memory holds on measured rows, or is what a cell prints."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.labs import claims
from tests.labs.claims import LABS
from tests.labs.entries import Claim, Entry, Given, Quote
from tests.labs.prose import HOW_MUCH, Number, numbers, printed, says_how_much, sentences


def each(*kinds: type[Entry]) -> pytest.MarkDecorator:
    found = [(lab, entry) for lab, entries in LABS.items() for entry in entries if isinstance(entry, kinds)]
    return pytest.mark.parametrize(("lab", "entry"), found, ids=[f"{lab[:2]}: {entry.says}" for lab, entry in found])


def are_rounded_from(says: str, values: Sequence[float]) -> bool:
    said = numbers(says)
    return len(said) == len(values) and all(map(Number.is_rounded_from, said, values))


def test_every_file_of_claims_is_of_a_lab():
    files = {path.stem for path in Path(claims.__file__).parent.glob("[a-z]*.py")}
    assert files == {lab[3:] for lab in LABS}


@each(Claim, Quote, Given)
def test_the_lab_says_so(lab: str, entry: Entry):
    assert any(entry.says in sentence for sentence in sentences(lab)), f"{lab} no longer says this"


@each(Claim)
def test_it_holds(lab: str, entry: Claim):
    found = entry.holds()
    assert found is True or (not isinstance(found, bool) and are_rounded_from(entry.says, found)), found


@each(Quote)
def test_it_is_printed(lab: str, entry: Quote):
    outputs = printed(lab)
    assert [line for line in entry.lines if line not in outputs] == [], "the lab does not print this"
    there = [number.value for line in entry.lines for number in numbers(line)]
    said = numbers(entry.says)
    assert said
    assert [one.value for one in said if not any(map(one.is_rounded_from, there))] == []


@pytest.mark.parametrize("lab", LABS)
def test_every_sentence_about_speed_or_memory_has_an_entry(lab: str):
    """What entries do not say of a sentence must not say how fast or how much, either. Questions claim nothing."""
    left = dict[str, str]()
    for sentence in sentences(lab):
        rest = sentence
        for entry in LABS[lab]:
            rest = rest.replace(entry.says, "…")
        if not sentence.endswith("?") and (found := HOW_MUCH.search(rest)):
            left[sentence] = found[0]
    assert left == {}, f"each needs a Claim, a Quote or a Given in tests/labs/claims/{lab[3:]}.py"


@pytest.mark.parametrize(
    "sentence",
    [
        "ZeRO++ is 3.1 times as fast",
        "By the forecast, a step takes 12 ms",
        "The sheet is right within a tenth",
        "It loses an eighth, and real GPUs more than a third",
        "Only 70% is hidden",
        "A GPU sends 450 GB/s",
        "It needs about 11,300 tokens per rank",
        "Every doubling halves the time",
        "Stage 3 is slower",
    ],
)
def test_what_says_how_much(sentence: str):
    assert says_how_much(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "Take eight H100s",
        "Copies are no longer copies",
        "Sooner or later it hangs",
        "The third axis is cp",
        "Each rank has half of x",
        "On 64 GPUs",
    ],
)
def test_what_does_not(sentence: str):
    assert not says_how_much(sentence)


@pytest.mark.parametrize(
    ("said", "value", "holds"),
    [
        ("2,500", 2549, True),
        ("2,500", 2551, False),
        ("0.47", 0.4749, True),
        ("86.0", 86.1, False),
        ("H100 has 9", 9.4, True),
    ],
)
def test_a_number_is_what_it_is_rounded_from(said: str, value: float, holds: bool):
    assert are_rounded_from(said, [value]) is holds
