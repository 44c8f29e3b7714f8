// A page without a kernel: for each widget a model that keeps its traits, as anywidget's does.
class PageModel {
  constructor({ values, bytes }, all) {
    this.traits = { ...values };
    for (const [name, text] of Object.entries(bytes)) {
      this.traits[name] = new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
    }
    this.listeners = new Map();
    this.all = all;
  }

  get(name) { return this.traits[name]; }

  // The widgets of a page show one thing, so a step of one is a step of all. The one that the reader touched last
  // decides: where another still plays, that one stops.
  set(name, value) {
    const step = name === "step";
    if (step && touched && touched !== this) value = touched.get(name);
    for (const model of step ? this.all : [this]) {
      model.traits[name] = value;
      for (const listener of model.listeners.get(`change:${name}`) ?? []) listener();
    }
  }

  on(event, listener) {
    this.listeners.set(event, [...(this.listeners.get(event) ?? []), listener]);
  }

  off(event, listener) {
    this.listeners.set(event, (this.listeners.get(event) ?? []).filter((other) => other !== listener));
  }

  save_changes() {}
  send() {}
}

const models = [];
let touched = null;
for (const traits of JSON.parse(document.getElementById("cards").textContent)) models.push(new PageModel(traits, models));
document.querySelectorAll(".card").forEach(async (el, place) => {
  for (const kind of ["pointerdown", "keydown", "click", "input"]) el.addEventListener(kind, () => { touched = models[place]; }, true);
  try {
    await renderers[place]({ model: models[place], el });
  } catch (error) {
    el.append(`This picture cannot be drawn: ${error.message}`);
  }
});
document.querySelector("footer[hidden]").hidden = false;
