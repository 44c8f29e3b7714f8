"""Sentences of labs 04, 05, 06, 10, 20 and 26 about speed and memory: entries by lab, for the files of claims/."""

import re
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

import tplab.torch as tt
from tests.labs import entries
from tests.labs.prose import milliseconds, numbers, printed
from tests.labs.schedules import RULES, WHICH, on_profile
from tplab import Mesh, P
from tplab.cost import Link, activation_bytes, find
from tplab.cost.measured import RingAttention, ring_attention
from tplab.exercises.three_dimensions import CLUSTERS, LAYOUTS, NETWORKS, modelled
from tplab.forecast import Model, Plan
from tplab.forecast.activations import kept
from tplab.forecast.measured import pairs
from tplab.forecast.memory import usable_bytes
from tplab.schedules import (
    Costs,
    gpipe,
    naive,
    one_f_one_b,
    simulate,
    zb_h1,
)
from tplab.trace.trace import Trace

BLOCK = "04_megatron_block"
MEMORY = "05_block_memory"
VOCABULARY = "06_vocabulary"
SCHEDULES = "10_pipeline_schedules"
SEQUENCE = "20_long_sequence"
THREE = "26_three_dimensions"


def Claim(lab: str, *about: Any) -> tuple[str, entries.Entry]:
    return lab, entries.Claim(*about)


def Quote(lab: str, *about: Any) -> tuple[str, entries.Entry]:
    return lab, entries.Quote(*about)


def Given(lab: str, *about: Any) -> tuple[str, entries.Entry]:
    return lab, entries.Given(*about)


def of(lab: str) -> tuple[entries.Entry, ...]:
    return tuple(entry for one, entry in CLAIMS if one == lab)


SHEET, H100 = find("h100"), find("h100-measured")
PLAYBOOK = find("h100-measured", fabric="playbook")
GPT3 = 2048, 1, 12288, 96
UNIT = 2048 * 12288
"""s b h of GPT-3's block: length times batch times width."""


def microseconds(program: str) -> float:
    """The µs that lab 05 prints for its MLP half."""
    (line,) = (one for one in printed(MEMORY).splitlines() if one.startswith(f"{program} ") and one.endswith("µs"))
    return numbers(line)[-1].value


def kept_by_swiglu() -> int:
    """The number of tensors of the hidden width that eager PyTorch keeps."""
    gate, up = (torch.ones(4, 8, requires_grad=True) for _ in range(2))
    down = torch.ones(8, 4, requires_grad=True)
    return len([one for one in tt.saved_tensors(lambda g, u: (F.silu(g) * u) @ down, gate, up) if one.shape == (4, 8)])


def gathered_once() -> float:
    """The bytes that lab 05 counts with split tokens, in sbh."""
    return numbers(re.findall(r"^split .*bytes,(.*)sbh$", printed(MEMORY), re.M)[0])[0].value


# -------------------------------------------------------------------------------------------------------- lab 04 and 06


def times_as_fast() -> tuple[float, float]:
    """How many times as fast sixteen ranks are as eight, by lab 04: (on InfiniBand, on the playbook's network)."""
    found = re.search(r"At 4,096: 16 ranks are ([\d.]+) times .* and ([\d.]+) times", printed(BLOCK))
    assert found
    return float(found[1]), float(found[2])


def equal_on(name: str) -> float:
    """The number of ranks on which a model's matmuls and all-reduces take equally long, as lab 04 prints it."""
    (line,) = (one for one in printed(BLOCK).splitlines() if one.startswith(name))
    return numbers(line)[-1].value


def gathered(x: Any, head: Any, ids: Any) -> Any:
    return F.cross_entropy(tt.gather_from(tt.copy_to(x, "tp") @ head.T, "tp").float(), ids)


def gathered_in_16_bits(x: Any, head: Any, ids: Any) -> Any:
    return F.cross_entropy(tt.gather_from(tt.copy_to(x, "tp") @ head.T, "tp"), ids)


def in_place(x: Any, head: Any, ids: Any) -> Any:
    logits = tt.copy_to(x, "tp") @ head.T
    return tt.vocab_parallel_cross_entropy(logits, ids, "tp", 4 * len(head))


