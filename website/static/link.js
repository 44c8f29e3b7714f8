// What a reader chose in the widgets of a page, in its link. A figure's data says which traits of its widget are kept, in
// the order in which they are set, each with its values if these are few, and which cell of Python makes the widget. The link has `name.trait=value`, with the
// figure's name and a value as JSON; of a trait that is a table, `name.trait.key=value`. Only what differs from the page is in it.
const PAUSE = 300, SAID = 2000; // milliseconds
const LONGEST = 6000; // letters: servers refuse longer links
const figures = new Map(); // what is drawn, by name: {model, data, isOwn: whether the reader chose anything}

const isTable = (value) => typeof value === "object" && value !== null;
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
const fits = (value, like) => value !== undefined && (like === null || value === null || typeof value === typeof like) && isTable(value) === isTable(like);

function read(text) {
  try {
    return JSON.parse(text);
  } catch { /* somebody else wrote it */ }
}

// The traits that the link gives a figure. What has another type than on the page is no state of this widget.
export function asked(name, { kept, values }) {
  const found = {};
  for (const [key, text] of new URLSearchParams(location.search)) {
    const [figure, trait, part] = key.split("."), value = read(text), now = values[trait];
    if (figure !== name || !(trait in kept) || (kept[trait] && !kept[trait].includes(value))) continue;
    if (part === undefined) { if (!isTable(now) && fits(value, now)) found[trait] = value; }
    else if (isTable(now) && part in now && fits(value, now[part])) found[trait] = { ...(found[trait] ?? now), [part]: value };
  }
  return found;
}

// What differs from the page: [key in the link, value].
function changes({ model, data: { kept, values } }) {
  return Object.keys(kept).flatMap((trait) => {
    const now = model.get(trait), before = values[trait];
    if (!isTable(before)) return same(now, before) ? [] : [[trait, now]];
    return Object.keys(before).filter((part) => !same(now[part], before[part])).map((part) => [`${trait}.${part}`, now[part]]);
  });
}

// The link of the page with the state of these figures, and without that of the other ones that are drawn.
function linkOf(chosen) {
  const all = new URLSearchParams(location.search);
  for (const key of [...all.keys()]) if (figures.has(key.split(".")[0])) all.delete(key);
  for (const name of chosen) for (const [key, value] of changes(figures.get(name))) all.append(`${name}.${key}`, JSON.stringify(value));
  const query = all.toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
  return `${location.pathname}${query && "?"}${query}`;
}

let resting = null;
function note() {
  clearTimeout(resting);
  resting = setTimeout(() => {
    const link = linkOf([...figures.keys()].filter((name) => figures.get(name).isOwn));
    if (link.length <= LONGEST) history.replaceState(null, "", link + location.hash);
  }, PAUSE);
}

// Keeps a widget's state in the link from the reader's first touch on.
export function keep(figure, model, data, isOwn) {
  const one = { model, data, isOwn }, name = figure.id;
  figures.set(name, one);
  for (const kind of ["pointerdown", "keydown"]) figure.addEventListener(kind, (event) => { one.isOwn ||= event.isTrusted; }, true);
  for (const trait of Object.keys(data.kept)) model.on(`change:${trait}`, () => { if (one.isOwn && figures.get(name) === one) note(); });
  figure.querySelector(":scope > .share")?.remove();
  if (Object.keys(data.kept).length) figure.append(share(name, one));
}

function share(name, one) {
  const line = document.createElement("p"), said = document.createElement("span");
  line.className = "share";
  said.setAttribute("role", "status");
  const copies = (label, text) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.addEventListener("click", async () => {
      said.textContent = await copied(text()).then(() => "Copied.", (error) => error.message);
      setTimeout(() => { said.textContent = ""; }, SAID * (said.textContent === "Copied." ? 1 : 5));
    });
    line.append(button);
  };
  copies("Copy link", () => {
    const link = linkOf([name]);
    return link.length <= LONGEST ? `${location.origin}${link}#${name}` : null;
  });
  if (one.data.python) copies("Copy as Python", () => pythonOf(one));
  line.append(said);
  return line;
}

async function copied(text) {
  if (text === null) throw new Error("This is too long for a link. Copy it as Python.");
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    throw new Error("Your browser does not let this page copy.");
  }
}

// The cell that makes the widget in this state.
function pythonOf({ model, data: { kept, values, python } }) {
  const lines = Object.keys(kept).flatMap((trait) => {
    const now = model.get(trait), before = values[trait];
    if (same(now, before)) return [];
    const part = isTable(now) ? Object.fromEntries(Object.entries(now).filter(([name, value]) => !same(value, before[name]))) : now;
    return [`card.${trait} = ${literal(part)}`];
  });
  return [python, ...lines, "card", ""].join("\n");
}

const WORDS = new Map([[true, "True"], [false, "False"], [null, "None"]]);
function literal(value) {
  if (!isTable(value)) return WORDS.get(value) ?? JSON.stringify(value);
  return `{${Object.entries(value).map(([name, one]) => `${literal(name)}: ${literal(one)}`).join(", ")}}`;
}
