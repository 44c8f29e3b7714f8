// Paints the pictures that widgets/paper/scene.py has kept, on a canvas, and finds what is under the pointer.
import { colours, el } from "./shell.js";
import { LETTERS, hatch, shape } from "./canvas.js";

const FINE = 20;
const LARGER = 1.05; // letters of most pages are narrower than those of a still picture
const COLUMNS = ["x", "y", "w", "h", "look", "text", "begin", "end", "path", "mark", "points", "pointing", "rows", "saying"];

// A colour of a scene in CSS: "c3" is one of the style sheet, "c3 26" 26 % of it over paper.
export function inCss(colour) {
  if (!colour) return "transparent";
  const [name, share] = colour.split(" "), full = name === "white" ? "#fff" : `var(--${name})`;
  return share ? `color-mix(in srgb,${full} ${share}%,var(--paper))` : full;
}

// What the colours mean, in a line that wraps; at its end a note, or a control.
export function drawLegend(root, keys, end = "") {
  const swatch = ({ fill, edge, hatch: lines, dashes, measured }) => {
    if (measured) return el("i.tpl-keydiamond");
    if (dashes) return el("i.tpl-keydashed", { style: `border-color:${inCss(dashes)}` });
    const striped = lines ? `repeating-linear-gradient(135deg,${inCss(lines)} 0 1.5px,transparent 1.5px 4.5px),` : "";
    return el("i", { style: `background:${striped}${inCss(fill)};border:1px solid ${inCss(edge)};background-clip:padding-box` });
  };
  root.append(el("div.tpl-legend", {}, ...keys.map((key) => el("span.tpl-key", {}, swatch(key), key.text)),
    ...(end ? [el("span.tpl-space"), typeof end === "string" ? el("span.tpl-key", {}, end) : end] : [])));
}

export class Scene {
  // data is what `packed` has made, number which of its scenes this is. over(event, rows, key) hears of the pointer,
  // press(key) of a click on what has a key. cursor: whether a line goes with the pointer.
  constructor(root, host, data, number, { over, press, cursor }) {
    const table = (place) => ({ ...data.tables[place], ...Object.fromEntries(COLUMNS.map((name) => [name, data[`${name}${place}`]])) });
    Object.assign(this, { root, host, over, hints: data.hints });
    this.tables = [table(number), table(data.tables[number].narrow)];
    this.canvas = el("canvas", { role: "img", "aria-label": data.tables[number].label });
    this.cursor = el("div.tpl-cursor", { hidden: "" });
    host.append(this.canvas, ...(cursor ? [this.cursor] : []));
    this.choose();
    this.canvas.addEventListener("pointermove", (event) => {
      const part = this.under(event), key = this.keyOf(part);
      this.canvas.style.cursor = press && key !== null ? "pointer" : "";
      this.pointed = part;
      this.show(event, part, key);
    });
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("click", (event) => {
      const key = this.keyOf(this.under(event));
      if (key !== null) press?.(key);
    });
  }

  // The layout that there is room for.
  choose() {
    const [wide, narrow] = this.tables, full = this.host.clientWidth;
    this.table = full && full < 0.66 * wide.width ? narrow : wide;
    const { width, height } = this.table;
    this.canvas.style.cssText += `;width:100%;max-width:${width}px;aspect-ratio:${width}/${height};display:block`;
  }

  show(event, part, key = null) {
    const { table, cursor, canvas } = this, { left, width } = canvas.getBoundingClientRect(), scale = width / table.width / FINE;
    cursor.hidden = part < 0;
    if (part >= 0) Object.assign(cursor.style, { left: `${event.clientX - left}px`, top: `${table.y[part] * scale}px`, height: `${table.h[part] * scale}px` });
    this.over(event, part < 0 ? null : this.rowsOf(part), key);
  }

  leave() {
    this.pointed = -1;
    this.cursor.hidden = true;
    this.over(null, null, null);
  }

  // By keys, to the next thing that says what it is. Returns what it says.
  step(by) {
    const { table } = this, marked = [...table.mark.keys()].filter((part) => table.mark[part] >= 0 && this.isThere(part));
    const at = Math.min(Math.max(marked.indexOf(this.pointed) + by, 0), marked.length - 1);
    this.pointed = marked[at];
    const frame = this.canvas.getBoundingClientRect(), scale = frame.width / table.width / FINE;
    const middle = table.x[this.pointed] + table.w[this.pointed] / 2;
    this.show({ clientX: frame.left + middle * scale, clientY: frame.top + table.y[this.pointed] * scale }, this.pointed);
    return this.rowsOf(this.pointed);
  }

