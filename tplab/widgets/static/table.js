// What each rank holds: one row per rank, one column per item (or one item of each group). A table where there is room for
// letters, else a canvas of small squares.
import { colours, el } from "./shell.js";
import { PASSED, cellText, itemColour, members, partOf, pool } from "./score.js";

export class Table {
  constructor(root, host, score, over) {
    Object.assign(this, { root, score, over });
    const { names, size } = score.table;
    this.rows = Math.min(score.ranks, 64);
    this.columns = Math.min(names.length, size);
    this.columnOf = score.table.column;
    this.small = Math.max(this.rows, this.columns) > 16;
    this.first = -1;
    const figure = el("figure.tpl-holds");
    host.append(figure);
    if (this.small) this.buildSmall(figure);
    else this.buildTable(figure);
    figure.append(el("figcaption", {}, score.table.caption));
  }

  buildTable(host) {
    const most = Math.max(this.rows, this.columns);
    const sums = this.score.items.some((item) => item[4].some((ranks) => ranks.length > 1));
    this.most = most > 8 ? 1 : this.columns <= 4 ? 4 : 3;
    const kind = most > 8 ? "tpl-tight" : this.columns <= 4 ? (sums ? "tpl-wide" : "") : "tpl-narrow";
    this.heads = Array.from({ length: this.columns }, () => el("th", { scope: "col" }));
    const body = el("tbody");
    this.cells = Array.from({ length: this.rows }, (_, rank) => {
      const cells = Array.from({ length: this.columns }, (_, place) => {
        const node = el("td.tpl-cell", {}, el("b"), el("small"), el("i"));
        node.addEventListener("pointermove", (event) => this.pointed(event, rank, place));
        node.addEventListener("pointerleave", () => this.over(null));
        return { node, state: "" };
      });
      body.append(el("tr", {}, el("th", { scope: "row" }, `rank ${rank}`), ...cells.map((cell) => cell.node)));
      return cells;
    });
    host.append(el(`table.tpl-table${kind && `.${kind}`}`, {}, el("thead", {}, el("tr", {}, el("td"), ...this.heads)), body));
  }

  buildSmall(host) {
    this.wide = Math.max(4, Math.min(20, Math.floor(400 / this.columns)));
    this.high = Math.max(4, Math.min(12, Math.floor(400 / this.rows)));
    this.width = 26 + this.columns * this.wide;
    this.height = 16 + this.rows * this.high;
    this.canvas = el("canvas.tpl-small", { role: "img", "aria-label": "what each rank holds" });
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.addEventListener("pointermove", (event) => {
      const place = Math.floor((event.offsetX - 26) / this.wide), rank = Math.floor((event.offsetY - 16) / this.high);
      if (place >= 0 && rank >= 0 && place < this.columns && rank < this.rows) this.pointed(event, rank, place);
      else this.over(null);
    });
    this.canvas.addEventListener("pointerleave", () => this.over(null));
    host.append(this.canvas);
  }

  pointed(event, rank, place) {
    const item = this.inColumn(rank, this.first + place);
    if (item >= 0) this.over(event, { rank, item });
    else this.over(null);
  }

  // Which of the items of a column this rank holds, or will, or could.
  inColumn(rank, column) {
    const { score } = this;
    const candidates = this.columnOf.flatMap((at, item) => (at === column ? [item] : []));
    return candidates.find((item) => this.lastHolds.has(rank * score.items.length + item)) ?? candidates[0] ?? -1;
  }

