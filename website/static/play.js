// Draws the widgets of a page. Until one comes near the reader's eyes, and where it cannot be drawn, its picture stays.
import { LabModel } from "./lab.js";
import { asked, keep } from "./link.js";
import { PageModel } from "./model.js";

const ROOMS = { PipelineLab: "schedule", LayoutLab: "layouts" }; // what Python computes, and where in tplab.widgets

const ends = new WeakMap(), turns = new WeakMap(); // of a figure: what ends its widget, and how often it was drawn

async function draw(figure) {
  const turn = (turns.get(figure) ?? 0) + 1;
  turns.set(figure, turn);
  const { default: widget } = await import(new URL(figure.dataset.module, document.baseURI));
  if (turns.get(figure) !== turn) return; // its data has changed meanwhile
  const data = JSON.parse(figure.querySelector("script").textContent), state = asked(figure.id, data);
  const isAsked = Object.keys(state).length > 0;
  try {
    await show(figure, widget, data, state, isAsked);
  } catch (error) {
    if (!isAsked) throw error;
    await show(figure, widget, data, {}, false); // the link has a state that this widget cannot be in
  }
}

// state: the traits that the link gives. What Python has to compute for them is asked for when the widget is there.
async function show(figure, widget, data, { settings, ...state }, isAsked) {
  const room = ROOMS[figure.dataset.kind], traits = { ...data, values: { ...data.values, ...state } };
  const model = room ? new LabModel(traits, room) : new PageModel(traits);
  const host = document.createElement("div"), old = figure.querySelectorAll(":scope > img, :scope > .playing");
  host.className = "playing";
  host.inert = true; // until it takes the picture's place
  figure.append(host);
  try {
    const end = await widget.render({ model, el: host });
    ends.get(figure)?.();
    ends.set(figure, end);
  } catch (error) {
    host.remove();
    throw error;
  }
  keep(figure, model, data, isAsked);
  if (settings) model.restore({ settings, ...state });
  else model.introduce?.();
  host.inert = false;
  for (const one of old) one.remove();
  figure.classList.add("alive");
  if ("plays" in figure.dataset) playAlong(host);
}

// A picture that plays by itself, again and again with a rest between, until the reader touches it or looks elsewhere.
const REST = 3500; // milliseconds
const SEEN = 200; // pixels: of a higher picture than the window's half, this much is enough
function playAlong(host) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  let seen = false, left = false;
  const button = host.querySelector(".tpl-play");
  const isPlaying = () => button.getAttribute("aria-label").startsWith("pause");
  const start = () => { if (seen && !left && !isPlaying()) button.click(); };
  for (const kind of ["pointerdown", "keydown"]) {
    host.addEventListener(kind, (event) => { left ||= event.isTrusted; }, { capture: true, passive: true });
  }
  new MutationObserver(() => { if (!isPlaying()) setTimeout(start, REST); }).observe(button, { attributeFilter: ["aria-label"] });
  new IntersectionObserver(([entry]) => {
    const { intersectionRect: inside, boundingClientRect: whole } = entry;
    seen = inside.height >= Math.min(SEEN, whole.height / 2);
    start();
  }, { threshold: Array.from({ length: 21 }, (_, index) => index / 20) }).observe(host);
}

// What a link leads to stays in its place while pictures above it become widgets, which are higher than they were: for
// some seconds, and until the widgets that were begun meanwhile are drawn; or until the reader moves on.
const SETTLED = 5000, FRAMES = 250; // milliseconds
const drawings = [], after = (time) => new Promise((resolve) => setTimeout(resolve, time));
let links = 0, settles = 0; // which of the links that were followed, if any
async function seek() {
  const link = settles = ++links;
  await after(SETTLED);
  await Promise.allSettled(drawings);
  await after(FRAMES);
  if (settles === link) leave();
}
function leave() { settles = 0; }
seek();
addEventListener("hashchange", seek);
for (const kind of ["wheel", "touchmove", "keydown", "pointerdown"]) addEventListener(kind, leave, { passive: true });
const grown = new ResizeObserver(() => {
  if (settles) document.querySelector(":target")?.scrollIntoView({ behavior: "instant" });
});
for (const article of document.querySelectorAll("article")) grown.observe(article);

// A figure whose data has changed is drawn anew.
document.addEventListener("redraw", ({ target }) => drawings.push(draw(target)));

const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    drawings.push(draw(target).catch(() => { target.dataset.still = "this browser cannot draw it"; }));
  }
}, { rootMargin: "800px 0px" });
for (const figure of document.querySelectorAll("figure.card")) near.observe(figure);

// Cells that run on the page.
if (document.querySelector("div.cell.tag_runs")) import("./cells.js");

// On paper, everything is light, and answers are unfolded: nobody can unfold them there.
addEventListener("beforeprint", () => {
  document.body.dataset.jpThemeLight = "true";
  for (const answer of document.querySelectorAll("article details:not(.hide, [open])")) {
    answer.open = true;
    answer.dataset.folded = "";
  }
});
addEventListener("afterprint", () => {
  delete document.body.dataset.jpThemeLight;
  for (const answer of document.querySelectorAll("[data-folded]")) {
    answer.open = false;
    delete answer.dataset.folded;
  }
});
