// The ranks on their mesh, the links between them, and the chunks on their way.
import { el } from "./shell.js";
import { bytesText } from "./units.js";
import { COLLECTIVE, OWN, PASSED, UNSURE, carried, cellText, flightColour, holdName, itemColour, members, partOf, pieceText, pool } from "./score.js";

const SLOT = 17;

// A point of a quadratic curve [x0, y0, cx, cy, x1, y1].
function onCurve([x0, y0, cx, cy, x1, y1], u) {
  const a = (1 - u) ** 2, b = 2 * u * (1 - u), c = u * u;
  return [a * x0 + b * cx + c * x1, a * y0 + b * cy + c * y1];
}

// What is written on a slot: a name, or the number itself where each rank has just one.
const onSlot = (score, hold) => (score.layout.numbers ? cellText(score, hold).label : holdName(score, hold));

export class Ranks {
  // over(event, what): the pointer is over {flight} or {rank, item} or {rank}; over(null) when it has left.
  constructor(host, score, over) {
    this.score = score;
    const { layout } = score;
    this.links = new Map(layout.links.map(([from, to, ...curve]) => [`${from}>${to}`, curve]));
    const svg = el("svg.tpl-ranks", {
      viewBox: `0 0 ${layout.width} ${layout.height}`, role: "img", "aria-label": `${score.ranks} ranks and the links between them`,
    });
    const scale = Math.min(1.15, Math.max(1, 430 / layout.width)); // small pictures may be larger, large ones smaller
    svg.style.flex = `1 1 ${0.78 * layout.width}px`;
    svg.style.maxWidth = `min(100%, ${scale * layout.width}px)`;
    this.bands = el("g");
    this.flights = el("g");
    const links = el("g"), ranks = el("g");
    if (this.links.size <= 300) for (const curve of this.links.values()) links.append(...this.link(curve, layout.boxes));
    for (const [x, y, text] of layout.labels) links.append(el("text.tpl-axis", { x, y }, text));
    this.ranks = layout.centres.map((centre, rank) => this.rank(ranks, rank, centre, over));
    this.pool = [];
    this.over = over;
    svg.append(links, this.bands, ranks, this.flights);
    host.append(svg);
  }

  link([x0, y0, cx, cy, x1, y1], head) {
    const parts = [el("path.tpl-link", { d: `M${x0} ${y0}Q${cx} ${cy} ${x1} ${y1}` })];
    if (!head) return parts;
    const angle = Math.atan2(y1 - cy, x1 - cx);
    const wing = (turn) => `${x1 - 6.5 * Math.cos(angle + turn)} ${y1 - 6.5 * Math.sin(angle + turn)}`;
    return [...parts, el("path.tpl-arrow", { d: `M${wing(0.55)}L${x1} ${y1}L${wing(-0.55)}` })];
  }

  rank(host, rank, [x, y], over) {
    const { boxes, wide, size: [width, height], slots } = this.score.layout;
    const group = el("g.tpl-rank");
    host.append(group);
    if (!boxes) {
      const dot = el("circle.tpl-dot", { cx: x, cy: y, r: width / 2 });
      const share = el("circle.tpl-share.tpl-turned", { cx: x, cy: y, r: width / 2 - 1.5, pathLength: 1 });
      group.append(dot, share, el("text.tpl-dotname", { x, y }, rank));
      group.addEventListener("pointermove", (event) => over(event, { rank }));
      group.addEventListener("pointerleave", () => over(null));
      return { group, share, slots: [] };
    }
    const few = slots[rank].length;
    const name = el("text.tpl-rankname", { x, y: few ? y - height / 2 + 14 : y - 3 }, `rank ${rank}`);
    group.append(el("rect.tpl-box", { x: x - width / 2, y: y - height / 2, width, height, rx: 10 }), name);
    // Where there are too many items for slots, a bar says how much of them all the rank holds.
    const bar = { x1: x - width / 2 + 9, x2: x + width / 2 - 9, y1: y + height / 2 - 8, y2: y + height / 2 - 8 };
    const share = few || !this.score.items.length ? null : el("line.tpl-share", { ...bar, pathLength: 1 });
    if (share) group.append(el("line.tpl-shareof", bar), share);
    const cells = slots[rank].map(([item, left, top]) => {
      const slot = el("g.tpl-slot", { style: `--c:${itemColour(this.score, item)}`, transform: `translate(${left} ${top})` },
        el("rect", { width: wide, height: SLOT, rx: 5 }), el("rect.tpl-gauge", { width: wide, height: SLOT, rx: 5 }),
        el("text", { x: wide / 2, y: SLOT / 2 }, this.score.items[item][0]));
      slot.addEventListener("pointermove", (event) => over(event, { rank, item }));
      slot.addEventListener("pointerleave", () => over(null));
      group.append(slot);
      return { item, slot, gauge: slot.children[1], state: "" };
    });
    return { group, name, share, slots: cells };
  }

