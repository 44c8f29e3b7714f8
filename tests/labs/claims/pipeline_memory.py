"""Lab 13: the memory of a pipeline's ranks, by its formulas, and as Megatron allocated it."""

from tests.labs.entries import Claim
from tests.labs.schedules import WHICH
from tplab.forecast import Model
from tplab.forecast.measured import ON_B200

WIDTH, TOKENS, BLOCKS, VOCABULARY, RANKS = 4096, 4096, 32, 128_000, 16
BLOCKS_WITH_ADAM = 16 * BLOCKS * 12 * WIDTH**2 / RANKS / 1e9  # GB of a rank
ACTIVATIONS = BLOCKS * 16 * TOKENS * WIDTH * 2 / RANKS / 1e9  # of one microbatch
HEAD, LOGITS = 16 * WIDTH * VOCABULARY / 1e9, TOKENS * VOCABULARY * 4 / 1e9
GPT_LITE = (65 + 200) * 768
"""The parameters of its embeddings, of 65 characters and 200 positions."""

LLAMA = Model.find("llama3-70b")
HALF = 9 * (6 * LLAMA.layer_parameters + LLAMA.hidden * LLAMA.vocab), 6 * 16 * 4096 * 8192 * 2
"""Bytes of six layers and an end: (parameters with their states, under ZeRO 1 on four copies; one microbatch)."""
BY_FORMULA = HALF[0] + 2 * HALF[1], HALF[0] + HALF[1] + 6 * 4096 * 128_256
MEASURED = [gib * 2**30 for gib in ON_B200[1, 2, 4]]

BY_DEEPSPEED = 7_304_192, 5_474_304, 3_649_536, 1_958_404
"""The most that autograd kept on each rank of DeepSpeed 0.19.8, without parameters: four processes with gloo train 12
blocks of 96 with 65 characters in 8 microbatches of [4, 32] (PipelineModule, LayerSpec, saved_tensors_hooks)."""

CLAIMS = (
    *WHICH,
    Claim("With Adam they add 3 MB", lambda: [16 * GPT_LITE / 1e6]),
    Claim(
        "At 16 ranks, $A$ is nearly three times as large as a rank's blocks with Adam",
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
        "The sum is right within 5%",
        lambda: all(abs(one / all_of_it - 1) < 0.05 for one, all_of_it in zip(BY_FORMULA, MEASURED, strict=True)),
    ),
    Claim(
        "Of the rest, the formula finds about four fifths",
        lambda: all(
            0.78 < (one - HALF[0]) / (all_of_it - HALF[0]) < 0.82
            for one, all_of_it in zip(BY_FORMULA, MEASURED, strict=True)
        ),
    ),
    Claim(
        "its ranks had 4, 3, 2 and 1.1 times what three blocks keep for a microbatch",
        lambda: [kept_bytes / (BY_DEEPSPEED[2] / 2) for kept_bytes in BY_DEEPSPEED],
    ),
)
