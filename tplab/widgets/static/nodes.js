// The ranks of a plan on the nodes of a cluster: a box for each node, a cell for each GPU. The groups of one rank are
// coloured, axis by axis; the ranks that share its experts span several axes, and have a border.
import { el } from "./shell.js";

const MESH = ["pp", "dp", "cp", "tp"]; // the last is the fastest
const AXIS_HUES = { pp: 3, dp: 1, cp: 4, tp: 0, ep: 6 };
const MOST_GPUS = 512;
const [NODE_GAP, NODE_PAD, NODE_HEAD] = [8, 4, 15];

// How many nodes are side by side, and the size of their cells: as large as fits.
function laidOut(nodes, size, width, tall) {
  const across = size <= 4 ? size : size <= 16 ? Math.ceil(size / 2) : Math.ceil(Math.sqrt(size * 2)), down = Math.ceil(size / across);
  let best = null;
  for (let columns = 1; columns <= nodes; columns++) {
    const lines = Math.ceil(nodes / columns);
    const wide = Math.min(((width + NODE_GAP) / columns - NODE_GAP - 2 * NODE_PAD) / across, 84);
    const high = Math.min(((tall + NODE_GAP) / lines - NODE_GAP - NODE_HEAD - NODE_PAD) / down, 34);
    const worth = Math.min(wide, 2.4 * high);
    if (!best || worth > best.worth) best = { columns, across, down, wide: Math.max(wide, 2), high: Math.max(high, 2), worth };
  }
  return best;
}

export class NodesView {
  constructor(host, tip) {
    this.svg = el("svg", { role: "img", style: "width:100%" });
    this.tip = tip;
    this.focus = 0;
    host.append(this.svg);
    this.svg.addEventListener("pointermove", (event) => {
      const rank = event.target.dataset?.rank;
      if (rank === undefined) return tip.hide();
      this.look(Number(rank));
      tip.show(event, this.about());
    });
    this.svg.addEventListener("pointerleave", () => tip.hide());
  }

  // sizes: of the axes of MESH; node: GPUs per node; groups: [axis, ranks, nodes] of the axes with several ranks, and
  // of "ep" if ranks share experts.
  set({ sizes, node, groups }, tall) {
    Object.assign(this, { sizes, node, groups, tall, axes: groups.map(([axis]) => axis).filter((axis) => MESH.includes(axis)) });
    this.ranks = sizes.reduce((a, b) => a * b, 1);
    this.nodes = Math.ceil(this.ranks / node);
    this.drawn = Math.min(this.nodes, Math.max(1, Math.floor(MOST_GPUS / node)));
    this.gpus = Math.min(this.ranks, this.drawn * node, Math.max(MOST_GPUS, node));
    if (this.focus >= this.gpus) this.focus = 0;
    this.draw();
  }

  at(rank) {
    const found = {};
    for (const [place, axis] of [...MESH.entries()].reverse()) {
      found[axis] = rank % this.sizes[place];
      rank = Math.floor(rank / this.sizes[place]);
    }
    return found;
  }

  // The ranks that differ from the focus only along an axis; for "ep", consecutive ones.
  group(axis) {
    if (axis === "ep") {
      const ranks = this.groups.find(([name]) => name === axis)?.[1] ?? 0, begin = this.focus - (this.focus % ranks);
      return Array.from({ length: ranks }, (_, index) => begin + index);
    }
    const place = MESH.indexOf(axis), stride = this.sizes.slice(place + 1).reduce((a, b) => a * b, 1);
    const first = this.focus - this.at(this.focus)[axis] * stride;
    return Array.from({ length: this.sizes[place] }, (_, index) => first + index * stride);
  }

  name(rank, between = " ") {
    const at = this.at(rank);
    return this.axes.map((axis) => `${axis} ${at[axis]}`).join(between);
  }

  about() {
    const few = (ranks) => (ranks.length > 8 ? `${ranks.slice(0, 6).join(", ")}, … ${ranks[ranks.length - 1]}` : ranks.join(", "));
    return [["", `rank ${this.focus}, on node ${Math.floor(this.focus / this.node)}`], ["place", this.name(this.focus, ", ")],
      ...this.groups.map(([axis]) => {
        const ranks = this.group(axis), nodes = new Set(ranks.map((rank) => Math.floor(rank / this.node))).size;
        return [`its ${axis} group`, `ranks ${few(ranks)}: ${nodes === 1 ? "in this node" : `on ${nodes} nodes`}`];
      })];
  }

