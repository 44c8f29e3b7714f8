// Curves that Python has drawn as SVG, in the colours of the page.
import { card, el, followTheme } from "./shell.js";

function render({ model, el: host }) {
  const { title, about, sentence, drawing } = model.get("content");
  const root = card(host, { title, about, label: sentence });
  // Names of glyphs and clips are the drawing's own: two drawings on one page must not share them.
  const own = `tpl${Math.random().toString(36).slice(2)}`;
  const figure = el("div", { role: "img", "aria-label": sentence });
  figure.innerHTML = drawing.replace(/(id="|href="#|url\(#)/g, `$1${own}`);
  figure.firstElementChild.setAttribute("style", "width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt");
  root.append(figure, el("p.tpl-say", {}, sentence));
  return followTheme(root, () => {});
}

export default { render };
