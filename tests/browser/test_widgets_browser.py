"""The widgets in a real JupyterLab: they play, step by key, follow the theme, and agree with Python."""

from __future__ import annotations

import base64
import time

import pytest
from playwright.sync_api import Locator, Page, Position, expect

from tests.browser.plain_page import hint_over
from tests.hand_traces import ALL, ring_all_reduce
from tests.widgets.frames import frame
from tplab import Mesh, P, Trace, units
from tplab.widgets import animate, shards
from tplab.widgets.paper.card import script
from tplab.widgets.paper.scene import Scene
from tplab.widgets.score.payload import picture
from tplab.widgets.score.score import score

NARROW = 600


def cell_of(trace: Trace, call: str) -> str:
    """A cell that makes `w` from a trace and shows it."""
    return f"from tplab import Trace\nfrom tplab.widgets import *\nw = {call}(Trace.from_json({trace.to_json()!r}))\nw"


def expect_python(book, expression: str, value: float) -> None:
    """Wait until Python has heard of what happened in the page: ipywidgets may hold a change back for a moment."""
    deadline = time.monotonic() + 30
    while (said := float(book.run(f"print({expression})"))) != pytest.approx(value, abs=0.02):
        assert time.monotonic() < deadline, f"{expression} is {said}, and not {value}"
        time.sleep(0.1)


def gather() -> Trace:
    return ALL["gather 4"]()


def card(book, cell: int = 0) -> Locator:
    return book.output(cell).locator(".tplab")


# --- the pure functions say the same in both languages ----------------------------------------------------------


def load(page: Page, *names: str) -> None:
    """The functions of some of the modules, as they are sent to the browser, on an empty page."""
    page.goto("about:blank")
    code = script(*names) + "\nwindow.tpl = { " + ", ".join(_FUNCTIONS[name] for name in names) + " };"
    page.add_script_tag(content=f"(() => {{ {code} }})();")


_FUNCTIONS = {
    "units": "plain, bytesText, timeText, rangeText, ticks",
    "wire": "unpack",
    "score": "frame, timeAt, positionAt, sentText, numSteps",
}

_FRAMES = """async ([data, positions]) => {
  const score = await tpl.unpack(new DataView(Uint8Array.from(atob(data), (c) => c.charCodeAt(0)).buffer));
  const items = score.items.length;
  return positions.map((position) => {
    const now = tpl.frame(score, position), cells = {};
    now.cells.forEach((hold, at) => {
      if (hold >= 0) cells[`${Math.floor(at / items)},${at % items}`] = hold;
    });
    const arriving = [...now.arriving.keys()].map((at) => `${Math.floor(at / items)},${at % items}`).sort();
    return { time: now.time, round: now.round, flights: now.flights, together: now.together, computing: now.computing,
      cells, arriving, sent: [...now.sent], back: tpl.positionAt(score, now.time) };
  });
}"""


@pytest.mark.parametrize("name", ALL)
def test_the_frame_is_the_same_in_python_and_in_javascript(page: Page, name: str):
    piece = score(ALL[name]())
    load(page, "units", "wire", "score")
    positions = [step / 4 for step in range(4 * piece.num_steps + 1)] + [0.333, piece.num_steps - 0.01]
    data = base64.b64encode(picture(piece)).decode()
    for position, theirs in zip(positions, page.evaluate(_FRAMES, [data, positions]), strict=True):
        ours = frame(piece, position)
        assert theirs["time"] == ours.time
        assert theirs["round"] == ours.round
        for kind in ("flights", "together", "computing"):
            assert [row for row, _ in theirs[kind]] == [row for row, _ in getattr(ours, kind)]
            assert [u for _, u in theirs[kind]] == pytest.approx([u for _, u in getattr(ours, kind)], abs=1e-12)
        assert theirs["arriving"] == sorted(f"{rank},{item}" for rank, item in ours.arriving)
        assert theirs["cells"] == {f"{rank},{item}": hold for (rank, item), hold in ours.cells.items()}
        assert theirs["sent"] == ours.sent
        begin, end = piece.times[int(min(position, piece.num_steps - 1))], ours.time
        if 0 < position < piece.num_steps and end > begin:
            assert theirs["back"] == pytest.approx(position, abs=1e-9)


