// What is known about one bar of a timeline, in words.
import { bytesText, timeText } from "./units.js";
import { COLLECTIVE, SEND, WAIT } from "./score.js";

// What the hint says about a bar.
export function describeBar(score, row) {
  const kind = score.kind[row], op = score.ops[score.op[row]], item = score.item[row];
  const time = (value) => timeText(value, score.unit, score.times[score.times.length - 1] - score.times[0]);
  const { start, end, times } = score, bytes = score.bytes[row], flops = score.flops?.[row] ?? 0;
  const what = kind === SEND ? `${op}: rank ${score.rank[row]} sends ${item >= 0 ? `chunk ${score.items[item][0]}` : ""} to rank ${score.peer[row]}`
    : kind === WAIT ? `rank ${score.rank[row]} waits` : `rank ${score.rank[row]}: ${op}`;
  const cause = kind === WAIT ? causeOf(score, row) : -1;
  const group = score.groups[score.group[row]] ?? [];
  return [["", what],
    ["when", `${time(start[row] - times[0])} to ${time(end[row] - times[0])}, ${timeText(end[row] - start[row], score.unit)}`],
    ["tensor", score.shapes?.[score.shape[row]] ?? ""], ["sends", bytes ? bytesText(bytes) : ""],
    ["FLOPs", flops ? flops.toLocaleString("en") : ""], ["with", kind === COLLECTIVE ? `ranks ${group.join(", ")}` : ""],
    ["waits for", cause < 0 ? "" : score.kind[cause] === SEND ? `rank ${score.rank[cause]}'s ${score.ops[score.op[cause]]}` : score.ops[score.op[cause]]],
    ["written at", score.where[score.place[row]] ?? ""]];
}

// What a rank waits for: what comes to it, or what it takes part in, and is over when the waiting is.
function causeOf(score, row) {
  const rank = score.rank[row], end = score.end[row];
  return score.end.findIndex((time, other) => time === end && ((score.kind[other] === SEND && score.peer[other] === rank)
    || (score.kind[other] === COLLECTIVE && score.rank[other] === rank)));
}
