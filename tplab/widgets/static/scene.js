// Paints the pictures recorded by widgets/paper/scene.py on a canvas, and finds what is under the pointer.
import { colours, el, saying } from "./shell.js";

export const FINE = 20; // lengths are in twentieths of a pixel
const LETTERS = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace';
const SMALL = 9.5; // of letters
const LARGER = 1.05; // letters of most pages are narrower than those of a still picture
const READ = 300; // the most things that are listed for screen readers, after their number
const RESTS = 250; // milliseconds without a new frame
const COLUMNS = ["x", "y", "w", "h", "look", "text", "moments", "begin", "end", "curves", "path", "mark", "points", "pointing", "key", "rows"];

// The legend, in a line that wraps; at its end a note, or controls. `live` repaints it.
export function drawLegend(root, data, end = "", host = root) {
  const row = el("div.tpl-legend");
  host.append(row);
  const swatches = data.legend.map(([text, number]) => {
    const key = el("span.tpl-key"), swatch = new Scene(root, key, data, number, { over() {} });
    swatch.canvas.setAttribute("aria-hidden", "true");
    key.append(text);
    row.append(key);
    return swatch;
  });
  if (end) row.append(el("span.tpl-space"), typeof end === "string" ? el("span.tpl-key", {}, end) : end);
  root.paintLegend = () => swatches.forEach((swatch) => swatch.draw(0));
  root.paintLegend();
}

export class Scene {
  // data: the result of `packed`; number: the index of the scene in it. over(event, rows, key): called when the pointer
  // moves; press(key): called for a click on something with a key. about(key): the tooltip of something for which
  // Python has not written one; null: none. reads(key): whether it is listed for screen readers. cursor: whether a line
  // follows the pointer. largest: the largest scale, relative to the still picture.
  constructor(root, host, data, number, more) {
    Object.assign(this, { reads: () => true, largest: 1 }, more, { root, host });
    this.canvas = el("canvas", number < data.scenes ? { role: "img" } : {});
    this.line = el("div.tpl-cursor", { hidden: "" });
    this.list = el("ul.tpl-read");
    host.append(this.canvas, ...(this.cursor ? [this.line] : []), ...(number < data.scenes && !data.tables[number].time ? [this.list] : []));
    this.load(data, number);
    this.listen();
  }

  load(data, number) {
    const table = (place) => {
      const found = { ...data.tables[place], ...Object.fromEntries(COLUMNS.map((name) => [name, data[`${name}${place}`]])) };
      for (const name of ["begin", "end"]) found[name] = Float64Array.from(found[name], (at) => found.moments[at]);
      found.moves = found.path.some((path, part) => path >= 0 && found.looks[found.look[part]].is !== "curve") || found.looks.some((look) => look.grows);
      return found;
    };
    this.hints = data.hints;
    this.tables = [table(number), table(data.tables[number].narrow)];
    for (const node of number < data.scenes ? [this.canvas, this.list] : []) node.setAttribute("aria-label", data.tables[number].label);
    this.fit();
  }

  listen() {
    const { canvas, press } = this;
    canvas.addEventListener("pointermove", (event) => {
      const part = this.under(event), key = this.keyOf(part);
      canvas.style.cursor = press && key !== null ? "pointer" : "";
      this.pointed = part;
      this.show(event, part, key);
    });
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("click", (event) => {
      const key = this.keyOf(this.under(event));
      if (key !== null) press?.(key);
    });
  }

  // [x, y, width, height] of something, in pixels.
  place(part) {
    const { x, y, w, h } = this.table;
    return [x[part] / FINE, y[part] / FINE, w[part] / FINE, h[part] / FINE];
  }

  across(x) {
    return x / FINE;
  }

  // The layout that fits.
  fit() {
    const [wide, narrow] = this.tables, full = this.host.clientWidth;
    const table = full && full < 0.66 * wide.width ? narrow : wide, { width, height } = table;
    if (table === this.table) return;
    this.table = table;
    this.canvas.style.cssText += `;width:100%;max-width:${this.largest * width}px;aspect-ratio:${width}/${height};display:block`;
  }

