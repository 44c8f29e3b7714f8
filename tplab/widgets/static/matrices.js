// Small matrices side by side, every entry a number.
import { card, el, followTheme } from "./shell.js";

function entry([text, share, wrong]) {
  const hue = share > 0 ? "var(--c0)" : "var(--c1)";
  const fill = `color-mix(in srgb,${hue} ${Math.round(30 * Math.abs(share))}%,var(--paper))`;
  // Wrong entries have a frame and a corner, so that colour is not the only mark.
  const style = wrong
    ? `background:linear-gradient(225deg,var(--c5) 0 7px,transparent 7.5px),${fill};border:1.6px solid var(--c5)`
    : `background:${fill};border:1px solid var(--line)`;
  return el("td", {
    style: `${style};width:44px;height:23px;padding:0;border-radius:4px;text-align:center;vertical-align:middle;font-size:12px`,
    "aria-label": wrong ? `${text}, wrong` : undefined,
  }, text);
}

function panel({ title, rows }) {
  return el("table", { style: "border-collapse:separate;border-spacing:2px;margin:0;width:auto;font:inherit;color:inherit;border:0" },
    el("caption", { style: "caption-side:top;padding:0 0 3px 1px;text-align:left;white-space:nowrap;color:var(--dim);font-size:12px;font-weight:600" }, title),
    el("tbody", {}, ...rows.map((row) => el("tr", { style: "background:none" }, ...row.map(entry)))));
}

function render({ model, el: host }) {
  const { title, text, panels, gap } = model.get("content");
  const root = card(host, { title, label: title || panels.map((one) => one.title).join(", ") });
  root.style.width = "fit-content";
  root.querySelector("header").hidden = !title;
  for (const line of text) {
    root.append(el("p.tpl-say", { style: "margin:0 0 6px;max-width:640px" }, line));
  }
  root.append(el("div", { style: `display:flex;flex-wrap:wrap;gap:12px ${gap - 2}px;align-items:flex-start` }, ...panels.map(panel)));
  return followTheme(root, () => {});
}

export default { render };
