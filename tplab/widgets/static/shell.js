// Shared by all widgets: elements, the theme of the page, the card, the tooltip.
const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "rect", "circle", "text", "line", "defs", "pattern", "tspan"]);

// el("div.tpl-x", {title: "…"}, child, …): an element with classes, attributes and children.
export function el(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const luminance = (colour) => {
  const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number);
  return a < 0.5 ? null : (0.299 * r + 0.587 * g + 0.114 * b) / 255;
};

// Whether the page around `node` is dark: by its own marker (JupyterLab, VS Code, Colab), otherwise by the background
// behind the widget, otherwise by the reader's preference.
export function isDark(node) {
  const { body, documentElement: html } = document;
  const lab = body.dataset.jpThemeLight;
  if (lab !== undefined) return lab === "false";
  const kind = body.dataset.vscodeThemeKind ?? "";
  if (kind) return /dark|high-contrast$/.test(kind);
  const marks = `${html.getAttribute("theme") ?? ""} ${html.dataset.theme ?? ""} ${html.className} ${body.className}`;
  if (/\bdark\b/.test(marks)) return true;
  for (let at = node; at; at = at.parentElement) {
    const light = luminance(getComputedStyle(at).backgroundColor);
    if (light !== null) return light < 0.5;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

const HIDDEN_FRAMES = 30;

// Keep `root`'s theme in sync with the page's; `changed` is called when it changes. Returns a function that ends this.
export function followTheme(root, changed) {
  const apply = () => {
    const theme = isDark(root.parentElement ?? document.body) ? "dark" : "light";
    if (root.dataset.theme === theme) return;
    root.dataset.theme = theme;
    changeSeen(HIDDEN_FRAMES);
  };
  // JupyterLab hides the notebook while it changes the theme; nothing can be measured or drawn until it is shown again.
  const changeSeen = (frames) => {
    changed();
    if (!root.clientWidth && frames) requestAnimationFrame(() => changeSeen(frames - 1));
  };
  const watcher = new MutationObserver(apply);
  for (const node of [document.body, document.documentElement]) watcher.observe(node, { attributes: true });
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  prefers.addEventListener("change", apply);
  apply();
  // The widget may not be in the page yet.
  const later = setTimeout(apply, 0);
  return () => {
    watcher.disconnect();
    prefers.removeEventListener("change", apply);
    clearTimeout(later);
  };
}

// Redraw, including the legend, when the theme or the width of the card changes, and handle the model's events. Returns
// a function that ends this and calls `ends`.
export function live(root, model, draw, events, ...ends) {
  let width = null;
  const redraw = () => {
    root.paintLegend?.();
    draw();
  };
  const unfollow = followTheme(root, redraw), resizer = new ResizeObserver(() => {
    if (root.clientWidth !== width) redraw();
    width = root.clientWidth;
  });
  resizer.observe(root);
  for (const [event, act] of Object.entries(events)) model.on(event, act);
  return () => {
    for (const [event, act] of Object.entries(events)) model.off(event, act);
    for (const end of [unfollow, () => resizer.disconnect(), ...ends]) end();
  };
}

// The colours of the theme, for canvases: read from the style sheet, so that they are defined in one place.
export function colours(root) {
  const style = getComputedStyle(root);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const found = { font: style.fontFamily, read };
  for (const name of ["dim", "line", "paper"]) found[name] = read(name);
  found.mix = (colour, share) => mix(colour, found.paper, share);
  found.lighter = (colour, share) => mix(colour, "#ffffff", share);
  found.onPaper = (colour) => mix(colour, read("toward"), parseFloat(read("onpaper")) / 100); // for thin lines
  return found;
}

function mix(a, b, share) {
  const parts = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const [x, y] = [parts(a), parts(b)];
  return `rgb(${x.map((part, at) => Math.round(share * part + (1 - share) * y[at])).join(",")})`;
}

// above: the text above it; the first line is the heading. Lines break only between sentences.
export function card(host, { title, about, badge, label, warning, above }) {
  const root = el("section.tplab", { tabindex: 0, role: "group", "aria-label": label ?? title });
  shareKeys(root);
  if (above) root.append(el("div.tpl-above", {}, ...above.split(/(?<=[.?!:])\n/).map((line) => el("p", {}, line))));
  const heading = el("header.tpl-head", {}, el("b", {}, title), el("span.tpl-about", {}, about ?? ""));
  if (badge) heading.append(el("span.tpl-badge", {}, badge));
  root.append(heading);
  if (warning) root.append(el("p.tpl-warning", { role: "note" }, warning));
  host.append(root);
  return root;
}

// JupyterLab handles keys before the card does. While the focus is in the card, single keys belong to the card: a space
// would scroll, and two d's delete a cell. Shortcuts with Ctrl or Cmd are JupyterLab's (save, find), unless they edit
// text; Enter with another key runs the cell; and Escape returns the focus to the notebook's cell.
const SUPPRESS = "data-lm-suppress-shortcuts", EDITING = ["a", "c", "v", "x", "y", "z"];
function shareKeys(root) {
  const mark = ({ target, key, ctrlKey, metaKey, shiftKey }) => {
    const command = ctrlKey || metaKey;
    const passes = key === "Enter" ? command || shiftKey : command && !EDITING.includes(key.toLowerCase());
    for (const node of [root, target]) if (root.contains(node)) node.toggleAttribute(SUPPRESS, !passes);
  };
  root.addEventListener("focusin", () => addEventListener("keydown", mark, true));
  root.addEventListener("focusout", () => removeEventListener("keydown", mark, true));
  root.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.defaultPrevented) root.closest(".jp-Cell")?.focus();
  });
}