  show(event, part, key = null) {
    const { table, line, canvas } = this, { left, width } = canvas.getBoundingClientRect(), scale = width / table.width / FINE;
    line.hidden = part < 0;
    if (part >= 0) Object.assign(line.style, { left: `${event.clientX - left}px`, top: `${table.y[part] * scale}px`, height: `${table.h[part] * scale}px` });
    this.over(event, part < 0 ? null : this.rowsOf(part), key);
  }

  leave() {
    this.pointed = -1;
    this.line.hidden = true;
    this.over(null, null, null);
  }

  // Keyboard: go to the next thing with a tooltip. Returns the tooltip.
  step(by) {
    const { table } = this, marked = [...table.mark.keys()].filter((part) => table.mark[part] >= 0 && this.isThere(part));
    const at = Math.min(Math.max(marked.indexOf(this.pointed) + by, 0), marked.length - 1);
    this.pointed = marked[at];
    const frame = this.canvas.getBoundingClientRect(), scale = frame.width / table.width / FINE;
    const middle = table.x[this.pointed] + table.w[this.pointed] / 2;
    this.show({ clientX: frame.left + middle * scale, clientY: frame.top + table.y[this.pointed] * scale }, this.pointed);
    return this.rowsOf(this.pointed);
  }

  rowsOf(part, time) {
    const { rows, mark, key: { length } } = this.table, key = this.keyOf(part), found = [];
    if (this.about && key !== null) return this.about(key, time);
    for (let at = mark[part]; at < rows.length; at += length) if (rows[at] >= 0) found.push(this.hints[rows[at]]);
    return found;
  }

  keyOf(part) {
    const key = this.table.key[this.table.mark[part]] ?? -1;
    return key < 0 ? null : key;
  }

  // A list for screen readers of everything with a tooltip, rewritten when the picture rests.
  read() {
    const { mark } = this.table, first = new Map();
    for (let part = 0; part < mark.length; part++) if (mark[part] >= 0 && this.isThere(part)) first.set(mark[part], part);
    const parts = [...first.values()].filter((part) => this.reads(this.keyOf(part)));
    const said = [...new Set(parts.slice(0, READ).map((part) => hintText(this.rowsOf(part))))].filter(Boolean);
    if (parts.length > READ) said.unshift(`the first ${READ} of ${parts.length.toLocaleString("en")}`);
    if (said.join() === this.said) return;
    this.said = said.join();
    this.list.hidden = !said.length;
    this.list.replaceChildren(...said.map((words) => el("li", {}, words)));
  }

  isThere(part) {
    return this.table.begin[part] < this.position && this.position <= this.table.end[part];
  }

  // The topmost box with a tooltip under the pointer; of equally large ones, the one with the nearest centre.
  under(event) {
    const { x: xs, y: ys, w, h, mark, path, width } = this.table, frame = this.canvas.getBoundingClientRect(), scale = (FINE * width) / frame.width;
    const across = (event.clientX - frame.left) * scale, down = (event.clientY - frame.top) * scale;
    let found = -1, nearest = 0;
    for (let part = mark.length - 1; part >= 0; part--) {
      if (mark[part] < 0 || !this.isThere(part)) continue;
      const [left, top] = path[part] < 0 ? [0, 0] : this.onCurve(part), x = xs[part] + FINE * left, y = ys[part] + FINE * top;
      if (across < x || down < y || across >= x + w[part] || down >= y + h[part]) continue;
      const away = Math.hypot(across - x - w[part] / 2, down - y - h[part] / 2);
      if (found < 0 || (w[part] === w[found] && h[part] === h[found] && away < nearest)) [found, nearest] = [part, away];
    }
    return found;
  }

  draw(position) {
    this.fit();
    const { canvas, table } = this, full = canvas.clientWidth;
    this.position = position;
    clearTimeout(this.resting);
    if (!full) return;
    if (this.list.isConnected) this.resting = setTimeout(() => this.read(), RESTS);
    const ratio = (full / table.width) * (window.devicePixelRatio || 1), pen = canvas.getContext("2d");
    // Between two moments, only moving things change.
    const state = [table.width, ratio, this.root.dataset.theme, table.moments.findIndex((moment) => moment >= position)].join();
    if (!table.moves && state === this.painted) return;
    this.painted = state;
    canvas.width = Math.round(table.width * ratio);
    canvas.height = Math.round(table.height * ratio);
    pen.textBaseline = "middle";
    const looks = this.looks(pen, ratio);
    for (let part = 0; part < table.look.length; part++) {
      if (!this.isThere(part)) continue;
      const look = looks[table.look[part]], [left, top] = table.path[part] < 0 || look.is === "curve" ? [0, 0] : this.onCurve(part);
      pen.setTransform(ratio, 0, 0, ratio, left * ratio, top * ratio);
      this.paint(pen, part, look);
    }
  }

