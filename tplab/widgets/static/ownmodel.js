// Controls for the sizes of the reader's own model. Its setting is a text: "layers=32, hidden=4096, ...".
import { el } from "./shell.js";

const YOUR_OWN = "your own …";

export const isOwn = (value) => String(value).includes("=");

export class OwnModel {
  // fields: [name, words, most] of each size; ask(text): called with changed sizes; fail(words): one is not a number.
  constructor(fields, { ask, fail }) {
    this.option = el("option", { value: YOUR_OWN }, YOUR_OWN);
    this.inputs = fields.map(([name, words, most]) => {
      const node = el("input.tpl-select", { type: "text", inputmode: "numeric", autocomplete: "off", "aria-label": words, onchange: () => {
        const number = node.value.replaceAll(/[,\s]/g, "");
        if (!/^\d+$/.test(number) || Number(number) > most) return fail(`${words} is “${node.value}”; it must be a whole number, ${most.toLocaleString("en")} at most.`);
        this.sizes[name] = Number(number);
        ask(this.text);
      } });
      node.addEventListener("keydown", (event) => event.stopPropagation()); // keys typed here choose no plans
      return [name, node, el("label.tpl-setting", {}, el("span", {}, words), node)];
    });
    this.box = el("div.tpl-settings", { role: "group", "aria-label": "sizes of your own model, made as Llama" }, ...this.inputs.map(([, , box]) => box));
    this.box.hidden = true;
  }

  get text() { return Object.entries(this.sizes).map(([name, size]) => `${name}=${size}`).join(", "); }

  // The sizes of the model that is shown, or of the one that is requested.
  set(sizes) {
    this.sizes = { ...sizes };
    for (const [name, node] of this.inputs) if (document.activeElement !== node) node.value = sizes[name].toLocaleString("en");
  }

  // The setting of the control "model": its option, and whether the sizes are shown.
  follow(setting) {
    this.box.hidden = !isOwn(setting);
    if (isOwn(setting)) this.set(Object.fromEntries(setting.split(",").map((pair) => pair.trim().split("=")).map(([name, size]) => [name, Number(size)])));
    return isOwn(setting) ? YOUR_OWN : setting;
  }
}