  draw(now, again = false) {
    const { score } = this, numItems = score.items.length;
    if (!this.lastHolds) {
      this.lastHolds = new Set();
      score.hold_rank.forEach((rank, row) => this.lastHolds.add(rank * numItems + score.hold_item[row]));
    }
    const first = score.table.first[now.round];
    if (first !== this.first) {
      this.first = first;
      this.heads?.forEach((head, place) => (head.textContent = score.table.names[first + place] ?? ""));
      again = true;
    }
    const holds = new Int32Array(this.rows * this.columns).fill(-1), coming = new Int32Array(holds.length).fill(-1);
    for (let item = 0; item < numItems; item++) {
      const place = this.columnOf[item] - first;
      if (place < 0 || place >= this.columns) continue;
      for (let rank = 0; rank < this.rows; rank++) {
        const at = rank * this.columns + place;
        if (now.cells[rank * numItems + item] >= 0) holds[at] = now.cells[rank * numItems + item];
        if (!this.small && now.arriving.has(rank * numItems + item)) coming[at] = item;
      }
    }
    if (this.small) this.drawSmall(holds, again);
    else this.cells.forEach((row, rank) => row.forEach((cell, place) => {
      this.drawCell(cell, holds[rank * this.columns + place], coming[rank * this.columns + place]);
    }));
  }

  drawCell(cell, hold, coming) {
    const state = `${hold},${coming}`;
    if (cell.state === state) return;
    cell.state = state;
    const { score } = this, [label, value, strip] = cell.node.children;
    const passed = hold >= 0 && score.hold_state[hold] === PASSED;
    const item = hold >= 0 ? score.hold_item[hold] : coming;
    let kind = hold < 0 ? "" : passed ? " tpl-passed" : " tpl-held";
    const part = hold >= 0 && !passed ? partOf(score, hold) : null;
    if (part) {
      kind += " tpl-part";
      cell.node.style.setProperty("--from", `${(100 * part[0]) / part[1]}%`);
      cell.node.style.setProperty("--to", `${(100 * (part[0] + 1)) / part[1]}%`);
    }
    strip.replaceChildren();
    label.textContent = value.textContent = "";
    if (hold >= 0) {
      const text = cellText(score, hold, this.most);
      label.textContent = text.label;
      value.textContent = text.value;
      if (text.all.length > 1) {
        if (!passed && text.inside.length < text.all.length) kind += " tpl-partial";
        if (text.all.length <= 16) strip.append(...text.all.map((rank) => el(text.inside.includes(rank) ? "u.tpl-in" : "u")));
      }
    } else if (coming >= 0) label.textContent = score.items[coming][0];
    cell.node.className = `tpl-cell${kind}${coming >= 0 ? " tpl-arriving" : ""}${label.textContent.length > 3 ? " tpl-long" : ""}`;
    cell.node.style.setProperty("--c", itemColour(this.score, Math.max(item, 0)));
  }

  drawSmall(holds, again) {
    const key = holds.join();
    if (key === this.key && !again) return;
    this.key = key;
    const { score, wide, high } = this, paint = (this.paint = again || !this.paint ? colours(this.root) : this.paint);
    const ratio = window.devicePixelRatio || 1, pen = this.canvas.getContext("2d");
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    pen.scale(ratio, ratio);
    pen.font = `10px ${paint.font}`;
    pen.fillStyle = paint.dim;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (let rank = 0; rank < this.rows; rank += 8) pen.fillText(rank, 20, 16 + (rank + 0.5) * high);
    pen.textAlign = "center";
    for (let place = 0; place < this.columns; place += 8) {
      pen.fillText(score.table.names[this.first + place] ?? "", 26 + (place + 0.5) * wide, 7);
    }
    for (let at = 0; at < holds.length; at++) {
      const hold = holds[at];
      let fill = paint.soft;
      if (hold >= 0) {
        this.fills ??= new Map();
        const code = `${score.hold_set[hold]},${score.hold_item[hold]},${score.hold_state[hold]},${this.root.dataset.theme}`;
        if (!this.fills.has(code)) {
          const inside = members(score, hold), share = inside.length / pool(score, hold, inside).length;
          const passed = score.hold_state[hold] === PASSED;
          this.fills.set(code, passed ? paint.line : paint.mix(score.pipeline ? paint.kinds.F : paint.hue(score.hold_item[hold]), 0.12 + 0.88 * share));
        }
        fill = this.fills.get(code);
      }
      pen.fillStyle = fill;
      pen.fillRect(26 + (at % this.columns) * wide, 16 + Math.floor(at / this.columns) * high, wide - 0.6, high - 0.6);
    }
  }
}
