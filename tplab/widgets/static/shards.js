// Which rank holds which piece: tensors cut up, and every rank with its own pieces. To point at one shows it everywhere.
import { card, el, followTheme } from "./shell.js";
import { unpack } from "./wire.js";

// Ranks in a few letters, as tensors/scene.py's ranks_text.
export function ranksText(ranks) {
  const last = ranks[ranks.length - 1];
  if (ranks.length > 2 && last - ranks[0] === ranks.length - 1) return `${ranks[0]}–${last}`;
  return ranks.length <= 4 ? ranks.join(", ") : `${ranks[0]}, ${ranks[1]}, … ${last}`;
}

function drawTensor(svg, drawing, stripes, pointed) {
  const { x, y, width, height, name, above, beside, summed, lines } = drawing;
  const group = el("g", { transform: `translate(${x} ${y})` });
  svg.append(group);
  if (above) group.append(el("text.tpl-size", { x: width / 2, y: -11 }, above));
  const words = beside ? beside.replace(" over", "\nover").split("\n") : [];
  words.forEach((word, place) => group.append(
    el("text.tpl-size.tpl-end", { x: -9, y: height / 2 + 14 * place - 7 * (words.length - 1) }, word)));
  group.append(el("text.tpl-tensor", { x: width / 2, y: height + 15 }, name));
  const pieces = drawing.pieces.map((piece) => {
    const box = { x: piece.x + 1, y: piece.y + 1, width: Math.max(piece.width - 2, 1), height: Math.max(piece.height - 2, 1), rx: 4 };
    const node = el("g.tpl-piece", { style: `--c:var(--c${piece.hue})` }, el("rect", box));
    if (summed) node.append(el("rect.tpl-sum", { ...box, fill: `url(#${stripes})` }));
    const text = (summed ? "Σ " : "") + ranksText(piece.ranks), room = 6.3 * text.length + 8;
    if (room < piece.width && piece.height > 14) {
      const [cx, cy] = [piece.x + piece.width / 2, piece.y + piece.height / 2];
      if (summed) node.append(el("rect.tpl-plate", { x: cx - room / 2, y: cy - 8.5, width: room, height: 17, rx: 4 }));
      node.append(el("text", { x: cx, y: cy }, text));
    }
    node.addEventListener("pointerenter", () => pointed({ piece, name }));
    node.addEventListener("pointerleave", () => pointed(null));
    group.append(node);
    return { piece, node };
  });
  const grid = [];
  for (let row = 1; row < lines[0]; row++) grid.push(`M0 ${(row * height) / lines[0]}H${width}`);
  for (let column = 1; column < lines[1]; column++) grid.push(`M${(column * width) / lines[1]} 0V${height}`);
  group.append(el("path.tpl-elements", { d: grid.join("") }));
  return pieces;
}

function drawRanks(svg, ranks, pointed, chosen) {
  const [width, height] = ranks.size;
  for (const [x, y, text] of ranks.labels) svg.append(el("text.tpl-size", { x, y }, text));
  return ranks.boxes.map((box, rank) => {
    const node = el("g.tpl-rank.tpl-press", {}, el("rect.tpl-box", { x: box.x, y: box.y, width, height, rx: 9 }),
      el("text.tpl-rankname", { x: box.x + width / 2, y: box.y + 11 }, ranks.few ? `rank ${rank}` : rank));
    for (const [x, y, w, h, px, py, pw, ph, hue] of box.minis) {
      node.append(el("rect.tpl-mini", { x, y, width: w, height: h, rx: 2 }),
        el("rect.tpl-own", { x: px, y: py, width: Math.max(pw, 2), height: Math.max(ph, 2), rx: 1, style: `--c:var(--c${hue})` }));
    }
    node.addEventListener("pointerenter", () => pointed({ rank }));
    node.addEventListener("pointerleave", () => pointed(null));
    node.addEventListener("click", () => chosen(rank));
    svg.append(node);
    return node;
  });
}

let widgets = 0; // the stripes of each widget's sums are found by a name of its own

