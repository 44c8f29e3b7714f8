// Pipeline schedules on a canvas: one lane per rank, with its actions above and its memory below, on one time axis.
import { actionBar, actionName, half } from "./action.js";
import { hatch } from "./canvas.js";
import { Chart } from "./chart.js";
import { colours, el } from "./shell.js";
import { plain, timeText } from "./units.js";

const TOP_MARGIN = 4, TITLE = 22, AXIS_HEIGHT = 22, GAP = 5, RIGHT = 62;

const F = 0;
const PASSES = ["the forward pass", "the whole backward pass", "the backward pass to its input: input gradients", "weight gradients, the rest of the backward pass"];

const microbatches = (number) => `${plain(number)} microbatch${number === 1 ? "" : "es"}`;

// The columns of run `place` of a board, by name.
function runOf(board, place) {
  const about = board.runs[place], run = { ...about, place };
  for (const name of ["rank", "kind", "stage", "slot", "microbatch", "joined", "start", "end", "waits", "message", "critical", "stair", "stairTime", "stairHeld"]) {
    run[name] = board[`${name}.${place}`];
  }
  run.slots = Math.max(1, ...run.slot);
  run.rows = Array.from({ length: about.ranks }, () => []);
  run.rank.forEach((rank, row) => run.rows[rank].push(row));
  return run;
}

export const label = (run, row) => actionName(run.kind[row], run.microbatch[row]);
export const inWords = (run, row) => (run.stage[row] >= 0 ? `${label(run, row)} of stage ${run.stage[row]}` : label(run, row));

export class GanttChart extends Chart {
  constructor(root, host, { seek, hint, pick, drop }) {
    super(root, host, { seek, hint, pick, drop, right: RIGHT, by: "kind" });
    this.names = el("canvas.tpl-names", { "aria-hidden": "true" }); // above the playhead, which does not cover them
    this.box.append(this.names);
    this.chosen = null;
    this.listen();
  }

  set(board) {
    this.board = board;
    this.runs = board.runs.map((_, place) => runOf(board, place));
    this.end = Math.max(...this.runs.map((run) => run.makespan), 1e-12);
    this.most = Math.max(...this.runs.map((run) => run.peak), board.limit ?? 0);
    const ranks = Math.max(...this.runs.map((run) => run.ranks));
    [this.bar, this.strip] = ranks <= 4 ? [24, 14] : ranks <= 8 ? [24, 11] : ranks <= 12 ? [17, 8] : [13, 6];
    this.gap = GAP;
    const room = (board.tall ?? Infinity) / ranks; // of a lane, if the height is limited
    if (this.bar + this.strip + GAP > room) {
      [this.gap, this.strip] = [room > 12 ? 3 : 1, Math.max(1, Math.floor(room / 4))];
      this.bar = Math.max(2, Math.floor(room) - this.gap - this.strip);
    }
    this.lane = board.lane ?? "rank";
    this.left = ranks > 12 ? 34 : 58;
    this.chosen = null;
    this.mark.hidden = true;
    let top = TOP_MARGIN;
    for (const run of this.runs) {
      if (this.runs.length > 1) top += TITLE;
      run.top = top;
      top += run.ranks * (this.bar + this.strip + this.gap) + AXIS_HEIGHT;
    }
    [this.height, this.bottom, this.view] = [top, top - AXIS_HEIGHT, [0, this.end]];
    const said = this.runs.map((run) => `${run.name} on ${run.ranks} rank${run.ranks === 1 ? "" : "s"}, ${timeText(run.makespan, board.unit)} long`);
    this.canvas.setAttribute("aria-label", said.join("; "));
    this.draw();
  }

  laneTop(run, rank) {
    return run.top + rank * (this.bar + this.strip + this.gap);
  }

  // [x, y, width, height] of an action.
  place(run, row) {
    const x = this.x(run.start[row]), [y, height] = half(run, row, this.laneTop(run, run.rank[row]), this.bar);
    return [x, y, this.x(run.end[row]) - x, height];
  }