def test_numbers_read_the_same_in_python_and_in_javascript(page: Page):
    load(page, "units")
    some = [0, 1, 3, 12, 999, 1000, 1023, 1024, 1152, 1536, 4096, 123456, 1 << 20, 5.5e9, 0.5, 0.125, 1.125, 22.4, 1e-3]
    times = [0, 1e-9, 2.24e-5, 9.9996e-4, 1e-3, 0.0123, 1, 1.5, 75.25]
    theirs = page.evaluate(
        """([some, times]) => [some.map(tpl.plain), some.map(tpl.bytesText),
        times.map((t) => tpl.timeText(t, "s")), times.map((t) => tpl.timeText(t, "steps")),
        tpl.ticks(0, 67.2e-6, 6), tpl.ticks(0, 3, 6, "steps"), tpl.rangeText([1024, 2048])]""",
        [some, times],
    )
    assert theirs[0] == [units.plain(x) for x in some]
    assert theirs[1] == [units.bytes_text(x) for x in some]
    assert theirs[2] == [units.time_text(t, "s") for t in times]
    assert theirs[3] == [units.time_text(t, "steps") for t in times]
    assert theirs[4] == pytest.approx(units.ticks(0, 67.2e-6, 6))
    assert theirs[5] == units.ticks(0, 3, 6, "steps")
    assert theirs[6] == units.range_text([1024, 2048])


# --- in JupyterLab ------------------------------------------------------------------------------------------------


def test_the_animation_is_drawn_in_the_theme_of_the_page(open_notebook):
    book = open_notebook([cell_of(gather(), "animate")], theme="dark")
    expect(card(book)).to_have_attribute("data-theme", "dark")
    expect(card(book)).to_contain_text("before the first step — every rank holds its own piece")
    for name in ("4 ranks and the links between them", "what has been on each rank"):
        expect(card(book).get_by_role("img", name=name)).to_be_visible()
    book.change_theme("light")
    expect(card(book)).to_have_attribute("data-theme", "light")


def test_keys_step_the_focused_widget_and_leave_the_notebook_alone(open_notebook):
    book = open_notebook([cell_of(gather(), "animate"), "1 + 1"])
    say = card(book).locator(".tpl-say")
    card(book).focus()
    book.page.keyboard.press("ArrowRight")
    expect(say).to_contain_text("step 1 of 3 — every rank sends its own piece to the next rank")
    expect(say).to_contain_text("sent so far: 4 KiB of 12 KiB per rank")
    book.page.keyboard.press("End")
    expect(say).to_contain_text("step 3 of 3")
    expect(hint_over(card(book), gather(), 3, rank=2, item=0)).to_contain_text("rank 2 has had piece a")
    book.page.keyboard.press("ArrowLeft")
    expect(say).to_contain_text("step 2 of 3")
    for key in ("b", "a", "m", "x", "Home"):  # in command mode: insert, insert, to Markdown, cut
        book.page.keyboard.press(key)
    expect(say).to_contain_text("before the first step")
    assert book.panel.locator(".jp-Cell").count() == 2
    # Python has heard of it, and can set it.
    expect_python(book, "w.step", 0.0)
    book.run("w.step = 1.5")
    expect(say).to_contain_text("step 2 of 3")
    expect(hint_over(card(book), gather(), 1.5, flight=5)).to_contain_text("to rank 2")
    card(book).get_by_label("one step on").click()
    expect(say).to_contain_text("step 2 of 3")
    expect_python(book, "w.step", 2.0)


