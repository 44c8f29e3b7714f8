"""Forecasts: what they are fitted to, how far off they are, and that they behave as times do."""

import copy
import json
import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fit import attention, chips
from benchmarks.fit import matmuls as fit
from benchmarks.fit.least import least, summary
from benchmarks.fit.tables import matmuls, prompts, source
from tplab import cost
from tplab.cost import H100_MEASURED, find, measured
from tplab.cost.fabric import Error
from tplab.cost.kernels import Tiles
from tplab.cost.named import A100_MEASURED, B200_MEASURED, H100_NODE
from tplab.cost.nccl import MEASURED, Nccl, Ratios
from tplab.errors import ClusterError

FORECASTS = [A100_MEASURED, H100_MEASURED, B200_MEASURED]
EACH = pytest.mark.parametrize("cluster", FORECASTS, ids=lambda cluster: cluster.name)


def of(gpu):
    return find(f"{gpu}-measured")


def known(cluster):
    assert cluster.fitted is not None
    return cluster.fitted


# -------------------------------------------------------------------------------------------------------- what it says


def test_every_cluster_says_what_its_times_are():
    kinds = {name: cluster.kind for name, cluster in cost.NAMED.items()}
    assert [name for name, kind in kinds.items() if kind == "forecast"] == [
        "h100-measured",
        "h200-measured",
        "a100-measured",
        "b200-measured",
    ]
    assert {kind for name, kind in kinds.items() if not name.endswith("-measured")} == {"data sheet"}
    assert H100_NODE.label == "modelled, data sheet"
    assert [cluster.label for cluster in FORECASTS] == ["forecast, ±6 %", "forecast, ±6 %", "forecast, ±7 %"]


@EACH
def test_a_forecast_names_its_source_and_its_error(cluster):
    assert "aiconfigurator, commit 095f58a, Apache-2.0" in known(cluster).source
    assert known(cluster).source in cluster.table()
    assert cluster.label in cluster.table()


def test_on_several_nodes_it_names_the_network_whose_error_counts_too():
    assert [cluster.kind_on(8) for cluster in FORECASTS] == [cluster.kind_on(1) for cluster in FORECASTS]
    assert H100_MEASURED.kind_on(9) == "the playbook's network, forecast, ±30 %"
    assert find("h100-measured", fabric="efa-p5").kind_on(16) == "EFA, forecast, ±8 %"
    # two rows of InfiniBand leave none to be judged by
    assert B200_MEASURED.kind_on(16) == "InfiniBand NDR, forecast, ±7 % in a node"
    assert H100_NODE.kind_on(64) == "InfiniBand NDR, data sheet" and H100_NODE.kind_on(8) == "data sheet"


def test_an_h200_is_an_h100_with_other_memory_and_says_so():
    """Nobody has published its tables: what computes takes as long, and what memory limits takes 3.35 / 4.8 of it."""
    own, other = find("h200-measured"), H100_MEASURED
    assert (
        own.label == f"{other.label} on an H100"
        and own.kind_on(16) == "InfiniBand NDR, forecast, ±6 % on an H100 in a node"
    )
    assert "those of an H100" in own.chip.source and "those of an H100" in own.inner_link.source
    assert own.chip.matmul_seconds(8192, 8192, 8192) == pytest.approx(
        other.chip.matmul_seconds(8192, 8192, 8192), rel=1e-4
    )
    start = other.chip.seconds(0, 0)
    assert own.chip.seconds(0, 1e9) - start == pytest.approx((other.chip.seconds(0, 1e9) - start) * 3.35 / 4.8)
    assert own.collective_seconds("all_reduce", 1e6, 8) == other.collective_seconds("all_reduce", 1e6, 8)
    assert pickle.loads(pickle.dumps(own)) == own


def test_the_sheets_of_later_chips():
    """Dense peaks in bfloat16, bandwidth and memory, beside what they are multiples of."""
    assert find("h200").chip.flops == H100_NODE.chip.flops
    for chip in (cost.B300, cost.GB200, cost.GB300):
        assert chip.peak("float8_e4m3fn") == 2 * chip.peak("bfloat16")
        assert "https://" in chip.source and "read 2026-" in chip.source
    assert cost.GB200.peak("bfloat16") / cost.B200.peak("bfloat16") == pytest.approx(10 / 9)
    assert [find(name).chip.memory / 1e9 for name in ("h200", "b200", "b300")] == [141, 180, 270]


@EACH
def test_forecasts_are_values(cluster):
    assert pickle.loads(pickle.dumps(cluster)) == cluster == copy.deepcopy(cluster)
    assert {cluster: 1}[pickle.loads(pickle.dumps(cluster))] == 1


