"""Lab 13: what the ranks of a pipeline hold, by its formulas, and what Megatron allocated."""

from tests.labs.entries import Claim
from tests.labs.schedules import WHICH
from tplab.forecast import Model, Plan
from tplab.forecast.activations import kept
from tplab.forecast.measured import ON_B200

WIDTH, TOKENS, BLOCKS, VOCABULARY, RANKS = 4096, 4096, 32, 128_000, 16
BLOCKS_WITH_ADAM = 16 * BLOCKS * 12 * WIDTH**2 / RANKS / 1e9  # GB of a rank
ACTIVATIONS = BLOCKS * 16 * TOKENS * WIDTH * 2 / RANKS / 1e9  # of one microbatch
HEAD, LOGITS = 16 * WIDTH * VOCABULARY / 1e9, TOKENS * VOCABULARY * 4 / 1e9
GPT_LITE = (65 + 200) * 768
"""Parameters of its embeddings: of 65 characters and 200 positions."""

LLAMA = Model.find("llama3-70b")
HALF = 9 * (6 * LLAMA.layer_parameters + LLAMA.hidden * LLAMA.vocab), 6 * 16 * 4096 * 8192 * 2
"""Of six layers and an end: parameters with their states, under ZeRO 1 on four copies; and what a microbatch keeps."""
BY_FORMULA = HALF[0] + 2 * HALF[1], HALF[0] + HALF[1] + 6 * 4096 * 128_256

CLAIMS = (
    *WHICH,
    Claim("With Adam they add 3 MB", lambda: [16 * GPT_LITE / 1e6]),
    Claim(
        "At 16 ranks these are nearly three times as large as the blocks' weights with Adam",
        lambda: 2.5 < RANKS * ACTIVATIONS / BLOCKS_WITH_ADAM < 3,
    ),
    Claim(
        "at 16 ranks the first one holds about 32 GB, the last one 19 GB, and the one before it 9 GB",
        lambda: [
            RANKS,
            BLOCKS_WITH_ADAM + HEAD + RANKS * ACTIVATIONS,
            BLOCKS_WITH_ADAM + HEAD + ACTIVATIONS + 1.5 * LOGITS,
            BLOCKS_WITH_ADAM + 2 * ACTIVATIONS,
        ],
    ),
    Claim(
        "The formula is within 5% of both",
        lambda: all(abs(one / (gib * 2**30) - 1) < 0.05 for one, gib in zip(BY_FORMULA, ON_B200[1, 2, 4], strict=True)),
    ),
    Claim(
        "a block of Llama keeps a little more than 16 times its input",
        lambda: 16 < kept(LLAMA, Plan(pp=2), 4096).layer / (4096 * LLAMA.hidden * 2) < 19,
    ),
)
