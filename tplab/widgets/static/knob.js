// One control, and bars that change with it.
import { card, el, hint, live, onKeys } from "./shell.js";
import { unpack } from "./wire.js";
import { Scene, drawLegend } from "./scene.js";

const TRACK = 400;

// The positions that are labelled under the slider: as many as fit, at equal distances, and the last. The first label
// is aligned with the slider's left end, the last with its right end, and the others are centred below their positions.
function named(names) {
  const last = names.length - 1, wide = names.map((name) => name.length * 6.5 + 10);
  const begin = (place) => (place === last ? TRACK - wide[place] : (place * TRACK) / last - (place && wide[place] / 2));
  for (let step = 1; step < last; step++) {
    const found = names.flatMap((_, place) => (place === last || (place % step === 0 && last - place >= step) ? [place] : []));
    if (found.every((place, at) => !at || begin(found[at - 1]) + wide[found[at - 1]] <= begin(place))) return found;
  }
  return last > 0 ? [0, last] : [0];
}

async function render({ model, el: host }) {
  const data = await unpack(model.get("scene")), { title, about, control, options } = model.get("content");
  const root = card(host, { title, about, label: title });
  const value = el("b"), marks = el("div.tpl-marks", { "aria-hidden": "true" }, ...options.map(() => el("i")));
  const slider = el("input.tpl-slider", {
    type: "range", min: 0, max: options.length - 1, step: 1, "aria-label": control,
    oninput: () => turn(Number(slider.value)),
  });
  // The labels of the other positions: all of them if there is room, otherwise some, including the first and the last.
  const every = named(options.map((option) => option.name));
  const ends = el("div.tpl-ends", { "aria-hidden": "true" }, ...every.map((place) =>
    el("span", { style: `left:${(100 * place) / Math.max(options.length - 1, 1)}%`, onclick: () => turn(place) }, options[place].name)));
  const track = el("div.tpl-track", { style: "max-width:420px" }, slider, marks, ends);
  root.append(el("div.tpl-controls", { style: "gap:10px;margin:2px 0 22px" }, el("span.tpl-about", {}, control), value, track));
  drawLegend(root, data);
  const bars = el("div"), words = el("p.tpl-say", { "aria-live": "polite" });
  root.append(bars, words);
  const tip = hint(root);
  const scene = new Scene(root, bars, data, 0, { over: tip.show });

  function turn(index) {
    model.set("index", Math.min(Math.max(index, 0), options.length - 1));
    model.save_changes();
    draw();
  }

  // JupyterLab does not pass the arrow keys to the slider, so they are handled here.
  const [on, back] = [1, -1].map((by) => () => turn(model.get("index") + by));
  onKeys(root, () => ({ ArrowRight: on, ArrowUp: on, ArrowLeft: back, ArrowDown: back, Home: () => turn(0), End: () => turn(options.length - 1) }));

  function draw() {
    const { name, sentence, label } = options[model.get("index")];
    tip.hide();
    slider.value = model.get("index");
    slider.setAttribute("aria-valuetext", name);
    track.style.setProperty("--at", `${(100 * model.get("index")) / Math.max(options.length - 1, 1)}%`);
    value.textContent = name;
    every.forEach((place, at) => ends.children[at].classList.toggle("tpl-on", place === model.get("index")));
    words.textContent = sentence;
    scene.canvas.setAttribute("aria-label", label);
    scene.draw(model.get("index"));
  }

  return live(root, model, draw, { "change:index": draw });
}

export default { render };
