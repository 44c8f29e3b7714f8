// Bars of a plan: the parts of its step, and what its ranks hold.
import { el } from "./shell.js";
import { DASHED, fillOf, straight, text } from "./planmap.js";
import { plain, ticks } from "./units.js";

const percent = (share) => `${(100 * share).toFixed(1)}%`;

// Whether something under the pointer says more: an element with `rows` for the hint.
function hinted(node, tip, rows) {
  node.addEventListener("pointermove", (event) => tip.show(event, rows));
  node.addEventListener("pointerleave", () => tip.hide());
  return node;
}

// The parts of the chosen plan's step, and under each the best's.
export function drawParts(svg, board, chosen, tip) {
  const count = board.parts.length, partOf = (index, part) => board.took[board.place.get(index) * count + part];
  const rivals = chosen === board.best ? [chosen] : [chosen, board.best];
  const rows = board.parts.map((_, part) => part).filter((part) => rivals.some((index) => partOf(index, part) > 0.004 * board.seconds[index]));
  const width = svg.clientWidth || 400, row = rivals.length > 1 ? 27 : 23, label = 104, room = width - label - 94;
  const longest = Math.max(...rows.flatMap((part) => rivals.map((index) => partOf(index, part))));
  const parts = rows.flatMap((part, place) => {
    const [name, hue] = board.parts[part], top = place * row, drawn = [text(label - 8, top + 9, name, { anchor: "end", dim: false, size: 12 })];
    rivals.forEach((index, rival) => {
      const seconds = Math.max(0, partOf(index, part)), wide = seconds ? Math.max((seconds / longest) * room, 1) : 0;
      const [y, height] = rival ? [top + 15, 7] : [top + 2, rivals.length > 1 ? 12 : 15];
      const style = rival ? "fill:none;stroke:var(--dim);stroke-width:1" : hue === -2 ? "fill:var(--hatch);stroke:var(--dim);stroke-dasharray:3 2" : fillOf(hue);
      const said = [["", `${name}, ${index === board.best ? (rivals.length > 1 ? "best plan" : "best plan, chosen") : "chosen plan"}`],
        ["seconds", `${plain(seconds)} s`], ["of the step", percent(seconds / board.seconds[index])]];
      drawn.push(hinted(el("rect", { x: label, y, width: wide, height, rx: 2, style }), tip, said));
    });
    const seconds = partOf(chosen, part), wide = (Math.max(...rivals.map((index) => partOf(index, part))) / longest) * room;
    drawn.push(text(label + wide + 7, top + 9, `${plain(seconds)} s, ${percent(seconds / board.seconds[chosen])}`, { anchor: "start", dim: false, size: 12 }));
    return drawn;
  });
  const high = rows.length * row;
  svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
  svg.style.height = `${high}px`;
  svg.setAttribute("aria-label", rows.map((part) => `${board.parts[part][0]}: ${plain(partOf(chosen, part))} s`).join("; "));
  svg.replaceChildren(...parts);
}

// What the ranks at each place of a pipeline hold, by kind: a column for each; the chosen plan beside the best.
export function drawHeld(svg, board, chosen, tip) {
  const rivals = chosen === board.best ? [chosen] : [chosen, board.best], count = board.kinds.length;
  const width = svg.clientWidth || 400, high = 132, base = high - 18, left = 30, gap = 18;
  const heldBy = (place, kind) => board.held[place * count + kind];
  const totals = rivals.map((index) => Math.max(board.limit * 1.08, board.gib[index]));
  const scale = (base - 16) / Math.max(...totals), wide = (width - left - gap * (rivals.length - 1)) / rivals.length;
  const parts = [];
  for (const gib of ticks(0, Math.max(...totals), 3)) {
    parts.push(straight(left, base - gib * scale, width, base - gib * scale, "line", "stroke-width:.7"), text(left - 5, base - gib * scale, plain(gib), { anchor: "end", size: 10.5 }));
  }
  rivals.forEach((index, rival) => {
    const x = left + rival * (wide + gap), from = board.start[board.place.get(index)], pp = board.start[board.place.get(index) + 1] - from;
    const each = Math.min(wide / pp, 54), bar = Math.max(each - (each > 6 ? 2 : 0.3), 0.8);
    const name = index === board.best ? (rivals.length > 1 ? "best" : "best, chosen") : "chosen";
    parts.push(text(x + 2, 6, name, { anchor: "start", dim: false, bold: true }));
    for (let place = 0; place < pp; place++) {
      let y = base;
      const rows = board.kinds.map(([kind], at) => [kind, heldBy(from + place, at)]).filter(([, gib]) => gib > 0.005);
      const total = rows.reduce((sum, [, gib]) => sum + gib, 0);
      const said = [["", `${name} plan, ${pp > 1 ? `pipeline rank ${place} of ${pp}` : "each rank"}`], ...rows.map(([kind, gib]) => [kind, `${plain(gib)} GiB`]), ["together", `${plain(total)} of ${plain(board.limit)} GiB`]];
      const column = el("g", {}, ...board.kinds.map(([, hue], at) => {
        const tall = heldBy(from + place, at) * scale;
        y -= tall;
        return tall > 0.2 ? el("rect", { x: x + place * each + 1, y, width: bar, height: tall, style: `${fillOf(hue)};stroke-width:${bar > 5 ? 0.8 : 0}` }) : null;
      }));
      parts.push(hinted(column, tip, said));
      const stride = Math.ceil(18 / each);
      if (pp > 1 && place % stride === 0) parts.push(text(x + (place + 0.5) * each, base + 10, place, { size: 10.5 }));
    }
    if (pp === 1) parts.push(text(x + 0.5 * each, base + 10, "each", { size: 10.5 }));
    parts.push(straight(x, base - board.limit * scale, x + wide, base - board.limit * scale, "ink", DASHED));
  });
  svg.setAttribute("viewBox", `0 0 ${width} ${high}`);
  svg.style.height = `${high}px`;
  svg.setAttribute("aria-label", rivals.map((index) => `${board.plans[index]}: up to ${plain(board.gib[index])} GiB`).join("; "));
  svg.replaceChildren(...parts);
}