  draw() {
    if (!this.board) return;
    const ratio = window.devicePixelRatio || 1, [pen, letters] = this.pens(ratio, this.canvas, this.names);
    if (!pen) return;
    this.letters = letters;
    const paint = colours(this.root), idle = hatch(pen, paint.hatch, ratio);
    for (const run of this.runs) {
      this.ground(pen, paint, run, idle);
      run.rank.forEach((_, row) => this.action(pen, paint, run, row));
      if (this.critical) this.path(pen, paint.accent, Array.from(run.critical, (row) => this.place(run, row)));
    }
    this.moveHead(this.now ?? 0);
  }

  ground(pen, paint, run, idle) {
    const right = this.x(run.makespan), every = run.ranks > 12 ? 4 : 1;
    if (this.runs.length > 1) {
      pen.font = `600 12px ${paint.font}`;
      pen.textAlign = "left";
      pen.fillStyle = paint.ink;
      pen.fillText(run.name, 0, run.top - TITLE / 2 + 1);
      const after = pen.measureText(run.name).width + 8;
      pen.font = `11px ${paint.font}`;
      pen.fillStyle = paint.dim;
      pen.fillText(run.about, after, run.top - TITLE / 2 + 1);
    }
    pen.font = `11px ${paint.font}`;
    for (let rank = 0; rank < run.ranks; rank++) {
      const y = this.laneTop(run, rank);
      pen.fillStyle = paint.dim;
      pen.textAlign = "left";
      if (rank % every === 0) pen.fillText(run.ranks > 12 ? rank : `${this.lane} ${rank}`, 0, y + this.bar / 2 + 0.5);
      pen.fillStyle = paint.soft;
      pen.fillRect(this.left, y, right - this.left, this.bar);
      pen.fillStyle = idle;
      pen.fillRect(this.left, y, right - this.left, this.bar);
      this.memory(pen, paint, run, rank, y + this.bar + 1.5);
    }
    this.axis(pen, paint, this.board.unit, this.laneTop(run, run.ranks) + 10, 90);
  }

  memory(pen, paint, run, rank, top) {
    const { strip, most } = this, limit = this.board.limit;
    const level = (held) => top + strip * (1 - held / most);
    const end = this.x(run.makespan);
    for (let at = run.stair[rank]; at < run.stair[rank + 1]; at++) {
      const held = run.stairHeld[at], x = this.x(run.stairTime[at]);
      const right = at + 1 < run.stair[rank + 1] ? this.x(run.stairTime[at + 1]) : end;
      if (held <= 0 || right <= x) continue;
      pen.fillStyle = paint.mix(paint.work, 0.45);
      pen.fillRect(x, level(held), right - x + 0.4, top + strip - level(held));
      if (limit === null || held <= limit + 1e-9) continue;
      pen.fillStyle = paint.hues[5];
      pen.fillRect(x, level(held), right - x + 0.4, level(limit) - level(held));
    }
    pen.fillStyle = paint.dim;
    pen.textAlign = "left";
    pen.font = `10px ${paint.font}`;
    if (rank % Math.ceil(11 / (this.bar + this.strip + this.gap)) === 0) pen.fillText(`up to ${plain(this.mostHeld(run, rank))}`, end + 6, top + strip / 2);
    if (limit === null) return;
    pen.fillStyle = paint.accent;
    pen.fillRect(this.left, level(limit) - 0.5, end - this.left, 1);
  }

  action(pen, paint, run, row) {
    pen.globalAlpha = this.critical && !this.onPath[run.place].has(row) ? 0.25 : 1;
    const action = { kind: run.kind[row], microbatch: run.microbatch[row], stage: run.stage[row], tier: run.slot[row] / run.slots, name: label(run, row) };
    actionBar(pen, paint, this.place(run, row), action, { by: this.by, letters: this.letters });
    pen.globalAlpha = 1;
  }

  showCritical(on) {
    this.critical = on;
    this.onPath = this.runs.map((run) => new Set(run.critical));
    this.draw();
  }

