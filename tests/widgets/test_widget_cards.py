"""The widgets on Python's side: traits, what is sent, what is shown without a kernel, and the look's promises."""

from __future__ import annotations

import base64
import io
import itertools
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import traitlets
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from tests.hand_traces import ALL, ring_all_gather, ring_all_reduce
from tests.widgets.frames import frame
from tplab import Mesh
from tplab.widgets import animate, timeline
from tplab.widgets.paper import palette
from tplab.widgets.paper.apng import encode
from tplab.widgets.paper.card import _STATIC, script, style
from tplab.widgets.paper.scene import on_curve
from tplab.widgets.paper.wire import pack, unpack
from tplab.widgets.score.layout import LINK_GAP, SLOT, columns, layout
from tplab.widgets.score.score import score
from tplab.widgets.score.still import MAX_BYTES, PAUSE, SECONDS, Picture, still, story

PNG = "image/png"


def image(data: bytes) -> PngImageFile:
    return PngImageFile(io.BytesIO(data))


@cache
def bundle(name: str) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """What the widget over one of the traces shows without a kernel; drawing it is what takes the time here."""
    return animate(ALL[name]())._repr_mimebundle_()


def moving_picture(name: str) -> PngImageFile:
    return image(base64.b64decode(bundle(name)[0][PNG]))


# --- traits and bundles -------------------------------------------------------------------------------------------


def test_step_can_be_read_and_set():
    widget = animate(ALL["gather 4"]())
    assert (widget.step, widget.num_steps) == (0.0, 3)
    widget.step = 2
    assert widget.step == 2.0
    widget.step = 1.5
    for wrong in (-0.1, 3.1, float("nan"), 4):
        with pytest.raises(traitlets.TraitError, match="there are steps 0 to 3"):
            widget.step = wrong
    assert widget.step == 1.5
    assert animate(ALL["gather 4"](), step=3).step == 3


@pytest.mark.parametrize("name", ALL)
def test_without_a_kernel_there_is_a_moving_picture_and_one_sentence(name: str):
    trace = ALL[name]()
    data, metadata = bundle(name)
    sentence = data["text/plain"]
    assert metadata[PNG] == {"alt": sentence}
    told = r"(\d+ microbatches, )?\d+ steps?, (each rank sends|nothing is sent).*\."
    assert re.fullmatch(rf"Animation of {trace.title} on Mesh\(.*\): {told}", sentence)
    assert repr(animate(trace)) == sentence
    assert "application/vnd.jupyter.widget-view+json" in data
    assert 3 / 4 * len(data[PNG]) <= MAX_BYTES
    assert moving_picture(name).is_animated


def test_the_picture_is_a_function_of_the_trace():
    again, _ = animate(ALL["gather 3"]())._repr_mimebundle_()
    data, _ = bundle("gather 3")
    assert (again["text/plain"], again[PNG]) == (data["text/plain"], data[PNG])


@pytest.mark.parametrize("name", ["gather 4", "pipeline 4"])
def test_the_moving_picture_loops_with_pauses_and_moves_for_less_than_five_seconds(name: str):
    moving = moving_picture(name)
    assert moving.info["loop"] == 0  # again and again
    shown = []
    for place in range(moving.n_frames):
        moving.seek(place)
        shown.append(moving.info["duration"])
    first, *between, last = shown
    assert first >= PAUSE and last >= PAUSE
    assert 2000 < sum(between) <= 1000 * SECONDS <= 5000


def test_the_first_frame_tells_the_story():
    """Where only one frame is shown, as in print, it is one in which something travels."""
    for name in ("gather 4", "all-reduce 8", "pipeline 4"):
        piece = score(ALL[name]())
        now = frame(piece, story(piece))
        assert now.flights or now.computing
        pictures = moving_picture(name), image(still(piece, story(piece)))
        first, alone = (np.asarray(picture.convert("RGB"), float) for picture in pictures)
        assert np.abs(first - alone).mean() < 1  # the palettes may differ a little


def test_chunks_keep_their_colours_in_the_moving_picture():
    moving = moving_picture("all-reduce 8")
    moving.seek(1)
    seen = {colour for _, colour in moving.convert("RGB").getcolors(1 << 20) or []}
    assert {palette.rgb(hue) for hue in (*palette.HUES, palette.SOFT)} <= seen
    assert moving.convert("RGB").getpixel((8, 60)) == (255, 255, 255)


