"""Lab 13: what the ranks of a pipeline hold, by its formulas, and what Megatron allocated."""

from tests.labs.entries import Claim, Given
from tplab.forecast.measured import ON_B200

WIDTH, TOKENS, BLOCKS, VOCABULARY, RANKS = 4096, 4096, 32, 128_000, 16
BLOCKS_WITH_ADAM = 16 * BLOCKS * 12 * WIDTH**2 / RANKS / 1e9  # GB of a rank
ACTIVATIONS = BLOCKS * 16 * TOKENS * WIDTH * 2 / RANKS / 1e9  # of one microbatch
HEAD, LOGITS = 16 * WIDTH * VOCABULARY / 1e9, TOKENS * VOCABULARY * 4 / 1e9
GPT_LITE = (65 + 200) * 768
"""Parameters of its embeddings: of 65 characters and 200 positions."""

CLAIMS = (
    Given("some have more than an eighth, because 8 ranks cannot share 12 blocks equally"),
    Claim("With Adam they add 3 MB", lambda: [16 * GPT_LITE / 1e6]),
    Claim(
        "At 16 ranks these are nearly three times as large as the blocks' weights with Adam",
        lambda: 2.5 < RANKS * ACTIVATIONS / BLOCKS_WITH_ADAM < 3,
    ),
    Claim(
        "at 16 ranks the last one holds about 20 GB, and the one before it 9 GB",
        lambda: [RANKS, BLOCKS_WITH_ADAM + HEAD + ACTIVATIONS + 2 * LOGITS, BLOCKS_WITH_ADAM + 2 * ACTIVATIONS],
    ),
    Claim(
        "Megatron allocated 71.5 GB on ranks of the first stage, and 67.6 GB on those of the last",
        lambda: [gib * 2**30 / 1e9 for gib in ON_B200[1, 2, 4]],
    ),
)
