"""Your own cluster: fitted to rows, kept in a file, read from nccl-tests, measured by the command."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from tplab import cost, measure
from tplab.cost import H100_MEASURED, NAMED, find
from tplab.cost.measured import between, collectives
from tplab.cost.own import Row, fit_cluster, load, read_tables, save
from tplab.errors import ClusterError
from tplab.forecast import Plan, forecast

NODE = [Row(row.op, row.gpus, 1, row.bytes, row.seconds) for row in collectives() if row.gpu == "h100"]
NETWORK = [Row(row.op, 8 * row.nodes, row.nodes, row.bytes, row.seconds) for row in between() if row.fabric == "efa-p5"]
FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


# --------------------------------------------------------------------------------------------------------------- fits


def test_a_fit_of_published_rows_is_as_near_as_it_says():
    own = fit_cluster("mine", [*NODE, *NETWORK], find("h100-measured", fabric="efa-p5"), "published rows")
    off = np.array([seconds / row.seconds - 1 for seconds, row in zip(own.predicted, [*NODE, *NETWORK])])
    inside, outside = np.abs(off[: len(NODE)]), np.abs(off[len(NODE) :])
    assert np.median(inside) < 0.05 and np.quantile(inside, 0.9) < 0.15
    assert np.median(outside) < 0.09 and np.quantile(outside, 0.9) < 0.25
    assert own.cluster.fitted is not None and own.cluster.fabric is not None and own.cluster.fabric.error is not None
    assert own.cluster.fitted.errors["collectives"].median < 0.06 and own.cluster.fabric.error.median < 0.12
    assert own.cluster.kind_on(16).startswith("your network, forecast")
    for seconds, row in zip(own.predicted, [*NODE, *NETWORK]):
        assert seconds == own.cluster.collective_seconds(row.op, row.bytes, row.ranks)


def test_constants_that_made_the_rows_are_found_again():
    base = find("laptop")

    def rows(latency, bandwidth, launch, peak):
        ring = [(op, R, n) for op in FACTORS for R in (2, 4) for n in (1e3, 1e5, 1e7)]
        for op, R, n in ring:
            hops = FACTORS[op] * (R - 1)
            yield Row(op, R, 1, n, 1e-5 + hops * latency + hops / R * n / bandwidth)
        for n in (1e3, 1e5, 1e7):
            yield Row("hop", 2, 1, n, latency + n / bandwidth)
            yield Row("matmul", 1, 1, 1e3 * n, launch + 1e3 * n / peak, "float32")
        yield Row("copy", 1, 1, 1e9, 1e9 / 3e10)

    found = fit_cluster("mine", list(rows(2e-6, 5e9, 3e-6, 1e11)), base, "made").cluster
    assert (found.inner_link.latency, found.inner_link.bandwidth) == pytest.approx((2e-6, 5e9), rel=0.02)
    assert found.collective_seconds("all_reduce", 1e6, 8) == pytest.approx(
        1e-5 + 14 * 2e-6 + 14 / 8 * 1e6 / 5e9, rel=0.02
    )
    assert (found.chip.launch, found.chip.peak("float32")) == pytest.approx((3e-6, 1e11), rel=0.02)
    assert found.chip.memory_bandwidth == pytest.approx(3e10)
    assert all(error.most < 0.02 for error in found.fitted.errors.values())  # type: ignore[union-attr]


def test_one_gpu_gives_its_chip_and_leaves_the_rest_as_it_was():
    rows = [Row("matmul", 1, 1, 2.0 * n**3, 5e-6 + 2 * n**3 / 6e14, "bfloat16") for n in (256, 1024, 2048, 4096, 8192)]
    found = fit_cluster("mine", rows, H100_MEASURED, "one GPU").cluster
    assert found.chip.matmul_seconds(4096, 4096, 4096) == pytest.approx(5e-6 + 2 * 4096**3 / 6e14, rel=0.05)
    assert found.collective_seconds("all_reduce", 1e6, 8) == H100_MEASURED.collective_seconds("all_reduce", 1e6, 8)


def test_what_cannot_have_been_measured_is_refused():
    for row in (Row("all_reduce", 2, 1, 8.0, 0.0), Row("gather", 2, 1, 8.0, 1.0), Row("hop", 2, 1, -1.0, 1.0)):
        with pytest.raises(ClusterError, match="cannot have been measured"):
            fit_cluster("mine", [row], find("laptop"), "made")
    with pytest.raises(ClusterError, match="nothing was measured"):
        fit_cluster("mine", [], find("laptop"), "made")


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("cluster", NAMED.values(), ids=NAMED)
def test_a_cluster_survives_its_file(cluster, tmp_path):
    path = tmp_path / "mine.json"
    save(cluster, path)
    assert load(path) == find(str(path)) == cluster


def test_a_file_is_accepted_wherever_a_name_is(tmp_path):
    path = tmp_path / "mine.json"
    mine = replace(find("h100-measured", fabric="efa-p5"), name="mine")
    save(mine, path)
    assert cost.collective("all_reduce", 1e6, 16, str(path)) == cost.collective("all_reduce", 1e6, 16, mine)
    plan = Plan(dp=2, tp=8)
    assert forecast("llama3-8b", plan, str(path), batch=8, sequence=4096).seconds == pytest.approx(
        forecast("llama3-8b", plan, mine, batch=8, sequence=4096).seconds
    )
    joined = find("h200-measured", fabric=str(path))
    assert (joined.fabric, joined.outer_link) == (mine.fabric, mine.outer_link)


def test_files_that_are_no_cluster_are_refused(tmp_path):
    path = tmp_path / "mine.json"
    with pytest.raises(ClusterError, match=r"mine\.json cannot be read: No such file"):
        find(str(path))
    for text, what in (("{", "is not JSON"), ("{}", "is not a cluster"), ("[]", "is not a cluster")):
        path.write_text(text)
        with pytest.raises(ClusterError, match=what):
            find(str(path))
    save(H100_MEASURED, path)
    path.write_text(path.read_text().replace('"node_size"', '"size"'))
    with pytest.raises(ClusterError, match="is not a whole cluster"):
        find(str(path))
    save(H100_MEASURED, path)
    whole = json.loads(path.read_text())
    for lost in (
        {"chip": {name: part for name, part in whole["chip"].items() if name != "kernels"}},
        {"fitted": whole["fitted"] | {"nccl": None}},
        {"chip": whole["chip"] | {"kernels": whole["chip"]["kernels"] | {"attention": None}}},
    ):
        path.write_text(json.dumps(whole | lost))
        with pytest.raises(ClusterError, match="is not a whole cluster"):
            find(str(path))
    save(find("laptop"), path)
    with pytest.raises(ClusterError, match="was measured on one node, so it says nothing of a network"):
        find("h100-measured", fabric=str(path))


# ---------------------------------------------------------------------------------------------------------- nccl-tests


def table(op="all_reduce", nodes=1, gpus=8, sizes=(1 << 10, 1 << 20, 1 << 30), title=True, on=H100_MEASURED, edit=None):
    """What nccl-tests prints, of times that a cluster says."""
    R, redop = nodes * gpus, "sum" if "reduce" in op else "none"
    printed = {"all_to_all": "alltoall"}.get(op, op)
    lines = [
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 1 step: 2(factor) warmup iters: 5 iters: 20",
        "#",
        "# Using devices",
    ]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid {rank} on n-{rank // gpus} device {rank % gpus:2} [0x1b] NVIDIA H100 80GB HBM3"
        for rank in range(R)
    ]
    if title:
        lines.append(f"# Collective test starting: {printed}_perf")
    lines += [
        "#       size         count      type   redop    root     time   algbw   busbw #wrong"
        "    time   algbw   busbw #wrong"
    ]
    for size in sizes:
        micros = on.collective_seconds(op, size, R) * 1e6
        algbw = size / micros / 1e3
        busbw = algbw * FACTORS[op] * (R - 1) / R
        pair = f"{micros:9.2f} {algbw:7.2f} {busbw:7.2f}      0"
        lines.append(f"{size:12} {size // 4:12}     float  {redop:>6}      -1 {pair} {pair}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 100.0"]
    return "\n".join(edit(lines) if edit else lines) + "\n"


@pytest.mark.parametrize("op", FACTORS)
@pytest.mark.parametrize("nodes", [1, 4])
def test_a_printed_table_is_read(op, nodes, tmp_path):
    file = tmp_path / "out.txt"
    file.write_text(table(op, nodes))
    ((rows, chip),) = read_tables([file])
    assert chip == "NVIDIA H100 80GB HBM3"
    assert [row[:4] for row in rows] == [(op, 8 * nodes, nodes, size) for size in (1 << 10, 1 << 20, 1 << 30)]
    seconds = [H100_MEASURED.collective_seconds(op, row.bytes, 8 * nodes) for row in rows]
    assert [row.seconds for row in rows] == pytest.approx(seconds, rel=1e-3)


def test_a_table_without_a_title_is_known_by_its_name_or_its_numbers(tmp_path):
    for op in ("all_reduce", "reduce_scatter"):
        (tmp_path / "out.txt").write_text(table(op, title=False))
        assert read_tables([tmp_path / "out.txt"])[0].rows[0].op == op
    for name, op in (("alltoall_perf.log", "all_to_all"), ("all_gather.txt", "all_gather")):
        (tmp_path / name).write_text(table(op, title=False))
        assert read_tables([tmp_path / name])[0].rows[0].op == op
    (tmp_path / "out.txt").write_text(table("all_gather", title=False))
    with pytest.raises(
        ClusterError, match=r"out\.txt is of a collective that its numbers do not tell; give all_reduce"
    ):
        read_tables([tmp_path / "out.txt"])


def change(row, cell, value):
    """An edit of a table: in the row counted from the end, the cell is another."""

    def edit(lines):
        place = len(lines) - 2 + row
        cells = lines[place].split()
        cells[cell] = value
        return [*lines[:place], " ".join(cells), *lines[place + 1 :]]

    return edit


@pytest.mark.parametrize(
    "edit, what",
    [
        (change(-1, 5, "0"), r"line 16: it took 0 us, which is not possible"),
        (change(-1, 5, "-3"), r"it took -3 us, which is not possible"),
        (change(-1, 5, "nan"), r"it took nan us, which is not possible"),
        (change(-1, 6, "900.0"), r"GB/s, and algbw says 900\.0"),
        (change(-1, 7, "900.0"), r"line 16: over 8 ranks, busbw of an all_reduce is 1\.75 x algbw, .* and not 900\.0"),
        (change(-1, 8, "12"), r"12 elements were wrong"),
        (change(-1, 5, "soon"), r"line 16 is not a row of nccl-tests: '1073741824"),
        (lambda lines: [line for line in lines if "Rank" not in line], r'no line "# Rank" says how many ranks ran'),
        (lambda lines: lines[:10], r"has no row of a table of nccl-tests"),
        (lambda lines: [line.replace("all_reduce", "sendrecv") for line in lines], r"give all_reduce, all_gather"),
    ],
)
def test_an_impossible_table_is_refused_with_its_row(edit, what, tmp_path):
    (tmp_path / "out.txt").write_text(table(edit=edit))
    if "sendrecv" in (tmp_path / "out.txt").read_text():
        what = "out"  # without a name its numbers still say all_reduce
        assert read_tables([tmp_path / "out.txt"])[0].rows[0].op == "all_reduce"
        return
    with pytest.raises(ClusterError, match=what):
        read_tables([tmp_path / "out.txt"])


def test_a_noisy_table_is_refused_with_its_row(tmp_path):
    def noisy(lines):
        place = len(lines) - 4  # the second row takes 8 times as long as it should
        cells = lines[place].split()
        size, micros = int(cells[0]), 80 * float(cells[5])
        cells[5:8] = f"{micros:.1f}", f"{size / micros / 1e3:.2f}", f"{1.75 * size / micros / 1e3:.2f}"
        return [*lines[:place], " ".join(cells), *lines[place + 1 :]]

    (tmp_path / "out.txt").write_text(table(sizes=(1 << 20, 1 << 22, 1 << 24), edit=noisy))
    with pytest.raises(
        ClusterError, match=r"line 16: 16777216 bytes took .*, and 4194304 bytes before them .*; that is noise"
    ):
        read_tables([tmp_path / "out.txt"])


# ----------------------------------------------------------------------------------------------------------- a command


def test_the_command_reads_tables_and_prints_predicted_beside_measured(tmp_path, capsys):
    sizes = [1 << power for power in range(10, 31, 2)]
    for op in FACTORS:
        (tmp_path / f"{op}.txt").write_text(table(op, sizes=sizes))
        (tmp_path / f"{op}-4.txt").write_text(table(op, 4, sizes=sizes))
    files = [str(path) for path in tmp_path.glob("*.txt")]
    out = str(tmp_path / "mine.json")
    assert measure.main(["--out", out, "--nccl-tests", *files]) == 0
    shown = capsys.readouterr().out
    assert "all_to_all" in shown and "measured" in shown and "collectives" in shown and f"--cluster {out}" in shown
    found = find(out)
    assert (found.name, found.node_size, found.chip.name) == ("mine", 8, "H100 SXM 80GB")
    for op in FACTORS:
        wanted = [H100_MEASURED.collective_seconds(op, size, 32) for size in sizes]
        assert [found.collective_seconds(op, size, 32) for size in sizes] == pytest.approx(wanted, rel=0.25)


def test_one_rank_and_a_poor_fit_are_named():
    rows = [Row("matmul", 1, 1, 2.0**power, 1e-6 * (1 if power % 2 else 90), "float32") for power in range(20, 40)]
    text = measure.report(rows, fit_cluster("mine", rows, find("laptop"), "made"))
    assert "1 rank: no links were measured; start it with torchrun" in text and "median" in text
    assert "a poor fit: these times do not follow" in text


def test_the_command_names_what_is_wrong(tmp_path, capsys):
    assert measure.main(["--out", str(tmp_path / "mine.json"), "--nccl-tests", str(tmp_path / "none.txt")]) == 2
    assert "none.txt cannot be read" in capsys.readouterr().err
    for out in ("mine.txt", str(tmp_path / "no" / "mine.json")):
        with pytest.raises(SystemExit):
            measure.main(["--out", out])
        assert "give the name of a .json file in a folder that exists" in capsys.readouterr().err


def test_two_ranks_measure_themselves_over_gloo(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "tplab.measure",
        "--most",
        "1",
    ]
    ran = subprocess.run([*command, "--out", "mine.json"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    assert "all_to_all" in ran.stdout and "hop" in ran.stdout and "matmul float32" in ran.stdout
    found = find(str(tmp_path / "mine.json"))
    assert found.fitted is not None and "gloo on 2 ranks" in found.fitted.source
    assert found.collective_seconds("all_reduce", 1e6, 2) > found.collective_seconds("all_reduce", 1e3, 2) > 0
