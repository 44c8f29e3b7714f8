"""`layout_lab`: what it shows are the numbers of `forecast`, a pure function of its settings."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import traitlets
from PIL import Image

from tplab.cost.named import H100_NODE
from tplab.errors import PlanError
from tplab.forecast import Model, Plan, forecast, plans
from tplab.units import plain
from tplab.widgets import layout_lab, to_html
from tplab.widgets.layouts import views
from tplab.widgets.layouts.drawing import WIDTH, plan_map, round_numbers, step
from tplab.widgets.layouts.views import ACTIONS, coordinates, drawn, group_of, groups, on_nodes
from tplab.widgets.layouts.words import GIB, KIND_HUES, KINDS, PARTS, seconds_text
from tplab.widgets.layouts.workbench import Workbench
from tplab.widgets.paper.scene import Scene, packed
from tplab.widgets.paper.wire import unpack

SMALL = {"cluster": "h100-measured", "gpus": 16, "batch": 64, "sequence": 4096}
SETTINGS: dict[str, Any] = {"model": "llama3-8b", **SMALL, "stack": "megatron"}
TINY = Model(layers=6, hidden=384, heads=6, vocab=1000)


def board_of(lab: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return unpack(lab.board)


def hints(scene: Scene, position: int) -> dict[str, dict[str, str]]:
    """What the hints of a picture say at a position: heading -> what -> text."""
    there = [part for part in scene.parts if part.mark >= 0 and part.when.begin < position <= part.when.end]
    marks = scene.marks
    rows = [marks[part.mark].rows for part in there]
    return {heading: dict(rest) for (_, heading), *rest in rows}


@pytest.mark.parametrize("cluster", ["h100-measured", "a100"])
def test_every_number_is_the_forecast_s(cluster: str):
    lab = layout_lab("llama3-8b", **{**SMALL, "cluster": cluster})
    header, of = board_of(lab)
    count = len(header["plans"])
    assert 20 < count <= 100
    assert header["known"] == [*range(count)]
    drawn, points = step(lab._bench), hints(plan_map(lab._bench), 0)
    for index, plan in enumerate(lab.shown):
        alone = forecast("llama3-8b", plan, cluster, batch=64, sequence=4096)
        assert header["plans"][index] == str(alone.plan)
        assert (of["seconds"][index], of["gib"][index]) == (alone.seconds, alone.peak.total / GIB)
        assert points[str(alone.plan)]["a step"] == seconds_text(alone)
        assert points[str(alone.plan)]["memory"].startswith(f"{plain(alone.peak.total / GIB)} of ")
        name = "best plan, chosen" if index == header["best"] else "chosen plan"
        said = hints(drawn, index)
        for part, words in PARTS.items():
            if alone.parts[part] > 0.004 * alone.seconds:
                assert said[f"{words}, {name}"]["seconds"] == f"{plain(alone.parts[part])} s"
                assert said[f"{words}, {name}"]["of the step"] == f"{alone.parts[part] / alone.seconds:.1%}"
        for place, held in enumerate(alone.held):
            where = f"pipeline rank {place} of {plan.pp}" if plan.pp > 1 else "each rank"
            assert said[f"{name}, {where}"]["together"].startswith(f"{plain(held.total / GIB)} of ")
            for kind in KIND_HUES:
                if getattr(held, kind) / GIB > 0.005:
                    assert said[f"{name}, {where}"][KINDS[kind]] == f"{plain(getattr(held, kind) / GIB)} GiB"
        assert header["says"][index].endswith(f"{alone.why[1:]}.")


def test_the_best_is_the_one_that_plans_finds_and_is_chosen_at_first():
    for name, sizes in (("llama3-8b", SMALL), ("mixtral-8x7b", {**SMALL, "gpus": 64})):
        lab = layout_lab(name, **sizes)
        found = plans(name, sizes["cluster"], gpus=sizes["gpus"], batch=64, sequence=4096)
        assert lab.best.plan == found[0].plan
        assert lab.forecast is lab.best
        header, _ = board_of(lab)
        fitting = len(plans(name, sizes["cluster"], gpus=sizes["gpus"], batch=64, sequence=4096, exact=0))
        assert header["note"].endswith(f" of {found.considered:,} plans are drawn; {fitting:,} fit")


def test_no_plan_off_the_front_is_both_faster_and_smaller_than_another():
    of = layout_lab("llama3-8b", **SMALL)._bench.points()
    seconds, gib = of["seconds"], of["gib"]
    for index, on_front in enumerate(of["front"]):
        beaten = ((seconds <= seconds[index]) & (gib <= gib[index])).sum() > 1
        assert on_front == (not beaten)


def test_plans_that_do_not_fit_are_beyond_the_limit_and_never_the_best():
    lab = layout_lab("llama3-70b", cluster="h100-measured", gpus=32, batch=64, sequence=8192)
    header, of = board_of(lab)
    beyond = of["gib"] > lab._bench.limit
    assert 0 < beyond.sum() < len(beyond)
    assert not beyond[header["best"]]
    assert all("fit" in said for said, out in zip(header["says"], beyond) if out)
    assert of["seconds"][header["best"]] == of["seconds"][~beyond].min()


def test_where_nothing_fits_it_says_so():
    lab = layout_lab("llama3-405b", cluster="h100-measured", gpus=8, batch=8, sequence=4096)
    assert repr(lab).startswith("llama3-405b on 8 GPUs: none of ")
    assert "take more GPUs" in repr(lab)
    _, of = board_of(lab)
    assert lab.best.peak.total / GIB == of["gib"].min()
    assert not lab._bench.points()["fits"].any()


def test_new_settings_are_answered_at_once_with_the_best_plan_and_estimates_of_the_others():
    lab = layout_lab("llama3-8b", **SMALL)
    boards: list[bytes] = []
    lab.observe(lambda change: boards.append(change["new"]), "board")
    lab.settings = {**lab.settings, "gpus": 8, "cluster": "h100"}
    fresh = layout_lab("llama3-8b", **{**SMALL, "gpus": 8, "cluster": "h100"})
    assert (lab.shown, lab.best, lab.forecast, lab.sentence) == (fresh.shown, fresh.best, fresh.best, fresh.sentence)
    assert len(boards) == 1
    header, of = board_of(lab)
    assert header["known"] == [header["best"]]
    assert {*hints(step(lab._bench), header["best"])} and not hints(step(lab._bench), (header["best"] + 1) % 9)
    exact = board_of(fresh)[1]
    np.testing.assert_allclose(of["seconds"], exact["seconds"], rtol=0.05)  # no pipeline is simulated for estimates
    np.testing.assert_allclose(of["gib"], exact["gib"], rtol=0.002)
    assert "data sheet: at peak rates" in repr(lab)
    assert " s at peak rates" in repr(lab)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "mixtral-8x7b"])
def test_estimates_are_near_the_forecasts(name: str):
    bench = Workbench({**SETTINGS, "model": name, "gpus": 64, "batch": 256})
    before = bench.points()
    bench.complete()
    after = bench.points()
    off = np.abs(before["seconds"] / after["seconds"] - 1)
    assert (off < 0.01).mean() > 0.8 and off.max() < 0.15  # pipelines are not simulated for estimates
    np.testing.assert_allclose(before["gib"], after["gib"], rtol=0.002)
    assert (before["seconds"] != after["seconds"]).any()


def test_a_plan_that_is_chosen_gets_its_forecast():
    lab = layout_lab("llama3-8b", **SMALL)
    lab.settings = {**lab.settings, "gpus": 32}
    sent: list[Any] = []
    lab.send = sent.append  # type: ignore[method-assign]
    last = len(lab.shown) - 1
    lab._on_message(lab, {"choose": last}, [])
    header, of = board_of(lab)
    alone = forecast("llama3-8b", lab.shown[last], "h100-measured", batch=64, sequence=4096)
    assert (lab.chosen, sent) == (last, [{"answered": True}])
    assert last in header["known"] and of["seconds"][last] == alone.seconds
    assert alone.why[1:] in header["says"][header["known"].index(last)]
    lab.chosen = 1
    assert board_of(lab)[0]["known"] == sorted({1, last, header["best"]})


def test_a_plan_whose_forecast_beats_the_best_is_the_best():
    bench = Workbench(SETTINGS)
    places = np.argsort(bench.points()["seconds"])
    slow = bench.shown[int(places[-1])].plan
    bench.forecasts, bench.best = {slow: bench._exactly(slow)}, int(places[-1])
    bench.complete()
    assert bench.forecast(bench.best) == layout_lab("llama3-8b", **SMALL).best


def test_impossible_settings_keep_what_is_shown_and_say_why():
    lab = layout_lab("llama3-8b", **SMALL)
    before = lab.board
    lab.settings = {**lab.settings, "gpus": 67}
    assert lab.is_stale
    assert "no plan trains this model on 67 GPUs" in lab.notice
    assert lab.board == before
    shown = lab.shown
    lab.settings = {**lab.settings, "gpus": 16}
    assert (lab.is_stale, lab.notice, lab.shown) == (False, "", shown)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama9"}, "model is 'llama9'"),
        ({"cluster": "abacus"}, "cluster is 'abacus'"),
        ({"stack": "make"}, "stack is 'make'"),
        ({"gpus": 0}, "gpus is 0; it must be a whole number from 1 to 4,096"),
        ({"batch": 2.5}, "batch is 2.5"),
        ({"sequence": True}, "sequence is True"),
        ({"color": "red"}, "settings are .*color"),
    ],
)
def test_settings_that_no_control_has_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Workbench({**SETTINGS, **changes})
    lab = layout_lab("llama3-8b", **SMALL)
    with pytest.raises(traitlets.TraitError, match=message):
        lab.settings = {**lab.settings, **changes}


def test_a_plan_can_be_given_and_chosen():
    odd = Plan(dp=2, tp=2, pp=4, microbatch=4, recompute="full", schedule="gpipe")
    lab = layout_lab("llama3-8b", **SMALL, plan=odd)
    assert lab.forecast.plan == odd
    lab.chosen = 0
    assert lab.forecast.seconds == pytest.approx(board_of(lab)[1]["seconds"].min())
    with pytest.raises(traitlets.TraitError, match="there are plans 0 to"):
        lab.chosen = len(lab.shown)
    with pytest.raises(PlanError, match="has 8 ranks, and gpus is 16"):
        layout_lab("llama3-8b", **SMALL, plan=Plan(tp=8))
    with pytest.raises(PlanError, match="tp=16 does not divide 8 key and value heads"):
        layout_lab("llama3-8b", **SMALL, plan=Plan(tp=16))


def test_models_and_clusters_of_your_own():
    ours = replace(H100_NODE, name="ours", node_size=4)
    lab = layout_lab(TINY, cluster=ours, gpus=6, batch=12, sequence=384)
    assert lab.settings["model"] == "yours"
    assert lab.settings["cluster"] == "ours"
    assert 6 in lab.choices["gpus"]
    assert lab.best.cluster.node_size == 4
    lab.settings = {**lab.settings, "gpus": 1}
    assert lab.best.plan.ranks == 1


def test_measured_plans_are_shown_with_who_measured_them():
    plan = Plan(dp=4, tp=2, pp=2, zero=1, microbatch=1)
    lab = layout_lab("llama3-8b", **SMALL, measured=[(plan, 9.5, 61.0), (Plan(dp=16), 7.25, None)], by="somebody, 2025")
    said = hints(plan_map(lab._bench), 0)
    assert said[str(plan)]["measured"] == "9.5 s, 61 GiB, by somebody, 2025"
    assert said[str(Plan(dp=16))]["measured"] == "7.25 s, by somebody, 2025"
    assert "Measured by somebody, 2025: 9.5 s, 61 GiB for dp 4, tp 2, pp 2" in repr(lab)
    many = [(Plan(dp=16, microbatch=size), float(size), None) for size in (1, 2, 4)]
    lab.settings = {**lab.settings, "batch": 128}
    assert repr(layout_lab("llama3-8b", **SMALL, measured=[*many, (plan, 9.5, 61.0)], by="us")).endswith(
        "Measured by us: 4 plans, 1 to 9.5 s."
    )
    assert not any(
        "measured" in rows for rows in hints(plan_map(lab._bench), 0).values()
    )  # they were measured with other settings
    assert "Measured" not in repr(lab)
    with pytest.raises(ValueError, match="say in `by` who measured it"):
        layout_lab("llama3-8b", **SMALL, measured=[(plan, 9.5, 61.0)])
    with pytest.raises(ValueError, match="as its measured value"):
        layout_lab("llama3-8b", **SMALL, measured=[(plan, -1.0, 61.0)], by="somebody")
    with pytest.raises(PlanError, match="was measured on 8 ranks, and gpus is 16"):
        layout_lab("llama3-8b", **SMALL, measured=[(Plan(tp=8), 9.5, 61.0)], by="somebody")


def test_without_a_kernel_it_is_a_picture_and_a_sentence(tmp_path: Any):
    lab = layout_lab("llama3-8b", **SMALL)
    data, _ = lab._repr_mimebundle_()
    assert data["text/plain"] == lab.sentence == repr(lab)
    assert str(lab.best.plan) in repr(lab)
    assert "forecast, −" in repr(lab)
    first = base64.b64decode(data["image/png"])
    assert Image.open(io.BytesIO(first)).size[0] == 2 * WIDTH + 64
    assert layout_lab("llama3-8b", **SMALL).picture() == first
    lab.chosen = len(lab.shown) - 1
    assert base64.b64decode(lab._repr_mimebundle_()[0]["image/png"]) != first
    page = to_html(lab, tmp_path / "layout.html").read_text(encoding="utf8")
    assert "llama3-8b" in page


def test_the_workbench_needs_no_widgets_no_font_and_no_pillow():
    code = """import sys, tplab.widgets.layouts.workbench
