// The scores of attention over a ring as tiles: what widgets/attention/still.py draws, at every position of a playhead.
import { card, colours, el, followTheme, hint } from "./shell.js";
import { hatch, shape } from "./canvas.js";
import { timeText } from "./units.js";
import { positionAt, timeAt } from "./score.js";
import { unpack } from "./wire.js";
import { Lanes } from "./lanes.js";
import { Player } from "./player.js";

const STRIP = 15, CHIP = 40;

// [begin, end, rank] of the tokens next to each other that one rank holds.
function runsOf(owner) {
  const runs = [];
  owner.forEach((rank, token) => {
    if (token && owner[token - 1] === rank) runs[runs.length - 1][1] = token + 1;
    else runs.push([token, token + 1, rank]);
  });
  return runs;
}

// The pass, from 0, the position in it, and the step that is shown, from 0; before the first step it is -1.
function placeOf(scene, position) {
  const pass = Math.floor(Math.max(Math.ceil(position - 1e-9) - 1, 0) / scene.ranks), within = position - pass * scene.ranks;
  return { pass, within, now: Math.max(Math.ceil(within - 1e-9) - 1, -1) };
}

class TilePanel {
  constructor(root, host, scene, number, { over, seek }) {
    Object.assign(this, { root, scene, seek });
    this.name = scene.names[number];
    this.efficiency = scene.efficiency[number];
    for (const column of ["steps", "load", "owner", "starts"]) this[column] = scene[`${column}${number}`];
    this.runs = runsOf(this.owner);
    const { width, height } = scene.place;
    this.canvas = el("canvas", { role: "img", "aria-label": `${this.name}: ${this.efficiency}` });
    this.canvas.style.cssText = `width:100%;max-width:${width}px;aspect-ratio:${width}/${height};display:block`;
    host.append(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => over(event, this.describe(...this.placeUnder(event))));
    this.canvas.addEventListener("pointerleave", () => over(null));
    this.canvas.addEventListener("click", (event) => {
      const [x, y] = this.placeUnder(event), step = this.barAt(x, y)?.step;
      if (step !== undefined) seek(step + 1);
    });
  }

  source(rank, step) {
    return (rank - step + this.scene.ranks) % this.scene.ranks;
  }

  scores(rank, step) {
    return this.load[rank * this.scene.ranks + step];
  }

  most(step) {
    return this.starts[step + 1] - this.starts[step];
  }

  // How many of its scores a rank has computed at a step.
  computed(rank, step, within) {
    if (step < Math.floor(within)) return this.scores(rank, step);
    if (step > Math.floor(within)) return 0;
    return Math.min(this.scores(rank, step), Math.floor((within % 1) * this.most(step) + 1e-9));
  }

  placeUnder(event) {
    const frame = this.canvas.getBoundingClientRect(), scale = this.scene.place.width / frame.width;
    return [(event.clientX - frame.left) * scale, (event.clientY - frame.top) * scale];
  }

  barAt(x, y) {
    const { bars, bar, per_score: unit } = this.scene.place, rank = Math.floor((y - bars[1]) / bar), time = (x - bars[0]) / unit;
    if (rank < 0 || rank >= this.scene.ranks || time < 0 || time >= this.starts[this.scene.ranks]) return null;
    let step = 0;
    while (this.starts[step + 1] <= time) step++;
    return { rank, step };
  }

  // What the hint says about a place.
  describe(x, y) {
    const { scene } = this, { grid, cell } = scene.place, scores = (count) => `${count} score${count === 1 ? "" : "s"}`;
    const bar = this.barAt(x, y);
    if (bar) {
      const { rank, step } = bar, count = this.scores(rank, step), idle = this.most(step) - count;
      return [["", `rank ${rank}, step ${step + 1} of ${scene.ranks}`], ["has", `keys and values of rank ${this.source(rank, step)}`],
        ["computes", count ? scores(count) : "nothing: its tile is skipped"], ["idle", idle ? `as long as ${scores(idle)} take` : "no"]];
    }
    const key = Math.floor((x - grid[0]) / cell), query = Math.floor((y - grid[1]) / cell);
    if (key < 0 || query < 0 || key >= scene.tokens || query >= scene.tokens) return null;
    const rank = this.owner[query], source = this.owner[key], step = this.steps[query * scene.tokens + key];
    const tile = this.source(rank, source), about = [["", `query ${query} and key ${key}`], ["query", `of rank ${rank}`], ["key", `of rank ${source}`]];
    if (step >= 0) return [...about, ["computed", `by rank ${rank} at step ${step + 1} of ${scene.ranks}, one of ${scores(this.scores(rank, step))}`]];
    return [...about, ["masked", this.scores(rank, tile) ? "the query does not see the key" : `like all of this tile, which rank ${rank} skips at step ${tile + 1}`]];
  }