def test_the_readme_s_picture_moves():
    file = Path(__file__).parents[2] / "docs" / "ring.png"
    moving = image(file.read_bytes())
    assert file.stat().st_size <= MAX_BYTES
    assert moving.n_frames > 24
    assert moving.info["loop"] == 0


def test_many_ranks_are_a_still_picture():
    for widget in (animate(ring_all_reduce(Mesh(tp=64), "tp")), timeline(ALL["mlp 4"]())):
        data = widget.picture()
        assert len(data) <= MAX_BYTES
        assert not getattr(image(data), "is_animated", False)


def test_the_timeline_is_a_picture_and_a_sentence_too():
    data, _ = timeline(ALL["overlap 4"]())._repr_mimebundle_()
    assert data["text/plain"].startswith("Timeline of all_gather_matmul on Mesh(tp=4): 3 steps, ")
    assert data[PNG]


def test_a_trace_is_sent_once_and_a_ring_all_reduce_over_64_ranks_is_below_100_kilobytes():
    sent = []
    for make, zoom in ((animate, set()), (timeline, {"begin", "end"})):
        widget = make(ring_all_reduce(Mesh(tp=64), "tp"))
        state = widget.get_state()
        sent.append(sum(len(value) for value in state.values() if isinstance(value, str | bytes)))
        own = {name for name in widget.keys if not name.startswith("_")} - {"layout", "tabbable", "tooltip"}
        assert own == {"above", "score", "step"} | zoom
    assert max(sent) <= 100_000


def test_colab_s_ipywidgets_gets_the_same_bundle(monkeypatch: pytest.MonkeyPatch):
    """ipywidgets 7 knows `_ipython_display_` only. It is there if the base class has it, and there only."""
    import importlib.util

    import ipywidgets

    from tplab.widgets.paper import card

    assert not hasattr(animate(ALL["gather 3"]()), "_ipython_display_") or ipywidgets.__version__ < "8"
    monkeypatch.setattr(ipywidgets.DOMWidget, "_ipython_display_", lambda self: None, raising=False)
    source = importlib.util.spec_from_file_location("card7", card.__file__)
    assert source
    assert source.loader
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, metadata, raw: shown.append((data, raw)))

    class Seven(module.Card):
        sentence = "a sentence"
        _handle_displayed = staticmethod(lambda **_: None)

        def picture(self) -> bytes:
            return b"png"

    Seven()._ipython_display_()
    ((data, raw),) = shown
    assert raw
    assert data["text/plain"] == "a sentence"
    assert data[PNG] == "cG5n"


def test_importing_the_widgets_loads_neither_framework_nor_matplotlib():
    code = "import sys, tplab.widgets; print([n for n in ('torch', 'jax', 'matplotlib') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout == "[]\n"


# --- what is sent -------------------------------------------------------------------------------------------------


def test_columns_come_back_as_they_were_sent():
    rng = np.random.default_rng(0)
    given = {
        "small": np.array([0, 1, 127]),
        "signed": np.array([-1, 300]),
        "large": np.array([2**40, 1]),
        "counting": np.arange(5, 5000),
        "mostly counting": np.r_[np.arange(100), 7, np.arange(50)],
        "real": rng.normal(size=33),
        "single": rng.normal(size=3).astype(np.float32),
        "none": np.zeros(0, int),
    }
    header, columns_ = unpack(pack({"title": "µ — Σ"}, given))
    assert header == {"title": "µ — Σ"}
    for name, column in given.items():
        assert np.array_equal(columns_[name], column), name
    assert columns_["small"].dtype == np.int8
    assert len(pack({}, {"counting": np.arange(100_000)})) < 2000


def test_the_scripts_are_one_module_without_imports_between_them():
    for widget in (animate(ALL["gather 3"]()), timeline(ALL["mlp 4"]())):
        code = widget._esm
        assert "import " not in re.sub(r'".*?"', "", code)
        assert re.findall(r"^export.*", code, re.MULTILINE) == ["export default { render };"]