  look(rank) {
    this.focus = rank;
    const colour = new Map(), sharing = new Set(this.group("ep"));
    for (const axis of this.axes) for (const one of this.group(axis)) if (one !== rank) colour.set(one, `var(--c${AXIS_HUES[axis]})`);
    for (const [one, cell] of this.cells.entries()) {
      const hue = colour.get(one), isFocus = one === rank;
      cell.style.fill = isFocus ? "var(--accent)" : hue ? `color-mix(in srgb,${hue} 45%,var(--paper))` : "var(--paper)";
      cell.style.stroke = sharing.has(one) ? `var(--c${AXIS_HUES.ep})` : isFocus ? "var(--accent)" : hue ?? "var(--line)";
      cell.style.strokeWidth = sharing.has(one) ? 2 : 1;
      if (cell.words) cell.words.style.fill = isFocus ? "var(--paper)" : hue ? "var(--ink)" : "var(--dim)";
    }
    this.svg.setAttribute("aria-label", this.about().map((row) => row.join(" ")).join("; "));
  }

  move(by) {
    this.look(Math.min(Math.max(this.focus + by, 0), this.gpus - 1));
  }

  draw() {
    const width = this.svg.clientWidth || 860, { columns, across, down, wide, high } = laidOut(this.drawn, Math.min(this.node, this.gpus), width, this.tall);
    const nodeWide = across * wide + 2 * NODE_PAD, nodeHigh = down * high + NODE_HEAD + NODE_PAD, parts = [];
    this.cells = [];
    const longest = this.axes.map((axis) => `${axis} ${this.sizes[MESH.indexOf(axis)] - 1}`), letter = 5.6;
    const inLine = longest.join(" ").length * letter < wide - 5, inLines = Math.max(0, ...longest.map((text) => text.length)) * letter < wide - 5;
    const half = Math.ceil(longest.length / 2), inTwo = longest.slice(0, half).join(" ").length * letter < wide - 5 && longest.slice(half).join(" ").length * letter < wide - 5;
    const lines = inLine ? 1 : inTwo && inLines && high > 23 ? 2 : 0;
    this.isShort = !lines && this.axes.length * 2 * letter < wide - 4; // "0·1·5" if there is no room for axes
    for (let node = 0; node < this.drawn; node++) {
      const x = (node % columns) * (nodeWide + NODE_GAP), y = Math.floor(node / columns) * (nodeHigh + NODE_GAP);
      parts.push(el("rect", { x: x + 0.5, y: y + 0.5, width: nodeWide - 1, height: nodeHigh - 1, rx: 5, style: "fill:var(--soft);stroke:var(--line)" }));
      parts.push(el("text", { x: x + NODE_PAD + 1, y: y + 8.5, style: "font-size:10px;fill:var(--dim);text-anchor:start;dominant-baseline:central" }, nodeWide > 44 ? `node ${node}` : node));
      for (let place = 0; place < this.node && node * this.node + place < this.gpus; place++) {
        const rank = node * this.node + place, left = x + NODE_PAD + (place % across) * wide, top = y + NODE_HEAD + Math.floor(place / across) * high;
        const cell = el("rect", { x: left + 1, y: top + 1, width: wide - 2, height: high - 2, rx: wide > 12 ? 3 : 0, "data-rank": rank });
        parts.push(cell);
        if ((lines || this.isShort) && high > 11) {
          const words = this.axes.map((axis) => `${axis} ${this.at(rank)[axis]}`);
          const rows = this.isShort ? [words.map((word) => word.split(" ")[1]).join("·")] : lines === 1 ? [words.join(" ")] : [words.slice(0, half).join(" "), words.slice(half).join(" ")];
          cell.words = el("text", { style: "font-size:9.5px;text-anchor:middle;dominant-baseline:central;pointer-events:none" },
            ...rows.map((row, line) => el("tspan", { x: left + wide / 2, y: top + high / 2 + (line - (rows.length - 1) / 2) * 11 }, row)));
          parts.push(cell.words);
        }
        this.cells.push(cell);
      }
    }
    const tall = Math.ceil(this.drawn / columns) * (nodeHigh + NODE_GAP) - NODE_GAP;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    this.svg.style.height = `${tall}px`;
    this.svg.replaceChildren(...parts);
    this.look(this.focus);
  }
}

// The legend: each axis, whether its groups leave a node, and the strength of its colour.
export const nodesLegend = (view) => [
  ["accent", "the rank under the pointer", 100],
  ...view.groups.map(([axis, ranks, nodes]) => [`c${AXIS_HUES[axis]}`, `its ${axis} group: ${ranks} ranks, ${nodes > 1 ? `on ${nodes.toLocaleString("en")} nodes` : "in one node"}`, axis === "ep" ? 0 : 45])];
