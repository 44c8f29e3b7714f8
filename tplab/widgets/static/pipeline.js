// A pipeline schedule and its figures; in the pipeline lab with controls over it.
import { card, el, hint, live, onKeys, toggle, tool } from "./shell.js";
import { plain, timeText } from "./units.js";
import { unpack } from "./wire.js";
import { Player } from "./player.js";
import { Gantt } from "./gantt.js";
import { drawLegend } from "./scene.js";
import { numSteps, positionAt, timeAt } from "./score.js";
import { Tasks } from "./tasks.js";

const PATIENCE = 3000; // milliseconds
const PAUSE = 400; // milliseconds from the last key until the text is sent
const SILENCE = "No kernel answers, so nothing changes here. Run this cell to use its controls.";
const STILL = "This page has no Python behind it, so it shows this one schedule. Its controls work in Jupyter.";
const CSV = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1,";
const SLIDERS = [
  ["ranks", "ranks"], ["microbatches", "microbatches"], ["virtual_stages", "stages per rank"], ["forward", "F"],
  ["input_grad", "I"], ["weight_grad", "W"], ["transfer", "transfer"],
  ["overlap", "overlap of F & B"],
];
const OVERLAP = "How much of the shorter pass of a pair is hidden behind the longer one: F & B takes F + B − overlap × min(F, B). " +
  "F and B then include their own messages, and only that share can be hidden. DualPipe and DualPipeV have pairs.";
const COSTS = "What the stages cost beside one another, first to last: 1, 1, 1, 2 makes F, I and W of the last one take twice as long. " +
  "A schedule with more stages cuts the same model finer. Empty: all cost the same.";

function slider(name, { least, most, by, turned }) {
  const input = el("input.tpl-slider", { type: "range", min: least, max: most, step: by, "aria-label": name });
  const marks = el("div.tpl-marks", { "aria-hidden": "true" }), value = el("b");
  const node = el("label.tpl-setting", {}, el("span", {}, name), value, el("div.tpl-track", {}, input, marks));
  const draw = (at, text = plain(at)) => {
    input.value = at;
    value.textContent = text;
    input.setAttribute("aria-valuetext", text);
    marks.style.setProperty("--at", `${(100 * (at - least)) / Math.max(most - least, 1e-9)}%`);
  };
  input.addEventListener("input", () => turned(Number(input.value)));
  // JupyterLab does not pass the arrow keys to the slider, so they are handled here.
  const [on, back] = [by, -by].map((step) => () => turned(Math.min(Math.max(Math.round((Number(input.value) + step) / by) * by, least), most)));
  onKeys(input, () => ({ ArrowRight: on, ArrowUp: on, ArrowLeft: back, ArrowDown: back, Home: () => turned(least), End: () => turned(most) }));
  return { node, draw, off: (off) => { input.disabled = off; node.classList.toggle("tpl-off", off); } };
}

