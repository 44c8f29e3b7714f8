// A page of to_html. Its widgets show the same thing, so they share one position. The widget that the reader touched
// last decides: if another one is playing, it stops.
import { PageModel } from "./model.js";

const models = [];
let touched = null;

class LinkedModel extends PageModel {
  set(name, value) {
    if (name !== "step") return super.set(name, value);
    const step = touched && touched !== this ? touched.get(name) : value;
    for (const model of models) PageModel.prototype.set.call(model, name, step);
  }
}

for (const traits of JSON.parse(document.getElementById("cards").textContent)) models.push(new LinkedModel(traits));
document.querySelectorAll(".card").forEach(async (el, place) => {
  for (const kind of ["pointerdown", "keydown", "click", "input"]) el.addEventListener(kind, () => { touched = models[place]; }, true);
  try {
    await renderers[place]({ model: models[place], el });
  } catch (error) {
    el.append(`This picture cannot be drawn: ${error.message}`);
  }
});
document.querySelector("footer[hidden]").hidden = false;
