// The cells of a lab that need no framework are edited and run on its page, by Python in a worker. A cell is run after those
// above it that have not run as they are now. To stop one, the worker is ended, and with it all that was computed.
import { FAILURES, startPython } from "./lab.js";
import { PageModel } from "./model.js";

const all = [...document.querySelectorAll("article div.cell")].filter((cell) => cell.querySelector(".cell_input pre"));
const AGAIN = "Stopped. Python begins anew, so the next run starts with the first cell.";
const node = (tag, classes, text = "") => Object.assign(document.createElement(tag), { className: classes, textContent: text });

let worker = null, running = null, asked = null, queue = []; // asked: the last of the queue
const models = new Map(); // of widgets, by the id of their comm

// A widget whose kernel is the worker.
class CommModel extends PageModel {
  constructor(id, state) {
    super({ values: state, bytes: {} });
    Object.assign(this, { id, changed: {} });
  }

  get isStill() { return false; }

  set(name, value) {
    this.changed[name] = value;
    super.set(name, value);
  }

  save_changes() {
    if (Object.keys(this.changed).length) this.post({ method: "update", state: this.changed, buffer_paths: [] });
    this.changed = {};
  }

  send(content) { this.post({ method: "custom", content }); }

  post(data) { if (models.get(this.id) === this) worker?.postMessage({ comm: this.id, data: JSON.stringify(data) }); }

  hear({ method, state, content }) {
    if (method === "update") for (const [name, value] of Object.entries(state)) super.set(name, value);
    if (method === "custom") for (const listener of this.listeners.get("msg:custom") ?? []) listener(content);
  }
}

class Cell {
  constructor(box, number) {
    this.box = box;
    this.number = number;
    this.code = box.querySelector(".cell_input pre");
    this.ran = null; // the source that has run
    const tools = node("p", "run"), label = (text, act) => {
      const button = node("button", "", text);
      button.type = "button";
      button.addEventListener("click", act);
      tools.append(button);
      return button;
    };
    this.button = label("Run", () => (running && (running === this || asked === this) ? stop(this) : run(this)));
    this.button.setAttribute("aria-label", `Run cell ${number}`);
    this.says = node("span", "");
    this.says.setAttribute("role", "status");
    tools.append(this.says);
    box.querySelector(".cell_input").after(tools);
    for (const [name, value] of Object.entries({ contenteditable: "plaintext-only", spellcheck: "false", role: "textbox", "aria-multiline": "true", "aria-label": `code of cell ${number}` })) this.code.setAttribute(name, value);
    this.code.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.shiftKey || event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      run(this);
    });
  }

  get source() { return this.code.innerText.replace(/\n+$/, ""); } // a browser may write a line break as an element

  begin() {
    this.output ??= this.box.querySelector(".cell_output") ?? this.box.appendChild(node("div", "cell_output"));
    this.output.replaceChildren();
    this.text = null;
    this.ran = this.source;
    this.busy("Running.");
  }

  busy(words) {
    this.state(words);
    this.button.textContent = "Stop";
    this.button.setAttribute("aria-label", `Stop cell ${this.number}`);
  }

  end(words = "") {
    this.state(words);
    this.button.textContent = "Run";
    this.button.setAttribute("aria-label", `Run cell ${this.number}`);
  }

  state(words) { this.says.textContent = words; }

  show({ text, error, where, shown }) {
    if (text !== undefined) {
      this.text ??= this.add("output stream", node("pre", ""));
      this.text.append(text);
      return;
    }
    this.text = null;
    if (error !== undefined) {
      const details = node("details", "hide"), pre = node("pre", "", where);
      details.append(node("summary", "", "where"), pre);
      this.add("output error", node("pre", "", error));
      return this.output.lastChild.append(details);
    }
    const view = shown["application/vnd.jupyter.widget-view+json"], model = models.get(view?.model_id);
    if (model) draw(model, this.add("output", node("div", "")), shown["text/plain"]);
    else if (shown["image/png"]) this.add("output", Object.assign(new Image(), { src: `data:image/png;base64,${shown["image/png"]}`, alt: shown["text/plain"] }));
    else this.add("output text_plain", node("pre", "", shown["text/plain"]));
  }

  add(classes, what) {
    const box = node("div", classes);
    box.append(what);
    this.output.append(box);
    return what;
  }
}

async function draw(model, host, words) {
  try {
    const kind = model.get("_anywidget_id").split(".").pop();
    const { default: widget } = await import(new URL(`../python/cards/${kind}.js`, import.meta.url));
    await widget.render({ model, el: host });
  } catch {
    host.replaceWith(node("pre", "", words)); // not one of tplab's widgets
  }
}

function run(last) {
  if (asked && asked !== running) asked.end();
  asked = last;
  queue = cells.slice(0, cells.indexOf(last) + 1).filter((cell) => cell === last || cell.ran !== cell.source);
  if (last !== running) last.busy("Waiting for the cells above it.");
  if (!running) next();
}

function next() {
  running = queue.shift() ?? null;
  if (!running) return (asked = null);
  running.begin();
  worker ??= startPython(hear, fail);
  worker.postMessage({ cell: running.number, source: running.ran });
}

function hear({ progress, failed, done, comm, type, data, buffers, ...output }) {
  if (failed) return fail(failed);
  if (progress) return asked?.state(progress.text); // the running one may be hidden, as the set-up is
  if (comm) return hearWidget(comm, type, data, buffers);
  if (running === asked) running?.state("Running.");
  if (done === undefined) return running?.show(output);
  const cell = running;
  cell.end();
  if (!done) {
    [queue, cell.ran] = [[], null];
    if (asked !== cell) asked?.end("A cell above it ended with an error.");
  }
  next();
}

function hearWidget(id, type, data, buffers) {
  (data.buffer_paths ?? []).forEach(([name], place) => {
    const { buffer, byteOffset, byteLength } = buffers[place];
    data.state[name] = new DataView(buffer, byteOffset, byteLength);
  });
  if (type === "comm_open" && data.state._anywidget_id) models.set(id, new CommModel(id, data.state));
  else if (type === "comm_msg") models.get(id)?.hear(data);
}

function stop(at, words = AGAIN) {
  worker?.terminate();
  worker = null;
  models.clear();
  for (const cell of cells) cell.ran = null;
  running?.end();
  asked?.end();
  at?.end(words);
  [running, asked, queue] = [null, null, []];
}

function fail({ what, why, host }) { stop(asked, FAILURES[what](why ?? "", host)); }

const cells = all.flatMap((box, place) => (box.classList.contains("tag_runs") ? [new Cell(box, place + 1)] : []));
const places = [...document.querySelectorAll(".launch a")].filter(({ textContent }) => ["Colab", "Binder"].includes(textContent));
for (const box of cells.length ? all : []) {
  if (box.classList.contains("tag_runs")) continue;
  const line = node("p", "run", "A browser cannot run this cell: it needs torch or JAX. Run the page on ");
  places.forEach((link, place) => line.append(place ? " or " : "", link.cloneNode(true)));
  line.append(".");
  box.querySelector(".cell_input").after(line);
}
