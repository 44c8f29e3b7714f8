// The tasks of a lab: one of them, its hints one at a time, and whether it is solved. Python provides the texts and
// decides; solved tasks are remembered in this browser.
import { el, tool } from "./shell.js";

const KEPT = "tplab.solved"; // names of tasks, in the browser's storage

// A page in a frame of another site may have no storage; then they are forgotten with the page.
function solvedTasks() {
  try {
    return new Set(JSON.parse(localStorage.getItem(KEPT) ?? "[]"));
  } catch {
    return new Set();
  }
}

function keepSolved(names) {
  try {
    localStorage.setItem(KEPT, JSON.stringify([...names]));
  } catch { /* see above */ }
}

export class Tasks {
  // ask(settings): requests these settings from Python when a task is chosen or restarted.
  constructor(model, ask) {
    Object.assign(this, { model, tasks: model.get("choices").tasks, solved: new Set(), hinted: new Map() });
    this.options = this.tasks.map(({ name }) => el("option", { value: name }));
    this.select = el("select.tpl-select", { "aria-label": "task", onchange: () => begin(this.select.value) }, el("option", { value: "" }, "choose a task"), ...this.options);
    this.count = el("span");
    this.again = tool("start again", "set the controls as the task begins", () => begin(this.task.name));
    this.hint = tool("hint", "show one more hint", () => {
      this.hinted.set(this.task.name, this.shown + 1);
      this.show(this.settings);
    });
    const [text, says, hints] = [el("p.tpl-asked"), el("p.tpl-verdict", { role: "status" }), el("ol.tpl-hints", { "aria-live": "polite" })];
    Object.assign(this, { text, says, hints });
    this.box = el("div.tpl-tasks", { role: "group", "aria-label": "tasks" },
      el("div.tpl-tools", {}, el("label", {}, "task ", this.select), this.count, el("span.tpl-space"), this.hint, this.again), text, says, hints);
    this.box.addEventListener("keydown", (event) => event.stopPropagation()); // keys typed here do not reach the picture
    this.box.hidden = Boolean(model.isStill); // without computing, nothing is solved
    const begin = (name) => ask({ task: name, ...this.tasks.find((task) => task.name === name)?.start });
  }

  get task() { return this.tasks.find(({ name }) => name === this.settings.task); }
  get shown() { return this.hinted.get(this.task.name) ?? 0; } // how many hints

  // settings: the requested ones; isWaiting: the verdict on them has not arrived yet; isLost: no Python takes them, and
  // the text of the chosen task needs none
  show(settings, isWaiting = false, isLost = false) {
    this.settings = isLost ? { ...settings, task: this.settings?.task } : settings;
    const { task } = this, verdict = this.model.get("verdict");
    const isOf = Boolean(task) && verdict.task === task.name, before = solvedTasks();
    this.solved = new Set([...this.solved, ...before]);
    if (isOf && verdict.is_solved && !before.has(task.name)) keepSolved(this.solved.add(task.name));
    this.tasks.forEach(({ name, lab, title }, place) => { this.options[place].textContent = `lab ${lab} · ${title}${this.solved.has(name) ? " ✓" : ""}`; });
    this.select.value = task?.name ?? "";
    this.count.textContent = `${this.tasks.filter(({ name }) => this.solved.has(name)).length} of ${this.tasks.length} solved`;
    for (const node of [this.hint, this.again, this.text, this.says, this.hints]) node.hidden = !task;
    const words = isOf ? verdict.text : "";
    if (this.says.textContent !== words) this.says.textContent = words;
    this.says.classList.toggle("tpl-waits", isWaiting);
    this.says.dataset.solved = isOf && verdict.is_solved;
    this.text.textContent = task?.text ?? "";
    const hints = task ? task.hints.slice(0, this.shown) : [];
    if (hints.length !== this.hints.children.length || hints[0] !== this.hints.firstChild?.textContent) this.hints.replaceChildren(...hints.map((words) => el("li", {}, words)));
    if (task) {
      this.hint.disabled = this.shown === task.hints.length;
      this.hint.textContent = this.shown ? `hint ${Math.min(this.shown + 1, task.hints.length)} of ${task.hints.length}` : "hint";
    }
  }
}