  // The looks with the colours of the theme.
  looks(pen, ratio) {
    this.colours = colours(this.root);
    return this.table.looks.map((look) => this.coloured(look, this.colours, pen, ratio));
  }

  coloured(look, paint, pen, ratio) {
    const found = (colour) => {
      const [name, share, over] = colour.split(" "), full = name === "white" ? "#ffffff" : paint.read(name);
      return share ? (over ? paint.lighter : paint.mix)(full, share / 100) : full;
    };
    const result = { ...look };
    for (const name of ["fill", "edge", "colour", "other", "small", "ink"]) if (look[name]) result[name] = found(look[name]);
    const thin = look.thin ? "edge" : look.is === "text" ? "fill" : "colour"; // lines and letters
    if (look.is === "hatch") result.colour = hatch(pen, result.colour, ratio);
    else if (look[thin]?.match(/^(c\d|kf)$/)) result[thin] = paint.onPaper(result[thin]);
    if (look.is === "text") result.font = `${look.bold ? 650 : 400} ${LARGER * look.size}px ${look.mono ? LETTERS : paint.font}`;
    return result;
  }

  // The share of something's time that has passed.
  shareOf(part) {
    const { begin, end } = this.table;
    return begin[part] === -Infinity ? 1 : (this.position - begin[part]) / (end[part] - begin[part]);
  }

  curveOf(part) {
    const { curves, path } = this.table;
    return Array.from(curves.subarray(8 * path[part], 8 * path[part] + 8), (length) => length / FINE);
  }

  // The point on its curve of something that moves.
  onCurve(part) {
    const curve = this.curveOf(part), u = this.shareOf(part), weights = [(1 - u) ** 3, 3 * u * (1 - u) ** 2, 3 * u * u * (1 - u), u ** 3];
    return [0, 1].map((axis) => weights.reduce((sum, weight, point) => sum + weight * curve[2 * point + axis], 0));
  }

  paint(pen, part, look) {
    const { text, texts, points, pointing } = this.table, [x, y, width, height] = this.place(part);
    const { is, fill, edge, colour, radius = 0, line = 1, font, anchor, grows, timed, shift, alpha = 1 } = look;
    pen.lineWidth = line;
    pen.globalAlpha = alpha;
    if (is === "text") {
      pen.font = font;
      pen.fillStyle = fill;
      pen.textAlign = { l: "left", m: "center", r: "right" }[anchor[0]];
      const words = texts[text[part]], wide = shift ? pen.measureText(words).width : 0;
      if (shift) {
        pen.fillStyle = this.colours.paper;
        pen.fillRect(x + shift - (shift < 0 ? wide : 0), y - 7, wide, 14);
        pen.fillStyle = fill;
      }
      pen.fillText(words, x + (shift ?? 0), y + 0.5);
    } else if (is === "bar") {
      this.bar(pen, [x, y, width, height], look, texts[text[part]]?.split("\n") ?? []);
    } else if (is === "hatch") {
      pen.fillStyle = colour;
      pen.fillRect(x, y, width, height);
    } else if (is === "box") {
      if (width <= 0 || !(fill || edge)) return;
      const inset = edge ? line / 2 : 0; // the outline is inside the box
      pen.fillStyle = fill;
      if (!radius && !edge) return pen.fillRect(x, y, width, height);
      shape(pen, x + inset, y + inset, Math.max(width - 2 * inset, 0.1), height - 2 * inset, radius);
      fillAndStroke(pen, fill, edge);
    } else if (is === "dashed") {
      shape(pen, x, y, width, height, 4);
      pen.setLineDash([3, 2]);
      fillAndStroke(pen, null, colour);
      pen.setLineDash([]);
    } else {
      pen.beginPath();
      if (is === "arc") pen.arc(x, y, width, -Math.PI / 2, (height / 180 - 0.5) * Math.PI);
      else if (is === "curve") {
        const [x0, y0, ...to] = this.curveOf(part);
        pen.moveTo(x0, y0);
        pen.bezierCurveTo(...to);
      }
      let far = 0;
      for (let at = pointing[part]; at < pointing[part + 1]; at++) {
        const [left, top] = [this.across(points[2 * at], timed), points[2 * at + 1] / FINE];
        if (grows && at > pointing[part]) far += Math.hypot(left - points[2 * at - 2] / FINE, top - points[2 * at - 1] / FINE);
        pen.lineTo(left, top);
      }
      if (grows) pen.setLineDash([this.shareOf(part) * far, far + 1]);
      fillAndStroke(pen, fill, colour);
      pen.setLineDash([]);
    }
  }