  // What is at a point: {run, rank, row, held}. row is -1 where the rank idles; held: whether it is the memory strip.
  at(x, y) {
    for (const run of this.runs) {
      const rank = Math.floor((y - run.top) / (this.bar + this.strip + this.gap));
      if (y < run.top || rank < 0 || rank >= run.ranks || x < this.left || x > this.x(run.makespan)) continue;
      if (y >= this.laneTop(run, rank) + this.bar) return { run, rank, row: -1, held: true };
      const row = run.rows[rank].find((row) => {
        const [left, top, width, height] = this.place(run, row);
        return x >= left && x < left + width && y >= top && y < top + height;
      });
      return { run, rank, row: row ?? -1, held: false };
    }
    return null;
  }

  // How many microbatches' activations a rank holds at this time.
  heldAt(run, rank, time) {
    let held = 0;
    for (let at = run.stair[rank]; at < run.stair[rank + 1] && run.stairTime[at] <= time + 1e-9; at++) held = run.stairHeld[at];
    return held;
  }

  mostHeld(run, rank) {
    return Math.max(0, ...run.stairHeld.slice(run.stair[rank], run.stair[rank + 1]));
  }

  listen() {
    const where = (event) => this.where(event);
    let held = null;
    this.box.addEventListener("pointerdown", (event) => {
      const found = this.at(...where(event));
      this.box.setPointerCapture(event.pointerId);
      held = this.editing && found && found.run.place === 0 && found.row >= 0 ? found : { row: -1 };
      if (held.row >= 0) this.choose(held.row);
      else this.seek(this.time(where(event)[0]));
    });
    this.box.addEventListener("pointermove", (event) => {
      if (!held) this.tell(event, ...where(event));
      else if (held.row < 0) this.seek(this.time(where(event)[0]));
    });
    this.box.addEventListener("pointerup", (event) => {
      if (held?.row >= 0) this.dropped(held, ...where(event));
      held = null;
    });
    this.box.addEventListener("pointercancel", () => { held = null; });
    this.box.addEventListener("pointerleave", () => { this.hint.hide(); });
  }

  choose(row) {
    this.chosen = row;
    const run = this.runs[0];
    this.wanted = row === null ? null : { rank: run.rank[row], kind: run.kind[row], stage: run.stage[row], microbatch: run.microbatch[row] };
    this.mark.hidden = row === null;
    if (row !== null) this.frame(this.mark, this.place(this.runs[0], row));
    this.pick(row);
  }

  // The next action on the chosen action's rank, or the previous one; the very first if none is chosen.
  chooseNext(by) {
    const run = this.runs[0];
    if (this.chosen === null) return this.choose(run.rows[0][0] ?? null);
    const row = run.rows[run.rank[this.chosen]][this.index(this.chosen) + by];
    if (row !== undefined) this.choose(row);
  }

  // The action of another rank that begins nearest to the chosen one.
  chooseRank(by) {
    const run = this.runs[0];
    if (this.chosen === null) return this.choose(run.rows[0][0] ?? null);
    const rows = run.rows[run.rank[this.chosen] + by] ?? [], away = (row) => Math.abs(run.start[row] - run.start[this.chosen]);
    if (rows.length) this.choose(rows.reduce((best, row) => (away(row) < away(best) ? row : best)));
  }

  // After a move the same action stays chosen, wherever it is now.
  keepChosen() {
    const wanted = this.wanted, run = this.runs[0];
    if (!wanted) return;
    const row = run.rank.findIndex((_, other) => ["rank", "kind", "stage", "microbatch"].every((name) => run[name][other] === wanted[name]));
    if (row >= 0) this.choose(row);
  }

  // The index of an action in its rank's row.
  index(row) {
    const run = this.runs[0];
    return run.rows[run.rank[row]].indexOf(row);
  }

  dropped({ run, row, rank }, x) {
    const time = this.time(x), others = run.rows[rank].filter((other) => other !== row);
    const to = others.filter((other) => (run.start[other] + run.end[other]) / 2 < time).length;
    if (to !== this.index(row) && !(time >= run.start[row] && time < run.end[row])) this.drop(rank, this.index(row), to);
  }