def test_it_plays_to_the_end_and_can_be_stopped(open_notebook):
    book = open_notebook([cell_of(gather(), "animate")])
    play = card(book).locator(".tpl-play")
    play.click()
    expect(play).to_have_attribute("aria-label", "pause (space)")
    card(book).focus()
    expect(card(book).locator(".tpl-slider")).not_to_have_value("0")  # it has moved
    book.page.keyboard.press(" ")
    expect(play).to_have_attribute("aria-label", "play (space)")
    position = float(card(book).locator(".tpl-slider").input_value())
    assert 0 < position < 3
    expect_python(book, "w.step", position)
    book.page.keyboard.press(" ")
    expect(card(book).locator(".tpl-say")).to_contain_text("step 3 of 3")
    expect(play).to_have_attribute("aria-label", "play (space)")
    expect_python(book, "w.step", 3.0)
    # The timeline is another way to the same playhead.
    lanes = card(book).locator(".tpl-plot").bounding_box()
    assert lanes
    book.page.mouse.click(lanes["x"] + lanes["width"] / 2, lanes["y"] + 20)
    expect(card(book).locator(".tpl-say")).to_contain_text("step 2 of 3")
    expect_python(book, "w.step", 1.5)


def test_reduced_motion_goes_from_step_to_step(open_notebook):
    book = open_notebook([cell_of(gather(), "animate")], reduced_motion=True)
    book.page.evaluate(
        """() => { window.seen = new Set(); const slider = document.querySelector(".tpl-slider");
        const look = () => { seen.add(Number(slider.value)); requestAnimationFrame(look); }; look(); }"""
    )
    card(book).locator(".tpl-play").click()
    expect(card(book).locator(".tpl-say")).to_contain_text("step 3 of 3")
    assert sorted(book.page.evaluate("[...seen]")) == [0, 1, 2, 3]


def test_the_hint_says_what_a_chunk_holds(open_notebook):
    book = open_notebook([cell_of(ALL["reduce-scatter 4"](), "animate")])
    book.run("w.step = 2.5")
    expect(card(book).locator(".tpl-say")).to_contain_text("step 3 of 3")
    trace = ALL["reduce-scatter 4"]()
    (sent, *_), _ = zip(*frame(trace, 2.5).flights)
    hint = hint_over(card(book), trace, 2.5, flight=sent)
    expect(hint).to_contain_text("to rank")
    expect(hint).to_contain_text("1 KiB")
    expect(hint).to_contain_text("(3 of 4)")
    hint_over(card(book), trace, 2.5, rank=0, item=3)
    expect(hint).to_contain_text("rank 0 has passed on piece d")
    expect(hint).to_contain_text("ranks 0, 3 (2 of 4)")


_OUTSIDE = """(root) => {
  const frame = root.getBoundingClientRect(), found = [];
  for (const node of root.querySelectorAll("*")) {
    const box = node.getBoundingClientRect();
    if (!box.width || node.closest("[hidden]") || node.closest(".tpl-veil")) continue;
    const hidden = getComputedStyle(node).visibility === "hidden";
    if (!hidden && (box.left < frame.left - 1 || box.right > frame.right + 1)) found.push(node.outerHTML.slice(0, 120));
  }
  return found;
}"""


def test_at_a_narrow_width_it_wraps_and_clips_nothing(open_notebook):
    names = ["gather 2x4", "all-reduce 8", "mlp 2x3"]
    product = """from tplab import Mesh, P
shards(Mesh(dp=2, tp=4), x=((8, 16), P("dp", None)), w=((16, 12), P(None, "tp")))"""
    cells = [cell_of(ALL[name](), "animate") for name in names]
    book = open_notebook([*cells, cell_of(ALL["overlap 4"](), "timeline"), product], run=False)
    book.page.set_viewport_size({"width": NARROW, "height": 900})
    book.run_all()
    for index in range(5):
        expect(card(book, index)).to_be_visible()
        assert card(book, index).evaluate(_OUTSIDE) == []
        assert card(book, index).evaluate("(root) => root.offsetWidth") < NARROW


def test_the_timeline_zooms_and_shows_the_critical_path(open_notebook):
    book = open_notebook([cell_of(ALL["overlap 4"](), "timeline")])
    expect(card(book)).to_contain_text("45 µs")
    expect(card(book)).to_contain_text("80%")
    lanes = card(book).locator(".tpl-lanes")
    box = lanes.bounding_box()
    assert box
    lanes.hover(position={"x": 100, "y": 14})
    hint = card(book).locator(".tpl-hint")
    for text in ("rank 0: dot_general", "0 µs to 9 µs", "bfloat16 [64, 64]", "4,194,304", "gather.py:12"):
        expect(hint).to_contain_text(text)
    whole = lanes.locator("canvas").evaluate("(canvas) => canvas.toDataURL()")
    card(book).get_by_text("critical path").first.click()
    marked = lanes.locator("canvas").evaluate("(canvas) => canvas.toDataURL()")
    assert marked != whole
    card(book).focus()
    book.page.keyboard.press("+")
    closer = lanes.locator("canvas").evaluate("(canvas) => canvas.toDataURL()")
    assert closer != marked
    book.page.keyboard.press("0")
    assert lanes.locator("canvas").evaluate("(canvas) => canvas.toDataURL()") == marked


