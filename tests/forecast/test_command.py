"""`python -m tplab.forecast`: the best layouts as text and as a page."""

import json
import re
from pathlib import Path

import pytest

from tplab.forecast import Plan
from tplab.forecast.__main__ import main

SMALL = ["llama3.2-1b", "--gpus", "8", "--batch", "64"]


def test_the_best_layouts_and_why_the_others_lost(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    main([*SMALL, "--top", "3", "--html", str(tmp_path / "page.html")])
    said = capsys.readouterr().out
    assert said.startswith(
        "llama3.2-1b on 8 x H100 SXM 80GB\n64 sequences of 4096 tokens in a step, megatron, h100-mea"
    )
    lines = re.findall(r"^ +([123]) +(\S+) +\S+ +(\S+)% +(\S+)  (.+)$", said, re.MULTILINE)
    assert [line[0] for line in lines] == ["1", "2", "3"]
    assert [float(line[1]) for line in lines] == sorted(float(line[1]) for line in lines)
    assert len({tuple(re.findall(r"(?:dp|tp|pp|cp) \d+", line[4])) for line in lines}) == 3
    assert "\n1: computing takes " in said and " fit. The others" in said
    page = (tmp_path / "page.html").read_text()
    assert page.count("<circle") == 3 and page.count("<rect") == 3 * (10 + 7) and "<script" not in page
    assert lines[0][4].replace("'", "&#x27;") in page


def test_a_cluster_is_what_its_name_says_and_the_measured_one_where_none_is_named(capsys: pytest.CaptureFixture[str]):
    said = {}
    for name in ("h100", "h100-measured", None):
        main([*SMALL, *(["--cluster", name] if name else []), "--top", "1"])
        said[name] = capsys.readouterr().out
    assert said[None] == said["h100-measured"]
    assert "megatron, h100: data sheet. For a forecast, take h100-measured. The best plan of each" in said["h100"]
    assert "megatron, h100-measured: forecast. The best plan of each" in said[None]
    seconds = {name: float(re.findall(r"^ +1 +(\S+)", text, re.MULTILINE)[0]) for name, text in said.items()}
    assert seconds["h100"] < seconds["h100-measured"]


def test_flags_say_what_every_plan_has(capsys: pytest.CaptureFixture[str]):
    flags = ["--stack", "fsdp", "--attention", "flash2", "--compiled", "false", "--state-dtype", "bfloat16"]
    main([*SMALL, *flags, "--top", "2"])
    plans = re.findall(r"^ +\d +\S.*  (dp .*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(plans) == 2
    assert all(plan.endswith("FlashAttention 2, not compiled, states in bfloat16") for plan in plans)


def test_a_model_by_its_config(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    config = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512}
    config |= {"num_attention_heads": 4, "vocab_size": 1000, "num_key_value_heads": 2}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    main([str(tmp_path / "tiny" / "config.json"), "--gpus", "2", "--batch", "4", "--cluster", "a100"])
    assert capsys.readouterr().out.startswith("tiny on 2 x A100 SXM 80GB\n")


def test_what_was_not_measured_is_searched_if_one_asks_for_it(capsys: pytest.CaptureFixture[str]):
    asked = ["deepseek-v3", "--gpus", "512", "--batch", "1024", "--virtual", "1", "--top", "1"]
    with pytest.raises(SystemExit):
        main(asked)
    assert "of a class that was measured; --outside, or plans(..., inside=False), searches" in capsys.readouterr().err
    main([*asked, "--outside", "--etp", "2", "--dispatch", "per_rank", "--skew", "0.5"])
    said = capsys.readouterr().out
    assert re.search(r" ep \d+,.* dispatch per_rank, skew 0.5, ", said)
    assert "outside what was measured, so there is no interval" in said
    with pytest.raises(SystemExit):
        main([*SMALL, "--dispatch", "gather", "--outside"])
    assert "dispatch=gather, but llama3.2-1b has no experts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["llama3-8b"], "give a model, --gpus and --batch"),
        (
            ["lama3-8b", *SMALL[1:]],
            "no model is named 'lama3-8b', nor is that the path of a config.json; did you mean llama3-8b",
        ),
        ([*SMALL, "--clustr", "h100"], "unrecognized argument: --clustr; did you mean --cluster? (--help lists"),
        ([*SMALL, "--fabric", "efa"], "no fabric is named 'efa'; there are 'playbook'"),
        ([*SMALL, "--attention", "flash4"], "argument --attention: invalid choice: 'flash4'"),
        (["--rows", "a.csv", "--out", "b.csv", "--cards", "4"], "--cards is a column of the table of --rows"),
        (["none.json", *SMALL[1:]], "none.json: No such file"),
        (["--rows", "none.csv", "--out", "out.csv"], "none.csv: No such file"),
        ([*SMALL, "--html", "/nodir/x"], "there is no folder /nodir"),
        ([*SMALL, "--sequence", "0"], "sequence is 0; it must be 1 or more (--help lists"),
        ([*SMALL, "--top", "-1"], "top is -1; it must be 1 or more (--help lists"),
        ([*SMALL, "--gpus", "0"], "gpus is 0; it must be 1 or more (--help lists"),
        ([*SMALL, "--virtual", "0"], "virtual is 0; it must be 1 or more (--help lists"),
        ([*SMALL, "--out", "out.csv"], "--out is where the table of --rows goes"),
        ([*SMALL, "--stack", "tplab"], "tplab gives stages equally many parameters"),
        ([*SMALL, "--cluster", "mars"], "no cluster is named 'mars'; there are h100, h200,"),
        (
            [*SMALL, "--cluster", "laptop"],
            "cluster 'laptop' has no speed in bfloat16, only in float32, float64; take another",
        ),
        (["--rows", "rows.csv"], "--rows needs --out"),
        ([*SMALL, "--compiled", "true"], "--compiled is a choice of --stack fsdp; it changes nothing for megatron"),
        ([*SMALL, "--etp", "2"], "--etp divides experts, and llama3.2-1b has none"),
        ([*SMALL, "--batch", "1.5"], "--batch is '1.5'; give a whole number"),
        (["llama3-7b", *SMALL[1:]], "nor is that the path of a config.json; did you mean"),
    ],
)
def test_what_is_missing_is_said(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.startswith("tplab.forecast: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "it has no names"),
        ('{"model_type": "gpt2"}', "has none of num_hidden_layers, n_layer"),
    ],
)
def test_a_broken_config_is_named(text: str, why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "broken.json"), "--gpus", "2", "--batch", "4"])
    assert re.search(f"broken.json.* {why}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("", "has no rows"),
        ("model,gpus\n", "has no rows"),
        ("modell,gpus\nllama3-8b,8\n", "'modell' is not read; did you mean model?"),
    ],
)
def test_a_table_that_gives_nothing_fails(table: str, why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "rows.csv").write_text(table)
    with pytest.raises(SystemExit) as ended:
        main(["--rows", str(tmp_path / "rows.csv"), "--out", str(tmp_path / "out.csv")])
    assert ended.value.code == 1
    assert why in capsys.readouterr().err