def test_22_constants_per_chip():
    """NCCL's own, matmuls in 16 bit with the memory's bandwidth, in 8 bit, and of attention share, narrow and start."""
    own = len([field for field in fields(Nccl) if field.name != "ratios"])
    assert own + (len(Tiles._fields) + 1) + (len(Tiles._fields) - 1) + 3 == 22


# ------------------------------------------------------------------------------------------------------------- errors

FITTED = {
    "collectives": {"a100": (0.033, 0.095), "b200": (0.029, 0.106), "h100": (0.036, 0.113)},
    "matmuls": {"a100": (0.051, 0.152), "b200": (0.062, 0.187), "h100": (0.047, 0.132)},
    "matmuls in 8 bit": {"b200": (0.04, 0.11), "h100": (0.086, 0.261)},
    "attention": {"b200": (0.041, 0.167), "h100": (0.05, 0.166)},
}
"""Median and 90th percentile on the rows that were fitted, with the constants frozen."""

HELD_OUT = {
    "collectives": {"a100": (0.042, 0.104), "b200": (0.034, 0.125), "h100": (0.049, 0.132)},
    "matmuls": {"a100": (0.051, 0.158), "b200": (0.063, 0.188), "h100": (0.048, 0.134)},
    "matmuls in 8 bit": {"b200": (0.04, 0.112), "h100": (0.092, 0.271)},
    "attention": {"b200": (0.042, 0.174), "h100": (0.053, 0.175)},
}
"""The same on rows that a fit has not seen: `python -m benchmarks.fit.chips --hold-out`, which takes minutes."""


def test_the_errors_are_those_in_the_frozen_table():
    """By the public functions, so that a forecast is what was fitted."""
    off: dict[str, dict[str, list[float]]] = {
        "collectives": {},
        "matmuls": {},
        "matmuls in 8 bit": {},
        "attention": {},
    }
    for row in measured.collectives():
        found = of(row.gpu).collective_seconds(row.op, row.bytes, row.gpus)
        off["collectives"].setdefault(row.gpu, []).append(found / row.seconds - 1)
    for gpu in fit.CHIPS:
        m, n, k, seconds = np.array(matmuls(gpu)).T
        every_tenth = slice(None, None, 10)
        chip = of(gpu).chip
        assert chip.kernels is not None
        some = [
            chip.matmul_seconds(int(x), int(y), int(z))
            for x, y, z in zip(m[every_tenth], n[every_tenth], k[every_tenth])
        ]
        off["matmuls"][gpu] = fit.matmul_errors(gpu, chip.kernels)
        assert some == pytest.approx((seconds * (1 + np.array(off["matmuls"][gpu])))[every_tenth], rel=1e-9)
    for gpu in fit.IN_8_BIT:
        chip, conversion = of(gpu).chip, fit.stored(gpu)[1]
        off["matmuls in 8 bit"][gpu] = []
        for m, n, k, seconds in matmuls(gpu, 8):
            there = conversion.start + m * conversion.row + m * k * conversion.bytes / chip.memory_bandwidth
            found = chip.matmul_seconds(m, n, k, "float8_e4m3fn") + there
            off["matmuls in 8 bit"][gpu].append(found / seconds - 1)
    for gpu in ("h100", "b200"):
        chip, written = of(gpu).chip, attention.stored(gpu)[1]
        for row in prompts(gpu):
            found = chip.attention_seconds(row.batch, row.heads, row.tokens, row.tokens, row.head_dim, causal=True)
            cache = 4 * row.batch * row.tokens * row.kv_heads * row.head_dim / (written * chip.memory_bandwidth)
            off["attention"].setdefault(gpu, []).append((found + cache) / row.seconds - 1)
    assert {name: {gpu: summary(errors) for gpu, errors in of.items()} for name, of in off.items()} == FITTED


def test_a_forecast_carries_its_error_on_rows_it_has_not_seen():
    for gpu in ("a100", "h100", "b200"):
        errors = known(of(gpu)).errors
        assert dict(errors) == {name: Error(*held_out[gpu]) for name, held_out in HELD_OUT.items() if gpu in held_out}
    for name, (median, most) in {
        "collectives": (0.05, 0.14),
        "matmuls": (0.07, 0.19),
        "matmuls in 8 bit": (0.1, 0.28),
        "attention": (0.06, 0.18),
    }.items():  # what was to be reached
        assert all(error[0] <= median and error[1] <= most for error in HELD_OUT[name].values())