// The controls of the lab. ask(changes) sends them to Python.
function controls(root, model, ask) {
  const { rules, virtual, pairs, limits } = model.get("choices");
  const select = (name, options, chosen) => {
    const node = el("select.tpl-select", { "aria-label": name, onchange: () => chosen(node.value) },
      ...options.map(([value, text]) => el("option", { value }, text)));
    return [el("label.tpl-setting", {}, el("span", {}, name), node), node];
  };
  const named = rules.map((rule) => [rule, model.get("choices").names[rule] ?? rule]);
  const [ruleBox, rule] = select("schedule", [...named, ["edited", "edited"]], (value) => ask({ rule: value }));
  const [besideBox, beside] = select("beside it", [["", "nothing"], ...named], (value) => ask({ compare: value || null }));
  rule.querySelector("[value=edited]").disabled = true;
  const offerOwn = (names) => [rule, beside].forEach((node) => names.forEach((name) => {
    if (name !== "edited" && ![...node.options].some((option) => option.value === name)) node.append(el("option", { value: name }, name));
  }));
  const sliders = Object.fromEntries(SLIDERS.map(([name, text]) => {
    const [least, most, by] = limits[name];
    return [name, slider(text, { least, most, by, turned: (value) => ask({ [name]: value }) })];
  }));
  sliders.overlap.node.title = OVERLAP;
  let typing = null;
  const costs = el("input.tpl-select", { type: "text", "aria-label": "cost of each stage", spellcheck: "false",
    autocomplete: "off", oninput: () => {
      clearTimeout(typing);
      typing = setTimeout(() => ask({ stage_costs: costs.value }), PAUSE);
    } });
  costs.addEventListener("keydown", (event) => event.stopPropagation()); // keys typed here do not reach the player
  const costsBox = el("label.tpl-setting", { title: COSTS }, el("span", {}, "cost of each stage"), costs);
  const least = 0.5, none = 16.5;
  const limit = slider("memory limit", { least, most: none, by: 0.5, turned: (value) => ask({ memory_limit: value >= none ? null : value }) });
  root.append(el("div.tpl-settings", {}, ruleBox, besideBox, ...SLIDERS.map(([name]) => sliders[name].node), costsBox, limit.node));
  return (settings) => {
    offerOwn(Object.keys(settings.own));
    rule.value = settings.rule;
    beside.value = settings.compare ?? "";
    for (const [name] of SLIDERS) sliders[name].draw(settings[name]);
    const chosen = [settings.rule, settings.compare];
    sliders.virtual_stages.off(!chosen.some((name) => virtual.includes(name)));
    sliders.overlap.off(!chosen.some((name) => pairs.includes(name)) && settings.rule !== "edited" && !chosen.some((name) => name in settings.own));
    if (costs.value !== settings.stage_costs && !costs.matches(":focus")) costs.value = settings.stage_costs;
    for (const name of ["ranks", "microbatches"]) sliders[name].off(settings.rule === "edited" || settings.rule in settings.own);
    costs.placeholder = Array(Math.min(settings.ranks, 8)).fill(1).join(", ");
    limit.draw(settings.memory_limit ?? none, settings.memory_limit === null ? "none" : plain(settings.memory_limit));
    if (!model.isStill) return;
    for (const node of root.querySelectorAll(".tpl-settings input, .tpl-settings select")) node.disabled = true;
    for (const node of root.querySelectorAll(".tpl-setting")) node.classList.add("tpl-off");
  };
}

