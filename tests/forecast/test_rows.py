"""Tables: what a row may leave out, what it may call things, and what happens to a row that makes no sense."""

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tplab.forecast import Model, Plan, forecast
from tplab.forecast.rows import ANSWERS, forecast_file, forecast_row, forecast_rows, model_of

ROW = {
    "model": "llama3-8b",
    "cluster": "h100-measured",
    "stack": "megatron",
    "gpus": "16",
    "batch": "64",
    "sequence": "8192",
}


def one(**cells: str) -> dict[str, str]:
    (found,) = forecast_rows([{**ROW, **cells}])
    return found


def test_a_row_is_a_forecast():
    found = one(tp="4", pp="2", microbatch="2", zero="0", sequence_parallel="true", recompute="full", dtype="bf16")
    plan = Plan(dp=2, tp=4, pp=2, microbatch=2, sequence_parallel=True, recompute="full")
    expected = forecast("llama3-8b", plan, "h100-measured", batch=64, sequence=8192)
    assert float(found["seconds"]) == pytest.approx(expected.seconds, rel=1e-5)
    assert float(found["memory_gb"]) == pytest.approx(expected.peak.total / 1e9, abs=0.01)
    assert float(found["memory_gib"]) == pytest.approx(expected.peak.total / 2**30, abs=0.01)
    assert found["memory_gb_by_rank"].split() == [f"{held.total / 1e9:.2f}" for held in expected.memory]
    assert (found["fits"], found["why"]) == ("true", expected.why)
    assert set(ANSWERS) < set(found)


def test_empty_cells_are_the_stacks_defaults():
    """Megatron's: ZeRO 1, sequence parallel; dp is what is left of the GPUs."""
    plan = Plan(dp=4, tp=4, zero=1, sequence_parallel=True)
    expected = forecast("llama3-8b", plan, "h100-measured", batch=64, sequence=8192)
    assert float(one(tp="4", zero="", dp="")["seconds"]) == pytest.approx(expected.seconds, rel=1e-5)


def test_a_model_by_name_by_size_or_both():
    assert model_of({"model": "Llama3_70B", "layers": "12"}) == replace(Model.find("llama3-70b"), layers=12)
    assert model_of({"model": "1B"}) == Model.find("playbook-1b")
    sizes = {"layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256"}
    assert model_of({**sizes, "gated": "true", "tied": "0"}) == replace(Model.find("llama3-8b"), name="")


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ({"stack": "Megatron LM", "cluster": "H100 SXM", "dtype": "BF16"}, {}),
        ({" GPUs ": " 16.0 ", "Model": "LLAMA3_8B", "model": "", "gpus": ""}, {}),
        ({"zero": "NaN", "dp": "null", "tp": "None", "recompute": "none"}, {}),
        ({"pp": "4", "schedule": "ZB-H1"}, {"pp": "4", "schedule": "zb_h1"}),
        ({"pp": "4", "virtual": "2", "schedule": "Interleaved 1F1B"}, {"pp": "4", "virtual": "2"}),
        ({"dtype": "FP8-CS"}, {"dtype": "float8"}),
        ({"dtype": "torch.float8_e5m2"}, {"dtype": "float8"}),
        ({"recompute": "True"}, {"recompute": "full"}),
        ({"recompute": "0"}, {"recompute": "none"}),
    ],
)
def test_cells_may_be_written_as_others_write_them(written: dict[str, str], plain: dict[str, str]):
    assert one(**written)["seconds"] == one(**plain)["seconds"] != ""


@pytest.mark.parametrize(
    ("cells", "field", "value"),
    [
        ({"attention": "Flash3"}, "attention", "flash3"),
        ({"attention": "FlashAttention-3"}, "attention", "flash3"),
        ({"attention": "FA2"}, "attention", "flash2"),
        ({"attention": "eager"}, "attention", "unfused"),
        ({"attention": "none"}, "attention", None),
        ({"flash": "false"}, "attention", "unfused"),
        ({"flash": "true"}, "attention", None),
        ({"flash": "true", "cluster": "a100"}, "attention", "flash2"),
        ({"cluster": "a100"}, "attention", "unfused"),
        ({"compiled": "yes"}, "compiled", True),
        ({"compiled": "false"}, "compiled", False),
        ({"state_dtype": "bf16"}, "state_dtype", "bfloat16"),
        ({"state_dtype": ""}, "state_dtype", None),
    ],
)
def test_a_row_says_what_the_stack_would_choose(cells: dict[str, str], field: str, value: object):
    assert getattr(forecast_row({**ROW, "tp": "8", **cells})[1].plan, field) == value