def place_in(scene: Scene, key: int, canvas: Locator) -> Position:
    """The middle of what has this key, in pixels of the canvas on the page."""
    part = next(part for part in scene.parts if part.mark >= 0 and scene.keys[part.mark] == key)
    box = canvas.bounding_box()
    assert box is not None
    x, y, width, height = (length * box["width"] / scene.width for length in part.place)
    return {"x": x + width / 2, "y": y + height / 2}


def test_shards_point_out_a_rank_everywhere(open_notebook):
    cell = """from tplab import Mesh, P
from tplab.widgets import shards
w = shards(Mesh(dp=2, tp=4), x=((8, 16), P("dp", None)), w=((16, 12), P(None, "tp")))
w"""
    shown = shards(Mesh(dp=2, tp=4), x=((8, 16), P("dp", None)), w=((16, 12), P(None, "tp")))
    book = open_notebook([cell])
    say = card(book).locator(".tpl-say")
    expect(say).to_contain_text("y [8, 12] comes out as P('dp', 'tp'), complete: nothing is sent")
    tensors, ranks = card(book).locator("canvas").all()
    whole = tensors.evaluate("(canvas) => canvas.toDataURL()")
    ranks.hover(position=place_in(shown.scenes[1], 5, ranks))
    expect(say).to_contain_text("rank 5 multiplies x[4:8, :] by w[:, 3:6]: y[4:8, 3:6]")
    assert tensors.evaluate("(canvas) => canvas.toDataURL()") != whole
    tensors.hover(position=place_in(shown.scenes[0], 8 + 2, tensors))  # the first piece of w
    expect(say).to_contain_text("w[:, 0:3] is held by ranks 0, 4")
    ranks.click(position=place_in(shown.scenes[1], 3, ranks))
    expect_python(book, "w.rank", 3)
    card(book).focus()
    book.page.mouse.move(0, 0)
    for key in ("Home", "ArrowRight"):
        book.page.keyboard.press(key)
    expect_python(book, "w.rank", 1)
    book.run("w.rank = 6")
    expect(say).to_contain_text("rank 6 multiplies")
    book.page.keyboard.press("Escape")
    expect_python(book, "w.rank", -1)


_PLAY_FRAMES = """async (number) => {
  document.querySelector(".tpl-play").click();
  for (let frame = 0; frame < number; frame++) await new Promise(requestAnimationFrame);
  document.querySelector(".tpl-play").click();
}"""


def test_64_ranks_play_at_60_frames_a_second_from_100_kilobytes(open_notebook, jupyter_lab):
    trace = ring_all_reduce(Mesh(tp=64), "tp")
    sent = sum(len(value) for value in animate(trace).get_state().values() if isinstance(value, str | bytes))
    assert sent <= 100_000
    (jupyter_lab.root / "trace.json").write_text(trace.to_json())
    cell = """from pathlib import Path
from tplab import Trace
from tplab.widgets import animate
w = animate(Trace.from_json(Path("trace.json").read_text()))
w"""
    book = open_notebook([cell])
    expect(card(book)).to_contain_text("64 ranks")
    chromium = book.page.context.new_cdp_session(book.page)
    chromium.send("Performance.enable", {"timeDomain": "threadTicks"})  # time of the CPU: other work makes it no longer

    def seconds() -> float:
        metrics = chromium.send("Performance.getMetrics")["metrics"]
        return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

    before = seconds()
    book.page.evaluate(_PLAY_FRAMES, 120)
    frame = (seconds() - before) / 120
    print(f"a frame takes {1000 * frame:.1f} ms of the CPU; sent {sent:,} bytes")
    assert frame < 1 / 60
