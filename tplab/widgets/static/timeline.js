// Where the time goes: one lane per rank, on which one can look closer.
import { card, el, followTheme, hint } from "./shell.js";
import { plain, rangeText, timeText } from "./units.js";
import { unpack } from "./wire.js";
import { COLLECTIVE, COMPUTE, SEND, head, numSteps, positionAt, timeAt } from "./score.js";
import { Player } from "./player.js";
import { Lanes } from "./lanes.js";
import { OverlayLanes, overlayNow, overlaySay } from "./overlay.js";

// [what, figure, note] of a whole trace.
export function facts(score, busy) {
  if (score.overlay) return score.facts;
  const { kind, start, end } = score, span = score.times[numSteps(score)] - score.times[0];
  const found = [["makespan", timeText(span, score.unit), score.unit === "steps" ? "steps" : ""]];
  if (score.computes) {
    const idle = 100 * (1 - busy.reduce((sum, share) => sum + share, 0) / busy.length);
    found.push(["busy", `${rangeText(busy.map((share) => Math.round(1000 * share) / 10), plain)}%`, "of the makespan, per rank"]);
    found.push(["idle", `${plain(Math.round(10 * idle) / 10)}%`, "of all ranks' time"]);
  }
  let compute = 0, all = 0;
  for (const row of score.critical) {
    all += end[row] - start[row];
    if (kind[row] === COMPUTE) compute += end[row] - start[row];
  }
  if (score.critical.length) {
    found.push(["critical path", score.critical.length.toLocaleString("en"), `bars, ${plain(Math.round((100 * compute) / (all || 1)))}% of it computing`]);
  }
  return found;
}

// The kinds of what is computed, as far as they are there.
function workKeys(score, key) {
  return score.pipeline ? [key("f", "F forward"), key("b", "B backward: I, then W")] : score.work.map(([kind, text]) => key(kind, text));
}

// What travels, as far as anything does: collectives by what they do, messages by what they carry.
function talkKeys(score, key) {
  const carry = "in the colour of what they carry", sends = score.kind.includes(SEND);
  const names = [[SEND, "messages"], [COLLECTIVE, "collectives"]].filter(([kind]) => score.kind.includes(kind)).map(([, name]) => name);
  if (score.pipeline) return names.length ? [key("send", `${names.join(" and ")}, ${carry}`)] : [];
  return [...score.talk.map(([kind, text]) => key(kind, text)), ...(sends ? [key("hues", `messages, ${carry}`)] : [])];
}

function busyShares(score) {
  const busy = new Array(score.ranks).fill(0), span = score.times[numSteps(score)] - score.times[0];
  score.kind.forEach((kind, row) => {
    if (kind === COMPUTE) busy[score.rank[row]] += score.end[row] - score.start[row];
  });
  return busy.map((time) => time / (span || 1));
}

// What the marks in the picture mean.
function keys(score) {
  const key = (kind, text) => el("span.tpl-key", {}, el(`i.tpl-key${kind}`), text);
  if (!score.overlay) return [...workKeys(score, key), ...talkKeys(score, key), score.computes ? key("idle", "idle") : null,
    score.measured ? key("diamond", `measured by ${score.by}`) : null];
  const kinds = ["F", "B", "I", "W"].filter((_, kind) => score.kind.includes(kind));
  const says = { F: "F forward", B: "B backward: I, then W", I: "I input gradient", W: "W weight gradient" };
  return [...kinds.map((kind) => key(kind.toLowerCase(), says[kind])), el("span.tpl-key", {}, `${score.word}, above`), key("due", "predicted, beneath"),
    score.other_rank.length ? key("work", "other work") : null, key("idle", "idle")];
}

async function render({ model, el: host }) {
  const score = await unpack(model.get("score"));
  const root = card(host, { title: score.title, about: score.about, badge: score.badge, warning: score.warning, label: `timeline of ${score.title}` });
  const over = score.overlay, tip = hint(root), busy = over ? null : busyShares(score);
  const tool = (text, label, act) => el("button.tpl-button.tpl-tool", { type: "button", title: label, "aria-label": label, onclick: act }, text);
  const critical = el("button.tpl-button.tpl-tool", { type: "button", "aria-pressed": "false" }, "critical path");
  critical.addEventListener("click", () => {
    const on = critical.getAttribute("aria-pressed") !== "true";
    critical.setAttribute("aria-pressed", on);
    lanes.showCritical(on);
  });
  let player = null;
  const tools = el("div.tpl-tools", {}, ...keys(score), el("span.tpl-space"), score.critical?.length ? critical : null,
    tool("−", "look from further away (−)", () => lanes.zoomAt(1 / 1.6)), tool("+", "look closer (+)", () => lanes.zoomAt(1.6)),
    tool("all", "the whole trace (0)", () => lanes.zoomAt(1e-9)));
  root.append(tools);
  let resting = null, isTelling = false;
  const onView = () => isTelling || lanes.show(model.get("begin"), model.get("end"));
  function keepView(begin, end) {
    clearTimeout(resting);
    resting = setTimeout(() => {
      isTelling = true;
      for (const [name, share] of [["begin", begin], ["end", end]]) model.set(name, Math.round(share * 1e6) / 1e6);
      isTelling = false;
      model.save_changes();
    }, 150);
  }
  const lanes = new (over ? OverlayLanes : Lanes)(root, root, score, {
    hint: tip, zoom: keepView, busy: score.computes ? busy : null, seek: (time) => player.seek(positionAt(score, time)),
  });
  root.append(el("div.tpl-facts", {}, ...facts(score, busy).map(([name, figure, note]) =>
    el("div", {}, el("div.tpl-what", {}, name), el("b", {}, figure), note ? el("span", {}, ` ${note}`) : null))));
  player = new Player(root, model, {
    steps: numSteps(score),
    show: (position) => lanes.moveHead(timeAt(score, position)),
    say(position) {
      if (over) return overlaySay(score, overlayNow(score, position));
      const round = Math.min(Math.ceil(position), numSteps(score));
      return [head(score, round), score.sentences[round], `t = ${timeText(timeAt(score, position) - score.times[0], score.unit)}`];
    },
  });
  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const span = lanes.view[1] - lanes.view[0];
    const act = {
      "+": () => lanes.zoomAt(1.6), "=": () => lanes.zoomAt(1.6), "-": () => lanes.zoomAt(1 / 1.6), 0: () => lanes.zoomAt(1e-9),
    }[event.key] ?? (event.shiftKey ? {
      ArrowLeft: () => lanes.moveTo(lanes.view[0] - span / 4), ArrowRight: () => lanes.moveTo(lanes.view[0] + span / 4),
    }[event.key] : null);
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  });
  const unfollow = followTheme(root, () => lanes.draw());
  lanes.draw();
  onView();
  for (const name of ["begin", "end"]) model.on(`change:${name}`, onView);
  return () => {
    clearTimeout(resting);
    for (const name of ["begin", "end"]) model.off(`change:${name}`, onView);
    unfollow();
    lanes.destroy();
    player.destroy();
  };
}

export default { render };