// Keys that are handled here and then hidden from the page: acts(event) is a table of key -> function.
// shifted: whether this includes keys pressed with Shift.
export function onKeys(node, acts, shifted = false) {
  node.addEventListener("keydown", (event) => {
    const { ctrlKey, metaKey, altKey, shiftKey } = event;
    const act = ctrlKey || metaKey || altKey || (shiftKey && !shifted) ? null : acts(event)[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  });
}

// A button with a text.
export const tool = (text, label, act, more = {}) =>
  el("button.tpl-button.tpl-tool", { type: "button", title: label, "aria-label": label, onclick: act, ...more }, text);

// A toggle button: act(on).
export function toggle(text, label, act) {
  const node = tool(text, label, () => {
    const on = node.getAttribute("aria-pressed") !== "true";
    node.setAttribute("aria-pressed", on);
    act(on);
  }, { "aria-pressed": "false" });
  return node;
}

// The rows of a tooltip that say something; one whose name is null goes on with the text of the one before.
export function saying(rows) {
  const said = [];
  for (const [what, text] of (rows ?? []).filter(Boolean)) {
    if (what === null) said[said.length - 1][1] += text;
    else said.push([what, text]);
  }
  return said.filter(([, text]) => text !== "");
}

// The tooltip: rows of [what, text], beside the pointer, inside the card; hidden without rows.
export function hint(root) {
  const box = el("div.tpl-hint", { role: "tooltip", hidden: "" });
  root.append(box);
  return {
    show(event, rows) {
      box.hidden = !rows;
      if (!rows) return;
      box.replaceChildren(...saying(rows).map(([what, text]) =>
        el("div", {}, what ? el("span", {}, what) : el("b", {}, text), what ? text : "")));
      const frame = root.getBoundingClientRect();
      const x = event.clientX - frame.left + 14, y = event.clientY - frame.top + 14;
      const room = frame.width - box.offsetWidth - 6, below = x > room ? y + 6 : y;
      // A notebook cuts off what is outside the card: without room below the pointer, the tooltip is above it.
      const above = event.clientY - frame.top - box.offsetHeight - 10, fits = below + box.offsetHeight <= frame.height - 4;
      box.style.left = `${Math.max(4, Math.min(x, room))}px`;
      box.style.top = `${fits ? below : Math.max(4, above)}px`;
    },
    hide() { box.hidden = true; },
  };
}

// Keep a line of text at the height of its longest text, so that nothing below it moves. Returns a function that
// measures again after the texts have changed, and one that ends this.
export function keepHeight(root, line, texts) {
  let width = 0;
  const measure = () => {
    if (!root.clientWidth || root.clientWidth === width) return;
    width = root.clientWidth;
    line.style.minHeight = "";
    const ghost = el("p.tpl-say", { style: "visibility:hidden" });
    line.after(ghost);
    const heights = texts().sort((a, b) => b.length - a.length).slice(0, 3).map((text) => {
      ghost.textContent = text;
      return ghost.offsetHeight;
    });
    ghost.remove();
    line.style.minHeight = `${Math.max(0, ...heights)}px`;
  };
  const resizer = new ResizeObserver(measure);
  resizer.observe(root);
  return [() => { width = 0; measure(); }, () => resizer.disconnect()];
}

export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
