// The timeline: one lane per rank, with computing above and messages below, on one canvas, under the playhead.
import { colours, el } from "./shell.js";
import { plain, timeText } from "./units.js";
import { COLLECTIVE, COMPUTE, SEND, WAIT } from "./score.js";
import { describeBar } from "./bars.js";
import { actionBar } from "./action.js";
import { hatch, shape } from "./canvas.js";
import { Chart } from "./chart.js";

export const LANES_TOP = 6, LANES_AXIS = 20;
const MEASURED = 17; // the height of what was measured

// As much of a text as fits.
function fitted(pen, text, room) {
  let short = text;
  while (short.length > 1 && pen.measureText(short).width > room) short = `${short.slice(0, -2)}…`;
  return short;
}

export class Lanes extends Chart {
  // seek(time): called when the reader clicks at a time. zoom(begin, end): called with the visible part, in shares of
  // the whole; null: no zooming. busy: each rank's busy share, to be shown.
  constructor(root, host, score, { seek, hint, zoom = null, busy = null }) {
    super(root, host, { score, seek, hint, zoom, busy });
    this.begin = score.times[0];
    this.last = Math.max(score.times[score.times.length - 1], this.begin + 1e-12);
    this.measured = score.measured ?? []; // [what, seconds from the start, in words]
    this.end = Math.max(this.last, ...this.measured.map(([, seconds]) => this.begin + seconds));
    this.view = [this.begin, this.end];
    this.left = score.ranks > 16 ? 34 : 58;
    this.right = busy ? 50 : 8;
    this.measure();
    const beside = this.measured.map(([name, , text]) => `, ${name} ${text} measured by ${score.by}`).join("");
    this.canvas.setAttribute("aria-label", `timeline of ${score.ranks} rank${score.ranks === 1 ? "" : "s"}, ${timeText(this.last - this.begin, score.unit)} long${beside}`);
    this.veil = zoom ? null : el("div.tpl-veil"); // the future is paler
    if (this.veil) this.plot.prepend(this.veil);
    this.listen();
  }

  // The lane and track of each bar, and the height of a lane.
  measure() {
    const { score } = this, { rank, kind, start, end } = score;
    this.rows = Array.from({ length: score.ranks }, () => []);
    this.track = new Uint8Array(rank.length);
    const free = Array.from({ length: score.ranks }, () => []);
    let tracks = 1;
    for (let row = 0; row < rank.length; row++) {
      if (end[row] <= start[row]) continue;
      this.rows[rank[row]].push(row);
      if (kind[row] === COMPUTE || kind[row] === WAIT) continue;
      const until = free[rank[row]];
      let track = until.findIndex((time) => time <= start[row] + 1e-15);
      if (track < 0) track = Math.min(until.length, 2);
      until[track] = end[row];
      this.track[row] = track;
      tracks = Math.max(tracks, track + 1);
    }
    const size = score.ranks <= 4 ? 17 : score.ranks <= 8 ? 15 : score.ranks <= 16 ? 11 : score.ranks <= 32 ? 6 : 3;
    this.work = score.computes ? size : 0;
    this.talk = tracks > 1 ? Math.max(2, Math.round((size * 1.5) / tracks)) : score.computes ? Math.max(2, Math.round(size * 0.8)) : size;
    this.lane = this.work + this.talk * tracks + (size > 6 ? 5 : 1);
    this.bottom = LANES_TOP + this.lane * score.ranks + MEASURED * this.measured.length;
    this.height = this.bottom + LANES_AXIS;
  }

