"""Lab 23: the cost of skew on the modelled clock, and in rows that aiconfigurator has measured."""

from tests.labs.entries import Claim, Given
from tests.labs.prose import milliseconds

LAB = "23_balance_of_experts"

# ai-dynamo/aiconfigurator 095f58a, Apache-2.0: H100, bfloat16, 12,288 tokens, hidden 4096, inner 14336, top 2 of 8
# experts, one of 4 ranks; ms
BALANCED, SKEWED = 5.3489, 9.9899
BY_HAND = (9, 3, 2, 2)

CLAIMS = (
    Claim("9/4 = 2.25 times as long", lambda: max(BY_HAND) / (sum(BY_HAND) / 4) == 2.25),
    Claim("So 56% of their time is lost", lambda: [100 * (1 - sum(BY_HAND) / (4 * max(BY_HAND)))]),
    Claim(
        "at a skew of about 1.5",
        lambda: abs(milliseconds(LAB, "skew 1.5") / milliseconds(LAB, "skew 0.0") - 2) < 0.05,
    ),
    Given("so no expert ever has more than half of all rows"),
    Given("A rank uses an expert if more than 5% of the rank's choices fall on it"),
    Claim("they take 5.35 ms", lambda: [BALANCED]),
    Claim("the busiest of the four takes 9.99 ms", lambda: [SKEWED]),
    Claim(
        "The layer becomes faster because it does less",
        lambda: milliseconds(LAB, "capacity 1.0") < milliseconds(LAB, "capacity None"),
    ),
)
