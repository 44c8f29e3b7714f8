// Plans for training a model: seconds against memory; the chosen one compared with the best, its step and its memory.
import { card, el, hint, live, onKeys, tool } from "./shell.js";
import { plain } from "./units.js";
import { unpack } from "./wire.js";
import { Gantt } from "./gantt.js";
import { NodesView, nodesLegend } from "./nodes.js";
import { Scene, drawLegend } from "./scene.js";
import { Tasks } from "./tasks.js";

const SILENT_AFTER = 8000; // milliseconds
const NO_KERNEL = "No kernel answers, so nothing changes here. Run this cell to use its controls; plans can be chosen all the same.";
const NO_PYTHON = "This page has no Python behind it, so its settings cannot be changed. Plans can be chosen all the same.";
const HELP = {
  plans: "Click a plan, or go through them with the arrow keys: left and right by seconds, up and down by memory.",
  pipeline: "Hover over an action to see what it gets and gives. The arrow keys choose another plan.",
  nodes: "Hover over a GPU to see its groups, or go from one to another with the arrow keys.",
};
const VIEWS = [["plans", "time and memory"], ["pipeline", "pipeline"], ["nodes", "nodes"]];
const VIEW_TALL = 300; // of the nodes
const CONTROLS = [["model", "model"], ["cluster", "cluster"], ["gpus", "GPUs"], ["batch", "sequences per step"],
  ["sequence", "tokens each"], ["stack", "software"]];

const YOUR_OWN = "your own …";

const isOwn = (value) => String(value).includes("=");