  // [top, height] of a bar. A wait has none: it is the background of the lane, where no bar covers it.
  at(row) {
    const { score } = this, top = LANES_TOP + score.rank[row] * this.lane, kind = score.kind[row];
    if (kind === WAIT) return [top, this.work || this.lane - (this.lane > 12 ? 5 : 1)];
    return kind === COMPUTE && this.work ? [top, this.work] : [top + this.work + this.track[row] * this.talk, this.talk - (this.talk > 5 ? 1 : 0)];
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, [pen] = this.pens(ratio, this.canvas);
    if (!pen) return;
    const paint = colours(this.root);
    this.hatch = hatch(pen, paint.hatch, ratio);
    this.tints = this.score.tints?.map(paint.read);
    this.drawGround(pen, paint);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, this.width, this.bottom);
    pen.clip();
    this.rows.forEach((rows, rank) => this.drawLane(pen, paint, rows, rank));
    if (this.critical) this.drawCritical(pen, paint);
    pen.restore();
    this.measured.forEach((row, place) => this.drawMeasured(pen, paint, row, this.measuredTop(place) + 7));
    this.moveHead(this.now ?? this.begin);
  }

  measuredTop(place) {
    return this.bottom - MEASURED * (this.measured.length - place);
  }

  // A line for each measured duration, with its name in the column of rank names, and its value at the end.
  drawMeasured(pen, paint, [name, seconds, text], y) {
    const x = this.x(this.begin + seconds), left = this.left, right = left + this.width;
    pen.font = `11px ${paint.font}`;
    pen.fillStyle = paint.dim;
    pen.textAlign = "left";
    pen.fillText(fitted(pen, name, left - 8), 0, y);
    if (x < left) return;
    pen.fillStyle = paint.ink;
    pen.fillRect(left, y - 0.7, Math.min(x, right) - left, 1.4);
    if (x > right + 0.5) return;
    pen.beginPath();
    for (const [dx, dy] of [[0, -5.2], [5.2, 0], [0, 5.2], [-5.2, 0]]) pen.lineTo(x + dx, y + dy);
    pen.fill();
    const room = pen.measureText(text).width + 8, inside = x + 10 + room <= right;
    pen.fillStyle = paint.paper;
    if (!inside) pen.fillRect(x - 8 - room, y - 7, room + 2, 14);
    pen.fillStyle = paint.ink;
    pen.textAlign = inside ? "left" : "right";
    pen.fillText(text, inside ? x + 10 : x - 12, y);
  }

  drawGround(pen, paint) {
    const { score, left } = this, every = this.lane < 12 ? 8 : 1;
    const width = Math.max(0, Math.min(this.width, this.end > this.last ? this.x(this.last) - left : this.width)); // of the trace
    pen.font = `11px ${paint.font}`;
    for (let rank = 0; rank < score.ranks; rank++) {
      const top = LANES_TOP + rank * this.lane, middle = top + (this.gap ? this.work : this.lane - 4) / 2;
      pen.fillStyle = paint.soft;
      pen.fillRect(left, top, width, this.lane - (this.gap ?? (this.lane > 12 ? 5 : 1)));
      if (this.work) this.drawIdle(pen, left, top, width, this.work);
      pen.fillStyle = paint.dim;
      pen.textAlign = "left";
      const name = score.names?.[rank] ?? rank;
      if (rank % every === 0) pen.fillText(score.ranks > 16 ? name : `rank ${name}`, 0, middle);
      pen.textAlign = "right";
      if (this.busy && rank % every === 0) pen.fillText(`${plain(Math.round(100 * this.busy[rank]))}%`, left + this.width + this.right, middle);
    }
    const mark = (x) => {
      pen.fillStyle = paint.line;
      pen.fillRect(Math.round(x), this.bottom - 1, 1, 4);
    };
    this.axis(pen, paint, score.unit, this.bottom + 12, 110, { zero: this.begin, moved: 2, mark });
  }

  drawIdle(pen, x, y, width, height) {
    pen.fillStyle = this.hatch;
    pen.fillRect(x, y, width, height);
  }

  drawLane(pen, paint, rows) {
    const { score, view: [from, to] } = this;
    const last = [-9, -9, -9, -9];
    for (const row of rows) {
      if (score.start[row] > to) break;
      const kind = score.kind[row];
      if (score.end[row] < from || kind === WAIT) continue; // shown by the background
      const [y, height] = this.at(row);
      const x = Math.max(this.x(score.start[row]), this.left - 4), right = Math.min(this.x(score.end[row]), this.left + this.width + 4);
      const track = kind === COMPUTE ? 3 : this.track[row];
      if (right - last[track] < 0.7) continue; // it would not be visible
      last[track] = right;
      pen.globalAlpha = this.critical && !this.critical.has(row) ? 0.22 : 1;
      if (score.action[row] >= 0) {
        const names = score.ops[score.op[row]].split("+"), size = height / names.length; // a pair: one above the other
        names.forEach((name, place) => {
          const action = { kind: "FBIW".indexOf(name[0]), microbatch: score.item[row], stage: -1, name };
          actionBar(pen, paint, [x, y + place * size, right - x, size], action, { from: this.left, to: this.left + this.width });
        });
        continue;
      }
      const colour = this.tints[score.tint[row]];
      const width = Math.max(right - x - (right - x > 3 ? 1 : 0), 0.8), large = height > 5 && width > 4;
      pen.fillStyle = paint.paper;
      if (kind === COMPUTE) pen.fillRect(x, y, width, height); // covers the hatching
      pen.fillStyle = paint.mix(colour, kind === COMPUTE ? 0.55 : large ? 0.24 : 0.7);
      shape(pen, x + 0.5, y + 0.5, width, height - 1, large ? 3 : 0);
      pen.fill();
      if (large) {
        pen.strokeStyle = colour;
        pen.lineWidth = 1;
        pen.stroke();
      }
      if (height >= 10 && width > 12) this.write(pen, paint, row, x, y, width, height);
    }
    pen.globalAlpha = 1;
  }

  // On a timeline, a collective is coloured by its effect and has no letter, because no table has a column for it.
  byKind(row) {
    return this.zoom && this.score.kind[row] === COLLECTIVE && !this.score.pipeline;
  }

  write(pen, paint, row, x, y, width, height) {
    const { score } = this, item = score.item[row], op = score.ops[score.op[row]];
    const name = item >= 0 && !this.byKind(row) ? score.items[item][0] : "";
    const texts = score.kind[row] === SEND ? [`send ${name}`, name] : name ? [`${op} ${name}`, op, name] : [op, op.replace(/^(_|native_|scaled dot-product )/, "")];
    pen.font = `${height >= 14 ? 11 : 10}px ${paint.font}`;
    const text = texts.find((text) => text && pen.measureText(text).width < width - 8);
    if (!text) return;
    pen.fillStyle = paint.ink;
    pen.textAlign = "left";
    pen.fillText(text, Math.max(x, this.left) + 6, y + height / 2 + 0.5);
  }

  drawCritical(pen, paint) {
    const { score } = this, bars = [...this.critical].map((row) => {
      const [y, height] = this.at(row), x = this.x(score.start[row]);
      return [x, y, this.x(score.end[row]) - x, height];
    });
    this.path(pen, paint.accent, bars, this.lane > 12 ? 2 : 1.2);
  }

  showCritical(on) {
    this.critical = on ? new Set(this.score.critical) : null;
    this.draw();
  }

  // Zoom by `factor` around `time`, which stays in place; or move.
  zoomAt(factor, time = this.now ?? (this.view[0] + this.view[1]) / 2) {
    const whole = this.end - this.begin, span = Math.min(whole, Math.max((this.view[1] - this.view[0]) / factor, whole * 1e-5));
    const share = (time - this.view[0]) / (this.view[1] - this.view[0]);
    this.moveTo(time - span * Math.min(Math.max(share, 0), 1), span);
  }

  moveTo(from, span = this.view[1] - this.view[0]) {
    from = Math.min(Math.max(from, this.begin), this.end - span);
    this.view = [from, from + span];
    this.leave();
    this.draw();
    this.zoom?.(...this.view.map((time) => (time - this.begin) / (this.end - this.begin)));
  }

  // The visible part, in shares of the whole.
  show(begin, end) {
    const whole = this.end - this.begin;
    if (end > begin) this.moveTo(this.begin + begin * whole, (end - begin) * whole);
  }

  // The pointer is over nothing.
  leave() {
    this.hint?.hide();
    for (const mark of this.plot.querySelectorAll(".tpl-barmark")) mark.hidden = true;
  }

  get closer() {
    return this.view[1] - this.view[0] < (this.end - this.begin) * 0.999;
  }

  listen() {
    const pointers = new Map();
    let moved = 0, spread = 0;
    const [x, y] = [0, 1].map((axis) => (event) => this.where(event)[axis]);
    this.box.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, event);
      this.box.setPointerCapture(event.pointerId);
      moved = 0;
      this.scrub = !this.closer || y(event) > this.bottom;
      if (this.scrub) this.seek(this.time(x(event)));
    });
    this.box.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) return this.point(event, x(event), y(event));
      const step = event.clientX - before.clientX;
      pointers.set(event.pointerId, event);
      moved += Math.abs(step);
      if (pointers.size === 2 && this.zoom) {
        const [a, b] = [...pointers.values()], wide = Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
        if (spread) this.zoomAt(wide / spread, this.time((x(a) + x(b)) / 2));
        spread = wide;
      } else if (this.scrub) this.seek(this.time(x(event)));
      else this.moveTo(this.view[0] - (step / this.width) * (this.view[1] - this.view[0]));
    });
    const up = (event) => {
      if (pointers.has(event.pointerId) && !this.scrub && moved < 4) this.seek(this.time(x(event)));
      pointers.delete(event.pointerId);
      spread = 0;
    };
    this.box.addEventListener("pointerup", up);
    this.box.addEventListener("pointercancel", up);
    this.box.addEventListener("pointerleave", () => this.leave());
    if (!this.zoom) return;
    this.box.addEventListener("wheel", (event) => {
      // The wheel scrolls the page until the widget has the focus.
      const turned = event.ctrlKey || event.metaKey || this.root.contains(document.activeElement);
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!turned || (!this.closer && (sideways || event.deltaY > 0))) return;
      event.preventDefault();
      const by = event.deltaMode === 1 ? 16 : 1;
      if (sideways) this.moveTo(this.view[0] + (((event.deltaX || event.deltaY) * by) / this.width) * (this.view[1] - this.view[0]));
      else this.zoomAt(Math.exp(-event.deltaY * by * 0.0025), this.time(x(event)));
    }, { passive: false });
  }

  // The visible bar at a point. A wait is not drawn, so it is found only where there is no bar.
  barAt(x, y) {
    const rank = Math.floor((y - LANES_TOP) / this.lane);
    if (!this.width || x < this.left || x > this.left + this.width || !this.rows[rank]) return -1;
    const { score } = this, time = this.time(x), slack = this.time(x + 2) - time;
    let found = -1, best = 0;
    for (const row of this.rows[rank]) {
      if (score.start[row] > time + slack) break;
      if (score.end[row] < time - slack) continue;
      const inside = score.start[row] <= time && time <= score.end[row];
      const [top, height] = this.at(row), here = y >= top && y < top + height + 1;
      const rating = score.kind[row] === WAIT ? (inside ? 1 : 0) : here ? (inside ? 3 : 2) : 0;
      if (rating && rating >= best) [found, best] = [row, rating];
    }
    return found;
  }

  point(event, x, y) {
    const row = this.barAt(x, y);
    this.mark.hidden = row < 0;
    const [name, , text] = this.measured.find((_, place) => y >= this.measuredTop(place) && y < this.measuredTop(place) + MEASURED) ?? [];
    if (name !== undefined && this.hint) {
      return this.hint.show(event, [["", name], ["measured", text], ["by", this.score.by], ["whole trace", timeText(this.last - this.begin, this.score.unit)]]);
    }
    if (row < 0) return this.hint?.hide();
    const [top, height] = this.at(row), left = this.x(this.score.start[row]);
    this.frame(this.mark, [left, top, this.x(this.score.end[row]) - left, height]);
    this.hint?.show(event, describeBar(this.score, row));
  }
}