@cache
def of_loss(fn: Any, tokens: int, entries: int, width: int) -> Trace:
    sizes = [torch.empty(size, width, dtype=torch.bfloat16, device="meta") for size in (tokens, entries)]
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    return tt.run(fn, Mesh(tp=4), *sizes, ids, in_specs=(P(), P("tp"), P()), cluster=H100).trace


def gathering_is_faster(tokens: int, llama: bool) -> bool:
    sizes = (128_256, 4096) if llama else (50_260, 768)
    return of_loss(gathered, tokens, *sizes).makespan < of_loss(in_place, tokens, *sizes).makespan


def computing(fn: Any) -> float:
    return sum(event.duration for event in of_loss(fn, 2048, 50_260, 768).select(rank=0, kind="compute").events)


# --------------------------------------------------------------------------------------------------------------- lab 10


def either_is_faster() -> bool:
    slow = [2, 1, 1, 1]
    costs = Costs(slow, slow, slow), Costs(transfer=1)
    differ = [simulate(gpipe(4, 8), one).makespan - simulate(one_f_one_b(4, 8), one).makespan for one in costs]
    return min(differ) < 0 < max(differ)


# --------------------------------------------------------------------------------------------------------------- lab 20


def of_rows(gpu: str, api: str, passes: str) -> dict[str, RingAttention]:
    return {row.variant: row for row in ring_attention() if (row.gpu, row.api, row.passes) == (gpu, api, passes)}


ROWS = [of_rows(gpu, api, p) for gpu in ("H800", "A100") for api in ("batch", "varlen") for p in ("fwd", "fwd+bwd")]


def tile(tokens: int) -> float:
    return H100.chip.attention_seconds(1, 32, tokens, tokens, 128, kv_heads=8, kernel="flash2")


def hop(tokens: int, link: Link) -> float:
    return link.seconds(4 * tokens * 8 * 128)


def merging_by_tiles() -> float:
    """The time of merging in lab 20's layer, relative to that of its tiles."""
    spec, sizes = P(None, None, "cp"), [(1, heads, 16384, 128) for heads in (32, 8, 8)]
    tensors = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]

    def layer(q: Any, k: Any, v: Any) -> Any:
        return tt.ring_attention(q, k, v, "cp", causal=False)

    trace = tt.run(layer, Mesh(cp=8), *tensors, in_specs=spec, cluster=H100).trace
    events = trace.select(rank=0, kind="compute").events
    tiles = sum(event.duration for event in events if "attention" in event.op)
    return (sum(event.duration for event in events) - tiles) / tiles


# --------------------------------------------------------------------------------------------------------------- lab 26

ORDERS = ("pp", "dp", "tp"), ("dp", "pp", "tp"), ("tp", "dp", "pp")


@cache
def of_order(network: str, order: tuple[str, ...]) -> float:
    """Milliseconds of a step on 2 x 2 x 2 GPUs."""
    return 1e3 * modelled(Mesh(**dict.fromkeys(order, 2)), NETWORKS[network]).makespan


def of_orders(network: str) -> list[float]:
    return [of_order(network, order) for order in ORDERS]


@cache
def of_layout(layout: str, cluster: str) -> Trace:
    return modelled(LAYOUTS[layout], CLUSTERS[cluster])


def fastest(cluster: str) -> str:
    return min(LAYOUTS, key=lambda layout: of_layout(layout, cluster).makespan)


def idle(trace: Trace) -> float:
    """The share of the time until the last computation in which ranks of a pipeline do not compute, on average."""
    events = trace.select(kind="compute").events
    took = sum(event.duration for event in events)
    return 1 - took / trace.mesh.size / max(event.end for event in events)


def averaging() -> float:
    events = of_layout("8 dp", "one node of 8").select(rank=0, kind="collective").events
    return 1e3 * sum(event.duration for event in events if event.axis == "dp")


# ------------------------------------------------------------------------------------------------------------ sentences