print([name for name in ("ipywidgets", "anywidget", "PIL", "matplotlib", "torch", "jax") if name in sys.modules])"""
    bare = f"import types, sys; sys.modules['tplab.widgets'] = m = types.ModuleType('tplab.widgets')\n\
import importlib.util as u; m.__path__ = [u.find_spec('tplab').submodule_search_locations[0] + '/widgets']\n{code}"
    done = subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_part_and_kind_has_a_name():
    assert KIND_HUES.keys() == KINDS.keys()
    one = forecast(TINY, Plan(), "h100", batch=1, sequence=384)
    assert set(one.parts) == set(PARTS)
    assert sum(getattr(one.peak, kind) for kind in KIND_HUES) == one.peak.total


@pytest.mark.parametrize(
    ("plan", "node_size", "said"),
    [
        (Plan(dp=4, tp=8), 8, "Inside a node of 8 GPUs: tp 8. Across nodes: dp 4, each group on 4 nodes."),
        (Plan(dp=4, tp=2), 8, "Inside a node of 8 GPUs: dp 4, tp 2."),
        (Plan(dp=2, tp=6), 8, "Across nodes: dp 2, each group on 2 nodes; tp 6, each group on 2 nodes."),
        (Plan(pp=2, tp=16), 8, "Across nodes: pp 2, each group on 2 nodes; tp 16, each group on 2 nodes."),
        (Plan(pp=2, dp=2, tp=2), None, "Inside a node of 8 GPUs: pp 2, dp 2, tp 2."),
        (Plan(dp=4, tp=2, ep=8), 8, "Inside a node of 8 GPUs: dp 4, tp 2, ep 8."),
        (
            Plan(dp=24, pp=2, ep=12),
            8,
            "Across nodes: pp 2, each group on 2 nodes; dp 24, each group on 3 nodes; ep 12, each group on 2 nodes.",
        ),
        (Plan(), 8, ""),
    ],
)
def test_which_axes_cross_the_network(plan: Plan, node_size: int | None, said: str):
    assert on_nodes(plan, node_size) == said


@pytest.mark.parametrize(("low", "high"), [(25, 90), (0.001, 5000), (2.01, 2.02), (0.9, 1.1)])
def test_axes_have_few_round_numbers(low: float, high: float):
    found = round_numbers(low, high)
    assert 2 <= len(found) <= 9
    assert all(low <= at <= high for at in found)


def test_the_text_at_the_limit_is_apart_from_plans_and_their_names():
    """On the map of 64 GPUs, a plan has its mark where this text would begin."""
    drawn = plan_map(Workbench({**SETTINGS, "gpus": 64, "batch": 512, "sequence": 8192, "task": ""}))
    (room,) = (part for part in drawn.parts if part.text.startswith("a GPU has"))
    (end, y), wide = room.place, drawn.width_of(room.text, 10)
    for part in drawn.parts:
        if part.method == "box" and part.place[2] == 28:  # around a plan's mark
            assert not (end - wide < part.place[0] + 14 < end and abs(part.place[1] + 14 - y) < 8)
        if part.text == "chosen":
            begin, top = part.place
            assert begin > end or begin + drawn.width_of("chosen", bold=True) < end - wide or abs(top - y) > 11


@pytest.mark.parametrize("rule", ["dualpipe", "dualpipe_v"])
def test_a_pipeline_that_goes_both_ways_is_drawn_with_two_microbatches_for_each_rank(rule: str):
    plan = Plan(dp=2, pp=32, schedule=rule)
    run = drawn(
        forecast("llama3-8b" if rule == "dualpipe" else "llama3-70b", plan, "h100-measured", batch=512, sequence=8192)
    )
    assert run is not None and run.schedule.num_microbatches == 64


def test_the_pipeline_of_the_chosen_plan_is_the_simulated_one_with_unequal_ends():
    plan = Plan(dp=2, tp=2, pp=4, zero=1)
    lab = layout_lab("llama3-8b", **{**SMALL, "batch": 256}, plan=plan)
    header, of = board_of(lab)
    run, shown = lab.forecast.pipeline(16), header["pipeline"]
    assert (shown["plan"], shown["runs"][0]["ranks"], shown["lane"]) == (lab.chosen, 4, "pp")
    np.testing.assert_array_equal(of["pipeline.start.0"], run.start)
    assert shown["about"].startswith("16 of 128 microbatches are drawn")
    ends, starts, kinds = (of[f"pipeline.{name}.0"] for name in ("end", "start", "kind"))
    takes = (ends - starts)[kinds == 0]
    assert max(takes) > 1.1 * min(takes)  # the head is in the last stage
    whole = lab.forecast.pipeline(10_000)
    assert whole.schedule.num_microbatches == 128
    count, parts = 128, lab.forecast.parts
    busy = np.bincount(whole.schedule.rank, whole.duration).max()
    assert whole.makespan - busy == pytest.approx(parts["bubble"] + parts["pp"], rel=1e-6)
    alone = [at for at, one in enumerate(lab.shown) if one.pp == 1]
    lab.chosen = alone[0]
    assert board_of(lab)[0]["pipeline"] is None and count == plan.microbatches(256)


def test_the_picture_of_all_plans_is_whole_where_the_chosen_one_has_a_pipeline():
    """A scene's columns and a chart's are sent together, and both have an "end" of the first picture."""
    lab = layout_lab("llama3-8b", **SMALL, plan=Plan(dp=2, tp=2, pp=4, zero=1))
    _, of = board_of(lab)
    ends = [part.when.end for part in plan_map(lab._bench).parts]
    assert of["moments0"][of["end0"]].tolist() == pytest.approx(ends)


@pytest.mark.parametrize("pp", [2, 16, 32])
def test_not_too_much_of_a_pipeline_is_drawn(pp: int):
    plan = Plan(pp=pp, dp=64 // pp, virtual=80 // pp if 80 % pp == 0 else 1)
    one = forecast("llama3-70b", plan, "h100-measured", batch=4096, sequence=4096)
    run = drawn(one)
    assert run is not None
    assert run.schedule.num_microbatches >= pp
    assert len(run.schedule) <= max(ACTIONS, 2 * pp * pp * plan.virtual)
    assert float(run.peak_activations.max()) <= one.held[0].in_flight * plan.virtual + 1e-6 or plan.virtual > 1


def test_groups_on_nodes():
    plan = Plan(pp=2, dp=4, tp=4)
    assert groups(plan, 8) == [("pp", 2, 2), ("dp", 4, 2), ("tp", 4, 1)]
    assert coordinates(plan, 13) == "pp 0 dp 3 tp 1"
    assert group_of(plan, 13, "dp") == [1, 5, 9, 13] == list(plan.mesh.groups("dp")[1])
    assert group_of(plan, 13, "pp") == [13, 29]
    sharing = Plan(pp=2, dp=4, tp=4, ep=8)
    assert groups(sharing, 8)[-1] == ("ep", 8, 1) and group_of(sharing, 13, "ep") == [*range(8, 16)]
    assert coordinates(sharing, 13) == "pp 0 dp 3 tp 1"  # not an axis of the mesh


def test_the_key_of_ranks_that_share_experts_has_their_border():
    one = forecast("qwen3-30b-a3b", Plan(dp=16, ep=8), "h100-measured", batch=64, sequence=4096)
    (table,) = packed([views.nodes(one)])[0]["tables"]
    assert {"is": "box", "fill": "paper", "edge": "c6", "radius": 3, "line": 2} in table[
        "looks"
    ]  # no rank has this fill


@pytest.mark.parametrize("plan", [Plan(dp=2, tp=2, pp=4, zero=1), Plan(dp=16)])
def test_each_view_has_a_still_of_its_own(plan: Plan):
    lab = layout_lab("llama3-8b", **SMALL, plan=plan)
    pictures = set()
    for view in ("plans", "pipeline", "nodes"):
        lab.view = view
        pictures.add(lab._repr_mimebundle_()[0]["image/png"])
    assert len(pictures) == 3


OWN = "layers=6, hidden=384, heads=6, kv_heads=6, head_dim=64, ffn=1536, vocab=1000, experts=0, experts_per_token=0"


def test_a_model_of_ones_own_is_forecast_from_its_sizes():
    lab = layout_lab("llama3-8b", **SMALL)
    lab.settings = {**lab.settings, "model": OWN}
    assert lab.best.model == replace(TINY, kv_heads=6, head_dim=64, ffn=1536, name="your model")
    header, of = board_of(lab)
    assert header["title"] == "Which layout for your model on 16 GPUs?"
    alone = forecast(lab.best.model, lab.best.plan, "h100-measured", batch=64, sequence=4096)
    assert of["seconds"][header["best"]] == alone.seconds
    assert ", ".join(f"{name}={size}" for name, size in header["own"].items()) == OWN
    lab.settings = {**lab.settings, "model": OWN.replace("kv_heads=6", "kv_heads=5")}
    assert lab.is_stale and "6 query heads cannot share 5 key and value heads" in lab.notice
    lab.settings = {**lab.settings, "model": "qwen3-30b-a3b"}
    sizes = board_of(lab)[0]["own"]
    assert (sizes["head_dim"], sizes["experts"], sizes["experts_per_token"]) == (128, 128, 8)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (OWN.replace("layers=6", "layers=6.5"), "layers is '6.5' in a model of your own; it must be a whole number"),
        (OWN.replace("layers=6", "layers=9999"), "layers is '9999' in a model of your own; .* 1,024 at most"),
        (OWN.replace("layers=6", "depth=6"), "depth is '6' in a model of your own; there are layers, hidden"),
        ("layers=6", "a model of your own has no hidden, heads"),
    ],
)
def test_sizes_that_no_control_can_make_are_refused(text: str, says: str):
    lab = layout_lab("llama3-8b", **SMALL)
    with pytest.raises(traitlets.TraitError, match=says):
        lab.settings = {**lab.settings, "model": text}


def test_what_is_asked_during_a_search_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    """JupyterLab sends a widget's first message to one thread of the kernel, and the later ones to another."""
    lab = layout_lab("llama3-8b", **SMALL)
    searching, go_on, sent = threading.Event(), threading.Event(), []
    ask = lab._bench.ask

    def slow(settings: dict[str, Any]) -> None:
        searching.set()
        assert go_on.wait(60)
        ask(settings)

    monkeypatch.setattr(lab._bench, "ask", slow)
    monkeypatch.setattr(lab, "send", lambda answer: sent.append((answer, lab.settings["batch"])))
    threads = [threading.Thread(target=lambda: lab.set_trait("settings", {**lab.settings, "batch": 32}))]
    threads[0].start()
    assert searching.wait(60)
    threads.append(threading.Thread(target=lambda: lab._handle_custom_msg({"settings": True}, [])))
    threads[1].start()
    threads[1].join(0.2)
    assert sent == []
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert sent == [({"answered": True}, 32)]
