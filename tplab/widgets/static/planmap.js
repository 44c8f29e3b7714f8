// The map of plans: seconds of a step against memory, the limit of a GPU, the best plan and the chosen one.
import { el } from "./shell.js";
import { plain, ticks } from "./units.js";

const [LEFT, AFTER, ABOVE, BELOW, TALL] = [44, 12, 14, 34, 310];
const HALO = "paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round";

export const hueOf = (hue) => (hue < 0 ? "var(--work)" : `var(--c${hue})`);
export const fillOf = (hue) => `fill:color-mix(in srgb,${hueOf(hue)} 55%,var(--paper));stroke:${hueOf(hue)}`;
export const text = (x, y, words, { size = 11, anchor = "middle", dim = true, bold = false, halo = false } = {}) =>
  el("text", { x, y, style: `font-size:${size}px;text-anchor:${anchor};fill:var(--${dim ? "dim" : "ink"});font-weight:${bold ? 650 : 400};${halo ? HALO : ""}` }, words);
export const straight = (x1, y1, x2, y2, colour, more = "") => el("line", { x1, y1, x2, y2, style: `stroke:var(--${colour});${more}` });
export const DASHED = "stroke-width:1.4;stroke-dasharray:5 3";

// Round numbers on an axis of logarithms, in the room there is.
function roundNumbers(low, high) {
  for (const nice of [[1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9], [1, 1.5, 2, 3, 4, 5, 7], [1, 2, 3, 5], [1]]) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      found.push(...nice.map((digit) => digit * 10 ** power).filter((at) => at >= low && at <= high));
    }
    if (found.length >= 2 && found.length <= 9) return found;
  }
  return [low, high];
}

export class PlanMap {
  constructor(host, { over, choose }) {
    this.svg = el("svg.tpl-press", { role: "img", style: "width:100%" });
    host.append(this.svg);
    this.svg.addEventListener("pointermove", (event) => over(event, this.under(event)));
    this.svg.addEventListener("pointerleave", () => over(null, null));
    this.svg.addEventListener("click", (event) => {
      const found = this.under(event);
      if (found !== null) choose(found);
    });
  }

  set(board) {
    this.board = board;
    const seconds = [...board.seconds, ...board.measured.map(([, took]) => took)];
    const held = [...board.gib, ...board.measured.map(([, , gib]) => gib ?? 0), 1.1 * board.limit];
    [this.low, this.high] = [Math.min(...seconds) / 1.1, Math.max(...seconds) * 1.06];
    this.most = 1.04 * Math.max(...held);
  }

  x(seconds) { return LEFT + (Math.log(seconds / this.low) / Math.log(this.high / this.low)) * (this.width - LEFT - AFTER); }
  y(gib) { return TALL - BELOW - (gib / this.most) * (TALL - ABOVE - BELOW); }
  // Where a plan is. What has no forecast yet is at its estimate.
  at(index) { return [this.x(this.board.seconds[index]), this.y(this.board.gib[index])]; }

  under(event) {
    const frame = this.svg.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
    let [found, least] = [null, 20];
    this.board.plans.forEach((_, index) => {
      const [left, top] = this.at(index), away = Math.hypot(left - x, top - y);
      if (away < least) [found, least] = [index, away];
    });
    return found;
  }

  draw(chosen) {
    const { board, svg } = this;
    this.width = svg.clientWidth || 480;
    svg.setAttribute("viewBox", `0 0 ${this.width} ${TALL}`);
    svg.setAttribute("aria-label", `${board.plans.length} plans, seconds of a step against GiB of the rank that holds most`);
    const base = TALL - BELOW, end = this.width - AFTER, limit = this.y(board.limit);
    const parts = [el("rect", { x: LEFT, y: ABOVE, width: end - LEFT, height: limit - ABOVE, style: "fill:var(--soft)" })];
    for (const gib of ticks(0, this.most, 5)) {
      parts.push(straight(LEFT, this.y(gib), end, this.y(gib), "line", "stroke-width:.7"), text(LEFT - 6, this.y(gib), plain(gib), { anchor: "end" }));
    }
    for (const seconds of roundNumbers(this.low, this.high)) {
      parts.push(straight(this.x(seconds), base, this.x(seconds), base + 4, "dim"), text(this.x(seconds), base + 13, plain(seconds)));
    }
    parts.push(text(LEFT - 6, 5, "GiB", { anchor: "end" }), text(end, TALL - 5, "seconds per step", { anchor: "end" }));
    parts.push(straight(LEFT, limit, end, limit, "ink", DASHED), text(end - 4, limit - 9, `a GPU has ${plain(board.limit)} GiB`, { anchor: "end" }));
    const front = board.plans.flatMap((_, index) => (board.front[index] ? [this.at(index)] : []));
    parts.push(el("path", { d: front.map(([x, y], place) => (place ? `H${x}V${y}` : `M${x} ${y}`)).join(""), style: "fill:none;stroke:var(--dim);stroke-width:1;opacity:.6" }));
    board.plans.forEach((_, index) => {
      const [x, y] = this.at(index);
      parts.push(board.gib[index] <= board.limit
        ? el("circle", { cx: x, cy: y, r: 4, style: `${fillOf(0)};stroke-width:1.2` })
        : el("path", { d: `M${x - 3.2} ${y - 3.2}l6.4 6.4m0 -6.4l-6.4 6.4`, style: "stroke:var(--c1);stroke-width:1.6;fill:none" }));
    });
    for (const [index, seconds, gib] of board.measured) {
      const [x, y] = this.at(index), [to, up] = [this.x(seconds), this.y(gib ?? board.gib[index])];
      parts.push(straight(x, y, to, up, "ink", "stroke-width:1"), el("path.tpl-diamond", { d: `M${to} ${up - 6}l6 6l-6 6l-6 -6Z` }));
    }
    const mark = (index, words, radius, colour, side) => {
      const [x, y] = this.at(index), isLeft = side < 0 ? x > LEFT + 40 : x > this.width - 70;
      parts.push(el("circle", { cx: x, cy: y, r: radius, style: `fill:none;stroke:var(--${colour});stroke-width:2.2` }));
      const about = { anchor: isLeft ? "end" : "start", dim: false, bold: true, size: 12, halo: true };
      parts.push(text(x + (isLeft ? -radius - 4 : radius + 4), side < 0 ? y : y - 11, words, about));
    };
    mark(board.best, board.best === chosen ? "" : "best", 6.5, "c2", -1);
    mark(chosen, board.best === chosen ? "best, chosen" : "chosen", 10, "accent", 1);
    svg.replaceChildren(...parts);
  }
}
