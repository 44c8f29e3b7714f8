"""A widget on a plain page, without JupyterLab: quick, for tests of its drawing and its hints.

Every text on a canvas is recorded in `window.written`, with its position on the page.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tplab import Trace
from tplab.widgets.paper.card import Card
from tplab.widgets.paper.scene import on_curve
from tplab.widgets.score import ranks, table
from tplab.widgets.score.score import score

_NOTE_TEXTS = """() => {
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  const wipe = Object.getOwnPropertyDescriptor(HTMLCanvasElement.prototype, "width");
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const left = { left: 0, start: 0, center: 0.5, right: 1, end: 1 }[this.textAlign];
    const width = this.measureText(text).width;
    const about = { text: String(text), canvas: this.canvas, colour: this.fillStyle };
    window.written.push({ ...about, x: x + (0.5 - left) * width, y, width });
    return write.apply(this, arguments);
  };
  Object.defineProperty(HTMLCanvasElement.prototype, "width", { ...wipe, set(value) {
    window.written = window.written.filter((one) => one.canvas !== this);  // a canvas that is sized anew is blank
    wipe.set.call(this, value);
  } });
}"""

_DRAW = """async ([code, css, state, more]) => {
  document.body.innerHTML = '<div id="host"></div>';
  const style = document.createElement("style");
  style.textContent = css;
  document.head.append(style);
  for (const [name, value] of Object.entries(state)) {
    if (value?.base64 === undefined) continue;
    state[name] = new DataView(Uint8Array.from(atob(value.base64), (c) => c.charCodeAt(0)).buffer);
  }
  const listeners = {};
  window.sent = [];
  window.model = {
    get: (name) => state[name],
    set: (name, value) => { state[name] = value; },
    save_changes() {},
    send: (content) => window.sent.push(content),
    on: (event, act) => (listeners[event] ??= []).push(act),
    off() {},
    tell: (event, ...about) => (listeners[event] ?? []).forEach((act) => act(...about)),
  };
  const module = await import(URL.createObjectURL(new Blob([code + more], { type: "text/javascript" })));
  window.made = module;
  await module.default.render({ model: window.model, el: document.getElementById("host") });
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
}"""


@dataclass(frozen=True)
class Written:
    """A text on a canvas, and the position of its centre on the page."""

    text: str
    x: float
    y: float
    width: float
    colour: str


@dataclass(frozen=True)
class Drawn:
    """A widget drawn on a page."""

    page: Page

    @property
    def written(self) -> list[Written]:
        """The texts on its canvases."""
        found = self.page.evaluate(
            """() => window.written.map(({ text, canvas, x, y, width, colour }) => {
              const box = canvas.getBoundingClientRect();
              return [text, box.left + x, box.top + y, width, colour];
            })"""
        )
        return [Written(*one) for one in found]

    def hint_at(self, x: float, y: float) -> str:
        """The text of the hint with the pointer there; "" if there is none."""
        self.page.mouse.move(x, y)
        hint = self.page.locator(".tpl-hint")
        return hint.inner_text() if hint.is_visible() else ""


def draw(page: Page, widget: Card, theme: str = "light", width: int = 980, height: int = 1400, more: str = "") -> Drawn:
    """Draw the widget as a notebook would. `more` is JavaScript to add to its script, such as an export."""
    page.set_viewport_size({"width": width, "height": height})
    page.goto("about:blank")
    page.evaluate(_NOTE_TEXTS)
    page.evaluate("light => { document.body.dataset.jpThemeLight = light; }", str(theme == "light").lower())
    code, css = getattr(widget, "_esm"), str(getattr(widget, "_css"))  # noqa: B009  only anywidget knows of them
    page.evaluate(_DRAW, [code, css, _state(widget), more])
    return Drawn(page)


def hint_over(card: Locator, trace: Trace, step: float, **what: int) -> Locator:
    """The hint of an animation with the pointer over `flight`, a bar, or over the table's cell of `rank` and `item`."""
    piece = score(trace)
    if "flight" in what:
        sheet, key, number = ranks.draw(piece), ranks.key_of_bar(piece, what["flight"]), 0
    else:
        sheet, key, number = table.draw(piece), table.key_of_cell(piece, what["rank"], what["item"]), 1
    assert sheet
    part = next(part for part in sheet.parts if part.mark >= 0 and sheet.keys[part.mark] == key)
    x, y, width, height = part.place
    if part.path >= 0:
        across, down = on_curve(list(sheet.paths.found)[part.path], part.when.share(piece.time(step)))
        x, y = x + across, y + down
    canvas = card.locator(".tpl-two canvas").nth(number)
    box = canvas.bounding_box()
    assert box is not None
    scale = box["width"] / sheet.width
    canvas.hover(position={"x": (x + width / 2) * scale, "y": (y + height / 2) * scale})
    return card.locator(".tpl-hint")


def check_live_theme(page: Page, canvases: str) -> None:
    """Check that switching the theme, and back, repaints the canvases that match this selector."""
    picture = f"() => [...document.querySelectorAll('{canvases}')].map((canvas) => canvas.toDataURL()).join()"
    light = page.evaluate(picture)
    for is_light, theme in (("false", "dark"), ("true", "light")):
        page.evaluate(f"document.body.dataset.jpThemeLight = '{is_light}'")
        expect(page.locator(".tplab")).to_have_attribute("data-theme", theme)
        assert (page.evaluate(picture) == light) == (theme == "light")


def _state(widget: Card) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name in widget.traits(sync=True):
        if name.startswith("_"):
            continue
        value = getattr(widget, name)
        if isinstance(value, bytes):
            value = {"base64": base64.b64encode(value).decode()}
        try:
            json.dumps(value)
        except TypeError:
            continue
        state[name] = value
    return state
