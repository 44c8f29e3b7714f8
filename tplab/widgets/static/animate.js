// One card for one trace: the ranks, what each of them holds, and the timeline, under one playhead.
import { card, el, hint, live } from "./shell.js";
import { bytesText } from "./units.js";
import { unpack } from "./wire.js";
import { COLLECTIVE, OWN, PASSED, UNSURE, carried, frame, head, members, numSteps, partOf, pieceText, pool, positionAt, sentText, timeAt, values } from "./score.js";
import { Player } from "./player.js";
import { Scene, drawLegend } from "./scene.js";
import { Lanes } from "./lanes.js";

// The tooltip of a chunk in transit, a cell of the table or a rank.
function describe(score, now, { flight, rank, item }) {
  if (flight >= 0) {
    item = score.item[flight];
    const from = score.rank[flight];
    const hold = item >= 0 ? now.cells[from * score.items.length + item] : -1;
    return [["", `${score.ops[score.op[flight]]}: rank ${from} sends ${carried(score, flight)} to rank ${score.peer[flight]}`],
      ["tensor", score.shapes[score.shape[flight]]], ["sends", bytesText(score.bytes[flight])], ...contents(score, hold),
      ["written at", score.where[score.place[flight]]]];
  }
  if (item === undefined) return aboutRank(score, now, rank);
  const hold = now.cells[rank * score.items.length + item], [, origin, , op] = score.items[item];
  const isOwn = hold >= 0 && score.hold_state[hold] === OWN;
  const what = `${op ? (isOwn ? "its own input of " : "the result of ") : ""}${pieceText(score, item)}`;
  const born = op || origin < 0 ? "" : `rank ${origin}`;
  if (hold < 0) {
    const coming = now.arriving.get(rank * score.items.length + item), group = coming >= 0 ? score.groups[score.group[coming]] : [];
    const way = coming === undefined ? [] : score.kind[coming] === COLLECTIVE ? ["made by", `ranks ${group.join(", ")}, not finished`] : ["comes from", `rank ${score.rank[coming]}, is on its way`];
    return [["", `rank ${rank} does not hold ${what}${coming === undefined ? "" : " yet"}`], way.length ? way : null];
  }
  const passed = score.hold_state[hold] === PASSED, part = partOf(score, hold);
  const which = part ? `, part ${part[0]} of ${part[1]} of the whole (counted from 0)` : "";
  return [["", `rank ${rank} ${passed ? "has passed on" : score.tells_past ? "has had" : "holds"} ${what}${which}`], ["started on", born], ...contents(score, hold)];
}

// What a rank is doing now, and what it has sent.
function aboutRank(score, now, rank) {
  const does = [...now.computing, ...now.together].filter(([row]) => score.rank[row] === rank).map(([row]) => score.ops[score.op[row]]);
  const sends = now.flights.filter(([row]) => score.rank[row] === rank).map(([row]) => `to rank ${score.peer[row]}`);
  return [["", `rank ${rank}`], ["runs", does.join(", ")], ["sends", sends.join(", ")], ["has sent", bytesText(now.sent[rank])]];
}

function contents(score, hold) {
  if (hold < 0) return [];
  if (score.hold_state[hold] === UNSURE) return [["made by", `ranks ${members(score, hold).join(", ")}; whose data they put in is not known`], ["values", values(score, hold)]];
  const inside = members(score, hold), all = pool(score, hold, inside);
  const joint = all.length > 1 ? `rank${inside.length === 1 ? "" : "s"} ${inside.join(", ")}${inside.length === all.length ? " (all of them)" : ` (${inside.length} of ${all.length})`}` : "";
  return [["data of", joint], ["values", values(score, hold)]];
}

async function render({ model, el: host }) {
  const score = await unpack(model.get("score"));
  const root = card(host, { title: score.title, about: score.about, badge: score.badge, warning: score.warning, above: model.get("above"), label: `animation of ${score.title}` });
  const tip = hint(root), cells = score.ranks * score.items.length;
  let now = frame(score, model.get("step"));
  // Keys belong to cells, then ranks, then bars.
  const what = (key) => (key >= cells + score.ranks ? { flight: key - cells - score.ranks }
    : key >= cells ? { rank: key - cells } : { rank: Math.floor(key / score.items.length), item: key % score.items.length });
  const about = (key) => describe(score, now, what(key));
  drawLegend(root, score);
  const two = el("div.tpl-two");
  root.append(two);
  const scenes = Array.from({ length: score.scenes - 1 }, (_, number) => { // the last one is the timeline
    const { width, height } = score.tables[number], largest = number ? 1 : Math.min(1.15, Math.max(1, 430 / width)); // a picture of few ranks may be larger
    const box = el("div.tpl-scene", { style: `flex:${number ? `0 1 ${width}` : `1 1 ${0.78 * width}`}px;--most:${largest * width}px;--shape:${width / height}` });
    two.append(box);
    return new Scene(root, box, score, number, { over: tip.show, about, largest, reads: (key) => number || key >= cells }); // the table has the cells
  });
  const draw = () => scenes.forEach((scene) => scene.draw(now.time));
  let player = null;
  const lanes = new Lanes(root, root, score, score.scenes - 1, { hint: tip, hasVeil: true, seek: (time) => player.seek(positionAt(score, time)) });
  player = new Player(root, model, {
    steps: numSteps(score),
    show(position) {
      now = frame(score, position);
      draw();
      lanes.moveHead(timeAt(score, position));
    },
    say(position) {
      const { round, sent } = position === now.position ? now : frame(score, position);
      return [head(score, round), score.sentences[round], sentText(score, sent)];
    },
  });
  const redraw = () => {
    lanes.draw();
    draw();
  };
  return live(root, model, redraw, {}, () => player.destroy());
}

export default { render };
