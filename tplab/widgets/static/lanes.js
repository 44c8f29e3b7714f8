// Scenes over time: the page scales what is drawn in time to the visible part of it. A playhead is above them.
import { el } from "./shell.js";
import { FINE, Scene } from "./scene.js";
import { ticks, timeText } from "./units.js";

const NEAR = 2; // pixels from a bar at which it is under the pointer, too

export class Lanes extends Scene {
  // seek(time): called when the reader clicks at a time. hint: the tooltip. zoom(begin, end): called with the visible part,
  // in shares of the whole; null: no zooming. hasVeil: whether the future is paler. hasNames: whether letters are above
  // the playhead.
  constructor(root, host, data, number, more) {
    const box = el("div.tpl-lanes");
    host.append(box);
    super(root, box, data, number, more);
    this.box = box;
    this.head = el("div.tpl-playhead");
    this.veil = this.hasVeil ? el("div.tpl-veil") : null;
    this.plot = el("div.tpl-plot", {}, this.veil, this.head);
    this.names = this.hasNames ? el("canvas.tpl-names", { "aria-hidden": "true" }) : null;
    box.append(...[this.plot, this.names].filter(Boolean));
    this.position = 0;
    this.marks = [];
    this.draw();
  }

  fit() {
    [this.table] = this.tables;
    Object.assign(this, this.table.time);
    this.bottom = this.axes[this.axes.length - 1];
    this.view = [this.begin, this.end];
  }

  x(time) {
    return this.left + ((time - this.view[0]) / (this.view[1] - this.view[0])) * this.width;
  }

  time(x) {
    return this.view[0] + ((x - this.left) / this.width) * (this.view[1] - this.view[0]);
  }

  // What is not in time is on the left, or as far from the right end as in the still picture.
  across(x, timed) {
    if (timed) return this.x(x);
    return x / FINE > this.table.width - this.right ? x / FINE - this.table.width + this.left + this.width + this.right : x / FINE;
  }

  place(part) {
    const { x, y, w, h, look, looks } = this.table, { timed } = looks[look[part]], left = this.across(x[part], timed);
    return [left, y[part] / FINE, timed ? this.x(x[part] + w[part]) - left : w[part] / FINE, h[part] / FINE];
  }

  // As much of a bar as is visible.
  visible(from, to) {
    return [Math.max(from, this.left), Math.min(to, this.left + this.width)];
  }

