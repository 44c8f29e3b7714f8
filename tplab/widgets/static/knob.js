// One control, and bars that change with it.
import { card, el, followTheme, hint } from "./shell.js";

const BAR_WIDTH = 900, ROW = 34, HEIGHT = 24, TRACK = 400;

// Which of these positions are named under the slider: as many as have room, at equal distances, and the last. The first
// name begins where the slider does, the last one ends there, and all others are centred below their positions.
function named(names) {
  const last = names.length - 1, wide = names.map((name) => name.length * 6.5 + 10);
  const begin = (place) => (place === last ? TRACK - wide[place] : (place * TRACK) / last - (place && wide[place] / 2));
  for (let step = 1; step < last; step++) {
    const found = names.flatMap((_, place) => (place === last || (place % step === 0 && last - place >= step) ? [place] : []));
    if (found.every((place, at) => !at || begin(found[at - 1]) + wide[found[at - 1]] <= begin(place))) return found;
  }
  return last > 0 ? [0, last] : [0];
}

// What is written after a bar's total.
const behindTotal = ({ note, measured }) => [note, measured ? `measured ${measured[1]}` : ""].filter(Boolean).join(" · ");

function render({ model, el: host }) {
  const { title, about, control, colours, by, options } = model.get("content");
  const root = card(host, { title, about, label: title });
  const value = el("b"), marks = el("div.tpl-marks", { "aria-hidden": "true" }, ...options.map(() => el("i")));
  const slider = el("input.tpl-slider", {
    type: "range", min: 0, max: options.length - 1, step: 1, "aria-label": control,
    oninput: () => turn(Number(slider.value)),
  });
  // The names of the other positions: all of them where there is room, else of some, the first and the last among them.
  const every = named(options.map((option) => option.name));
  const ends = el("div.tpl-ends", { "aria-hidden": "true" }, ...every.map((place) =>
    el("span", { style: `left:${(100 * place) / Math.max(options.length - 1, 1)}%`, onclick: () => turn(place) }, options[place].name)));
  const track = el("div.tpl-track", { style: "max-width:420px" }, slider, marks, ends);
  root.append(el("div.tpl-controls", { style: "gap:10px;margin:2px 0 22px" }, el("span.tpl-about", {}, control), value, track));
  const tint = (name) => (colours[name] < 0 ? "var(--work)" : `var(--c${colours[name] % 8})`);
  const paint = (name) => `fill:color-mix(in srgb,${tint(name)} 30%,var(--paper));stroke:${tint(name)}`;
  root.append(el("div.tpl-tools", {}, ...Object.keys(colours).map((name) => el("span.tpl-key", {},
    el("i", { style: `background:color-mix(in srgb,${tint(name)} 30%,var(--paper));border:1px solid ${tint(name)}` }), name)),
    by ? el("span.tpl-key", {}, el("i.tpl-keydiamond"), `measured by ${by}`) : null));
  const bars = el("svg", { role: "img", style: "width:100%;height:auto;display:block" });
  const words = el("p.tpl-say", { "aria-live": "polite" });
  root.append(bars, words);
  const tip = hint(root);

  function turn(index) {
    model.set("index", Math.min(Math.max(index, 0), options.length - 1));
    model.save_changes();
    draw();
  }

  // JupyterLab keeps the arrow keys from the slider, so they are read here.
  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const at = model.get("index");
    const to = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1, Home: 0, End: options.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    turn(to);
  });

  function draw() {
    const { name, sentence, rows } = options[model.get("index")];
    tip.hide();
    slider.value = model.get("index");
    slider.setAttribute("aria-valuetext", name);
    track.style.setProperty("--at", `${(100 * model.get("index")) / Math.max(options.length - 1, 1)}%`);
    value.textContent = name;
    every.forEach((place, at) => ends.children[at].classList.toggle("tpl-on", place === model.get("index")));
    words.textContent = sentence;
    const label = 16 + 7 * Math.max(...rows.map((row) => row.label.length));
    const behind = 30 + 7 * Math.max(...options.flatMap((option) => option.rows).map((row) => `${row.total} ${behindTotal(row)}`.length));
    const room = BAR_WIDTH - label - behind;
    bars.setAttribute("viewBox", `0 0 ${BAR_WIDTH} ${ROW * rows.length}`);
    bars.setAttribute("aria-label", rows.map((row) => `${row.label}: ${row.total} ${behindTotal(row)}`).join("; "));
    bars.replaceChildren(...rows.flatMap((row, place) => {
      const middle = place * ROW + HEIGHT / 2, drawn = [];
      drawn.push(el("text", { x: label - 10, y: middle, style: "text-anchor:end;font-size:13px" }, row.label));
      let x = label;
      for (const [part, share, text] of row.parts) {
        const width = share * room;
        drawn.push(el("rect", { x, y: place * ROW, width: Math.max(width - 1, 1), height: HEIGHT, rx: 3, style: paint(part) }));
        const said = `${part} ${text}`, shown = said.length * 6.6 + 10 < width ? said : part.length * 6.6 + 10 < width ? part : "";
        drawn.push(el("text", { x: x + width / 2, y: middle, style: "font-size:12px" }, shown));
        x += width;
      }
      if (row.measured) {
        const [share, text] = row.measured, at = label + share * room, top = place * ROW, foot = top + HEIGHT + 1;
        const rows = [["", row.label], ["measured", text], ["by", by], ["bar", row.total]];
        drawn.push(el("path", { d: `M${x} ${middle}H${Math.max(at, x)}`, style: "stroke:var(--dim);stroke-width:1;fill:none" }));
        drawn.push(el("path", { d: `M${at} ${Math.max(top - 2, 0)}V${foot}`, style: "stroke:var(--ink);stroke-width:1.6" }));
        drawn.push(el("path.tpl-diamond", { d: `M${at} ${foot - 6}l6 6l-6 6l-6 -6Z` }));
        drawn.push(el("rect", {
          x: at - 8, y: top, width: 16, height: ROW - 2, style: "fill:transparent",
          onpointermove: (event) => tip.show(event, rows), onpointerleave: () => tip.hide(),
        }));
        x = Math.max(x, at);
      }
      drawn.push(el("text", { x: x + 8, y: middle, style: "text-anchor:start;font-size:13px" },
        el("tspan", { style: "font-weight:600" }, row.total), el("tspan", { dx: 7, style: "fill:var(--dim)" }, behindTotal(row))));
      return drawn;
    }));
  }

  model.on("change:index", draw);
  const unfollow = followTheme(root, () => {});
  draw();
  return () => {
    model.off("change:index", draw);
    unfollow();
  };
}

export default { render };
