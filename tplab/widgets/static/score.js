// The picture at one moment, from the columns of a score, without access to the page.
import { rangeText } from "./units.js";

export const COMPUTE = 0, SEND = 1, COLLECTIVE = 2, WAIT = 3;
export const OWN = 1, HELD = 2, PASSED = 3, GONE = 4, UNSURE = 5;

export const numSteps = (score) => score.times.length - 1;

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

// The time of the playhead at `position`, in rounds.
export function timeAt(score, position) {
  const steps = numSteps(score);
  position = clamp(position, 0, steps);
  const index = Math.min(Math.floor(position), steps - 1);
  const begin = score.times[index], end = score.times[index + 1];
  return position === index + 1 ? end : begin + (position - index) * (end - begin);
}

// The position of the playhead at `time`: the reverse.
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

// [index, count] if it is one of `count` equal parts of a tensor.
export const partOf = (score, hold) => {
  const part = score.parts[score.hold_part[hold]];
  return part?.length ? part : null;
};

// The contents of a message, for a sentence.
export function carried(score, row) {
  const flow = ["", "activations of ", "gradients of "][score.flow[row]];
  return score.item[row] >= 0 ? `${flow}${pieceText(score, score.item[row])}` : "a message";
}

// The name of an item, for a sentence.
export const pieceText = (score, item) => score.items[item][2];

// The numbers of a hold as text, if they were kept.
export const values = (score, hold) => score.values[score.hold_value[hold]] ?? "";

export function sentText(score, sent) {
  if (!score.totalSent) {
    score.totalSent = new Float64Array(score.ranks);
    score.rank.forEach((rank, row) => (score.totalSent[rank] += score.bytes[row]));
  }
  if (!score.totalSent.some((total) => total > 0)) return "";
  return `sent so far: ${rangeText(sent)} of ${rangeText(score.totalSent)} per rank`;
}

export const head = (score, round) => (round ? `step ${round} of ${numSteps(score)}` : "before the first step");
