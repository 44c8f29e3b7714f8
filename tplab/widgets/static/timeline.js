// Where the time goes: one lane per rank, with zooming.
import { card, el, hint, live, onKeys, toggle, tool } from "./shell.js";
import { timeText } from "./units.js";
import { unpack } from "./wire.js";
import { head, numSteps, positionAt, timeAt } from "./score.js";
import { Player } from "./player.js";
import { Lanes } from "./lanes.js";
import { drawLegend } from "./scene.js";

// [position of the playhead, what the ranks do there and were predicted to do, how far they are].
export function overlaySay({ times, unit, stops, said }, time) {
  const whole = times[times.length - 1], stop = stops.findLastIndex((at) => at <= time + 1e-9 * whole);
  return [`t = ${timeText(time, unit, whole)}`, ...said[stop]];
}

async function render({ model, el: host }) {
  const score = await unpack(model.get("score"));
  const root = card(host, { title: score.title, about: score.about, badge: score.badge, warning: score.warning, above: model.get("above"), label: `timeline of ${score.title}` });
  const tip = hint(root), critical = toggle("critical path", undefined, (on) => lanes.draw(Number(on)));
  let player = null;
  drawLegend(root, score, el("span.tpl-tools", {}, score.has_path ? critical : null,
    tool("−", "look from further away (−)", () => lanes.zoomAt(1 / 1.6)), tool("+", "look closer (+)", () => lanes.zoomAt(1.6)),
    tool("all", "the whole trace (0)", () => lanes.zoomAt(1e-9))));
  let resting = null, isTelling = false;
  const onView = () => isTelling || lanes.look(model.get("begin"), model.get("end"));
  function keepView(begin, end) {
    clearTimeout(resting);
    resting = setTimeout(() => {
      isTelling = true;
      for (const [name, share] of [["begin", begin], ["end", end]]) model.set(name, Math.round(share * 1e6) / 1e6);
      isTelling = false;
      model.save_changes();
    }, 150);
  }
  const lanes = new Lanes(root, root, score, 0, { hint: tip, zoom: keepView, seek: (time) => player.seek(positionAt(score, time)) });
  root.append(el("div.tpl-facts", {}, ...score.facts.map(([name, figure, note]) =>
    el("div", {}, el("div.tpl-what", {}, name), el("b", {}, figure), note ? el("span", {}, ` ${note}`) : null))));
  player = new Player(root, model, {
    steps: numSteps(score),
    show: (position) => lanes.moveHead(timeAt(score, position)),
    say(position) {
      if (score.said) return overlaySay(score, timeAt(score, position));
      const round = Math.min(Math.ceil(position), numSteps(score));
      return [head(score, round), score.sentences[round], `t = ${timeText(timeAt(score, position) - score.times[0], score.unit)}`];
    },
  });
  const zoom = (by) => () => lanes.zoomAt(by), move = (by) => () => lanes.moveTo(lanes.view[0] + by * (lanes.view[1] - lanes.view[0]));
  onKeys(root, ({ shiftKey }) => ({
    "+": zoom(1.6), "=": zoom(1.6), "-": zoom(1 / 1.6), 0: zoom(1e-9), ...(shiftKey ? { ArrowLeft: move(-0.25), ArrowRight: move(0.25) } : {}),
  }), true);
  onView();
  const events = { "change:begin": onView, "change:end": onView };
  return live(root, model, () => lanes.draw(), events, () => clearTimeout(resting), () => player.destroy());
}

export default { render };
