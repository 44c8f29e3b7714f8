// What a rank holds over time: areas on top of each other, as Python has laid them out, of the rank that is chosen.
import { card, el, followTheme, hint } from "./shell.js";
import { bytesText } from "./units.js";
import { unpack } from "./wire.js";

const tint = (hue) => (hue < 0 ? "var(--work)" : `var(--c${hue})`);
const fill = (hue) => `color-mix(in srgb,${tint(hue)} 30%,var(--paper))`;

async function render({ model, el: host }) {
  const scene = await unpack(model.get("scene"));
  const { kinds, num_kinds: many, size: [width, height, top, bottom], panels, ranks } = scene;
  const root = card(host, { title: scene.title, about: scene.about, label: scene.title });
  const choice = el("select.tpl-select", { "aria-label": "rank", onchange: () => choose(Number(choice.value)) },
    ...ranks.map((text, rank) => el("option", { value: rank }, text)));
  const isPredicted = panels.some(({ predicted }) => predicted.some(Boolean));
  root.append(el("div.tpl-tools", {},
    ...kinds.map(([name, hue]) => el("span.tpl-key", {}, el("i", { style: `background:${fill(hue)};border:1px solid ${tint(hue)}` }), name)),
    isPredicted ? el("span.tpl-key", {}, el("i.tpl-keydashed"), "predicted") : null, el("span.tpl-space"), choice));
  const drawing = el("svg.tpl-stacks", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const tip = hint(root);
  const figure = el("div.tpl-curves", { tabindex: "0", role: "group",
    "aria-label": "memory over time: left and right arrow keys go through moments, up and down through ranks" }, drawing);
  const says = el("p.tpl-say", { "aria-live": "polite" });
  root.append(figure, says);

  const cursor = el("line.tpl-now", { visibility: "hidden" });
  let stops = [], now = -1; // the moments of the rank that is shown, from panel to panel

  function choose(rank) {
    model.set("rank", Math.min(Math.max(rank, 0), ranks.length - 1));
    model.save_changes();
    draw();
  }

  function draw() {
    const rank = model.get("rank"), base = height - bottom;
    choice.value = rank;
    says.textContent = scene.says[rank].replace(/^r/, "R");
    drawing.setAttribute("aria-label", scene.says[rank]);
    stops = [];
    now = -1;
    leave();
    drawing.replaceChildren(...scene.ticks.map(([y, text]) => el("text.tpl-size.tpl-end", { x: panels[0].x - 8, y }, text)),
      ...panels.flatMap((panel) => drawPanel(panel, rank, base)), cursor);
  }

  function drawPanel(panel, rank, base) {
    const right = panel.x + panel.width, area = panel.areas[panel.of_rank[rank]];
    const [xs, tops, bytes] = ["xs", "tops", "bytes"].map((column) => scene[column + area.name]);
    const drawn = [el("text.tpl-paneltitle", { x: panel.x, y: top - 16 }, panel.title),
      ...scene.ticks.map(([y]) => el("line.tpl-grid", { x1: panel.x, x2: right, y1: y, y2: y }))];
    const count = area.texts.length;
    for (const [, hue, kind] of [...kinds].reverse()) {
      let edge = "", isThere = false;
      for (let stop = 0; stop < count; stop++) {
        edge += `${stop ? "L" : ""}${xs[stop] / 10} ${tops[stop * many + kind] / 10}H${xs[stop + 1] / 10}`;
        isThere ||= bytes[stop * many + kind] > 0;
      }
      if (!isThere) continue;
      drawn.push(el("path", { d: `M${xs[0] / 10} ${base}L${edge}V${base}Z`, style: `fill:${fill(hue)}` }),
        el("path", { d: `M${edge}`, style: `fill:none;stroke:color-mix(in srgb,${tint(hue)} var(--onpaper),var(--toward))` }));
    }
    for (const [name, x, y] of area.labels) drawn.push(el("text.tpl-size.tpl-onarea", { x, y }, name));
    drawn.push(el("line.tpl-grid", { x1: panel.x, x2: right, y1: base, y2: base }),
      ...panel.ticks.map(([x, text]) => el("text.tpl-size", { x: Math.min(x, right - 8), y: base + 12 }, text)),
      el("text.tpl-size", { x: (panel.x + right) / 2, y: base + 29 }, scene.along));
    const due = panel.predicted[rank];
    if (due) drawn.push(el("line.tpl-due", { x1: panel.x, x2: right, y1: due[0], y2: due[0] }));
    for (let stop = 0; stop < count; stop++) {
      const parts = due ? panel.parts[rank] : [], text = (amount, predicted) => bytesText(amount) + (predicted ? `, predicted ${bytesText(predicted)}` : "");
      const held = kinds.map(([name, , kind]) => [name, bytes[stop * many + kind], parts[kind]]).reverse();
      const total = held.reduce((sum, [, amount]) => sum + amount, 0);
      stops.push({ from: xs[stop] / 10, to: xs[stop + 1] / 10, panel, base, rows: [
        ["", `${panel.title ? `${panel.title}, ` : ""}${area.texts[stop]}`],
        ...held.filter(([, amount, predicted]) => amount || predicted).map(([name, ...amounts]) => [name, text(...amounts)]),
        ["in total", text(total, due?.[1])],
      ] });
    }
    return drawn;
  }

  const leave = () => { tip.hide(); cursor.setAttribute("visibility", "hidden"); };
  const show = (stop, event, x) => {
    for (const [name, value] of Object.entries({ x1: x, x2: x, y1: top, y2: stop.base, visibility: "visible" })) cursor.setAttribute(name, value);
    tip.show(event, stop.rows);
  };
  figure.addEventListener("pointermove", (event) => {
    const frame = drawing.getBoundingClientRect(), x = ((event.clientX - frame.left) * width) / frame.width;
    const near = stops.findLastIndex((stop) => x >= stop.from && x <= stop.panel.x + stop.panel.width && x < Math.max(stop.to, stop.from + 1));
    if (near < 0) return leave();
    now = near;
    show(stops[near], event, x);
  });
  figure.addEventListener("pointerleave", leave);
  figure.addEventListener("blur", leave);
  figure.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    if (event.key === "Escape") return leave();
    const turn = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: stops.length - 1 }[event.key];
    if (!turn && to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    if (turn) return choose(model.get("rank") + turn);
    now = Math.min(Math.max(to, 0), stops.length - 1);
    const stop = stops[now], frame = drawing.getBoundingClientRect(), x = (stop.from + stop.to) / 2;
    show(stop, { clientX: frame.left + (x * frame.width) / width, clientY: frame.top + (top * frame.height) / height }, x);
    says.textContent = stop.rows.map(([what, text]) => (what ? `${what} ${text}` : text)).join("; ");
  });
  // In a narrow place, letters on the axes shrink less than the picture.
  const resizer = new ResizeObserver(() => {
    const larger = width / Math.max(figure.clientWidth, 1);
    drawing.style.setProperty("--larger", Math.min(Math.max(larger, 1), 1.4).toFixed(2));
  });
  resizer.observe(figure);
  model.on("change:rank", draw);
  const unfollow = followTheme(root, leave);
  draw();
  return () => {
    model.off("change:rank", draw);
    resizer.disconnect();
    unfollow();
  };
}

export default { render };
