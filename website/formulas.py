"""docs/formulas.md, all formulas of the course on one sheet. tplab's own code also computes each formula's example.

python -m website.formulas      rewrites the page
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from labs.source import course
from tplab.cost import activation_bytes, bytes_sent
from tplab.data.zero import bytes_per_parameter
from tplab.forecast import Model, Plan, forecast
from tplab.forecast.memory import memory
from tplab.forecast.pipelines import in_flight
from tplab.forecast.traffic import bytes_by_axis
from tplab.schedules import Costs, interleaved_1f1b, one_f_one_b, simulate
from tplab.sequence import AttentionMask, TokenLayout, attention_bytes, efficiency, tokens_to_hide_hop

PAGE = Path(__file__).parent.parent / "docs" / "formulas.md"

INTRODUCTION = """\
# All formulas on one sheet

<!-- written by python -m website.formulas -->

One line for each formula of the course, with an example. The values of the examples are what tplab's code counts or
simulates, and a test compares them with the formulas.

| | |
| --- | --- |
| $R$ | ranks of an axis; $d$, $t$, $p$, $c$ are those of data, tensor, pipeline and context parallelism |
| $n$ | bytes of a whole tensor |
| $N$ | parameters; $N_u$ those that a token uses: without experts, all of them |
| $L, h, a, V$ | layers, width, heads, vocabulary (padded to a multiple of $t$) |
| $w$ | width of all heads together; in most models it is $h$ |
| $g$ | key and value heads |
| $C, W$ | FLOP/s of a chip, bytes per second of a link |
| $s, b$ | tokens of a sequence, sequences of a microbatch |
| $m$ | microbatches of a pipeline in one step; $v$ stages on each rank |
"""


@dataclass(frozen=True)
class Formula:
    """A formula, an example, and the example's value, by the formula and by tplab.

    lab    the number of the lab that explains it
    unit   of the value
    """

    what: str
    formula: str
    example: str
    by_hand: float
    by_tplab: Callable[[], float]
    unit: str
    lab: str

    @property
    def value(self) -> str:
        amount = self.by_tplab()
        if self.unit == "%":
            return f"{100 * amount:.1f} %"
        return f"{amount:,.0f} {self.unit}" if amount > 100 else f"{amount:,.4g} {self.unit}"


SIZE = 2**20
MODEL = Model.find("llama2-7b")
QUERY = {"num_tokens": 8192, "num_ranks": 8, "num_heads": 32, "num_kv_heads": 8, "head_width": 128}
KEYS = 2 * 8192 // 8 * 8 * 128 * 2  # bytes of k and v on a rank
CAUSAL = AttentionMask()


LLAMA = Model.find("llama3-8b")
ONE = forecast(LLAMA, Plan(dp=8, zero=3), "h100-measured", batch=64, sequence=8192)


def _sent(axis: str, plan: Plan, batch: int, model: Model = LLAMA, rank: int = 0) -> float:
    """The bytes that a rank of this pipeline stage sends along an axis in a step, with sequences of 8,192 tokens."""
    return bytes_by_axis(model, plan, batch=batch, sequence=8192)[rank][axis]


def _ring(op: str, elements: int) -> Callable[[], float]:
    return lambda: bytes_sent(op, elements, 2, 8, 0)


def _bubble(virtual: int) -> Callable[[], float]:
    schedule = interleaved_1f1b(4, 8, virtual) if virtual > 1 else one_f_one_b(4, 8)
    return lambda: simulate(schedule, Costs()).bubble_fraction


def _zero(stage: int) -> Callable[[], float]:
    return lambda: sum(bytes_per_parameter(stage, 64))


SHEET: dict[str, tuple[Formula, ...]] = {
    "What each rank sends in a collective (ring)": (
        Formula(
            "all_reduce",
            "$2 (R-1)/R \\cdot n$",
            "2 MiB, 8 ranks",
            2 * 7 / 8 * 2 * SIZE,
            _ring("all_reduce", SIZE),
            "B",
            "02",
        ),
        Formula(
            "reduce_scatter",
            "$(R-1)/R \\cdot n$",
            "2 MiB, 8 ranks",
            7 / 8 * 2 * SIZE,
            _ring("reduce_scatter", SIZE),
            "B",
            "02",
        ),
        Formula(
            "all_gather",
            "$(R-1)/R \\cdot n$",
            "2 MiB in all, 8 ranks",
            7 / 8 * 2 * SIZE,
            _ring("all_gather", SIZE // 8),
            "B",
            "02",
        ),
        Formula(
            "all_to_all",
            "$(R-1)/R \\cdot n$",
            "2 MiB on each of 8 ranks",
            7 / 8 * 2 * SIZE,
            _ring("all_to_all", SIZE),
            "B",
            "02",
        ),
    ),
    "What training computes": (
        Formula(
            "FLOPs per token",
            "$6 N_u + 12 L w s$",
            "Llama 2 7B, s = 4,096",
            6 * MODEL.parameters + 12 * 32 * 4096 * 4096,
            lambda: MODEL.flops_per_token(4096),
            "FLOPs",
            "28",
        ),
        Formula(
            "model FLOPs utilisation (MFU)",
            "FLOPs per token $\\cdot$ tokens per second of a GPU $/ C$",
            "Llama 3 8B on 8 H100s, dp 8, ZeRO 3",
            ONE.model.flops_per_token(8192) * ONE.tokens_per_second_per_gpu / 989e12,
            lambda: ONE.mfu,
            "%",
            "28",
        ),
    ),
    "What each rank sends in a training step": (
        Formula(
            "tensor parallelism, one layer and microbatch",
            "$16 (t-1)/t \\cdot s b h$: four all_reduces in 16 bits",
            "Llama 3 8B, s = 8,192, b = 1, t = 8",
            16 * 7 / 8 * 8192 * 4096,
            lambda: _sent("tp", Plan(tp=8), 1) - _sent("tp", Plan(tp=8), 1, replace(LLAMA, layers=31)),
            "B",
            "04",
        ),
        Formula(
            "data parallelism, gradients in float32",
            "$8 (d-1)/d \\cdot N$",
            "Llama 3 8B, d = 8",
            8 * 7 / 8 * LLAMA.parameters,
            lambda: _sent("dp", Plan(dp=8), 8),
            "B",
            "16",
        ),
        Formula(
            "the same with ZeRO 1 or 2",
            "$6 (d-1)/d \\cdot N$",
            "Llama 3 8B, d = 8",
            6 * 7 / 8 * LLAMA.parameters,
            lambda: _sent("dp", Plan(dp=8, zero=1), 8),
            "B",
            "17",
        ),
        Formula(
            "the same with ZeRO 3",
            "$8 (d-1)/d \\cdot N m$: again for every microbatch",
            "Llama 3 8B, d = 8, m = 4",
            8 * 7 / 8 * LLAMA.parameters * 4,
            lambda: _sent("dp", Plan(dp=8, zero=3), 32),
            "B",
            "17",
        ),
        Formula(
            "a stage in the middle of a pipeline",
            "$4 s b h m$: forward and backward, in 16 bits",
            "Llama 3 8B, s = 8,192, b = 1, m = 8",
            4 * 8192 * 4096 * 8,
            lambda: _sent("pp", Plan(pp=4), 8, rank=1),
            "B",
            "11",
        ),
    ),
    "Pipelines": (
        Formula("bubble of 1F1B and GPipe", "$(p-1)/(m+p-1)$", "p = 4, m = 8", 3 / 11, _bubble(1), "%", "10"),
        Formula(
            "bubble, interleaved; $p$ divides $m$",
            "$(p-1)/(vm+p-1)$",
            "p = 4, m = 8, v = 2",
            3 / 19,
            _bubble(2),
            "%",
            "10",
        ),
        Formula(
            "microbatches in flight on rank r, 1F1B",
            "$\\min(p - r, m)$",
            "p = 4, m = 8, r = 1",
            3,
            lambda: max(sum(counts) for _, counts in in_flight("one_f_one_b", 4, 1, 8)[1]),
            "microbatches",
            "13",
        ),
    ),
    "Memory": (
        Formula("states, Adam in mixed precision", "$16$ bytes per parameter", "no ZeRO", 16, _zero(0), "B", "17"),
        Formula("ZeRO 1", "$4 + 12/d$", "d = 64", 4 + 12 / 64, _zero(1), "B", "17"),
        Formula("ZeRO 2", "$2 + 14/d$", "d = 64", 2 + 14 / 64, _zero(2), "B", "17"),
        Formula("ZeRO 3", "$16/d$", "d = 64", 16 / 64, _zero(3), "B", "17"),
        Formula(
            "activations of a GPT layer, sequence parallel, with dropout and all scores kept (no FlashAttention)",
            "$s b h (34 + 5 a s / h) / t$",
            "s = 2,048, b = 4, h = 6,144, a = 64, t = 8",
            2048 * 4 * 6144 * (34 + 5 * 64 * 2048 / 6144) / 8,
            lambda: activation_bytes(2048, 4, 6144, 64, 8, sequence_parallel=True),
            "B",
            "05",
        ),
        Formula(
            "logits on the last stage, Megatron",
            "$6 s b V / t$",
            "Llama 3 8B, s = 8,192, b = 1",
            6 * 8192 * 128256,
            lambda: memory(Model.find("llama3-8b"), Plan(pp=4), 8, 8192)[-1].logits,
            "B",
            "27",
        ),
    ),
    "Long sequences": (
        Formula(
            "ring attention, forward",
            "$(c-1)$ times $K$ and $V$ of a rank",
            "8,192 tokens, 32 and 8 heads of 128, c = 8",
            7 * KEYS,
            lambda: attention_bytes("ring", **QUERY).forward,
            "B",
            "20",
        ),
        Formula(
            "ring attention, backward",
            "$(c-1) KV + c \\, dKV$, with $dK$ and $dV$ in float32",
            "the same",
            7 * KEYS + 8 * 2 * KEYS,
            lambda: attention_bytes("ring", **QUERY).backward,
            "B",
            "20",
        ),
        Formula(
            "exchange of heads, forward",
            "$(c-1)/c$ of $Q$, $K$, $V$ and $O$",
            "the same",
            7 / 8 * (KEYS + 2 * 1024 * 32 * 128 * 2),
            lambda: attention_bytes("head", **QUERY).forward,
            "B",
            "20",
        ),
        Formula(
            "a causal ring of consecutive tokens computes",
            "$c/(2c-1)$ of the time",
            "c = 8, long sequences",
            8 / 15,
            lambda: efficiency(TokenLayout("contiguous", 8 * 4096, 8), CAUSAL),
            "%",
            "21",
        ),
        Formula(
            "a hop is hidden from",
            "$2 (g/a) \\, C / W$ tokens per rank, causal and balanced",
            "a = 32, g = 8, H100 on NVLink",
            2 * 8 / 32 * 989e12 / 450e9,
            lambda: tokens_to_hide_hop(989e12, 450e9, 32, 8),
            "tokens",
            "20",
        ),
    ),
}


def page() -> str:
    titles = {lab.number: (lab.name, lab.title) for lab in course.labs()}
    parts = [INTRODUCTION]
    for title, formulas in SHEET.items():
        lines = ["| what | formula | example | value | lab |", "| --- | --- | --- | --: | --- |"]
        for one in formulas:
            name, lab = titles[one.lab]
            link = f"[{one.lab} {lab}](../labs/{name}.ipynb)"
            lines.append(f"| {one.what} | {one.formula} | {one.example} | {one.value} | {link} |")
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf8")