  tell(event, x, y) {
    const found = this.at(x, y);
    if (!found) return this.hint.hide();
    const time = this.time(x);
    this.hint.show(event, found.held ? this.aboutHeld(found, time) : found.row < 0 ? this.aboutIdle(found, time) : this.aboutAction(found, time));
  }

  text(time) {
    return timeText(time, this.board.unit, this.end);
  }

  // "F3 of stage 1 on rank 1": an action in words, for a reader on `rank`.
  who(run, row, rank) {
    return `${inWords(run, row)}${run.rank[row] === rank ? "" : ` on ${this.lane} ${run.rank[row]}`}`;
  }

  heldText(run, rank, time) {
    const limit = this.board.limit === null ? "" : `; the limit is ${plain(this.board.limit)}`;
    return `${microbatches(this.heldAt(run, rank, time))}; at most ${plain(this.mostHeld(run, rank))}${limit}`;
  }

  aboutHeld({ run, rank }, time) {
    const busy = run.rows[rank].find((row) => run.start[row] <= time && time < run.end[row]);
    return [["", `${this.lane} ${rank} holds the activations of ${microbatches(this.heldAt(run, rank, time))}`],
      ["time", this.text(time)], ["at most", microbatches(this.mostHeld(run, rank))],
      ["limit", this.board.limit === null ? "" : microbatches(this.board.limit)],
      ["meanwhile", busy === undefined ? "the rank idles" : `the rank runs ${inWords(run, busy)}`]];
  }

  aboutIdle({ run, rank }, time) {
    const next = run.rows[rank].find((other) => run.start[other] > time);
    const before = run.rows[rank].filter((other) => run.end[other] <= time).pop();
    const from = before === undefined ? 0 : run.end[before], to = next === undefined ? run.makespan : run.start[next];
    const why = next === undefined ? "the other ranks: it is done, they are not" : run.waits[next] >= 0 ? this.who(run, run.waits[next], rank) : "the other ranks";
    return [["", `${this.lane} ${rank} idles`], ["time", `${this.text(from)} to ${this.text(to)}, ${this.text(to - from)}`],
      ["waits for", why], ["then runs", next === undefined ? "" : inWords(run, next)], ["holds", this.heldText(run, rank, time)]];
  }

  aboutAction({ run, rank, row }, time) {
    const pass = PASSES[run.kind[row]], from = run.message[row], [start, end] = [run.start[row], run.end[row]];
    const takers = [...run.message.keys()].filter((other) => run.message[other] === row).map((other) => this.who(run, other, rank));
    const what = run.kind[row] === F ? "activations" : "gradients";
    return [["", `${this.lane} ${rank}: ${inWords(run, row)}`], ["does", pass ?? ""],
      ["time", `${this.text(start)} to ${this.text(end)}, ${this.text(end - start)}`],
      ["gets", from >= 0 ? `${run.kind[from] === F ? "activations" : "gradients"} of ${this.who(run, from, rank)}` : ""],
      ["gives", takers.length ? `${what} to ${takers.join("; ")}` : ""],
      ["waited for", run.waits[row] >= 0 ? this.who(run, run.waits[row], rank) : ""],
      ["holds", this.heldText(run, rank, time)]];
  }

  // What the ranks do at this time, in words.
  say(time) {
    const run = this.runs[0], busy = [], waiting = [];
    for (let rank = 0; rank < run.ranks; rank++) {
      const row = run.rows[rank].find((row) => run.start[row] <= time + 1e-9 && time < run.end[row] - 1e-9);
      if (row !== undefined) {
        busy.push(`rank ${rank} runs ${label(run, row)}`);
        continue;
      }
      const next = run.rows[rank].find((row) => run.start[row] >= time - 1e-9);
      if (next !== undefined && run.waits[next] >= 0) waiting.push(`rank ${rank} waits for ${label(run, run.waits[next])} from rank ${run.rank[run.waits[next]]}`);
    }
    const few = (texts) => (texts.length > 3 ? `${texts.slice(0, 3).join(", ")}, …` : texts.join(", "));
    return [few(busy) || "all ranks are done", few(waiting)].filter(Boolean).join("; ");
  }
}