def test_one_strange_row_loses_no_other(monkeypatch: pytest.MonkeyPatch):
    def fails(*given: object, **more: object) -> None:
        raise ZeroDivisionError("by zero")

    good = one()
    monkeypatch.setattr("tplab.forecast.rows.plan_of", fails)
    assert one()["why"] == "not forecast: ZeroDivisionError: by zero"
    assert one().keys() == good.keys()


def test_a_table_keeps_every_row_and_its_order(tmp_path: Path):
    text = "\ufeffmodel,gpus,batch,sequence\nllama3-8b,8,64,4096\n\nllama3-8b\n,,,\nllama3-8b,8,64,4096,more,cells\n"
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8")
    done = forecast_file(tmp_path / "rows.csv", tmp_path / "out.csv")
    assert [bool(row["seconds"]) for row in done] == [True, False, False, True]
    with open(tmp_path / "out.csv", newline="") as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["llama3-8b", "llama3-8b", "", "llama3-8b"]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"cluster": "H100"}, "cluster H100 is taken as h100-measured; computing takes"),
        ({"cluster": "h100-sxm-80gb"}, "cluster h100-sxm-80gb is taken as h100-measured; computing takes"),
        ({"cluster": "DGX-H100"}, "cluster dgx-h100 was not measured, so this is h100-measured; computing takes"),
        ({"cluster": ""}, "no cluster is named, so this is h100-measured; computing takes"),
        ({"cluster": "h100_measured"}, "computing takes"),
    ],
)
def test_a_cluster_that_is_another_one_says_so(cells: dict[str, str], said: str):
    found = one(**cells, tp="8")
    assert found["seconds"] == one(tp="8")["seconds"]
    assert found["why"].startswith(said)


def test_a_chip_with_less_memory_is_another_one():
    cells = {"gpus_per_node": "4", "tp": "2", "sequence": "4096"}
    large, small = (one(cluster=name, **cells) for name in ("a100", "a100-40gb"))
    assert small["why"].startswith("cluster a100-40gb was not measured, so this is a100-measured with 40 GB; ")
    assert (large["fits"], small["fits"]) == ("true", "false")
    assert (
        1 < float(small["seconds"]) / float(large["seconds"]) < 1.3
    )  # its memory is slower, too: 1,555 GB/s for 2,039
    assert one(cluster="gh100x")["why"].startswith("not forecast: no cluster is named 'gh100x'; did you mean h100")


