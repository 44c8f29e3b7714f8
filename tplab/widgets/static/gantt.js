// Pipeline schedules over time: what their lanes say, and how their actions are chosen and moved.
import { Lanes } from "./lanes.js";
import { plain, timeText } from "./units.js";

const F = 0;
const PASSES = ["the forward pass", "the whole backward pass", "the backward pass to its input: input gradients", "weight gradients, the rest of the backward pass"];

const microbatches = (number) => `${plain(number)} microbatch${number === 1 ? "" : "es"}`;

export class Gantt extends Lanes {
  // pick(row): called with the chosen action, or null; drop(rank, index, to): with a place to which one is dragged.
  constructor(root, host, board, more) {
    super(root, host, board, 0, { hasNames: true, about: (key, time) => this.says(key, time), ...more });
  }

  load(board, number) {
    super.load(board, number);
    this.board = board;
    this.runs = board.runs.map((about, place) => {
      const run = { ...about, rows: Array.from({ length: about.ranks }, () => []) };
      for (const name of ["rank", "kind", "start", "end", "waits", "message", "stair", "stairTime", "stairHeld"]) run[name] = board[`${name}.${place}`];
      run.rank.forEach((rank, row) => run.rows[rank].push(row));
      return run;
    });
    [this.chosen, this.framed, this.pointed] = [null, null, -1];
    this.colour(this.by);
  }

  // by: what the colours mean, once the picture is drawn again.
  colour(by) {
    this.by = by;
    this.table.look = this.board[`look.${by}0`] ?? this.board.look0;
  }

  // The run, the rank and the action or the lane that a key belongs to: keys are those of lanes, each with its memory, then
  // those of actions.
  what(key) {
    const lanes = 2 * this.runs.reduce((sum, run) => sum + run.ranks, 0);
    let at = key < lanes ? key : key - lanes;
    for (const run of this.runs) {
      const many = key < lanes ? 2 * run.ranks : run.rank.length;
      if (at < many) return key < lanes ? { run, rank: at >> 1, held: at % 2 } : { run, rank: run.rank[at], row: at };
      at -= many;
    }
    return null;
  }

  says(key, time) {
    const found = this.what(key);
    return found.row !== undefined ? this.aboutAction(found, time) : found.held ? this.aboutHeld(found, time) : this.aboutIdle(found, time);
  }

  // A press on an action, while they are edited, chooses it; a drag moves it.
  take(event) {
    const part = this.editing ? this.under(event) : -1, { run, row } = part < 0 ? {} : this.what(this.keyOf(part));
    if (row === undefined || run !== this.runs[0]) return null;
    this.choose(row);
    return (end) => this.dropped(row, this.time(this.where(end)[0]));
  }

  choose(row) {
    const { rank, names } = this.runs[0], { mark, key } = this.table;
    this.chosen = row;
    this.wanted = row === null ? null : { rank: rank[row], name: names[row] };
    this.framed = row === null ? null : mark.find((at) => at >= 0 && this.what(key[at]).row === row);
    this.frame();
    this.pick(row);
  }

  // The next action on the chosen action's rank, or the previous one; the very first if none is chosen.
  chooseNext(by) {
    const { rank, rows } = this.runs[0];
    if (this.chosen === null) return this.choose(rows[0][0] ?? null);
    const row = rows[rank[this.chosen]][this.index(this.chosen) + by];
    if (row !== undefined) this.choose(row);
  }

  // The action of another rank that begins nearest to the chosen one.
  chooseRank(by) {
    const { rank, rows, start } = this.runs[0];
    if (this.chosen === null) return this.choose(rows[0][0] ?? null);
    const others = rows[rank[this.chosen] + by] ?? [], away = (row) => Math.abs(start[row] - start[this.chosen]);
    if (others.length) this.choose(others.reduce((best, row) => (away(row) < away(best) ? row : best)));
  }

  // After a move the same action stays chosen, wherever it is now.
  keepChosen() {
    const { wanted } = this, { rank, names } = this.runs[0];
    const row = names.findIndex((name, at) => name === wanted?.name && rank[at] === wanted.rank);
    if (row >= 0) this.choose(row);
  }

  // The index of an action in its rank's row.
  index(row) {
    const { rank, rows } = this.runs[0];
    return rows[rank[row]].indexOf(row);
  }

