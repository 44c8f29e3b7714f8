// Curves that Python drew as SVG, in the colours of the page; and their values under the pointer.
import { card, el, hint, live, onKeys } from "./shell.js";

function render({ model, el: host }) {
  const { title, about, sentence } = model.get("content");
  const root = card(host, { title, about, label: sentence });
  const picture = el("div", { role: "img" });
  const cursor = el("div.tpl-cursor", { hidden: "" }), tip = hint(root);
  const figure = el("div.tpl-curves", { tabindex: "0", role: "group", "aria-label": "values of the lines: arrow keys" }, picture, cursor);
  const says = el("p.tpl-say", { "aria-live": "polite" });
  root.append(figure, says);

  let stops = [], now = -1;
  // Python may redraw while something runs.
  const draw = () => {
    const { about, sentence, drawing, panels } = model.get("content");
    // Names of glyphs and clips are made unique: two drawings on one page must not share them.
    const own = `tpl${Math.random().toString(36).slice(2)}`;
    picture.innerHTML = drawing.replace(/(id="|href="#|url\(#)/g, `$1${own}`);
    picture.firstElementChild.setAttribute("style", "width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt");
    picture.setAttribute("aria-label", sentence);
    root.querySelector(".tpl-about").textContent = about;
    says.textContent = sentence;
    stops = panels.flatMap(({ box: [left, top, right, bottom], stops }) =>
      stops.map(([at, x, values]) => ({ at: left + at * (right - left), left, top, right, bottom, rows: [["", x], ...values] })));
    now = -1;
  };
  const leave = () => { tip.hide(); cursor.hidden = true; };
  const show = (stop, event) => {
    const { top, bottom, at } = stop;
    Object.assign(cursor.style, { left: `${at * 100}%`, top: `${top * 100}%`, height: `${(bottom - top) * 100}%` });
    cursor.hidden = false;
    tip.show(event, stop.rows);
  };
  figure.addEventListener("pointermove", (event) => {
    const frame = figure.getBoundingClientRect();
    const x = (event.clientX - frame.left) / frame.width, y = (event.clientY - frame.top) / frame.height;
    const near = stops.filter(({ left, top, right, bottom }) => x >= left && x <= right && y >= top && y <= bottom);
    if (!near.length) return leave();
    const stop = near.reduce((best, other) => (Math.abs(other.at - x) < Math.abs(best.at - x) ? other : best));
    now = stops.indexOf(stop);
    show(stop, event);
  });
  figure.addEventListener("pointerleave", leave);
  figure.addEventListener("blur", leave);
  figure.addEventListener("keydown", ({ key }) => key === "Escape" && leave());
  const step = (by) => () => {
    if (!stops.length) return;
    now = Math.min(Math.max(now + by, 0), stops.length - 1);
    const stop = stops[now], frame = figure.getBoundingClientRect();
    show(stop, { clientX: frame.left + stop.at * frame.width, clientY: frame.top + stop.top * frame.height });
    says.textContent = stop.rows.map(([what, text]) => (what ? `${what} ${text}` : text)).join(", ");
  };
  onKeys(figure, () => ({ ArrowLeft: step(-1), ArrowRight: step(1) }));
  draw();
  return live(root, model, leave, { "change:content": draw });
}

export default { render };