COLUMNS = {
    "microbatchs": "did you mean microbatch?",
    "sequence_paralell": "did you mean sequence_parallel?",
    "offload": "note_offload would be carried along",
    "dp_replicate": "note_dp_replicate would be carried along",
    "optimizer": "note_optimizer would be carried along",
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_that_is_not_known_is_refused_where_it_says_something(name: str):
    assert one(**{name: "2"})["why"] == f"not forecast: the column {name!r} is not read; {COLUMNS[name]}"
    assert not one(**{name: "2"})["seconds"]
    assert one(**{name: "nan"}) == {**one(), name: "nan"}


@pytest.mark.parametrize("name", ["note", "Note_mine", "measured_seconds", "id", "source", "seconds", "Unnamed: 0"])
def test_columns_of_ones_own_are_carried_along(name: str):
    assert one(**{name: "2"}) == {name: "2"} | one()


NONSENSE = {
    "not forecast: no cluster is named 'mars'": {"cluster": "mars"},
    "not forecast: tp x pp x cp = 3 does not divide 16 GPUs": {"tp": "3"},
    "not forecast: tp is -2; it is a whole number, 1 or more": {"tp": "-2"},
    "not forecast: dp x tp x pp x cp = 8, and the row says 16 GPUs": {"dp": "8"},
    "not forecast: tp=16 does not divide 8 key and value heads": {"tp": "16"},
    "not forecast: no model is named 'lama3-8b', nor is that the path of a config.json; did you mean llama3-8b": {
        "model": "lama3-8b"
    },
    "not forecast: no model is named 'mine', and the row does not say its layers": {"model": "mine", "hidden": "64"},
    "not forecast: sequence is 0; it must be 1 or more": {"sequence": "0"},
    "not forecast: the row does not say its batch": {"batch": ""},
    "not forecast: pp is '1.5'; it must be a whole number": {"pp": "1.5"},
    "not forecast: batch is '1,024'; it must be a whole number": {"batch": "1,024"},
    "not forecast: gpus is 'inf'; it must be a whole number": {"gpus": "inf"},
    "not forecast: gpus is '1e8'; it must be a whole number, 1,000,000 at most": {"gpus": "1e8"},
    "not forecast: layers is '1e12'; it must be a whole number, 1,000,000 at most": {"layers": "1e12"},
    "not forecast: overlap is 'perhaps'; it must be true or false": {"overlap": "perhaps"},
    "not forecast: compiled is 'perhaps'; it must be true or false": {"compiled": "perhaps"},
    "not forecast: attention is 'ring'; it must be one of flash2, flash3, unfused": {"attention": "ring"},
    "not forecast: state_dtype is 'float8'; it must be one of float32, bfloat16": {"state_dtype": "fp8"},
    "not forecast: no schedule is called 'zigzag'": {"schedule": "zigzag"},
    "not forecast: a model with kv_heads=0 is impossible; it is 1 or more": {"kv_heads": "0"},
    "not forecast: a model with heads=-1 is impossible; it is 1 or more": {"heads": "-1"},
    "not forecast: gpus is 'many'; it must be a whole number": {"gpus": "many"},
    "not forecast: the row does not say its batch and sequence; sequence is 'n/a', which says nothing": {
        "batch": "",
        "sequence": "n/a",
    },
    "not forecast: the row does not say its sequence; sequence is 'nan', which says nothing": {"sequence": "nan"},
    "not forecast: no fabric is named 'token-ring'; there are 'playbook', 'infiniband-ndr'": {"fabric": "token ring"},
    "not forecast: cluster 'h100-measured': the 8 ranks of a node cannot share 3 cards": {"cards": "3"},
    "not forecast: cards is 'many'; it must be a whole number": {"cards": "many"},
    "not forecast: cluster 'h100-measured': oversubscription is 0.5; it must be 1 or more": {"oversubscription": "0.5"},
    "not forecast: oversubscription is 'much'; it must be a number": {"oversubscription": "much"},
    "not forecast: cluster 'tpu_v5e' is one node, so it has no gpus_per_node=4": {
        "cluster": "tpu_v5e",
        "gpus_per_node": "4",
    },
    "not forecast: cluster 'tpu_v5e': one node holds every rank; cards and": {"cluster": "tpu_v5e", "cards": "4"},
}


@pytest.mark.parametrize("why", NONSENSE)
def test_a_row_that_makes_no_sense_says_why(why: str):
    found = one(**NONSENSE[why])
    assert found["why"].startswith(why)
    assert not found["seconds"] and not found["fits"]


def test_what_a_network_is_counts():
    """ZeRO 3 over two nodes sends its layers between them."""
    row = {**ROW, "zero": "3", "batch": "16", "sequence": "1024"}
    rest = {"fabric": "Ethernet 100G"}, {"cards": "1"}, {"oversubscription": "4"}, {"gpus_per_node": "4"}
    took = [forecast_row({**row, **cells})[1].seconds for cells in ({}, *rest)]
    assert min(took[1:]) > 1.02 * took[0]
    assert forecast_row({**row, "fabric": "playbook"})[1].seconds == took[0]
    assert forecast_row({**row, "cards": "8", "oversubscription": "1", "gpus_per_node": "8"})[1].seconds == took[0]


def test_compiled_is_of_torch_fsdp():
    assert one(compiled="true")["why"].startswith(
        "compiled is a choice of torch FSDP, and nothing changes with it for "
    )
    assert one(compiled="true", stack="fsdp")["why"].startswith("computing takes")
    assert one(compiled="true")["seconds"] == one()["seconds"]


def test_an_unknown_stack_is_forecast_as_megatron_and_says_so():
    assert one(stack="axolotl")["seconds"] == one()["seconds"]
    assert one(stack="axolotl")["why"].startswith("stack axolotl was not measured, so this is Megatron's; ")


def test_the_command_writes_a_table(tmp_path: Path):
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        file.write("# a comment\n")
        writer = csv.DictWriter(file, [*ROW, "note"])
        writer.writeheader()
        writer.writerows([{**ROW, "note": "mine"}, {**ROW, "gpus": "0"}])
    command = [sys.executable, "-m", "tplab.forecast", "--rows", "rows.csv", "--out", "out.csv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout == "2 rows, of which 1 could not be forecast: out.csv\n"
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["note"] for row in rows] == ["mine", ""] and rows[0]["seconds"] and rows[1]["why"]
    assert forecast_file(tmp_path / "rows.csv", tmp_path / "again.csv")[0]["seconds"] == rows[0]["seconds"]
