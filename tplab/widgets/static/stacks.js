// The memory of the chosen rank over time, as stacked areas.
import { card, el, hint, live, onKeys } from "./shell.js";
import { unpack } from "./wire.js";
import { Scene, drawLegend, hintText } from "./scene.js";

async function render({ model, el: host }) {
  const data = await unpack(model.get("scene")), { ranks } = data;
  const root = card(host, { title: data.title, about: data.about, label: data.title });
  const choice = el("select.tpl-select", { "aria-label": "rank", onchange: () => choose(Number(choice.value)) },
    ...ranks.map((text, rank) => el("option", { value: rank }, text)));
  drawLegend(root, data, choice);
  const figure = el("div.tpl-curves.tpl-stacks", { tabindex: "0", role: "group",
    "aria-label": "memory over time: left and right arrow keys go through moments, up and down through ranks" });
  const says = el("p.tpl-say", { "aria-live": "polite" });
  root.append(figure, says);
  const tip = hint(root);
  const scene = new Scene(root, figure, data, 0, { over: tip.show, cursor: true });

  function choose(rank) {
    model.set("rank", Math.min(Math.max(rank, 0), ranks.length - 1));
    model.save_changes();
    draw();
  }

  function draw() {
    const rank = model.get("rank");
    choice.value = rank;
    says.textContent = data.says[rank].replace(/^r/, "R");
    scene.canvas.setAttribute("aria-label", data.says[rank]);
    tip.hide();
    scene.draw(rank);
  }

  figure.addEventListener("blur", () => scene.leave());
  figure.addEventListener("keydown", ({ key }) => key === "Escape" && scene.leave());
  const turn = (by) => () => choose(model.get("rank") + by), step = (by) => () => { says.textContent = hintText(scene.step(by)); };
  onKeys(figure, () => ({ ArrowUp: turn(1), ArrowDown: turn(-1), ArrowLeft: step(-1), ArrowRight: step(1), Home: step(-Infinity), End: step(Infinity) }));
  return live(root, model, draw, { "change:rank": draw });
}

export default { render };