  // A bar, with the first of the texts that has room, smaller if necessary.
  bar(pen, [x, y, wide, height], { fill, other, small, edge, dashes, ink, line = 1, size, mono, anchor = "mm" }, texts) {
    const isLarge = wide > 5 && height > 5.5, gap = wide > 3.5 ? 0.5 : 0, left = x + gap, width = Math.max(wide - 2 * gap, 0.8);
    if (fill) {
      pen.fillStyle = this.colours.paper; // it covers hatching
      pen.fillRect(x, y, wide, height);
    }
    shape(pen, left, y + 0.5, width, height - 1, isLarge ? 3 : 0);
    pen.setLineDash(dashes ? [3, 2] : []);
    pen.lineWidth = line;
    fillAndStroke(pen, isLarge ? fill : small ?? fill, isLarge && edge);
    pen.setLineDash([]);
    if (other) {
      pen.save();
      pen.clip();
      pen.fillStyle = other;
      pen.fillRect(left + width / 2, y, width / 2 + 0.5, height);
      pen.restore();
    }
    const [from, to] = this.visible?.(x, x + wide) ?? [x, x + wide], isLeft = anchor[0] === "l", room = to - from - (isLeft ? 8 : 1.5);
    if (room < 4 || !texts.length) return;
    const letters = this.letters ?? pen;
    letters.fillStyle = ink ?? readable(other ?? fill);
    letters.textAlign = isLeft ? "left" : "center";
    for (const text of texts) for (const tall of text ? [size, SMALL] : []) {
      letters.font = mono ? `600 ${tall}px ${LETTERS}` : `${tall}px ${this.colours.font}`;
      if (letters.measureText(text).width > room) continue;
      letters.fillText(text, isLeft ? from + 6 : (from + to) / 2, y + height / 2 + 0.5);
      return;
    }
  }
}

// A tooltip in one line.
export const hintText = (rows) => saying(rows).map(([what, text]) => (what ? `${what} ${text}` : text)).join("; ");

function fillAndStroke(pen, fill, edge) {
  if (fill) {
    pen.fillStyle = fill;
    pen.fill();
  }
  if (!edge) return;
  pen.strokeStyle = edge;
  pen.stroke();
}

function shape(pen, x, y, width, height, radius) {
  pen.beginPath();
  if (radius) pen.roundRect(x, y, width, Math.max(height, 0.5), Math.min(radius, width / 2));
  else pen.rect(x, y, width, Math.max(height, 0.5));
}

function hatch(pen, colour, ratio) {
  const tile = document.createElement("canvas"), size = 6 * ratio;
  tile.width = tile.height = Math.round(size);
  const lines = tile.getContext("2d");
  lines.strokeStyle = colour;
  lines.lineWidth = 1.3 * ratio;
  for (const shift of [-1, 0, 1]) {
    lines.beginPath();
    lines.moveTo(shift * tile.width - 1, tile.height + 1);
    lines.lineTo((shift + 1) * tile.width + 1, -1);
    lines.stroke();
  }
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform?.(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

// White or nearly black, whichever is easier to read on a colour.
function readable(colour) {
  const [r, g, b] = colour.match(/\d+/g).map((part) => (part / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#10151f" : "#ffffff";
}
