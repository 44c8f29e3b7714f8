// Lanes on a canvas, all on one time axis, and a playhead above them.
import { shape } from "./canvas.js";
import { el } from "./shell.js";
import { ticks, timeText } from "./units.js";

export class Chart {
  // `left` and `right` are the room beside the lanes, `bottom` is where the axis begins; `view` is the visible time.
  constructor(root, host, more) {
    Object.assign(this, { root, ...more });
    this.canvas = el("canvas", { role: "img" });
    this.head = el("div.tpl-playhead");
    this.mark = el("div.tpl-barmark", { hidden: "" });
    this.plot = el("div.tpl-plot", {}, this.mark, this.head);
    this.box = el("div.tpl-lanes", {}, this.canvas, this.plot);
    host.append(this.box);
  }

  x(time) {
    return this.left + ((time - this.view[0]) / (this.view[1] - this.view[0])) * this.width;
  }

  time(x) {
    return this.view[0] + ((x - this.left) / this.width) * (this.view[1] - this.view[0]);
  }

  where(event) {
    const frame = this.box.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  }

  // The pens of these canvases, blank and as wide as the card; [] while it is hidden.
  pens(ratio, ...canvases) {
    for (const node of [this.box, ...canvases]) node.style.height = `${this.height}px`;
    const full = this.box.clientWidth;
    if (!full) return [];
    this.width = full - this.left - this.right;
    Object.assign(this.plot.style, { left: `${this.left}px`, width: `${this.width}px`, height: `${this.bottom}px` });
    return canvases.map((canvas) => {
      canvas.width = Math.round(full * ratio);
      canvas.height = Math.round(this.height * ratio);
      const pen = canvas.getContext("2d");
      pen.scale(ratio, ratio);
      pen.textBaseline = "middle";
      return pen;
    });
  }

  // Times at height y, `each` pixels or more apart, counted from `zero`; the first is moved to the left.
  axis(pen, paint, unit, y, each, { zero = 0, moved = 0, mark = () => {} } = {}) {
    const [from, to] = this.view, left = this.left;
    for (const time of ticks(from, to, Math.max(2, this.width / each), unit, zero)) {
      const x = this.x(time), isFirst = x < left + 12;
      mark(x);
      pen.fillStyle = paint.dim;
      pen.textAlign = isFirst ? "left" : x > left + this.width - 16 ? "right" : "center";
      pen.fillText(timeText(time - zero, unit, this.end - zero), isFirst ? x - moved : x, y);
    }
  }

  // Frame a bar, as much of it as is visible.
  frame(mark, [x, y, width, height]) {
    const left = Math.max(x, this.left), right = Math.min(x + Math.max(width, 2), this.left + this.width);
    mark.hidden = right <= left;
    Object.assign(mark.style, { left: `${left - this.left}px`, top: `${y}px`, width: `${right - left}px`, height: `${height}px` });
  }

  moveHead(time) {
    this.now = time;
    if (!this.width) return;
    const x = this.x(time) - this.left, inside = x >= -0.5 && x <= this.width + 0.5;
    this.head.style.transform = `translateX(${x}px)`;
    this.head.style.visibility = inside ? "" : "hidden";
    if (!this.veil) return;
    const from = Math.min(Math.max(x, 0), this.width);
    this.veil.style.transform = `translateX(${from}px) scaleX(${(this.width - from) / this.width})`;
  }

  // A chain of bars, each [x, y, width, height]: their outlines, and lines from one to the next.
  path(pen, colour, bars, thick = 2) {
    pen.strokeStyle = colour;
    pen.lineWidth = thick;
    let before = null;
    for (const [x, y, width, height] of bars) {
      const middle = y + height / 2;
      if (width > 1) {
        shape(pen, x + 1, y + 1, Math.max(width - 2, 1), height - 2, 3);
        pen.stroke();
      }
      if (before && Math.abs(before[1] - middle) > 1) {
        pen.beginPath();
        pen.moveTo(...before);
        pen.lineTo(x, middle);
        pen.stroke();
      }
      before = [x + width, middle];
    }
  }
}