// Controls for the sizes of the reader's own model. Its setting is a text: "layers=32, hidden=4096, ...".
class OwnModel {
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

async function render({ model, el: host }) {
  let board = await unpack(model.get("board"));
  const root = card(host, { title: board.title, about: board.about, badge: board.badge, label: board.title });
  const own = new OwnModel(model.get("choices").own, { ask: (sizes) => ask({ model: sizes }), fail: (words) => { [failure, isAsking] = [words, false]; tell(); } });
  const boxes = CONTROLS.map(([name, words]) => {
    const node = el("select.tpl-select", { "aria-label": words, onchange: () => ask({ [name]: node.value === own.option.value ? own.text : typeof model.get("choices")[name][0] === "number" ? Number(node.value) : node.value }) },
      ...model.get("choices")[name].map((value) => el("option", { value }, typeof value === "number" ? value.toLocaleString("en") : value)));
    node.addEventListener("keydown", (event) => event.stopPropagation()); // keys typed here choose no plans
    node.disabled = Boolean(model.isStill);
    return [name, node, el("label.tpl-setting", { style: "width:auto;min-width:118px" }, el("span", {}, words), node)];
  });
  boxes[0][1].append(own.option);
  root.append(el("div.tpl-settings", {}, ...boxes.map(([, , box]) => box)), own.box);
  const key = (mark, words) => el("span.tpl-key", {}, mark, words);
  const swatch = (colour, share) => el("i", { style: `background:color-mix(in srgb,${colour} ${share}%,var(--paper));border:${share ? 1 : 2}px solid ${colour}` });
  const legend = el("div"), left = el("figure.tpl-plans"), right = el("div.tpl-plans");
  const tools = VIEWS.map(([name, words]) => tool(words, undefined, () => see(name)));
  const schedule = el("div", { hidden: "" }), mesh = el("div", { hidden: "" }), plans = el("div.tpl-layouts", {}, left, right);
  const aboutView = el("span.tpl-key");
  root.append(el("div.tpl-tools", {}, el("span.tpl-choice", { role: "group", "aria-label": "picture" }, ...tools), aboutView), legend, plans, schedule, mesh);
  const says = el("p.tpl-say", { "aria-live": "polite" }), note = el("p.tpl-notice", { role: "status" }), bar = el("progress.tpl-progress", { max: 1, "aria-label": "loading", hidden: "" });
  const where = el("p.tpl-layouthead");
  const tasks = new Tasks(model, (changes) => ask(changes));
  root.append(says, where, note, bar, tasks.box);
  const tip = hint(root), gpus = new NodesView(mesh, tip);
  const isKnown = (index) => board.place.has(index), of = (column, index) => column[board.place.get(index)];
  let scenes = [];

  // Whether the pictures of a plan are available without asking Python.
  const hasAll = (index) => isKnown(index) && (model.get("view") !== "pipeline" || board.pipeline?.plan === index || board.axes[index][0] === 1);

  function choose(index) {
    model.set("chosen", Math.min(Math.max(index, 0), board.plans.length - 1));
    model.save_changes();
    draw();
    askOf();
  }
  // Python is asked for missing pictures, and whether the chosen plan solves the task.
  function askOf() {
    if (!model.isStill && (model.get("settings").task || !hasAll(chosenOf()))) send({ choose: chosenOf() });
  }

  // The left and right arrows go by seconds, up and down by memory; among nodes, from one GPU to another.
  const beside = (column, by) => {
    const order = [...board[column].keys()].sort((a, b) => board[column][a] - board[column][b]);
    return order[Math.min(Math.max(order.indexOf(chosenOf()) + by, 0), order.length - 1)];
  };
  const go = (toGpu, toPlan) => () => (model.get("view") === "nodes" ? gpus.move(toGpu()) : choose(toPlan()));
  onKeys(root, () => ({
    ArrowRight: go(() => 1, () => beside("seconds", 1)), ArrowLeft: go(() => -1, () => beside("seconds", -1)),
    ArrowUp: go(() => -gpus.node, () => beside("gib", 1)), ArrowDown: go(() => gpus.node, () => beside("gib", -1)),
    Home: go(() => -Infinity, () => board.best), End: go(() => Infinity, () => beside("seconds", Infinity)),
  }));

  let silence = null, failure = "", isAsking = false, isWaiting = false, coming = null;
  function ask(changes) {
    model.set("settings", { ...model.get("settings"), ...changes });
    isAsking = true;
    send({ settings: true });
  }
  function send(content) {
    [failure, isWaiting] = ["", true];
    tell();
    clearTimeout(silence);
    silence = setTimeout(() => {
      [failure, isAsking, isWaiting] = [NO_KERNEL, false, false];
      tell();
    }, SILENT_AFTER);
    try {
      model.save_changes();
      model.send(content);
    } catch { /* a closed connection is silent, too */ }
  }
  // On a page, Python may still be loading: show its progress, or why loading failed.
  function onAnswer(content) {
    clearTimeout(silence);
    [failure, coming, isAsking, isWaiting] = [content?.failed ?? "", content?.progress ?? null, false, Boolean(content?.progress)];
    tell();
  }

  function tell() {
    root.dataset.stale = Boolean(model.get("is_stale"));
    const words = coming ? coming.text : isAsking ? "Searching …" : failure || model.get("notice") || (model.isStill ? NO_PYTHON : HELP[model.get("view")]);
    bar.hidden = coming?.share === undefined;
    if (!bar.hidden) bar.value = coming.share;
    if (note.textContent !== words) note.textContent = words;
    note.classList.toggle("tpl-wrong", !isAsking && !coming && Boolean(failure || model.get("notice")));
    for (const [name, node] of boxes) {
      const setting = String(model.get("settings")[name]), value = name === "model" ? own.follow(setting) : setting;
      if (![...node.options].some((option) => option.value === value)) node.append(el("option", { value }, value));
      node.value = value;
    }
    tasks.show(model.get("settings"), isWaiting, Boolean(failure));
  }

  const clearLegend = () => { // and stop repainting it
    legend.replaceChildren();
    root.paintLegend = null;
  };
  const chosenOf = () => Math.min(model.get("chosen"), board.plans.length - 1);
  function draw() {
    const chosen = chosenOf();
    tip.hide();
    scenes[0].draw(chosen);
    right.classList.toggle("tpl-waits", !isKnown(chosen));
    if (!isKnown(chosen)) {
      says.replaceChildren(el("b", {}, board.plans[chosen]), ` takes about ${plain(board.seconds[chosen])} s, by the search's estimate. Python makes its forecast.`);
      where.textContent = "";
      return;
    }
    const view = model.get("view");
    scenes[1].draw(chosen);
    if (view === "nodes") {
      gpus.set({ sizes: board.axes[chosen], node: board.node, groups: of(board.groups, chosen) }, VIEW_TALL);
      const many = gpus.drawn < gpus.nodes ? `${gpus.drawn} of ${gpus.nodes.toLocaleString("en")} nodes are drawn. ` : "";
      aboutView.textContent = `${many}${gpus.isShort ? `In each cell: ${gpus.axes.join(" · ")}. ` : ""}`;
      legend.replaceChildren(el("div.tpl-legend", {}, ...nodesLegend(gpus).map(([colour, words, share]) => key(swatch(`var(--${colour})`, share), words))));
    }
    if (view === "pipeline") drawPipeline(chosen);
    const plan = el("b", {}, board.plans[chosen]);
    where.textContent = of(board.nodes, chosen);
    says.replaceChildren(plan, ` ${of(board.says, chosen)}`);
  }
  // Python simulates a pipeline: without Python, only the one included in the page is available.
  function drawPipeline(chosen) {
    const run = board.pipeline?.plan === chosen ? { ...board.pipeline } : null, prefix = "pipeline.";
    if (run) for (const name of Object.keys(board.columns)) if (name.startsWith(prefix)) run[name.slice(prefix.length)] = board[name];
    schedule.replaceChildren();
    aboutView.textContent = run ? run.about : board.axes[chosen][0] === 1 ? "This plan has no pipeline: pp is 1, so every rank has all layers."
      : `Python simulates the pipeline of this plan${model.isStill ? ", and there is none on this page" : " …"}.`;
    clearLegend();
    if (!run) return;
    drawLegend(root, run, "", legend);
    new Gantt(root, schedule, run, { hint: tip, seek() {} }).head.hidden = true; // nothing plays here
  }
  function see(view) {
    model.set("view", view);
    model.save_changes();
    onView();
    askOf();
  }
  function onView() {
    const view = model.get("view");
    [plans, schedule, mesh].forEach((node, place) => { node.hidden = VIEWS[place][0] !== view; });
    tools.forEach((node, place) => node.setAttribute("aria-pressed", VIEWS[place][0] === view));
    show();
    tell();
  }
  function show() {
    root.querySelector("header b").textContent = board.title;
    root.querySelector(".tpl-about").textContent = board.about;
    root.querySelector(".tpl-badge").textContent = board.badge;
    root.setAttribute("aria-label", `${board.title} ${board.about}. Arrow keys choose a plan.`);
    aboutView.textContent = "";
    clearLegend();
    if (model.get("view") === "plans") drawLegend(root, board, board.note, legend);
    if (!isOwn(model.get("settings").model)) own.set(board.own);
    board.place = new Map(board.known.map((index, place) => [index, place]));
    left.replaceChildren();
    right.replaceChildren();
    scenes = [new Scene(root, left, board, 0, { over: tip.show, press: choose }), new Scene(root, right, board, 1, { over: tip.show })];
    draw();
  }
  const onBoard = async () => {
    clearTimeout(silence);
    board = await unpack(model.get("board"));
    show();
    tell();
  };
  onView();
  const events = { "change:board": onBoard, "change:view": onView, "change:chosen": draw, "change:settings": tell, "change:notice": tell, "change:is_stale": tell, "change:verdict": tell, "msg:custom": onAnswer };
  return live(root, model, draw, events, () => clearTimeout(silence));
}

export default { render };
