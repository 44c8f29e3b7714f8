// A drawing that Python draws again while something runs.
import { card, el, followTheme } from "./shell.js";

function render({ model, el: host }) {
  const { title, label } = model.get("content");
  const root = card(host, { title, about: " ", label });
  const about = root.querySelector(".tpl-about");
  const figure = el("div", { role: "img" });
  const say = el("p.tpl-say", {});
  const draw = () => {
    const content = model.get("content");
    // Names of glyphs and clips are the drawing's own: two drawings on one page must not share them.
    const own = `tpl${Math.random().toString(36).slice(2)}`;
    about.textContent = content.about;
    say.textContent = content.sentence;
    figure.setAttribute("aria-label", content.sentence);
    figure.innerHTML = content.drawing.replace(/(id="|href="#|url\(#)/g, `$1${own}`);
    figure.firstElementChild.setAttribute("style", "width:100%;height:auto;stroke-linejoin:round;stroke-linecap:butt");
  };
  draw();
  model.on("change:content", draw);
  root.append(figure, say);
  const end = followTheme(root, () => {});
  return () => { model.off("change:content", draw); end(); };
}

export default { render };
