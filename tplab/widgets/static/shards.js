// Which rank holds which piece: tensors cut up, and ranks with their pieces. Hovering over one shows it everywhere.
import { card, el, keepHeight, live, onKeys } from "./shell.js";
import { unpack } from "./wire.js";
import { Scene } from "./scene.js";

async function render({ model, el: host }) {
  const data = await unpack(model.get("scene"));
  const root = card(host, { title: data.title, about: data.about, badge: data.badge, label: data.title });
  const pictures = el("div.tpl-two"), say = el("p.tpl-say", { "aria-live": "polite" });
  root.append(pictures, say);
  const last = data.says.findLastIndex(([name]) => name.startsWith("rank "));
  const choose = (rank) => {
    model.set("rank", rank);
    model.save_changes();
  };
  let over = -1; // what is under the pointer
  const scenes = [0, 1].map((number) => new Scene(root, pictures, data, number, {
    over(event, rows, key) {
      if (over === (key ?? -1)) return;
      over = key ?? -1;
      show();
    },
    about: (key) => [["", data.says[key].join(" ")]],
    press: (key) => key <= last && choose(key === model.get("rank") ? -1 : key),
  }));
  for (const { canvas, table } of scenes) canvas.style.flex = `1 1 ${0.75 * table.width}px`;

  function show() {
    const position = over >= 0 ? over : model.get("rank");
    for (const scene of scenes) scene.draw(position);
    const [name, words] = data.says[position] ?? ["", data.sentence];
    const text = name ? ` ${words}` : words;
    if (say.textContent !== name + text) say.replaceChildren(el("b", {}, name), text);
  }

  const goTo = (next) => () => {
    over = -1;
    choose(next);
  };
  onKeys(root, () => {
    const now = model.get("rank");
    return { ArrowRight: goTo(Math.min(now + 1, last)), ArrowLeft: goTo(now < 0 ? last : Math.max(now - 1, 0)), Home: goTo(0), End: goTo(last), Escape: goTo(-1) };
  });
  const [, letGo] = keepHeight(root, say, () => [data.sentence, ...data.says.map((pair) => pair.join(" "))]);
  return live(root, model, show, { "change:rank": show }, letGo);
}

export default { render };