  draw(now) {
    const { score } = this, numItems = score.items.length;
    const working = new Map(now.computing.map(([row]) => [score.rank[row], score.ops[score.op[row]]]));
    const busy = new Set([...working.keys(), ...now.together.map(([row]) => score.rank[row])]);
    this.ranks.forEach((shape, rank) => {
      shape.group.classList.toggle("tpl-busy", busy.has(rank));
      if (shape.name) {
        const text = working.get(rank) ?? `rank ${rank}`;
        const most = Math.floor(score.layout.size[0] / 6.6) - 2;
        const name = working.has(rank) && score.pipeline ? `rank ${rank}: ${text}` : working.has(rank) ? `${rank} · ${text.length > most ? `${text.slice(0, most - 1)}…` : text}` : text;
        if (shape.name.textContent !== name) shape.name.textContent = name;
      }
      for (const slot of shape.slots) this.drawSlot(slot, rank, now.cells[rank * numItems + slot.item], now);
      if (shape.share) this.drawShare(shape, rank, now);
    });
    this.drawBands(now);
    now.flights.forEach(([row, u], place) => this.drawFlight(place, row, u, now));
    for (let place = now.flights.length; place < this.pool.length; place++) this.pool[place].group.style.display = "none";
  }

  drawSlot(slot, rank, hold, now) {
    const arriving = now.arriving.has(rank * this.score.items.length + slot.item);
    const state = `${hold}${arriving}`;
    if (slot.state === state) return;
    slot.state = state;
    const held = hold >= 0, passed = held && this.score.hold_state[hold] === PASSED;
    const share = held && !passed ? members(this.score, hold).length / pool(this.score, hold).length : 0;
    slot.slot.setAttribute("class", `tpl-slot${passed ? " tpl-passed" : held ? " tpl-held" : ""}${arriving ? " tpl-arriving" : ""}`);
    slot.gauge.setAttribute("height", SLOT * share);
    slot.gauge.setAttribute("y", SLOT * (1 - share));
    slot.slot.lastChild.textContent = held ? onSlot(this.score, hold) : this.score.items[slot.item][0];
  }

  drawShare(shape, rank, now) {
    const { score } = this, numItems = score.items.length;
    let sum = 0;
    for (let item = 0; item < numItems; item++) {
      const hold = now.cells[rank * numItems + item];
      if (hold >= 0 && score.hold_state[hold] !== PASSED) sum += this.shareOf(hold);
    }
    shape.share.setAttribute("stroke-dasharray", `${sum / Math.max(numItems, 1)} 1`);
  }

  shareOf(hold) {
    this.shares ??= new Float32Array(this.score.hold_set.length).fill(-1);
    if (this.shares[hold] < 0) {
      const inside = members(this.score, hold);
      this.shares[hold] = inside.length / pool(this.score, hold, inside).length;
    }
    return this.shares[hold];
  }