def test_the_clusters_that_are_offered_have_the_dtype_of_plans_and_a_last_node_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "laptop" not in capsys.readouterr().out.partition("A table:")[0]
    main([*SMALL, "--gpus-per-node", "3", "--cluster", "h100", "--top", "1"])
    assert "The last node has 2 of its 3 GPUs." in capsys.readouterr().out


def test_where_nothing_fits_the_smallest_need_is_said(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["llama3-405b", "--gpus", "8", "--batch", "8"])
    assert ended.value.code == 1
    need, room = re.findall(r"the smallest needs (\S+) GiB per GPU, and (\S+) can", capsys.readouterr().out)[0]
    assert float(need) > 405e9 * 16 / 8 / 2**30 * 0.8 and float(room) < 80


def test_the_numbers_of_plans_add_up(capsys: pytest.CaptureFixture[str]):
    main(["llama3-8b", "--gpus", "16", "--batch", "16"])
    plans, layouts = capsys.readouterr().out.split("\n1: ")[1].split("layouts of ranks are not among")
    counts = [int(count.replace(",", "")) for count in re.findall(r"^ +([\d,]+)  ", plans, re.MULTILINE)]
    considered = int(re.findall(r"of ([\d,]+) plans", plans)[0].replace(",", ""))
    assert sum(counts) + 1 == considered
    refused = [int(count.replace(",", "")) for count in re.findall(r"^ +([\d,]+)  ", layouts, re.MULTILINE)]
    assert f"\n{sum(refused):,} " in plans


def test_a_plan_reads_as_one_would_say_it():
    assert str(Plan(dp=2, pp=4, virtual=2, recompute="full")) == (
        "dp 2, pp 4, microbatch 1, 1f1b of 2 stages per rank, full recomputation"
    )