def test_the_committed_constants_are_what_the_fit_gives():
    """A short version of the fit: from the committed constants, no step makes the loss smaller."""
    fitted = {gpu: known(of(gpu)).nccl for gpu in chips.KINDS}
    rows = measured.collectives()
    begin = np.log([getattr(fitted["h100"], name) for name in chips._OWN])
    ratios = np.log([getattr(fitted["h100"].ratios, name) for name in chips._RATIOS])
    h100 = [row for row in rows if row.gpu == "h100"]

    def residuals(theta):
        return chips._off(chips._nccl("h100", theta, ratios, fitted["h100"].switch), h100)

    before, _ = least(residuals, begin, 0.05, steps=0)
    after, theta = least(residuals, begin, 0.05, steps=3)
    assert before * 0.99 < after <= before
    assert np.exp(theta) == pytest.approx(np.exp(begin), rel=0.2)  # along valleys, constants make up for each other
    moved = begin + np.log(1.1)
    assert least(residuals, moved, 0.05, steps=0)[0] > 1.2 * before  # it would notice


def test_a_fit_finds_constants_that_made_the_rows():
    """Rows from known constants: the fit finds their times again, though not all of the constants."""
    true = replace(known(H100_MEASURED).nccl, hop=1.5e-6, start=9e-6, bandwidth=2e11)
    rows = [
        row._replace(gpu="h100", seconds=true.taken(row.op, row.bytes, row.gpus).seconds)
        for row in measured.collectives()
        if row.gpu == "h100"
    ]
    found = chips.fit_collectives(rows, rounds=1)["h100"]
    off = [abs(found.taken(row.op, row.bytes, row.gpus).seconds / row.seconds - 1) for row in rows]
    assert np.median(off) < 0.01
    assert found.hop == pytest.approx(1.5e-6, rel=0.1)


def test_every_table_has_its_source_and_the_constants_are_whole():
    for name in map(measured.source, ("nccl", "network_h100")):
        assert "commit" in name and "Apache-2.0" in name
    for name in map(
        source, ("matmul_h100", "matmul_a100", "matmul_b200", "matmul_h100_8bit", "matmul_b200_8bit", "attention")
    ):
        assert "commit" in name and "Apache-2.0" in name
    assert len(measured.collectives()) == 360
    assert [len(matmuls(gpu)) for gpu in ("h100", "a100", "b200")] == [1452, 983, 821]
    assert [len(matmuls(gpu, 8)) for gpu in fit.IN_8_BIT] == [788, 816]
    assert [len(prompts(gpu)) for gpu in ("h100", "b200")] == [305, 338]
    assert len(measured.network()) == 21
    stored = json.loads(measured.CONSTANTS.read_text())
    assert set(stored["ratios"]) | {"peer_ramp"} == set(Ratios._fields)


# ---------------------------------------------------------------------------------------------------------- properties


@EACH
@pytest.mark.parametrize("op", cost.OPS)
@given(
    n=st.integers(0, 2**34),
    more=st.integers(0, 2**34),
    ranks=st.sampled_from([1, 2, 3, 5, 8, 12, 16, 64]),
    data=st.data(),
)
def test_more_bytes_take_no_less_time_and_the_order_of_ranks_none(cluster, op, n, more, ranks, data):
    seconds = cluster.collective_seconds(op, n, ranks)
    assert cluster.collective_seconds(op, n + more, ranks) >= seconds >= 0
    assert (seconds == 0) == (ranks == 1)
    shuffled = data.draw(st.permutations(range(ranks)))
    assert cluster.collective_seconds(op, n, shuffled) == seconds


@EACH
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@given(n=st.integers(0, 2**28))
def test_more_nodes_take_no_less_time(cluster, op, n):
    seconds = [cluster.collective_seconds(op, n, 8 * nodes) for nodes in (1, 2, 3, 4, 8, 16, 64)]
    assert seconds == sorted(seconds)


@EACH
@given(n=st.integers(0, 2**30), ranks=st.integers(2, 7))
def test_more_ranks_of_a_node_take_no_less_time(cluster, n, ranks):
    for op in ("all_gather", "reduce_scatter"):
        assert cluster.collective_seconds(op, n, ranks + 1) >= cluster.collective_seconds(op, n, ranks)


@given(m=st.integers(1, 20000), n=st.integers(1, 20000), k=st.integers(1, 20000), more=st.integers(1, 3000))
def test_larger_matmuls_take_no_less_time(m, n, k, more):
    for cluster in FORECASTS:
        chip = cluster.chip
        seconds = chip.matmul_seconds(m, n, k)
        larger = [
            chip.matmul_seconds(m + more, n, k),
            chip.matmul_seconds(m, n + more, k),
            chip.matmul_seconds(m, n, k + more),
        ]
        assert all(other >= seconds for other in larger)
        assert seconds >= 2 * m * n * k / chip.peak("bfloat16")
        assert chip.matmul_seconds(m, n, k, batch=2) >= seconds


