// An executed pipeline schedule over its prediction.
import { actionBar, actionName, half } from "./action.js";
import { el } from "./shell.js";
import { timeText } from "./units.js";
import { LANES_AXIS, LANES_TOP, Lanes } from "./lanes.js";

const whole = (data) => data.times[data.times.length - 1];

// [position of the playhead, what the ranks do there and were predicted to do, how far they are].
export function overlaySay(data, time) {
  const stop = data.stops.findLastIndex((at) => at <= time + 1e-9 * whole(data));
  return [`t = ${timeText(time, data.unit, whole(data))}`, ...data.said[stop]];
}

export class OverlayLanes extends Lanes {
  constructor(root, host, data, options) {
    super(root, host, data, options);
    this.canvas.setAttribute("aria-label", `timeline of ${data.title} on ${data.ranks} rank${data.ranks === 1 ? "" : "s"}: ${data.about}`);
    this.markDue = el("div.tpl-barmark", { hidden: "" });
    this.plot.append(this.markDue);
  }

  measure() {
    const { score } = this;
    this.rows = Array.from({ length: score.ranks }, () => []);
    score.rank.forEach((rank, row) => this.rows[rank].push(row));
    [this.work, this.dueHeight, this.gap] = score.ranks <= 8 ? [22, 13, 9] : score.ranks <= 16 ? [13, 7, 5] : [6, 3, 2];
    this.lane = this.work + this.dueHeight + this.gap;
    this.bottom = LANES_TOP + this.lane * score.ranks;
    this.height = this.bottom + LANES_AXIS;
  }

  laneTop(rank) {
    return LANES_TOP + rank * this.lane;
  }

  // [x, width]; an action without duration is visible too.
  stretch(start, end) {
    const x = this.x(start), width = this.x(end) - x;
    return width > 0.01 ? [x, width] : [Math.min(x, this.left + this.width - 2), 3];
  }

  // [x, y, width, height] of an action as executed, and as predicted.
  ran(row) {
    const { score } = this, [x, width] = this.stretch(score.start[row], score.end[row]);
    return [x, this.laneTop(score.rank[row]), width, this.work];
  }

  due(row) {
    const { score } = this, [x, width] = this.stretch(score.due_start[row], score.due_end[row]);
    const [y, height] = half(score, row, this.laneTop(score.rank[row]) + this.work + 1, this.dueHeight - 1);
    return [x, y, width, height];
  }

  // There are no waits after the end of the batch.
  drawIdle(pen, x, y, width, height) {
    super.drawIdle(pen, x, y, Math.min(Math.max(this.x(this.score.makespan) - x, 0), width), height);
  }

  drawLane(pen, paint, rows, rank) {
    const { score, view: [from, to] } = this;
    this.drawOthers(pen, paint, rank);
    const last = [-9, -9], slots = Math.max(1, ...score.slot);
    for (const row of rows) {
      const name = actionName(score.kind[row], score.microbatch[row]);
      for (const [which, start, end] of [[0, score.start[row], score.end[row]], [1, score.due_start[row], score.due_end[row]]]) {
        if (start > to || end < from) continue;
        const place = which ? this.due(row) : this.ran(row), right = place[0] + place[2];
        if (right - last[which] < 0.7 && !score.joined[row]) continue; // it would not be visible
        last[which] = right;
        const action = { kind: score.kind[row], microbatch: score.microbatch[row], stage: score.stage[row], tier: score.slot[row] / slots, name };
        actionBar(pen, paint, place, action, { outlined: which === 1, from: this.left, to: this.left + this.width });
      }
    }
  }

  drawOthers(pen, paint, rank) {
    const { score } = this;
    pen.fillStyle = paint.mix(paint.work, 0.42);
    score.other_rank.forEach((of, row) => {
      if (of !== rank) return;
      const x = this.x(score.other_start[row]);
      pen.fillRect(x, this.laneTop(rank), Math.max(this.x(score.other_end[row]) - x, 0.7), this.work);
    });
  }

  // [row, as predicted?] at a point, or [-1, its row] for other work.
  under(x, y) {
    const { score } = this, rank = Math.floor((y - LANES_TOP) / this.lane);
    if (!this.width || x < this.left || x > this.left + this.width || !this.rows[rank]) return null;
    const inside = ([left, top, width, height]) => x >= left - 1 && x < left + Math.max(width, 1) + 1 && y >= top && y < top + height;
    const exact = ([left, , width]) => x >= left && x < left + width;
    for (const [place, asDue] of [[this.ran, false], [this.due, true]]) {
      const found = this.rows[rank].filter((row) => inside(place.call(this, row)));
      if (found.length) return [found.find((row) => exact(place.call(this, row))) ?? found[0], asDue];
    }
    if (y >= this.laneTop(rank) + this.work) return null;
    const time = this.time(x), slack = this.time(x + 1) - time;
    const other = score.other_rank.findIndex((of, row) => of === rank && score.other_start[row] <= time + slack && score.other_end[row] >= time - slack);
    return other < 0 ? null : [-1, other];
  }

  point(event, x, y) {
    const found = this.under(x, y);
    this.mark.hidden = this.markDue.hidden = !found || found[0] < 0;
    if (!found) return this.hint?.hide();
    if (found[0] < 0) return this.hint?.show(event, this.describeOther(found[1]));
    this.frame(this.mark, this.ran(found[0]));
    this.frame(this.markDue, this.due(found[0]));
    this.hint?.show(event, this.describe(found[0]));
  }

  describe(row) {
    const { score } = this, { unit } = score, all = whole(score), near = 1e-9 * all;
    const stretch = (start, end) => `${timeText(start, unit, all)} to ${timeText(end, unit, all)}, ${timeText(end - start, unit)}`;
    const late = (by, verb) => (Math.abs(by) <= near ? `${verb} on time` : `${verb} ${timeText(Math.abs(by), unit)} ${by > 0 ? "later" : "earlier"}`);
    const start = score.start[row], end = score.end[row], spare = end - start - score.busy[row];
    const rank = score.names[score.rank[row]];
    return [["", `${actionName(score.kind[row], score.microbatch[row])} of stage ${score.stage[row]}, rank ${rank}`],
      [score.word, stretch(start, end)], ["predicted", stretch(score.due_start[row], score.due_end[row])],
      ["difference", `${late(start - score.due_start[row], "starts")}, ${late(end - score.due_end[row], "ends")}`],
      ["of it", spare > near ? `${timeText(spare, unit)} waiting` : ""]];
  }

  describeOther(row) {
    const { score } = this, all = whole(score), time = (value) => timeText(value, score.unit, all);
    const start = score.other_start[row], end = score.other_end[row];
    return [["", `rank ${score.names[score.other_rank[row]]}: ${score.ops[score.other_op[row]]}, no action of the schedule`],
      [score.word, `${time(start)} to ${time(end)}, ${timeText(end - start, score.unit)}`]];
  }
}