def test_names_at_the_top_level_of_the_modules_differ_for_they_are_put_together():
    entries, shared = {}, []
    for file in _STATIC.glob("*.js"):
        code = file.read_text(encoding="utf8")
        names = re.findall(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", code, re.MULTILINE)
        names += re.findall(r"^(?:export )?const \w+ = [^,;\n]*, (\w+) =", code, re.MULTILINE)
        if "export default" in code:
            entries[file.stem] = names
        else:
            shared += names
    assert {"animate", "timeline", "shards"} <= set(entries)
    for names in entries.values():
        together = sorted(shared + names)
        assert together == sorted(set(together))


def test_a_script_keeps_every_line_of_code():
    files = "\n".join((_STATIC / f"{name}.js").read_text() for name in ("units", "score"))  # it imports the other
    whole = "".join(re.sub(r"^\s*//.*$", "", line) for line in files.splitlines())
    short = "".join(script("score").split())
    kept = re.sub(r"import \{.*?;", "", whole).replace("export ", "")
    assert short == "".join(kept.split())


def test_a_script_begins_with_what_it_imports_each_once():
    code = script("timeline")
    assert code.index("class Scene ") < code.index("class Lanes ") and code.count("class Scene ") == 1
    assert code == script("shell", "timeline") and code.count("export") == 1


# --- the look -----------------------------------------------------------------------------------------------------


def _tokens(theme: str) -> dict[str, str]:
    first = style()[: style().index("}")]
    dark = re.search(r"\.tplab\[data-theme=dark\]\{(.*?)\}", style(), re.DOTALL)
    assert dark
    found = dict(re.findall(r"--(\w+):(#[0-9a-f]{6})", first))
    return found if theme == "light" else found | dict(re.findall(r"--(\w+):(#[0-9a-f]{6})", dark[1]))


def _linear(colour: str) -> np.ndarray:
    part = np.array(palette.rgb(colour)) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def written(colour: tuple[int, int, int]) -> str:
    return "#" + bytes(colour).hex()


def contrast(a: str, b: str) -> float:
    """WCAG 2.2's ratio of relative luminances."""
    low, high = sorted(float(_linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


def test_every_rule_of_the_style_sheet_is_about_our_own_elements():
    for rule in re.findall(r"([^{}]+)\{[^{}]*\}", style()):
        for selector in re.sub(r"\([^)]*\)", "", rule).split(","):
            assert re.match(r"\.tplab($|[ \[:.])", selector.strip())


def test_python_s_colours_are_those_of_the_style_sheet():
    tokens = _tokens("light")
    names = ("ink", "dim", "line", "soft", "paper", "accent", "hatch", "work")
    assert {name: tokens[name] for name in names} == {name: getattr(palette, name.upper()) for name in names}
    assert [tokens[f"c{index}"] for index in range(8)] == list(palette.HUES)
    assert {kind: tokens[palette.token(colour)] for kind, colour in palette.OPS.items()} == palette.OPS
    assert {kind: tokens[f"k{kind.lower()}"] for kind in "FIW"} == palette.KINDS


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_can_be_told_from_what_is_behind_them(theme: str):
    token = _tokens(theme)
    for ground in ("paper", "soft"):
        assert contrast(token["ink"], token[ground]) >= 7
        assert contrast(token["dim"], token[ground]) >= 4.5
        assert contrast(token["accent"], token[ground]) >= 4.5
    assert contrast(token["paper"], token["accent"]) >= 4.5  # the icon on the play button
    for index in range(8):
        colour = token[f"c{index}"]
        assert contrast("#ffffff", colour) >= 4.5  # a chunk's letter
        assert contrast(colour, token["paper"]) >= 3  # the piece on the card
        toward, share = ("#ffffff", 0.62) if theme == "dark" else ("#000000", 1.0)
        arriving = written(palette.mix(colour, share, toward))
        assert contrast(arriving, token["paper"]) >= 4.5
        tint = written(palette.mix(colour, 0.42, token["paper"]))
        assert contrast(token["ink"], tint) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_kinds_of_actions_differ_in_lightness_and_carry_letters(theme: str):
    token = _tokens(theme)
    lightness = [116 * np.cbrt(float(_linear(token[f"k{kind}"]) @ [0.2126, 0.7152, 0.0722])) - 16 for kind in "fiw"]
    assert np.diff(lightness).min() > 14  # what a grey print tells apart
    for kind in "fiw":
        assert max(contrast("#ffffff", token[f"k{kind}"]), contrast("#10151f", token[f"k{kind}"])) >= 4.5


_SIGHT = {  # Machado, Oliveira and Fernandes 2009, severity 1: no L, no M, no S cones
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("sight", _SIGHT)
def test_hues_stay_apart_for_colour_blind_readers(sight: str):
    """In CIELAB, where 2.3 is what can just be seen; a letter stands beside each hue as well."""

    def lab(colour: str) -> np.ndarray:
        rgb = np.clip(np.array(_SIGHT[sight]) @ _linear(colour), 0, 1)
        xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
        f = np.cbrt(xyz / [0.9505, 1, 1.089])
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    for a, b in itertools.combinations(palette.HUES, 2):
        assert np.linalg.norm(lab(a) - lab(b)) > 6, (a, b)


# --- geometry -----------------------------------------------------------------------------------------------------

MESHES = [(Mesh(tp=size), "tp") for size in (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 33, 64, 80)]
MESHES += [(Mesh(dp=2, tp=4), "tp"), (Mesh(dp=4, tp=2), "dp"), (Mesh(dp=3, tp=3), "tp"), (Mesh(dp=8, tp=8), "dp")]
MESHES += [(Mesh(a=2, b=2, c=2), "b")]


@pytest.mark.parametrize(("mesh", "axis"), MESHES, ids=str)
def test_ranks_do_not_overlap_and_links_end_outside_of_them(mesh: Mesh, axis: str):
    place = layout(score(ring_all_gather(mesh, axis)))
    half = np.array(place.size) / 2
    low, high = place.centres - half, place.centres + half
    assert (low >= 0).all()
    assert (high <= [place.width, place.height]).all()
    for a, b in itertools.combinations(range(mesh.size), 2):
        if place.boxes:
            assert (low[a] > high[b]).any() or (low[b] > high[a]).any()
        else:
            assert np.hypot(*(place.centres[a] - place.centres[b])) > place.size[0]
    assert len(place.links) == (mesh.size if mesh.axis_size(axis) > 1 else 0)
    for (start, end), curve in place.links.items():
        points = np.array([on_curve(curve, u) for u in np.linspace(0, 1, 41)])
        assert (points >= 0).all()
        assert (points <= [place.width, place.height]).all()
        for rank in (start, end):
            away = np.abs(points - place.centres[rank])
            assert ((away > half).any(1) if place.boxes else np.hypot(*away.T) > half[0]).all()
    if place.boxes and 3 <= mesh.size <= 5 and len(mesh.shape) == 1:
        lengths = [np.hypot(curve[0] - curve[4], curve[1] - curve[5]) for curve in place.links.values()]
        assert min(lengths) >= LINK_GAP - 14  # room for a chunk to be seen between two ranks


@pytest.mark.parametrize("name", ALL)
def test_slots_lie_inside_of_their_rank(name: str):
    place = layout(score(ALL[name]()))
    for rank, items in enumerate(place.slots):
        corners = [place.slot(rank, number) for number in range(len(items))]
        assert len(set(corners)) == len(items)
        for x, y in corners:
            left, top = place.centres[rank] - np.array(place.size) / 2
            assert left < x < x + SLOT < left + place.size[0]
            assert top < y < y + SLOT < top + place.size[1]


def test_items_of_different_groups_share_columns_and_many_are_shown_by_the_page():
    assert columns(score(ALL["gather 2x4"]())).names == ["a e", "b f", "c g", "d h"]
    assert columns(score(ring_all_gather(Mesh(dp=5, tp=2), "tp"))).names == ["a …", "b …"]
    many = columns(score(ring_all_reduce(Mesh(tp=64), "tp")))
    assert (len(many.names), many.page_size, set(many.first)) == (64, 64, {0})


@pytest.mark.parametrize("name", ALL)
def test_the_still_picture_shows_the_step(name: str):
    """Two steps are two pictures, and the same step is the same picture, whatever was drawn before it."""
    picture = Picture(score(ALL[name]()))
    first, middle = picture.draw(0), picture.draw(0.5)
    assert first.tobytes() != middle.tobytes()
    assert picture.draw(0).tobytes() == first.tobytes()
    assert Picture(score(ALL[name]())).draw(0.5).tobytes() == middle.tobytes()


def test_an_animated_png_has_the_pixels_of_every_frame():
    sizes, frames = (40, 30), []
    for place in range(6):
        frame = Image.new("RGB", sizes, "#ffffff")
        frame.paste("#2f6bd8", (5 * place, 4, 5 * place + 6, 20))
        frames.append(frame)
    frames.insert(3, frames[2].copy())  # nothing changes: its time is added to the one before
    data = encode(frames, [100] * len(frames))
    moving = image(data)
    assert moving.n_frames == 6
    shown = []
    for place in range(6):
        moving.seek(place)
        shown.append((moving.convert("RGB").tobytes(), moving.info["duration"]))
    del frames[3]
    assert shown == [(frame.tobytes(), 200.0 if place == 2 else 100.0) for place, frame in enumerate(frames)]
    assert not getattr(image(encode(frames[:1], [0])), "is_animated", False)