async function render({ model, el: host }) {
  const scene = await unpack(model.get("scene"));
  const root = card(host, { title: scene.title, about: scene.about, badge: scene.badge, label: scene.title });
  const stripes = `tpl-stripes-${++widgets}-${Math.random().toString(36).slice(2, 8)}`;
  const tensors = el("svg.tpl-tensors", { viewBox: `0 0 ${scene.width} ${scene.height}`, role: "img", "aria-label": scene.sentence },
    el("defs", {}, el("pattern", { id: stripes, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      el("rect.tpl-stripe", { width: 1.6, height: 6 }))));
  const ranks = el("svg.tpl-tensors", { viewBox: `0 0 ${scene.ranks.width} ${scene.ranks.height}`, role: "img", "aria-label": "the ranks" });
  for (const [svg, { width }] of [[tensors, scene], [ranks, scene.ranks]]) {
    svg.style.flex = `1 1 ${0.75 * width}px`;
    svg.style.maxWidth = `min(100%, ${width}px)`;
  }
  const say = el("p.tpl-say", { "aria-live": "polite" });
  const last = scene.ranks.boxes.length - 1;
  const choose = (rank) => {
    model.set("rank", rank === model.get("rank") ? -1 : rank);
    model.save_changes();
  };
  let over = null;
  const pointed = (what) => { over = what; show(); };
  const pieces = scene.drawings.flatMap((drawing) => drawTensor(tensors, drawing, stripes, pointed));
  const boxes = drawRanks(ranks, scene.ranks, pointed, choose);
  root.append(el("div.tpl-two", {}, tensors, ranks), say);

  function show() {
    const rank = over?.rank ?? (over ? -1 : model.get("rank"));
    const few = over?.piece ? new Set(over.piece.ranks) : rank >= 0 ? new Set([rank]) : null;
    for (const { piece, node } of pieces) {
      const on = !few || (over?.piece ? piece === over.piece : piece.ranks.includes(rank));
      node.classList.toggle("tpl-off", !on);
      node.classList.toggle("tpl-on", Boolean(few) && on);
    }
    boxes.forEach((box, at) => {
      box.classList.toggle("tpl-busy", Boolean(few?.has(at)));
      box.classList.toggle("tpl-off", Boolean(few) && !few.has(at));
    });
    const parts = over?.piece ? describe(over) : rank >= 0 ? [`rank ${rank}`, ` ${scene.says[rank]}`] : ["", scene.sentence];
    if (say.textContent !== parts.join("")) say.replaceChildren(el("b", {}, parts[0]), parts[1]);
  }

  function describe({ piece, name }) {
    const tensor = name.split(" ")[0], drawing = scene.drawings.find((one) => one.name === name);
    const many = piece.ranks.length > 1, who = `${many ? "ranks" : "rank"} ${ranksText(piece.ranks)}`;
    return [`${tensor}${piece.index}`, drawing.summed ? ` is the sum of what ${who} compute` : ` is held by ${who}`];
  }

  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const now = model.get("rank");
    const next = { ArrowRight: Math.min(now + 1, last), ArrowLeft: now < 0 ? last : Math.max(now - 1, 0), Home: 0, End: last, Escape: -1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    over = null;
    model.set("rank", next);
    model.save_changes();
  });
  model.on("change:rank", show);
  // The card keeps the height of the longest of its sentences.
  const reserve = () => {
    if (!root.clientWidth || root.clientWidth === reserve.width) return;
    reserve.width = root.clientWidth;
    const longest = [scene.sentence, ...scene.says.map((text, rank) => `rank ${rank} ${text}`)].sort((a, b) => b.length - a.length)[0];
    say.style.minHeight = "";
    const ghost = el("p.tpl-say", { style: "visibility:hidden" }, longest);
    say.after(ghost);
    say.style.minHeight = `${ghost.offsetHeight}px`;
    ghost.remove();
  };
  const resizer = new ResizeObserver(reserve);
  resizer.observe(root);
  const unfollow = followTheme(root, () => {});
  show();
  return () => {
    unfollow();
    resizer.disconnect();
    model.off("change:rank", show);
  };
}

export default { render };
