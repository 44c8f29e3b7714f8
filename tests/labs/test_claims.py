"""Each sentence of the labs about speed and memory holds on measured rows, or is what a cell prints."""

import pytest

from tests.labs import claims, claims_of_layers
from tests.labs.claims import Claim, Given, Quote
from tests.labs.prose import HOW_MUCH, numbers, printed, says_how_much, sentences

CLAIMS = (*claims.CLAIMS, *claims_of_layers.CLAIMS)
LABS = (*claims.LABS, *claims_of_layers.LABS)
ENTRIES = {kind: [pytest.param(entry, id=entry.says) for entry in CLAIMS if isinstance(entry, kind)]
           for kind in (Claim, Quote, Given)}  # fmt: skip


def are_rounded_from(says: str, values) -> bool:
    said = numbers(says)
    return len(said) == len(values) and all(map(lambda number, value: number.is_rounded_from(value), said, values))


@pytest.mark.parametrize("entry", [entry for entries in ENTRIES.values() for entry in entries])
def test_the_lab_says_so(entry: Claim | Quote | Given):
    assert entry.lab in LABS
    assert any(entry.says in sentence for sentence in sentences(entry.lab)), f"{entry.lab} no longer says this"


@pytest.mark.parametrize("claim", ENTRIES[Claim])
def test_it_holds(claim: Claim):
    found = claim.holds()
    assert found is True or (not isinstance(found, bool) and are_rounded_from(claim.says, found)), found


@pytest.mark.parametrize("quote", ENTRIES[Quote])
def test_it_is_printed(quote: Quote):
    outputs = printed(quote.lab)
    assert [line for line in quote.lines if line not in outputs] == [], "the lab does not print this"
    there = [number.value for line in quote.lines for number in numbers(line)]
    said = numbers(quote.says)
    assert said
    assert [one.value for one in said if not any(map(one.is_rounded_from, there))] == []


@pytest.mark.parametrize("lab", LABS)
def test_every_sentence_about_speed_or_memory_has_an_entry(lab: str):
    """What entries do not say of a sentence must not say how fast or how much, either. Questions claim nothing."""
    left = dict[str, str]()
    for sentence in sentences(lab):
        rest = sentence
        for entry in CLAIMS:
            rest = rest.replace(entry.says, "…") if entry.lab == lab else rest
        if not sentence.endswith("?") and (found := HOW_MUCH.search(rest)):
            left[sentence] = found[0]
    assert left == {}, "each needs a Claim, a Quote or a Given in tests/labs/claims.py"


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
    "sentence", ["Take eight H100s", "The third axis is cp", "Each rank has half of x", "On 64 GPUs"]
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
