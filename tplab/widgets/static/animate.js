// One card, one trace: the ranks, what each of them holds, and the timeline, under one playhead.
import { card, el, followTheme, hint } from "./shell.js";
import { numberText } from "./units.js";
import { unpack } from "./wire.js";
import { frame, head, positionAt, sentText, timeAt, values, numSteps } from "./score.js";
import { Player } from "./player.js";
import { Ranks, describe } from "./ranks.js";
import { Table } from "./table.js";
import { Lanes } from "./lanes.js";

function numbersOf(score, hold) {
  const numbers = Array.from(values(score, hold), numberText);
  return numbers.length > 12 ? `${numbers.slice(0, 12).join(" ")} … (${numbers.length})` : numbers.join(" ");
}

// What the marks in the picture mean.
function legend(score) {
  const key = (kind, text) => el("span.tpl-key", {}, el(`i.tpl-key${kind}`), text);
  if (score.pipeline) {
    return [key("f", "forward; activations on their way"), key("gradients", "gradients on their way"), key("b", "backward"), key("kept", "activations that a rank holds")];
  }
  if (!score.items.length) return [];
  const sums = score.items.some((item) => item[4].some((ranks) => ranks.length > 1));
  const named = score.ranks <= 8 && !score.layout?.numbers; // as Table writes them
  return [key("kept", "held"), key("coming", "arriving"), sums ? key("passed", "passed on") : null,
    sums ? key("parts", `${named ? "0+1: the ranks " : ""}whose parts are in it`) : null, score.computes ? key("elementwise", "computing") : null].filter(Boolean);
}

async function render({ model, el: host }) {
  const score = await unpack(model.get("score"));
  const root = card(host, { title: score.title, about: score.about, badge: score.badge, warning: score.warning, label: `animation of ${score.title}` });
  const tip = hint(root);
  let now = frame(score, model.get("step"));
  const over = (event, what) => {
    if (event) tip.show(event, describe(score, now, what, (hold) => numbersOf(score, hold)));
    else tip.hide();
  };
  root.append(el("div.tpl-legend", {}, ...legend(score)));
  const two = el("div.tpl-two");
  root.append(two);
  const ranks = new Ranks(two, score, over);
  const table = score.items.length ? new Table(root, two, score, over) : null;
  let player = null;
  const lanes = new Lanes(root, root, score, { hint: tip, seek: (time) => player.seek(positionAt(score, time)) });
  player = new Player(root, model, {
    steps: numSteps(score),
    show(position) {
      now = frame(score, position);
      ranks.draw(now);
      table?.draw(now);
      lanes.moveHead(timeAt(score, position));
    },
    say(position) {
      const { round, sent } = position === now.position ? now : frame(score, position);
      return [head(score, round), score.sentences[round], sentText(score, sent)];
    },
  });
  const unfollow = followTheme(root, () => {
    lanes.draw();
    table?.draw(now, true);
  });
  lanes.draw();
  return () => {
    unfollow();
    lanes.destroy();
    player.destroy();
  };
}

export default { render };