function save(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

async function render({ model, el: host }) {
  const isLab = model.get("settings") !== undefined, isAlive = isLab && !model.isStill;
  let board = await unpack(model.get("board"));
  const root = card(host, { title: board.title, about: board.about, badge: board.badge, above: model.get("above"), label: `pipeline schedule ${board.title}` });
  const tip = hint(root);
  let waiting = false, wanted = null, silence = null, failure = "", did = "", drawn = model.get("settings");
  let drawing = Promise.resolve(), isMoving = false, more = 0; // the board's drawing; a move, and how far to go after it

  // One request at a time: while Python works on one, only the latest of the following ones is kept.
  function ask(changes) {
    wanted = { ...(wanted ?? model.get("settings")), ...changes };
    show(wanted);
    if (waiting) return;
    waiting = true;
    model.set("settings", wanted);
    wanted = null;
    send({ settings: true });
  }

  // Python answers every message. Without an answer, there is no kernel, or a busy one, which may still answer.
  function send(content) {
    clearTimeout(silence);
    silence = setTimeout(() => giveUp(SILENCE), PATIENCE);
    try {
      model.save_changes();
      model.send(content);
    } catch { /* a closed connection is silent, too */ }
  }
  function giveUp(why) {
    [failure, waiting, wanted, isMoving, more] = [why, false, null, false, 0];
    show(drawn, true);
    tellNotice();
  }
  // On a page, Python may still be loading: show its progress, or why loading failed.
  async function onAnswer(content) {
    clearTimeout(silence);
    if (isMoving) await drawing; // the choice refers to the new board
    [failure, did] = ["", content.did ?? ""];
    if (content.failed) return giveUp(content.failed);
    tellNotice(content.progress);
    if (content.progress) return;
    [waiting, drawn, isMoving] = [false, model.get("settings"), false];
    if (more) shift(more);
    if (content.file) save(content.file, content.text);
    if (wanted) ask({});
    else show(drawn);
  }
  const tasks = isLab ? new Tasks(model, ask) : null, draws = isLab ? controls(root, model, ask) : null;
  const show = (settings, isLost = false) => {
    draws?.(settings);
    tasks?.show(settings, false, isLost);
  };

  const shift = (by) => {
    if (chart.chosen === null) return;
    more = isMoving ? more + by : 0;
    if (isMoving) return;
    const index = chart.index(chart.chosen);
    isMoving = true;
    send({ move: [chart.runs[0].rank[chart.chosen], index, index + by] });
  };
  const earlier = tool("◂ earlier", "move the chosen action one place earlier", () => shift(-1), { hidden: "" });
  const later = tool("later ▸", "move the chosen action one place later", () => shift(1), { hidden: "" });
  const undo = tool("undo", "take back the last move (Ctrl+Z)", () => send({ undo: true }), { hidden: "" });
  const reset = tool("reset", "take back all moves", () => send({ reset: true }), { hidden: "" });
  const edit = toggle("edit", "move actions by hand", (on) => {
    chart.editing = on;
    earlier.hidden = later.hidden = !on;
    chart.choose(null);
    if (on) note.textContent = "Choose an action with the pointer or the arrow keys; drag it, or move it with Shift and ← or →.";
    showEdits();
  });
  const showEdits = () => {
    for (const node of [undo, reset]) {
      node.hidden = !chart.editing && !model.get("num_edits");
      node.disabled = !model.get("num_edits");
    }
  };
  // While actions are edited, the arrow keys apply to the chosen one; otherwise they move the playhead.
  const onEditKey = (event) => {
    if (!chart.editing || event.target.closest("input, select, textarea") || event.altKey) return;
    const command = event.ctrlKey || event.metaKey;
    const act = command ? { z: () => send({ undo: true }) }[event.key]
      : event.shiftKey ? { ArrowLeft: () => shift(-1), ArrowRight: () => shift(1) }[event.key]
        : { ArrowLeft: () => chart.chooseNext(-1), ArrowRight: () => chart.chooseNext(1), ArrowUp: () => chart.chooseRank(-1),
          ArrowDown: () => chart.chooseRank(1), Escape: () => edit.click() }[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    act();
  };
  root.addEventListener("keydown", onEditKey, true);
  const pasted = el("textarea.tpl-text", { rows: 5, spellcheck: "false", "aria-label": "CSV to show", placeholder: CSV });
  const paste = el("form.tpl-paste", { hidden: "", onsubmit: (event) => { event.preventDefault(); send({ paste: pasted.value }); } }, pasted,
    el("div", {}, "One line per rank, in either of torch's forms. ", tool("show it", "show what is pasted", () => {}, { type: "submit" })));
  paste.addEventListener("keydown", (event) => event.stopPropagation()); // keys typed here do not reach the player
  const toPaste = toggle("paste CSV", "paste CSV of your own", (on) => {
    paste.hidden = !on;
    if (on) pasted.focus();
  });
  const files = ["svg", "csv", "perfetto"].map((kind) => tool(kind === "perfetto" ? "Perfetto" : kind.toUpperCase(), `save as ${kind}`, () => send({ export: kind, colour: shown })));
  const legend = el("div");
  let shown = "kind"; // what the colours mean
  const showLegend = () => {
    legend.replaceChildren();
    drawLegend(root, { ...board, legend: board.legends[shown] }, "", legend);
  };
  const choice = el("span.tpl-choice", { role: "group", "aria-label": "colour by" }, el("span", {}, "colour by"),
    ...Object.keys(board.legends).map((by) => tool(by, `colour by ${by}`, () => {
      colourBy(by);
      model.set("colour", by);
      model.save_changes();
    })));
  const colourBy = (by) => {
    shown = by;
    for (const node of choice.querySelectorAll("button")) node.setAttribute("aria-pressed", node.textContent === by);
    showLegend();
    chart.colour(by);
    chart.draw();
  };
  root.append(legend, el("div.tpl-tools", {}, choice,
    el("span.tpl-space"), ...(isAlive ? [earlier, later, undo, reset, edit] : []), toggle("critical path", "show what sets the makespan", (on) => chart.draw(Number(on))),
    ...(isAlive ? [toPaste, ...files] : [])));
  if (isAlive) root.append(paste);
  const note = el("p.tpl-notice", { role: "status" }), bar = el("progress.tpl-progress", { max: 1, "aria-label": "loading", hidden: "" });
  note.hidden = !isLab;
  let player = null;
  const chart = new Gantt(root, root, board, {
    hint: tip,
    seek: (time) => player.seek(positionAt(board, time)),
    pick: (row) => {
      earlier.disabled = later.disabled = row === null;
      if (row !== null) note.textContent = `chosen: ${chart.runs[0].names[row]}, rank ${chart.runs[0].rank[row]}`;
    },
    drop: (rank, index, to) => send({ move: [rank, index, to] }),
  });
  const figures = el("div.tpl-figures");
  const meanings = el("dl"), explained = el("details.tpl-meanings", {}, el("summary", {}, "what the figures mean"), meanings);
  for (const event of ["keydown", "keyup"]) explained.addEventListener(event, (pressed) => pressed.stopPropagation()); // keys typed here do not reach the player
  root.append(note, bar, figures, explained);

  function draw() {
    root.querySelector("header b").textContent = board.title;
    root.querySelector(".tpl-about").textContent = board.about;
    root.setAttribute("aria-label", `pipeline schedule ${board.title}`);
    chart.load(board, 0);
    chart.draw();
    if (chart.editing) chart.keepChosen();
    if (did) tellNotice();
    showLegend();
    figures.replaceChildren(...board.runs.map((run) => el("div.tpl-facts", {},
      board.runs.length > 1 ? el("div.tpl-of", {}, run.name) : null,
      ...run.facts.map(([name, figure, more]) => el("div", {}, el("div.tpl-what", {}, name), el("b", {}, figure), el("span", {}, ` ${more}`))))));
    meanings.replaceChildren(...board.meanings.flatMap(([name, words]) => [el("dt", {}, name), el("dd", {}, words)]));
    player?.restart(numSteps(board));
  }
  const tellNotice = (progress) => {
    root.dataset.stale = Boolean(model.get("is_stale"));
    const text = progress ? progress.text : failure || (model.get("notice") || did || (model.isStill ? STILL : ""));
    if (note.textContent !== text) note.textContent = text;
    note.classList.toggle("tpl-wrong", Boolean(text) && text !== STILL && text !== did && !progress);
    bar.hidden = progress?.share === undefined;
    if (!bar.hidden) bar.value = progress.share;
  };
  const onNotice = () => tellNotice();
  draw();
  player = new Player(root, model, {
    steps: numSteps(board),
    show: (position) => chart.moveHead(timeAt(board, position)),
    say: (position) => [`t = ${timeText(timeAt(board, position), board.unit, chart.end)}`, chart.say(timeAt(board, position)), ""],
  });
  if (isLab) root.append(tasks.box);
  const onBoard = () => {
    drawing = unpack(model.get("board")).then((found) => {
      board = found;
      draw();
    });
  };
  const onColour = () => colourBy(model.get("colour"));
  onColour();
  const onSettings = () => show(wanted ?? model.get("settings"));
  const events = { "change:board": onBoard, "change:colour": onColour };
  if (isLab) {
    onSettings();
    tellNotice();
    showEdits();
    Object.assign(events, { "change:num_edits": showEdits, "change:is_stale": onNotice, "change:settings": onSettings, "change:verdict": onSettings, "change:notice": onNotice, "msg:custom": onAnswer });
  }
  return live(root, model, () => chart.draw(), events, () => clearTimeout(silence), () => player.destroy());
}

export default { render };
