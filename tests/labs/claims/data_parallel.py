"""Lab 16: the tokens from which gradients hide, and the losses of real runs."""

from functools import cache

import torch
from torch import nn
from torch.nn.utils import skip_init

import tplab.torch as tt
from tests.labs.entries import Claim, Given, Quote
from tests.labs.model import NDR, PLAYBOOK, SHEET, tokens
from tplab import Mesh
from tplab.cost import Cluster
from tplab.data.hiding import tokens_to_hide
from tplab.forecast import forecast
from tplab.forecast.measured import Run, playbook
from tplab.trace import overlap


@cache
def three_billion() -> dict[int, Run]:
    """GPUs -> the playbook's fastest run of 3 billion parameters that only splits the batch."""
    found = dict[int, Run]()
    for run in playbook():
        if run.model.name == "playbook-3b" and run.plan.dp == run.plan.ranks:
            found[run.plan.dp] = min(found.get(run.plan.dp, run), run, key=lambda one: one.seconds)
    return found


def forecast_seconds(gpus: int) -> float:
    run = three_billion()[gpus]
    return forecast(run.model, run.plan, NDR, batch=run.batch, sequence=run.sequence, stack=run.stack).seconds


def most_gpus(cluster: Cluster) -> int:
    """The most H100s, in whole nodes, over which 4 million tokens can be spread so that gradients hide."""
    few, many = 1, 1000  # nodes
    while many - few > 1:
        middle = (few + many) // 2
        enough = 8 * middle * tokens_to_hide("data parallel", cluster, 8 * middle) <= 4e6
        few, many = (middle, many) if enough else (few, middle)
    return 8 * few


def hidden(ranks: int, tokens: int) -> float:
    """The share of lab 16's gradients that is hidden, by the data sheet."""
    sizes = {"dtype": torch.bfloat16, "device": "meta"}
    model = nn.Sequential(*(skip_init(nn.Linear, 8192, 8192, bias=False, **sizes) for _ in range(16)))

    def step(model, x):  # each rank has its own model: hooks on a shared one would run on all ranks
        tt.data_parallel(model, "dp", bucket_bytes=25e6, broadcast=False)
        model(x).mean().backward()

    x = torch.empty(tokens, 8192, dtype=torch.bfloat16, device="meta")
    return overlap(tt.run(step, Mesh(dp=ranks), model, x, cluster=SHEET).trace).share


def buckets() -> list[int]:
    """The MB of each bucket, if 64 layers of 1,024 x 1,024 numbers in bfloat16 are sent in buckets of at most 50 MB."""
    layer, found = 2 * 1024**2, list[int]()
    for _ in range(64):
        if not found or found[-1] + layer > 50e6:
            found.append(0)
        found[-1] += layer
    return found


CLAIMS = (
    Claim("The 64 layers above have 134 MB of gradients", lambda: [64, 64 * 1024**2 * 2 / 1e6]),
    Quote("about 70%", ("50 MB             2.90 ms, 71% hidden",)),
    Quote("The size hardly matters between 5 and 50 MB", ("5 MB              2.92 ms", "50 MB             2.90 ms")),
    Claim(
        "Buckets of 50 MB are filled with whole layers and hold 48, 48 and 38 MB, so the last has 28% of the bytes",
        lambda: [50, *(size / 1e6 for size in buckets()), 100 * buckets()[-1] / sum(buckets())],
    ),
    Claim(
        "With 2,048 tokens, one node hides nine tenths and two nodes three quarters",
        lambda: 0.85 < hidden(8, 2048) < 0.95 and 0.7 < hidden(16, 2048) < 0.8,
    ),
    Claim(
        "With 4,096 tokens, both hide over nine tenths",
        lambda: all(hidden(ranks, 4096) > 0.9 for ranks in (8, 16)),
    ),
    Claim(
        "a network card has only a ninth of NVLink's bandwidth",
        lambda: SHEET.inner_link.bandwidth == 9 * SHEET.link(0, 8).bandwidth,
    ),
    Claim(
        "An H100 has 989 TFLOP/s and 450 GB/s, so eight need 1,923 tokens each",
        lambda: [989, 450, 7 / 8 * SHEET.chip.flops["bfloat16"] / SHEET.inner_link.bandwidth],
    ),
    Claim("$B$ is 400 GB/s: eight cards of 50 GB/s", lambda: [8 * SHEET.link(0, 8).bandwidth / 1e9, 50]),
    Claim(
        "about 1,900 tokens per rank are enough inside a node, and 2,500 on 64 GPUs",
        lambda: [*tokens("data parallel", 8, SHEET), *tokens("data parallel", 64, SHEET), 64],
    ),
    Claim("The forecast asks for 1,400 in a node", lambda: tokens("data parallel", 8, NDR)),
    Claim(
        "measured matmuls are slower",
        lambda: (
            NDR.chip.matmul_seconds(1409, 32768, 8192, "bfloat16")
            > 1.2 * SHEET.chip.matmul_seconds(1409, 32768, 8192, "bfloat16")
        ),
    ),
    Claim(
        "each of 64 GPUs needs no more than that",
        lambda: tokens("data parallel", 64, NDR) <= tokens("data parallel", 8, NDR),
    ),
    Claim("On the playbook's network it needs 3,300", lambda: tokens("data parallel", 64, PLAYBOOK)),
    Claim(
        "you can use 4 million / 2,490 = 1,600 GPUs by the data sheet, and 4 million / 1,470 = 2,700 by the forecast",
        lambda: [
            4,
            *tokens("data parallel", most_gpus(SHEET), SHEET),
            most_gpus(SHEET),
            4,
            *tokens("data parallel", most_gpus(NDR), NDR),
            most_gpus(NDR),
        ],
    ),
    Claim("the limit is about 600", lambda: [most_gpus(PLAYBOOK)]),
    Claim(
        "faster on two nodes than on one: the fastest run there has two sequences per microbatch instead of one",
        lambda: (
            [three_billion()[gpus].plan.microbatch for gpus in (16, 8)] == [2, 1]
            and 16 * forecast_seconds(16) < 8 * forecast_seconds(8)
        ),
    ),
    Claim(
        "each GPU has 8,192 tokens, more than the thresholds above ask for, and yet more than a third is lost",
        lambda: (
            max(tokens("data parallel", 128, SHEET, NDR, PLAYBOOK)) < 8192
            and 128 * three_billion()[128].seconds > 8 * three_billion()[8].seconds / (1 - 1 / 3)
        ),
    ),
    Given("torch's own DistributedDataParallel uses 25 MiB"),
    Given("More tokens per rank make the backward pass longer"),
)
