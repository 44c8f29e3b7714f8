// A pipeline lab on a page without a kernel: Python comes in a worker when the reader first asks for something.
import { PageModel } from "./model.js";

const REMINDER = 1000; // milliseconds: the widget takes a longer silence for a kernel that is gone
const LOADING = { text: "Python is loading.", share: 0 }, COMPUTING = { text: "Python is computing." };
const HINT = "These controls run Python in your browser. The first time you use one, the page loads Python from this site, "
  + "about 14 MB, and NumPy from cdn.jsdelivr.net.";
const OTHERWISE = "Check your connection and try again, or use the buttons at the top of the page to run it elsewhere.";
const FAILURES = {
  python: () => `Python could not be loaded from this site. ${OTHERWISE}`,
  numpy: (why, host) => `NumPy could not be loaded from ${host}, the one host besides this site that the lab needs: your `
    + `network may not let you reach it. ${OTHERWISE}`,
  tplab: (why) => `Python stopped with an error: ${why.trim().split("\n").pop()} Please report this error and the settings you chose.`,
};

export class LabModel extends PageModel {
  constructor(traits) {
    super(traits);
    this.first = this.shown = this.get("settings");
    this.worker = null;
    this.progress = LOADING;
  }

  // What the reader should know before a control is touched.
  introduce() { this.tell({ progress: { text: HINT } }); }

  send(message) {
    this.worker ??= this.start();
    const question = { settings: this.get("settings"), message, colour: this.get("colour") };
    this.worker.postMessage({ first: this.first, question });
    if (this.progress !== COMPUTING) this.tell({ progress: this.progress });
    this.reminder ??= setInterval(() => this.tell({ progress: this.progress }), REMINDER);
  }

  start() {
    const worker = new Worker(new URL("../python/worker.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data }) => this.hear(data);
    worker.onerror = () => this.fail({ what: "python" });
    return worker;
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
    for (const [name, value] of Object.entries(traits)) this.set(name, value);
    this.tell(answer);
  }

  fail({ what, why, host }) {
    this.rest();
    this.worker?.terminate(); // the next question begins anew
    this.worker = null;
    this.progress = LOADING;
    this.set("settings", this.shown);
    this.tell({ failed: FAILURES[what](why, host) });
  }

  rest() {
    clearInterval(this.reminder);
    this.reminder = null;
  }

  tell(content) {
    for (const listener of this.listeners.get("msg:custom") ?? []) listener(content);
  }
}
