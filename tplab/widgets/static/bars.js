// Texts about one bar of a timeline.
import { bytesText, timeText } from "./units.js";
import { COLLECTIVE, COMPUTE, SEND, WAIT, carried, pieceText } from "./score.js";

// The tooltip of a bar: what it is, then its time, size, partners and line in the program.
export function describeBar(score, row) {
  const kind = score.kind[row], group = score.groups[score.group[row]] ?? [];
  const { start, end, times } = score, bytes = score.bytes[row], flops = score.flops?.[row] ?? 0;
  const time = (value) => timeText(value - times[0], score.unit, times[times.length - 1] - times[0]);
  const beside = kind === SEND || kind === COLLECTIVE ? waitBeside(score, row) : -1;
  return [["", title(score, row)],
    ["when", `${time(start[row])} to ${time(end[row])}, ${timeText(end[row] - start[row], score.unit)}`],
    ["tensor", score.shapes?.[score.shape[row]] ?? ""], ["sends", bytes ? `${bytesText(bytes)}${kind === COLLECTIVE ? " in total" : ""}` : ""],
    ["started on", startedOn(score, row)], ["in", inPhase(score, row)], ["FLOPs", flops ? flops.toLocaleString("en") : ""], ["between", kind === COLLECTIVE ? `ranks ${group.join(", ")}` : ""],
    ["waits for", kind === WAIT ? awaited(score, row) : ""],
    ["meanwhile", beside >= 0 ? `rank ${score.rank[row]} waits for ${awaited(score, beside) || "other ranks"}` : ""],
    ["types", score.types?.[score.type[row]] ?? ""], ["written at", score.where[score.place[row]] ?? ""]];
}

function title(score, row) {
  const kind = score.kind[row], op = score.ops[score.op[row]], rank = score.rank[row], item = score.item[row];
  const what = kind === SEND ? carried(score, row) : item >= 0 ? pieceText(score, item) : "";
  if (kind === SEND) return `${op}: rank ${rank} sends ${what} to rank ${score.peer[row]}`;
  if (kind === WAIT) return `rank ${rank} waits`;
  const how = score.reductions?.[score.reduction[row]];
  const axis = kind === COLLECTIVE ? score.axes?.[score.axis[row]] : "";
  return `rank ${rank}: ${op}${how ? ` (${how})` : ""}${axis ? ` over ${axis}` : ""}${kind === COMPUTE && item >= 0 ? `, with ${what}` : ""}`;
}

// The meaning of a piece's letter: the rank that it comes from.
function startedOn(score, row) {
  const [, origin = -1] = score.items[score.item[row]] ?? [];
  return score.pipeline || origin < 0 ? "" : `rank ${origin}`;
}

// The pass of a bar, in a program that has both.
function inPhase(score, row) {
  const phase = score.phases?.includes("backward") ? score.phases[score.phase[row]] : "";
  return phase ? `the ${phase} pass` : "";
}

function awaited(score, row) {
  const cause = causeOf(score, row);
  if (cause < 0) return "";
  if (score.kind[cause] !== SEND) return score.ops[score.op[cause]];
  return `${score.item[cause] >= 0 ? carried(score, cause) : score.ops[score.op[cause]]} from rank ${score.rank[cause]}`;
}

// What a rank waits for: a message to it, or a collective that it takes part in, which ends when the wait does.
function causeOf(score, row) {
  const rank = score.rank[row], end = score.end[row];
  return score.end.findIndex((time, other) => time === end && ((score.kind[other] === SEND && score.peer[other] === rank)
    || (score.kind[other] === COLLECTIVE && score.rank[other] === rank)));
}

// A wait of the rank while this bar is in transit.
function waitBeside(score, row) {
  return score.kind.findIndex((kind, other) => kind === WAIT && score.rank[other] === score.rank[row]
    && score.start[other] < score.end[row] && score.end[other] > score.start[row]);
}
