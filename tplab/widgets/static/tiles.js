// Pictures at every position of a playhead, and the timeline of a run below them. The pictures repeat after `period`
// steps, for another pass.
import { card, el, hint, live } from "./shell.js";
import { timeText } from "./units.js";
import { positionAt, timeAt } from "./score.js";
import { unpack } from "./wire.js";
import { Lanes } from "./lanes.js";
import { Player } from "./player.js";
import { Scene, drawLegend } from "./scene.js";

async function render({ model, el: host }) {
  const data = await unpack(model.get("scene"));
  const score = data.times.length ? await unpack(model.get("score")) : null;
  const root = card(host, { title: data.title, about: data.about, label: data.sentence, badge: score?.badge });
  drawLegend(root, data, data.note);
  const row = el("div.tpl-tiles", { style: `grid-template-columns:repeat(auto-fit,minmax(min(100%,${Math.min(data.tables[0].width, 270)}px),1fr))` });
  root.append(row);
  const tip = hint(root), passOf = (position) => Math.floor(Math.max(Math.ceil(position - 1e-9) - 1, 0) / data.period);
  let player = null;
  const press = (step) => player.seek(step + passOf(player.position) * data.period);
  const panels = Array.from({ length: data.scenes }, (_, number) => new Scene(root, row, data, number, { over: tip.show, press }));
  const lanes = score && new Lanes(root, root, score, 0, { hint: tip, hasVeil: true, seek: (time) => player.seek(positionAt(data, time)) });
  const draw = (position) => {
    for (const panel of panels) panel.draw(position - passOf(position) * data.period);
  };
  player = new Player(root, model, {
    steps: data.says.length - 1,
    seconds: 1.6,
    show(position) {
      draw(position);
      lanes?.moveHead(timeAt(data, position));
    },
    say(position) {
      const [head, words] = data.says[Math.ceil(position - 1e-9)];
      return [head, words, lanes ? `t = ${timeText(timeAt(data, position) - data.times[0], score.unit)}` : ""];
    },
  });
  const redraw = () => {
    draw(player.position);
    lanes?.draw();
  };
  return live(root, model, redraw, {}, () => player.destroy());
}

export default { render };