  draw(position = this.position) {
    const { box, canvas, names, table } = this, full = box.clientWidth, ratio = window.devicePixelRatio || 1;
    this.position = position;
    for (const node of [box, canvas, names]) if (node) node.style.height = `${table.height}px`;
    if (!full) return;
    this.width = full - this.left - this.right;
    Object.assign(this.plot.style, { left: `${this.left}px`, width: `${this.width}px`, height: `${this.bottom}px` });
    const [pen, letters] = [canvas, names].map((node) => {
      if (!node) return null;
      node.width = Math.round(full * ratio);
      node.height = Math.round(table.height * ratio);
      const found = node.getContext("2d");
      found.scale(ratio, ratio);
      found.textBaseline = "middle";
      return found;
    });
    this.letters = letters;
    const looks = this.looks(pen, ratio), last = new Map();
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, this.width, table.height);
    pen.clip();
    const parts = [...table.look.keys()].filter((part) => this.isThere(part)), lookOf = (part) => looks[table.look[part]];
    const inTime = (part) => lookOf(part).timed && lookOf(part).is !== "text"; // texts are not cut off at the ends
    for (const part of parts.filter(inTime)) {
      const [x, y, width] = this.place(part), right = x + width, look = lookOf(part);
      if (look.is === "bar") { // is it visible?
        if (x > this.left + this.width || right < this.left || (width < 0.7 && Math.abs(right - (last.get(y) ?? -9)) < 0.7)) continue;
        last.set(y, right);
      }
      this.paint(pen, part, look);
    }
    pen.restore();
    for (const part of parts.filter((part) => !inTime(part))) {
      const x = this.place(part)[0] - this.left;
      if (!lookOf(part).timed || (x >= -0.5 && x <= this.width + 0.5)) this.paint(pen, part, lookOf(part));
    }
    pen.globalAlpha = 1;
    this.axes.forEach((y) => this.axis(pen, y));
    this.frame();
    this.moveHead(this.now ?? this.begin);
  }

  // Times below the lanes that end at y; the first is moved to the left.
  axis(pen, y) {
    const { left, width, view: [from, to], begin, end, unit, colours: { dim, line, font } } = this;
    pen.font = `11px ${font}`;
    for (const time of ticks(from, to, Math.max(2, width / 100), unit, begin)) {
      const x = this.x(time), isFirst = x < left + 12;
      pen.fillStyle = line;
      pen.fillRect(Math.round(x), y - 1, 1, 4);
      pen.fillStyle = dim;
      pen.textAlign = isFirst ? "left" : x > left + width - 16 ? "right" : "center";
      pen.fillText(timeText(time - begin, unit, end - begin), isFirst ? x - 2 : x, y + 12);
    }
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
  look(begin, end) {
    const whole = this.end - this.begin;
    if (end > begin) this.moveTo(this.begin + begin * whole, (end - begin) * whole);
  }

  get closer() {
    return this.view[1] - this.view[0] < (this.end - this.begin) * 0.999;
  }

  where(event) {
    const frame = this.canvas.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  }

  // The bar at a point, or near it; what is not drawn, such as a wait, is found only where there is no bar.
  under(event) {
    const { y: ys, h, mark, look, looks } = this.table, [x, y] = this.where(event);
    if (x < this.left || x > this.left + this.width) return -1;
    let found = -1, best = 0;
    for (let part = 0; part < mark.length; part++) {
      if (mark[part] < 0 || y * FINE < ys[part] || y * FINE >= ys[part] + h[part] || !this.isThere(part)) continue;
      const [left, , width] = this.place(part), away = Math.max(left - x, x - left - width);
      if (away > NEAR) continue;
      const rating = looks[look[part]].is === "bar" ? (away <= 0 ? 3 : 2) : away <= 0 ? 1 : 0;
      if (rating && rating >= best) [found, best] = [part, rating];
    }
    return found;
  }

  point(event) {
    this.pointed = this.under(event);
    this.frame();
    if (this.pointed < 0) this.hint.hide();
    else this.hint.show(event, this.rowsOf(this.pointed, this.time(this.where(event)[0])));
  }

  // Frames around the bars under the pointer.
  frame() {
    const { mark, look, looks } = this.table, at = this.framed ?? mark[this.pointed] ?? -1;
    for (const node of this.marks) node.remove();
    this.marks = at < 0 ? [] : [...mark.keys()].filter((part) => mark[part] === at && looks[look[part]].is === "bar" && this.isThere(part)).flatMap((part) => {
      const [x, y, width, height] = this.place(part), [left, right] = this.visible(x, x + Math.max(width, 2));
      return right <= left ? [] : [el("div.tpl-barmark", { style: `left:${left - this.left}px;top:${y}px;width:${right - left}px;height:${height}px` })];
    });
    this.plot.append(...this.marks);
  }

  // The pointer is over nothing.
  leave() {
    this.pointed = -1;
    this.hint?.hide();
    this.frame();
  }

  // What a press at this point begins, unless it moves the playhead: called with the event that ends it.
  take() { return null; }

  listen() {
    const pointers = new Map(), box = this.host;
    let moved = 0, spread = 0, taken = null;
    const [x, y] = [0, 1].map((axis) => (event) => this.where(event)[axis]);
    box.addEventListener("pointerdown", (event) => {
      box.setPointerCapture(event.pointerId);
      taken = this.take(event);
      if (taken) return;
      pointers.set(event.pointerId, event);
      moved = 0;
      this.scrub = !this.closer || y(event) > this.bottom;
      if (this.scrub) this.seek(this.time(x(event)));
    });
    box.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) return taken ? undefined : this.point(event);
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
      if (event.type === "pointerup") taken?.(event);
      if (pointers.has(event.pointerId) && !this.scrub && moved < 4) this.seek(this.time(x(event)));
      pointers.delete(event.pointerId);
      [spread, taken] = [0, null];
    };
    box.addEventListener("pointerup", up);
    box.addEventListener("pointercancel", up);
    box.addEventListener("pointerleave", () => this.leave());
    if (!this.zoom) return;
    box.addEventListener("wheel", (event) => {
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
}