  dropped(row, time) {
    const { rank, rows, start, end } = this.runs[0], others = rows[rank[row]].filter((other) => other !== row);
    const to = others.filter((other) => (start[other] + end[other]) / 2 < time).length;
    if (to !== this.index(row) && !(time >= start[row] && time < end[row])) this.drop(rank[row], this.index(row), to);
  }

  // How many microbatches' activations a rank holds at this time, and at most.
  heldAt(run, rank, time) {
    let held = 0;
    for (let at = run.stair[rank]; at < run.stair[rank + 1] && run.stairTime[at] <= time + 1e-9; at++) held = run.stairHeld[at];
    return held;
  }

  mostHeld(run, rank) {
    return Math.max(0, ...run.stairHeld.slice(run.stair[rank], run.stair[rank + 1]));
  }

  text(time) {
    return timeText(time, this.board.unit, this.end);
  }

  // "F3 of stage 1 on rank 1": an action in words, for a reader on `rank`.
  who(run, row, rank) {
    return `${run.names[row]}${run.rank[row] === rank ? "" : ` on ${this.board.lane} ${run.rank[row]}`}`;
  }

  heldText(run, rank, time) {
    const limit = this.board.limit === null ? "" : `; the limit is ${plain(this.board.limit)}`;
    return `${microbatches(this.heldAt(run, rank, time))}; at most ${plain(this.mostHeld(run, rank))}${limit}`;
  }

  aboutHeld({ run, rank }, time) {
    const busy = run.rows[rank].find((row) => run.start[row] <= time && time < run.end[row]);
    return [["", `${this.board.lane} ${rank} holds the activations of ${microbatches(this.heldAt(run, rank, time))}`],
      ["time", this.text(time)], ["at most", microbatches(this.mostHeld(run, rank))],
      ["limit", this.board.limit === null ? "" : microbatches(this.board.limit)],
      ["meanwhile", busy === undefined ? "the rank idles" : `the rank runs ${run.names[busy]}`]];
  }

  aboutIdle({ run, rank }, time) {
    const next = run.rows[rank].find((other) => run.start[other] > time);
    const before = run.rows[rank].filter((other) => run.end[other] <= time).pop();
    const from = before === undefined ? 0 : run.end[before], to = next === undefined ? run.makespan : run.start[next];
    const why = next === undefined ? "the other ranks: it is done, they are not" : run.waits[next] >= 0 ? this.who(run, run.waits[next], rank) : "the other ranks";
    return [["", `${this.board.lane} ${rank} idles`], ["time", `${this.text(from)} to ${this.text(to)}, ${this.text(to - from)}`],
      ["waits for", why], ["then runs", next === undefined ? "" : run.names[next]], ["holds", this.heldText(run, rank, time)]];
  }

  aboutAction({ run, rank, row }, time) {
    const pass = PASSES[run.kind[row]], from = run.message[row], [start, end] = [run.start[row], run.end[row]];
    const takers = [...run.message.keys()].filter((other) => run.message[other] === row).map((other) => this.who(run, other, rank));
    const what = (of) => (run.kind[of] === F ? "activations" : "gradients");
    return [["", `${this.board.lane} ${rank}: ${run.names[row]}`], ["does", pass ?? ""],
      ["time", `${this.text(start)} to ${this.text(end)}, ${this.text(end - start)}`],
      ["gets", from >= 0 ? `${what(from)} of ${this.who(run, from, rank)}` : ""],
      ["gives", takers.length ? `${what(row)} to ${takers.join("; ")}` : ""],
      ["waited for", run.waits[row] >= 0 ? this.who(run, run.waits[row], rank) : ""],
      ["holds", this.heldText(run, rank, time)]];
  }

  // What the ranks do at this time, in words.
  say(time) {
    const { rows, start, end, waits, names, rank: ranks } = this.runs[0], busy = [], waiting = [];
    const label = (row) => names[row].replace(/ of stage.*/, "");
    rows.forEach((all, rank) => {
      const row = all.find((row) => start[row] <= time + 1e-9 && time < end[row] - 1e-9);
      if (row !== undefined) return busy.push(`rank ${rank} runs ${label(row)}`);
      const next = all.find((row) => start[row] >= time - 1e-9);
      if (next !== undefined && waits[next] >= 0) waiting.push(`rank ${rank} waits for ${label(waits[next])} from rank ${ranks[waits[next]]}`);
    });
    const few = (texts) => (texts.length > 3 ? `${texts.slice(0, 3).join(", ")}, …` : texts.join(", "));
    return [few(busy) || "all ranks are done", few(waiting)].filter(Boolean).join("; ");
  }
}