CLAIMS = (
    Claim(
        BLOCK,
        "an all-reduce takes about as long on eight ranks as on four",
        lambda: all(
            0.9 < H100.collective_seconds("all_reduce", n, 8) / H100.collective_seconds("all_reduce", n, 4) < 1.1
            for n in (1024 * 8192, 4096 * 8192, 16384 * 8192)
        ),
    ),
    Claim(
        BLOCK,
        "sixteen ranks are a little faster than eight on InfiniBand, and less than half as fast on the playbook's",
        lambda: 1 < times_as_fast()[0] < 1.25 and times_as_fast()[1] < 0.5,
    ),
    Claim(
        BLOCK,
        "the same number of GPUs and the same batch, but the second has twice the tp and half the dp",
        lambda: all(
            (b.plan.tp, 2 * b.plan.dp, b.plan.ranks, b.batch) == (2 * a.plan.tp, a.plan.dp, a.plan.ranks, a.batch)
            for few in (4, 8)
            for microbatch in (1, 2, 4)
            for a, b in pairs(few, 2 * few, microbatch)
        ),
    ),
    Claim(
        BLOCK,
        "sixteen ranks process fewer tokens per second than eight",
        lambda: all(2 * a.seconds < b.seconds for microbatch in (1, 2, 4) for a, b in pairs(8, 16, microbatch)),
    ),
    Claim(
        BLOCK,
        "most of the cost is latency",
        lambda: (
            2 * PLAYBOOK.collective_seconds("all_reduce", 1, 16)
            > PLAYBOOK.collective_seconds("all_reduce", 4096 * 8192, 16)
        ),
    ),
    Claim(
        BLOCK,
        "A block that is three times as wide can use about three times as many ranks",
        lambda: 2.7 < equal_on("gpt3-175b") / equal_on("megatron-7.5b") < 3.3,
    ),
    Given(BLOCK, "four times as wide as $x$"),
    Given(BLOCK, "four times as much as the one that lab 01's order needs"),
    # ------------------------------------------------------------------------------------------------------------------
    Claim(
        MEMORY,
        "An H100 has about 79 GiB for a program",
        lambda: [usable_bytes(H100.chip) / 2**30],
    ),
    Claim(
        MEMORY,
        "2.7 GiB for one layer, and 257 GiB for 96",
        lambda: [activation_bytes(*GPT3) / 2**30, 96 * activation_bytes(*GPT3) / 2**30, 96],
    ),
    Claim(
        MEMORY,
        "it is 240 MiB per layer, and 22.5 GiB for all 96",
        lambda: [10 * UNIT / 2**20, 96 * 10 * UNIT / 2**30, 96],
    ),
    Claim(
        MEMORY,
        "On four ranks these are $2 \\cdot 2 \\cdot \\frac34\\,sbh$ more, so a rank keeps $11.5\\,sbh$ "
        "instead of $8.5\\,sbh$",
        lambda: 0 < gathered_once() - 2 * 2 * 3 / 4 - 34 / 4 < 0.2,  # the rest are small tensors
    ),
    Claim(MEMORY, "Eager PyTorch also keeps", lambda: kept_by_swiglu() == 4),  # gate, up, the product
    Quote(
        MEMORY,
        "it is 43% of what a rank keeps of GPT-3's block, and 71% of Llama's",
        ("43% of GPT-3's block, 71% of Llama's",),
    ),
    Claim(
        MEMORY,
        "saves a sixth of the time",
        lambda: 0.14 < 1 - microseconds("split") / microseconds("whole") < 0.19,
    ),
    Claim(
        MEMORY,
        "The second gather takes back about 40 µs",
        lambda: [microseconds("gathered again") - microseconds("split")],
    ),
    Claim(
        MEMORY,
        "measured 19.0 ms instead of 19.6, forward and backward, for a layer of a 22-billion-parameter model on eight "
        "A100s, which is 3%",
        lambda: [7.2 + 11.8, 7.7 + 11.9, 22, 100 * (1 - 19.0 / 19.6)],  # arXiv:2205.05198, table 4
    ),
    # ------------------------------------------------------------------------------------------------------------------
    Claim(
        VOCABULARY,
        "computing takes more than half as long as before",
        lambda: 0.5 < computing(in_place) / computing(gathered) < 0.75,
    ),
    Claim(
        VOCABULARY,
        "gathering would take 726 µs instead of 1,083",
        lambda: [1e6 * of_loss(fn, 2048, 50_260, 768).makespan for fn in (gathered_in_16_bits, gathered)],
    ),
    Claim(
        VOCABULARY,
        "With 32 tokens gathering is faster for both, and with 64 for GPT-2 only",
        lambda: (
            [gathering_is_faster(tokens, llama) for llama in (False, True) for tokens in (32, 64)]
            == [True, True, True, False]
        ),
    ),
    Claim(VOCABULARY, "The forecast charges 2.4 µs per launch", lambda: [1e6 * H100.chip.launch]),
    Quote(VOCABULARY, "gathering sends $V/12$ times as many bytes", ("gathering sends 4,188 times", "12")),
    Claim(
        VOCABULARY,
        "Gathering the logits sends thousands of times as many bytes",
        lambda: "sends 4,188 times" in printed(VOCABULARY) and "sends 10,688 times" in printed(VOCABULARY),
    ),
    Claim(
        VOCABULARY,
        "With few tokens, launches decide: by the forecast, gathering is faster",
        lambda: gathering_is_faster(32, False) and gathering_is_faster(32, True),
    ),
    Claim(
        VOCABULARY,
        "the loss of a sequence takes as much memory as five or six blocks",
        lambda: (
            5
            < kept(Model.find("llama3-8b"), Plan(), 8192).logits / kept(Model.find("llama3-8b"), Plan(), 8192).layer
            < 6
        ),
    ),
    # ------------------------------------------------------------------------------------------------------------------
    Claim(
        SCHEDULES,
        "The lower one, whose backward is split into two parts, ends sooner",
        lambda: simulate(zb_h1(4, 8)).makespan < simulate(one_f_one_b(4, 8)).makespan,
    ),
    Claim(SCHEDULES, "four ranks are no faster than one", lambda: simulate(naive(ranks=4)).makespan == 4 * 3),
    Claim(SCHEDULES, "With other costs, either GPipe or 1F1B can be faster", either_is_faster),
    Claim(
        SCHEDULES,
        "With such messages, it is faster than 1F1B and ZB-H1",
        lambda: all(
            simulate(gpipe(4, m), Costs(transfer=1)).makespan < simulate(rule(4, m), Costs(transfer=1)).makespan
            for rule in (one_f_one_b, zb_h1)
            for m in (8, 12, 16, 24)
        ),
    ),
    Claim(
        SCHEDULES,
        "idles for 10.8% of the makespan, which here is also its span",
        lambda: (
            [100 * (1 - 24 * (18.522 + 18.086 + 9.337) / run.makespan)]
            if (run := on_profile(RULES["ZB-H2"])).span == run.makespan
            else False
        ),
    ),
    Given(
        SCHEDULES, "up to 23% more throughput than 1F1B in about the same memory, and up to 31% with more memory"
    ),  # abstract
    *((SCHEDULES, entry) for entry in WHICH),
    # ------------------------------------------------------------------------------------------------------------------
    Claim(SEQUENCE, "that is 4 GiB in each layer", lambda: [2 * 2 * 8 * 128 * 2**20 / 2**30]),
    Claim(
        SEQUENCE,
        "Together they take about a fifth as long as the tiles",
        lambda: 0.17 < merging_by_tiles() < 0.23,
    ),
    Claim(
        SEQUENCE,
        "With twice as many tokens, a long tile takes four times as long",
        lambda: 3.6 < tile(16384) / tile(8192) < 4.1,
    ),
    Claim(
        SEQUENCE,
        "A hop takes only twice as long",
        lambda: all(1.7 < hop(16384, link) / hop(8192, link) < 2.01 for link in (H100.link(0, 1), H100.link(0, 8))),
    ),
    Claim(
        SEQUENCE,
        "a slower kernel hides more, and FlashAttention 2 reaches about a third of the peak on an H100",
        lambda: (
            tile(4096) > SHEET.chip.attention_seconds(1, 32, 4096, 4096, 128, kv_heads=8)
            and 0.28 < 4 * 32768**2 * 32 * 128 / tile(32768) / 989e12 < 0.36
        ),
    ),
    Claim(
        SEQUENCE,
        "in a node, even the tile of one token takes longer than its hop",
        lambda: all(hop(tokens, H100.link(0, 1)) < tile(tokens) for tokens in range(1, 2**15)),
    ),
    Claim(
        SEQUENCE,
        "the ring takes 111 ms, 16% longer than measured here",
        lambda: [
            milliseconds(SEQUENCE, "ring   forward"),
            100 * (milliseconds(SEQUENCE, "ring   forward") / (1e3 * ROWS[1]["ring"].seconds) - 1),
        ],
    ),
    Claim(
        SEQUENCE,
        "are rings whose ranks have about equal work, and are much faster",
        lambda: all(
            row.seconds < 0.75 * rows["ring"].seconds
            for rows in ROWS
            for name, row in rows.items()
            if name in ("zigzag", "stripe")
        ),
    ),
    Claim(
        SEQUENCE,
        "With documents, it is between ring and zigzag",
        lambda: all(
            rows["zigzag"].seconds < rows["llama3_allgather"].seconds < rows["ring"].seconds
            for rows in ROWS
            if "llama3_allgather" in rows
        ),
    ),
    Claim(
        SEQUENCE,
        "On four ranks, more than a third of the time is lost, and with more ranks the loss approaches one half",
        lambda: 1 - (1 + 2 + 3 + 4) / 4**2 > 1 / 3 and 0.49 < 1 - sum(range(1, 101)) / 100**2 < 0.5,
    ),
    Given(SEQUENCE, "A hop is hidden if it takes no longer than the tile"),
    # ------------------------------------------------------------------------------------------------------------------
    Claim(
        THREE,
        "With the pipeline across the nodes it is fastest, and with tensor parallelism across them it is slowest",
        lambda: of_orders("InfiniBand") == sorted(of_orders("InfiniBand")),
    ),
    Claim(THREE, "with 50 GB/s per GPU", lambda: [SHEET.link(0, 8).bandwidth / 1e9]),
    Claim(THREE, "with 1.25 GB/s", lambda: [NETWORKS["10 Gb Ethernet"].link(0, 4).bandwidth / 1e9]),
    Claim(THREE, "a step takes 41.5, 43.0 and 54.7 ms", lambda: of_orders("InfiniBand")),
    Claim(
        THREE,
        "a step takes 7.0 times as long with the pipeline across the nodes, 7.4 times with data parallelism, and 15 "
        "times with tensor parallelism",
        lambda: [a / b for a, b in zip(of_orders("10 Gb Ethernet"), of_orders("InfiniBand"))],
    ),
    Claim(THREE, "The forecasts for InfiniBand are 53, 55 and 67 ms", lambda: of_orders("InfiniBand, forecast")),
    Claim(THREE, "are 57, 60 and 82 ms", lambda: of_orders("Playbook, forecast")),
    Claim(
        THREE,
        "There, 4 dp x 2 pp is the fastest, although three dimensions send a little less",
        lambda: (
            fastest("8 machines") == "4 dp x 2 pp"
            and 0.9
            < of_layout("2 pp x 2 dp x 2 tp", "8 machines").bytes_sent(rank=0)
            / of_layout("4 dp x 2 pp", "8 machines").bytes_sent(rank=0)
            < 1
        ),
    ),
    Claim(
        THREE,
        "On four machines of two, all three dimensions are best",
        lambda: fastest("4 machines of 2") == "2 pp x 2 dp x 2 tp",
    ),
    Claim(
        THREE,
        "Here they are idle for longer, because the last one also has the head",
        lambda: idle(of_layout("4 dp x 2 pp", "one node of 8")) > 1 / 3,
    ),
    Claim(
        THREE,
        "25 ms for 4 dp x 2 tp, and 27 ms for 8 dp, of which it spends 6 ms",
        lambda: [
            *(1e3 * of_layout("4 dp x 2 tp", "one node of 8").makespan, 4, 2),
            *(1e3 * of_layout("8 dp", "one node of 8").makespan, 8, averaging()),
        ],
    ),
    Claim(
        THREE,
        "If that were hidden behind the backward pass, 8 dp would be the fastest",
        lambda: (
            1e3 * of_layout("8 dp", "one node of 8").makespan - averaging()
            < 1e3 * of_layout(fastest("one node of 8"), "one node of 8").makespan
        ),
    ),
    Claim(
        THREE,
        "with few microbatches, a layout without it can be faster",
        lambda: "pp" not in fastest("one node of 8"),
    ),
    Given(THREE, "how many times as long a step takes"),
    Given(THREE, "between machines there is 10 Gb Ethernet for each GPU"),
    Given(THREE, "Choose the fastest layout for each"),
)