  // A band through the ranks that work together, filling as they do.
  drawBands(now) {
    const groups = new Map(now.together.map(([row, u]) => [this.score.group[row], [row, u]]));
    const key = [...groups.keys()].join();
    if (key !== this.bandKey) {
      this.bandKey = key;
      this.bands.replaceChildren(...[...groups.keys()].map((group) => {
        const points = this.score.groups[group].map((rank) => this.score.layout.centres[rank].join(" "));
        const d = `M${points.join("L")}${points.length > 2 ? "Z" : ""}`;
        return el("g", {}, el("path.tpl-band", { d }), el("path.tpl-bandon", { d, pathLength: 1 }));
      }));
    }
    [...groups.values()].forEach(([, u], place) => {
      this.bands.children[place].lastChild.setAttribute("stroke-dasharray", `${u} 1`);
    });
  }

  drawFlight(place, row, u, now) {
    const { score } = this, curve = this.links.get(`${score.rank[row]}>${score.peer[row]}`);
    const flight = (this.pool[place] ??= this.newFlight());
    if (!curve) return;
    const [x, y] = onCurve(curve, u);
    flight.group.style.display = "";
    flight.group.setAttribute("transform", `translate(${x.toFixed(2)} ${y.toFixed(2)})`);
    if (flight.row === row) return;
    flight.row = row;
    const item = score.item[row];
    flight.group.setAttribute("style", `--c:${flightColour(score, row)}`);
    if (!flight.text) return;
    const hold = item >= 0 ? now.cells[score.rank[row] * score.items.length + item] : -1;
    const text = score.layout.numbers && hold >= 0 ? onSlot(score, hold) : item >= 0 ? score.items[item][0] : "";
    const half = text.length < 3 ? 11 : 15;
    flight.text.textContent = text;
    flight.group.firstChild.setAttribute("x", -half);
    flight.group.firstChild.setAttribute("width", 2 * half);
  }

  newFlight() {
    const flight = { row: -1 };
    if (this.score.layout.boxes) {
      flight.text = el("text", {});
      flight.group = el("g.tpl-flight", {}, el("rect", { x: -11, y: -11, width: 22, height: 22, rx: 6 }), flight.text);
    } else flight.group = el("g.tpl-flight", {}, el("circle", { r: 4.5 }));
    flight.group.addEventListener("pointermove", (event) => this.over(event, { flight: flight.row }));
    flight.group.addEventListener("pointerleave", () => this.over(null));
    this.flights.append(flight.group);
    return flight;
  }
}

// What the hint says about a chunk on its way, a cell of the table or a rank.
export function describe(score, now, { flight, rank, item }, values) {
  if (flight >= 0) {
    item = score.item[flight];
    const from = score.rank[flight];
    const hold = item >= 0 ? now.cells[from * score.items.length + item] : -1;
    return [["", `${score.ops[score.op[flight]]}: rank ${from} sends ${carried(score, flight)} to rank ${score.peer[flight]}`],
      ["tensor", score.shapes[score.shape[flight]]], ["sends", bytesText(score.bytes[flight])], ...contents(score, hold, values),
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
  return [["", `rank ${rank} ${passed ? "has passed on" : "holds"} ${what}${which}`], ["started on", born], ...contents(score, hold, values)];
}

// What a rank does now, and what it has sent.
function aboutRank(score, now, rank) {
  const does = [...now.computing, ...now.together].filter(([row]) => score.rank[row] === rank).map(([row]) => score.ops[score.op[row]]);
  const sends = now.flights.filter(([row]) => score.rank[row] === rank).map(([row]) => `to rank ${score.peer[row]}`);
  return [["", `rank ${rank}`], ["runs", does.join(", ")], ["sends", sends.join(", ")], ["has sent", bytesText(now.sent[rank])]];
}

function contents(score, hold, values) {
  if (hold < 0) return [];
  if (score.hold_state[hold] === UNSURE) return [["made by", `ranks ${members(score, hold).join(", ")}; whose data they put in is not known`], ["values", values(hold)]];
  const { inside, all } = cellText(score, hold);
  const joint = all.length > 1 ? `rank${inside.length === 1 ? "" : "s"} ${inside.join(", ")}${inside.length === all.length ? " (all of them)" : ` (${inside.length} of ${all.length})`}` : "";
  return [["data of", joint], ["values", values(hold)]];
}