  draw(position) {
    this.position = position;
    const { scene, canvas } = this, { place } = scene, full = canvas.clientWidth;
    if (!full) return;
    const ratio = (full / place.width) * (window.devicePixelRatio || 1), pen = canvas.getContext("2d");
    canvas.width = Math.round(place.width * ratio);
    canvas.height = Math.round(place.height * ratio);
    pen.scale(ratio, ratio);
    const paint = colours(this.root);
    this.pen = pen;
    this.paint = paint;
    this.idle = hatch(pen, paint.mix(paint.dim, 0.5), ratio);
    pen.textBaseline = "middle";
    const { within, now } = placeOf(scene, position);
    this.write(this.name, 0, 9, { size: 13, weight: 650, align: "left" });
    const wide = pen.measureText(this.name).width;
    this.write(this.efficiency, wide + 8, 9.5, { size: 11, fill: paint.dim, align: "left" });
    this.drawGrid(within, now);
    this.drawBars(within, now);
  }

  write(text, x, y, { size, weight = 400, fill = this.paint.ink, align = "center" }) {
    const { pen } = this;
    pen.font = `${weight} ${size}px ${this.paint.font}`;
    pen.textAlign = align;
    pen.fillStyle = fill;
    pen.fillText(text, x, y);
  }

  box(x, y, width, height, fill, edge, radius = 0, line = 0.8) {
    const { pen } = this;
    shape(pen, x, y, width, height, radius);
    pen.fillStyle = fill;
    pen.fill();
    if (!edge) return;
    pen.strokeStyle = edge;
    pen.lineWidth = line;
    pen.stroke();
  }

  drawGrid(within, now) {
    const { scene, pen, paint } = this, { grid: [x, y], cell } = scene.place, size = cell * scene.tokens;
    for (const [begin, end, rank] of this.runs) {
      const across = begin * cell, length = (end - begin) * cell - 1, colour = paint.hue(rank);
      for (const [left, top, width, height] of [[x + across, y - STRIP, length, STRIP - 3], [x - STRIP, y + across, STRIP - 3, length]]) {
        this.box(left + 0.5, top + 0.5, width, height, paint.mix(colour, 0.26), colour);
        if (length > 8) this.write(rank, left + width / 2 + 0.5, top + height / 2 + 1, { size: 9, weight: 650 });
      }
    }
    this.box(x, y, size, size, paint.paper, paint.line, 0, 1);
    for (let rank = 0; now >= 0 && rank < scene.ranks; rank++) {
      if (this.scores(rank, now)) continue;
      pen.fillStyle = this.idle;
      for (const [top, bottom, of] of this.runs) {
        if (of !== rank) continue;
        for (const [left, right, source] of this.runs) {
          if (source === this.source(rank, now)) pen.fillRect(x + left * cell, y + top * cell, (right - left) * cell, (bottom - top) * cell);
        }
      }
    }
    const seen = new Int32Array(scene.ranks * scene.ranks), gap = cell > 6 ? 0.5 : 0.25;
    for (let at = 0; at < this.steps.length; at++) {
      const step = this.steps[at];
      if (step < 0) continue;
      const query = Math.floor(at / scene.tokens), rank = this.owner[query], place = rank * scene.ranks + step;
      const isDone = seen[place]++ < this.computed(rank, step, within), colour = paint.hue(rank);
      const fill = !isDone ? paint.paper : step === now ? colour : paint.mix(colour, 0.26);
      this.box(x + (at % scene.tokens) * cell + gap, y + query * cell + gap, cell - 2 * gap, cell - 2 * gap, fill, paint.mix(colour, 0.55), 0, 0.7);
    }
  }

