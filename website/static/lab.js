// A pipeline lab or a layout lab on a page without a kernel: Python comes in a worker when the reader first asks for something.
import { PageModel } from "./model.js";

const REMINDER = 1000; // milliseconds: the widget takes a longer silence for a kernel that is gone
const LOADING = { text: "Python is loading.", share: 0 }, COMPUTING = { text: "Python is computing." };
const PYTHON = new URL("../python/", import.meta.url);
const hint = ({ bytes, numpyFrom }) => "These controls run Python in your browser. The first time you use one, the page loads "
  + `Python from this site, about ${Math.ceil(bytes / 1e6)} MB${numpyFrom && `, and NumPy from ${new URL(numpyFrom).host}`}.`;
const OTHERWISE = "Check your connection and try again, or run the page on Colab or Binder: the buttons are at its top.";
const lastLine = (why) => why.trim().split("\n").pop();
export const FAILURES = {
  python: () => `Python could not be loaded from this site. ${OTHERWISE}`,
  numpy: (why, host) => `NumPy could not be loaded from ${host}: your network may not let you reach it. ${OTHERWISE}`,
  link: (why) => `The link asks for what this lab cannot show, so the lab is as it was: ${lastLine(why)}`,
  tplab: (why) => `Python stopped with an error: ${lastLine(why)} Please report this error and the settings you chose.`,
};

// A worker with Python. hear(data) gets its messages, fail({what}) that it could not begin.
export function startPython(hear, fail) {
  const code = `import "${new URL("worker.js", PYTHON)}";`; // a blob, so that the page's policy binds the worker
  const address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  const worker = new Worker(address, { type: "module" });
  worker.onmessage = ({ data }) => hear(data);
  worker.onerror = () => fail({ what: "python" });
  return worker;
}

export class LabModel extends PageModel {
  get isStill() { return false; }

  // room: the folder of tplab.widgets that computes the lab
  constructor(traits, room) {
    super(traits);
    this.room = room;
    this.first = this.shown = this.get("settings");
    this.worker = null;
    this.progress = LOADING;
  }

  // What the reader should know before a control is touched. Without it, the controls work just as well.
  async introduce() {
    const about = await fetch(new URL("about.json", PYTHON)).then((response) => response.json()).catch(() => null);
    if (about && !this.worker) this.tell({ progress: { text: hint(about) } });
  }

  // The state that a link asks for: first the settings, for which Python comes, and then what depends on its answer.
  restore(state) {
    this.asked = state;
    this.set("settings", state.settings);
    this.send("chosen" in state ? { choose: state.chosen } : { settings: true });
  }

  send(message) {
    this.worker ??= this.start();
    const question = { settings: this.get("settings"), message };
    this.worker.postMessage({ first: this.first, room: this.room, question });
    if (this.progress !== COMPUTING) this.tell({ progress: this.progress });
    this.reminder ??= setInterval(() => this.tell({ progress: this.progress }), REMINDER);
  }

  start() {
    return startPython((data) => this.hear(data), (why) => this.fail(why));
  }

  hear({ progress, failed, traits, answer, board }) {
    if (failed) return this.fail(failed);
    if (progress) {
      this.progress = progress;
      return this.tell({ progress });
    }
    this.rest();
    this.progress = COMPUTING;
    this.shown = traits.settings;
    if (board) this.set("board", new DataView(board.buffer, board.byteOffset, board.byteLength));
    const { settings, ...more } = this.asked ?? {};
    this.asked = null;
    for (const [name, value] of Object.entries({ ...traits, ...more })) this.set(name, value);
    this.tell(answer);
  }

  fail({ what, why, host }) {
    this.rest();
    this.worker?.terminate(); // the next question begins anew
    this.worker = null;
    this.progress = LOADING;
    this.set("settings", this.shown);
    const words = this.asked && what === "tplab" ? FAILURES.link : FAILURES[what];
    this.asked = null;
    this.tell({ failed: words(why, host) });
  }

  rest() {
    clearInterval(this.reminder);
    this.reminder = null;
  }

  tell(content) {
    for (const listener of this.listeners.get("msg:custom") ?? []) listener(content);
  }
}
