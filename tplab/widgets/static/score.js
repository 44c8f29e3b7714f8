// The picture at one moment: what widgets/score.py and frame.py say, in JavaScript. Nothing here touches the page.
import { numberText, rangeText } from "./units.js";

export const COMPUTE = 0, SEND = 1, COLLECTIVE = 2, WAIT = 3;
export const OWN = 1, HELD = 2, PASSED = 3, GONE = 4, UNSURE = 5;

export const numSteps = (score) => score.times.length - 1;

// The kind of what a bar computes, for its colour: a product of a backward pass has one of its own.
export function workKind(score, row) {
  const kind = score.op_kinds[score.op[row]];
  return kind === "product" && score.phases?.[score.phase[row]] === "backward" ? "backward" : kind;
}

// What a collective does, for its colour: it combines what ranks put in, as a sum, or only moves it.
export const talkKind = (score, row) => (score.reductions[score.reduction[row]] ? "combines" : "moves");

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

// When the playhead at `position` (in rounds) is.
export function timeAt(score, position) {
  const steps = numSteps(score);
  position = clamp(position, 0, steps);
  const index = Math.min(Math.floor(position), steps - 1);
  const begin = score.times[index], end = score.times[index + 1];
  return position === index + 1 ? end : begin + (position - index) * (end - begin);
}

// Where the playhead is at `time`: the reverse.
export function positionAt(score, time) {
  const { times } = score, steps = numSteps(score);
  if (time >= times[steps]) return steps;
  let index = 0;
  while (index < steps - 1 && times[index + 1] <= time) index++;
  const span = times[index + 1] - times[index];
  return clamp(index + (span > 0 ? (time - times[index]) / span : 0), 0, steps);
}

export function frame(score, position) {
  const steps = numSteps(score);
  position = clamp(position, 0, steps);
  const time = timeAt(score, position);
  const { rank, kind, item, peer, start, end, bytes } = score;
  const numItems = score.items.length;
  const flights = [], together = [], computing = [];
  const sent = new Float64Array(score.ranks);
  const arriving = new Map(); // rank * items + item -> the flight's bar
  for (let row = 0; row < rank.length; row++) {
    if (end[row] <= time) sent[rank[row]] += bytes[row];
    else if (start[row] < time) {
      const moment = [row, (time - start[row]) / (end[row] - start[row])];
      if (kind[row] === SEND) {
        flights.push(moment);
        if (item[row] >= 0) arriving.set(peer[row] * numItems + item[row], row);
      } else if (kind[row] === COLLECTIVE) {
        together.push(moment);
        if (item[row] >= 0) arriving.set(rank[row] * numItems + item[row], row);
      }
      else if (kind[row] === COMPUTE) computing.push(moment);
    }
  }
  const cells = new Int32Array(score.ranks * numItems).fill(-1);
  const { hold_time: when, hold_rank: holder, hold_item: held } = score;
  for (let row = 0; row < when.length && when[row] <= time; row++) {
    cells[holder[row] * numItems + held[row]] = score.hold_state[row] === GONE ? -1 : row;
  }
  return { position, time, round: Math.min(Math.ceil(position), steps), flights, together, computing, cells, arriving, sent };
}

// The ranks whose data is in what a hold is about.
export function members(score, hold) {
  const width = Math.ceil(score.ranks / 8), from = score.hold_set[hold] * width, found = [];
  for (let rank = 0; rank < score.ranks; rank++) {
    if ((score.sets[from + (rank >> 3)] >> (rank & 7)) & 1) found.push(rank);
  }
  return found;
}

// Every rank whose data could be in it.
export function pool(score, hold, inside = members(score, hold)) {
  return score.items[score.hold_item[hold]][4].find((ranks) => ranks.includes(inside[0])) ?? inside;
}

// What stands in a cell: the chunk's letter or whose data is in it, and its value where it is a single number.
export function cellText(score, hold, most = 4) {
  const [, , , , , how] = score.items[score.hold_item[hold]], isSure = score.hold_state[hold] !== UNSURE;
  const inside = isSure ? members(score, hold) : [], all = isSure ? pool(score, hold, inside) : [];
  const label = all.length > 1 && !partOf(score, hold) ? contributors(inside, all, how, most) : holdName(score, hold);
  const numbers = values(score, hold);
  if (score.layout?.numbers && numbers.length) return { label: numberText(numbers[0]), value: "", inside, all };
  const value = most === 1 && numbers.length !== 1 ? "" : fewNumbers(Array.from(numbers.subarray ? numbers.subarray(0, SHOWN) : [], numberText));
  return { label, value, inside, all };
}

const SHOWN = 8, ROOM = 10; // of a few numbers in a cell: how many, and letters

// As many of these as there is room for in a cell: "24 28", "7 -3 4 …".
export function fewNumbers(texts) {
  if (texts.length <= 1) return texts[0] ?? "";
  const whole = texts.join(" ");
  if (whole.length <= ROOM && texts.length < SHOWN) return whole;
  let shown = "";
  for (const text of texts) {
    if (shown.length + text.length + 1 > ROOM - 1) break;
    shown += `${text} `;
  }
  return shown ? `${shown}…` : "";
}

// [index, count] if it is one of `count` equal parts of a tensor.
export const partOf = (score, hold) => {
  const part = score.parts[score.hold_part[hold]];
  return part?.length ? part : null;
};

// The name of what a rank holds: that of its item, with the number of its part below the line.
export const holdName = (score, hold) => {
  const part = partOf(score, hold), low = (digit) => String.fromCharCode(0x2080 + Number(digit));
  return score.items[score.hold_item[hold]][0] + (part ? Array.from(String(part[0]), low).join("") : "");
};

// The colour of a bar, and of an item: in a pipeline activations have that of F, and gradients that of I.
export const barColour = (score, paint, row) => (score.pipeline ? [paint.work, paint.kinds.F, paint.kinds.I][score.flow[row]] : paint.hue(score.item[row]));
export const flightColour = (score, row) => (score.pipeline ? ["var(--work)", "var(--kf)", "var(--kig)"][score.flow[row]]
  : score.item[row] >= 0 ? `var(--c${score.item[row] % 8})` : "var(--work)");
export const itemColour = (score, item) => (score.pipeline ? "var(--kf)" : `var(--c${item % 8})`);

// The name of an item in a sentence.
// What a message carries, in a sentence.
export function carried(score, row) {
  const flow = ["", "activations of ", "gradients of "][score.flow[row]];
  return score.item[row] >= 0 ? `${flow}${pieceText(score, score.item[row])}` : "a message";
}

export const pieceText = (score, item) => score.items[item][2];

export function contributors(inside, all, how, most = 4) {
  if (inside.length > most) return most > 1 ? `${inside.length} of ${all.length}` : `${inside.length}${all.length < 10 ? `/${all.length}` : ""}`;
  return inside.join({ sum: "+", product: "·" }[how] ?? ",");
}

// The numbers of a hold, where they were kept.
export function values(score, hold) {
  const place = score.hold_value[hold];
  if (place < 0) return [];
  return score.value_numbers.subarray(score.value_start[place], score.value_start[place + 1]);
}

export function sentText(score, sent) {
  if (!score.totalSent) {
    score.totalSent = new Float64Array(score.ranks);
    score.rank.forEach((rank, row) => (score.totalSent[rank] += score.bytes[row]));
  }
  if (!score.totalSent.some((total) => total > 0)) return "";
  return `sent so far: ${rangeText(sent)} of ${rangeText(score.totalSent)} per rank`;
}

export const head = (score, round) => (round ? `step ${round} of ${numSteps(score)}` : "before the first step");