  rowsOf(part) {
    const { rows, saying, mark } = this.table;
    return [...rows.subarray(saying[mark[part]], saying[mark[part] + 1])].map((row) => this.hints[row]);
  }

  keyOf(part) {
    return this.table.keys[this.table.mark[part]] ?? null;
  }

  isThere(part) {
    return this.table.begin[part] < this.position && this.position <= this.table.end[part];
  }

  // The uppermost box under the pointer that says what it is.
  under(event) {
    const { table } = this, frame = this.canvas.getBoundingClientRect(), scale = (FINE * table.width) / frame.width;
    const x = (event.clientX - frame.left) * scale, y = (event.clientY - frame.top) * scale;
    for (let part = table.mark.length - 1; part >= 0; part--) {
      if (table.mark[part] < 0 || !this.isThere(part)) continue;
      const across = x - table.x[part], down = y - table.y[part];
      if (across >= 0 && down >= 0 && across < table.w[part] && down < table.h[part]) return part;
    }
    return -1;
  }

  draw(position) {
    this.choose();
    const { canvas, table } = this, full = canvas.clientWidth;
    this.position = position;
    if (!full) return;
    const ratio = (full / table.width) * (window.devicePixelRatio || 1), pen = canvas.getContext("2d");
    canvas.width = Math.round(table.width * ratio);
    canvas.height = Math.round(table.height * ratio);
    pen.textBaseline = "middle";
    const paint = colours(this.root), looks = table.looks.map((look) => this.coloured(look, paint, pen, ratio));
    for (let part = 0; part < table.look.length; part++) {
      if (!this.isThere(part)) continue;
      const [left, top] = table.path[part] < 0 ? [0, 0] : movedBy(table.paths[table.path[part]], position);
      pen.setTransform(ratio, 0, 0, ratio, left * ratio, top * ratio);
      this.paint(pen, part, looks[table.look[part]]);
    }
  }

  // A look with the colours of the theme.
  coloured(look, paint, pen, ratio) {
    const found = (colour) => {
      const [name, share] = colour.split(" "), full = name === "white" ? "#ffffff" : paint.read(name);
      return share ? paint.mix(full, share / 100) : full;
    };
    const result = { ...look };
    for (const name of ["fill", "edge", "colour"]) if (look[name]) result[name] = found(look[name]);
    if (look.is === "hatch") result.colour = hatch(pen, result.colour, ratio);
    else if (look.colour?.match(/^c\d$/)) result.colour = paint.onPaper(result.colour);
    if (look.is === "text") result.font = `${look.bold ? 650 : 400} ${LARGER * look.size}px ${look.mono ? LETTERS : paint.font}`;
    return result;
  }

  paint(pen, part, { is, fill, edge, colour, radius = 0, line = 1, font, anchor }) {
    const { x: xs, y: ys, w, h, text, texts, points, pointing } = this.table;
    const x = xs[part] / FINE, y = ys[part] / FINE, width = w[part] / FINE, height = h[part] / FINE;
    pen.lineWidth = line;
    if (is === "text") {
      pen.font = font;
      pen.fillStyle = fill;
      pen.textAlign = { l: "left", m: "center", r: "right" }[anchor[0]];
      pen.fillText(texts[text[part]], x, y + 0.5);
    } else if (is === "hatch") {
      pen.fillStyle = colour;
      pen.fillRect(x, y, width, height);
    } else if (is === "box" || is === "dashed") {
      if (width <= 0 || !(fill || edge)) return;
      const inset = edge ? line / 2 : 0; // the outline is inside of the box
      shape(pen, x + inset, y + inset, Math.max(width - 2 * inset, 0.1), height - 2 * inset, is === "dashed" ? 3 : radius);
      fillAndStroke(pen, fill, edge, is === "dashed" ? [3, 2] : []);
    } else {
      pen.beginPath();
      for (let at = pointing[part]; at < pointing[part + 1]; at++) pen.lineTo(points[2 * at] / FINE, points[2 * at + 1] / FINE);
      fillAndStroke(pen, fill, colour, []);
    }
  }
}

function fillAndStroke(pen, fill, edge, dashes) {
  if (fill) {
    pen.fillStyle = fill;
    pen.fill();
  }
  if (!edge) return;
  pen.strokeStyle = edge;
  pen.setLineDash(dashes);
  pen.stroke();
}

// How far something is moved: on a straight line between the stops around a position.
function movedBy(stops, position) {
  const next = Math.max(stops.findIndex(([at]) => at >= position), 1), [[from, x, y], [to, across, down]] = [stops[next - 1], stops[next]];
  const part = Math.min(Math.max((position - from) / (to - from), 0), 1);
  return [x + part * (across - x), y + part * (down - y)];
}
