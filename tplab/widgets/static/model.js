// A model without a kernel: it holds a widget's traits, as anywidget's does.
export class PageModel {
  constructor({ values, bytes }) {
    this.traits = { ...values };
    for (const [name, text] of Object.entries(bytes)) {
      this.traits[name] = new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
    }
    this.listeners = new Map();
  }

  get(name) { return this.traits[name]; }

  set(name, value) {
    this.traits[name] = value;
    for (const listener of this.listeners.get(`change:${name}`) ?? []) listener();
  }

  on(event, listener) {
    this.listeners.set(event, [...(this.listeners.get(event) ?? []), listener]);
  }

  off(event, listener) {
    this.listeners.set(event, (this.listeners.get(event) ?? []).filter((other) => other !== listener));
  }

  // There is no answer: nothing can be computed without Python.
  get isStill() { return true; }

  save_changes() {}
  send() {}
}