  drawBars(within, now) {
    const { scene, pen, paint } = this, { bars: [x, y], bar, per_score: unit } = scene.place;
    const end = this.starts[scene.ranks] * unit, height = bar - 3, hasRoom = bar >= 12;
    const edge = scene.place.width - CHIP + 7.5; // what each rank has now
    pen.font = `400 9px ${paint.font}`;
    const areWide = this.load.every((count) => !count || pen.measureText("KV 0").width + 3 < count * unit - 0.5), mark = areWide ? "KV " : "";
    const about = areWide ? "scores computed, step by step" : "scores computed with KV of rank ...";
    this.write(about, x, y - 9, { size: 10.5, fill: paint.dim, align: "left" });
    this.write("has", edge + (CHIP - 8) / 2, y - 9, { size: 10.5, fill: paint.dim });
    for (let rank = 0; rank < scene.ranks; rank++) {
      const top = y + rank * bar, middle = top + height / 2 + 0.5;
      this.write(`rank ${rank}`, x - 6, middle, { size: Math.min(10.5, bar), fill: paint.dim, align: "right" });
      this.box(x, top, end, height, paint.soft);
      pen.fillStyle = this.idle;
      pen.fillRect(x, top, end, height);
      for (let step = 0; step < scene.ranks; step++) {
        const count = this.scores(rank, step), colour = paint.hue(rank), left = x + this.starts[step] * unit, wide = count * unit - 0.5;
        if (!count) continue;
        this.box(left + 0.5, top + 0.5, wide - 1, height - 1, step > now ? paint.paper : step === now ? colour : paint.mix(colour, 0.26), colour, 2);
        pen.font = `400 9px ${paint.font}`;
        const text = `${mark}${this.source(rank, step)}`;
        if (hasRoom && pen.measureText(text).width + 3 < wide) this.write(text, left + wide / 2, middle, { size: 9, fill: step === now ? "#ffffff" : paint.ink });
      }
      if (!hasRoom) continue;
      const has = this.source(rank, Math.max(now, 0)), colour = paint.hue(has);
      this.box(edge, top + 0.5, CHIP - 8, height - 1, paint.mix(colour, 0.26), colour, 4);
      this.write(`KV ${has}`, edge + (CHIP - 8) / 2, middle, { size: 9 });
    }
    const bottom = y + scene.ranks * bar, step = Math.min(Math.floor(within), scene.ranks - 1);
    const head = x + unit * (this.starts[step] + (within - step) * this.most(step));
    pen.fillStyle = paint.line;
    for (const start of this.starts) pen.fillRect(x + start * unit - 0.5, bottom - 1, 1, 4);
    pen.fillStyle = paint.accent;
    pen.fillRect(head - 0.8, y - 3, 1.6, bottom - y + 3);
    this.write("0", x, bottom + 10, { size: 10, fill: paint.dim });
    this.write(`${this.starts[scene.ranks].toLocaleString("en")} scores long`, x + end, bottom + 10, { size: 10, fill: paint.dim, align: "right" });
  }
}

async function render({ model, el: host }) {
  const scene = await unpack(model.get("scene"));
  const score = scene.times.length ? await unpack(model.get("score")) : null;
  const root = card(host, { title: scene.title, about: scene.about, label: scene.sentence, badge: score?.badge });
  const key = (kind, text) => el("span.tpl-key", {}, el(`i.tpl-key${kind}`), text);
  root.append(el("div.tpl-legend", {}, key("solid", "this step, in the colour of the rank"), key("kept", "computed before"),
    key("due", "to come"), key("idle", "skipped, idle"), el("span.tpl-space"), el("span.tpl-key", {}, scene.axes)));
  const row = el("div.tpl-tiles", { style: `grid-template-columns:repeat(auto-fit,minmax(min(100%,${Math.min(scene.place.width, 270)}px),1fr))` });
  root.append(row);
  const tip = hint(root);
  let player = null;
  const over = (event, rows) => (event && rows ? tip.show(event, rows) : tip.hide());
  const seek = (step) => player.seek(step + placeOf(scene, player.position).pass * scene.ranks);
  const panels = scene.names.map((_, number) => new TilePanel(root, row, scene, number, { over, seek }));
  const lanes = score && new Lanes(root, root, score, { hint: tip, seek: (time) => player.seek(positionAt(scene, time)) });
  player = new Player(root, model, {
    steps: scene.says.length - 1,
    seconds: 1.6,
    show(position) {
      for (const panel of panels) panel.draw(position);
      lanes?.moveHead(timeAt(scene, position));
    },
    say(position) {
      const [head, words] = scene.says[Math.ceil(position - 1e-9)];
      return [head, words, lanes ? `t = ${timeText(timeAt(scene, position) - scene.times[0], score.unit)}` : ""];
    },
  });
  const redraw = () => {
    for (const panel of panels) panel.draw(player.position);
    lanes?.draw();
  };
  const unfollow = followTheme(root, redraw);
  const resizer = new ResizeObserver(redraw);
  resizer.observe(row);
  return () => {
    unfollow();
    resizer.disconnect();
    lanes?.destroy();
    player.destroy();
  };
}

export default { render };