def test_formula_best_and_cluster_agree_to_the_digit():
    for cluster in FORECASTS:
        for ranks in (2, 8, 11, 16):
            for op in MEASURED:
                n = 48 * 11 * 1000
                part = n / ranks if op == "all_gather" else n
                want = cluster.collective_seconds(op, n, ranks)
                assert cost.collective(op, part, ranks, cluster).seconds == want
                assert cost.best(op, part, ranks, cluster.name).seconds == want


def test_runs_take_what_the_formulas_say():
    """Matmuls, collectives and elementwise work, in torch and in JAX, on tensors without numbers and with."""
    import torch

    from tplab import Mesh, P
    from tplab import jax as tj
    from tplab import torch as tt

    chip, n = H100_MEASURED.chip, 512
    assert chip.kernels is not None

    def program(x, w):
        return tt.all_reduce(x @ w, "tp").relu()

    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((n, 4096), (4096, 768)))
    events = tt.run(program, Mesh(tp=8), x, w, cluster="h100-measured").trace.select(rank=0).events
    took = {event.op: event.end - event.start for event in events if event.kind in ("compute", "collective")}
    assert took == pytest.approx(
        {
            "mm": chip.matmul_seconds(n, 768, 4096),
            "all_reduce": H100_MEASURED.collective_seconds("all_reduce", 2 * n * 768, 8),
            "relu": chip.launch + 4 * n * 768 / (chip.memory_bandwidth * chip.kernels.bandwidth),
        }
    )
    batched = tt.run(lambda a, b: a @ b, Mesh(tp=1), x.view(8, 64, 4096), w.expand(8, 4096, 768), cluster=H100_MEASURED)
    assert batched.trace.makespan == chip.matmul_seconds(64, 768, 4096, batch=8)

    a, b = np.zeros((8, 64, 48), np.float32), np.zeros((96, 48), np.float32)
    out = tj.run(
        lambda a, b: tj.all_gather(a @ b.T, "tp"), Mesh(tp=2), a, b, in_specs=(P(), P("tp")), cluster=H100_MEASURED
    )
    half = chip.matmul_seconds(8 * 64, 48, 48, "float32")
    gathered = H100_MEASURED.collective_seconds("all_gather", 2 * 8 * 64 * 48 * 4, 2)
    assert out.trace.makespan == pytest.approx(half + gathered)


def test_a_sum_in_the_switch_is_faster_than_any_ring():
    """8 H100: NVLink carries 450 GB/s one way, and so no ring's bus bandwidth is higher; NVLS comes close at 0.5 GB."""
    n = 2**29
    taken = cost.collective("all_reduce", n, 8, H100_MEASURED)
    assert taken.algorithm == "NVLS"
    assert 1.75 * n / taken.seconds > 400e9
    ring = replace(known(H100_MEASURED).nccl, in_switch=0.0).taken("all_reduce", n, 8).seconds
    assert 1.75 * n / ring < 370e9
    names = [cost.collective("all_reduce", size, 8, H100_MEASURED).algorithm for size in (512, 2**19, 2**26)]
    assert names == ["LL", "LL128", "NVLS"]


def test_what_cannot_be_is_refused():
    with pytest.raises(ClusterError, match="algorithm is 'ring', but cluster 'h100-measured' is a forecast"):
        cost.collective("all_reduce", 8, 8, H100_MEASURED, "ring")
    with pytest.raises(ClusterError, match="no collective is named 'allreduce'"):
        H100_MEASURED.collective_seconds("allreduce", 8, 8)
    with pytest.raises(ClusterError, match="nbytes is -1"):
        H100_MEASURED.collective_seconds("all_reduce", -1, 8)
    with pytest.raises(ClusterError, match="NCCL's constant hop is -1"):
        replace(known(H100_MEASURED).nccl, hop=-1.0)


def test_traces_of_runs_say_which_clock_they_have():
    import torch

    from tplab import Mesh
    from tplab import jax as tj
    from tplab import torch as tt

    for name in ("h100", "b200-measured"):
        ran = tt.run(lambda x: tt.all_reduce(x, "tp"), Mesh(tp=2), torch.ones(4), cluster=name, count_memory=True)
        assert ran.trace.place == f"{name}, {find(name).kind_on(1)}"
        assert ran.memory.cluster == ran.trace.place
        assert (
            tj.run(lambda x: tj.all_reduce(x, "tp"), Mesh(tp=2), np.ones(4), cluster=name).trace.place
            == ran.trace.place
        )
