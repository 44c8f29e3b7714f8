// On the map of the course, a lab under the pointer is joined to the labs that it builds on.
const map = document.querySelector(".front .map");
const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function forget() {
  map.querySelector("svg.needs")?.remove();
  for (const tile of map.querySelectorAll(".needed")) tile.classList.remove("needed");
}

function join(tile) {
  forget();
  const needed = tile.dataset.needs.split(" ").map((number) => number && document.getElementById(`lab-${number}`)).filter(Boolean);
  if (!needed.length) return;
  const origin = map.getBoundingClientRect(), to = tile.getBoundingClientRect();
  const svg = node("svg", { class: "needs", "aria-hidden": "true" });
  for (const other of needed) {
    other.classList.add("needed");
    const from = other.getBoundingClientRect();
    const beside = Math.abs(from.top - to.top) < 4;
    // Between neighbours in a row from side to side, else from below to above.
    const [x1, y1] = beside ? [from.right, from.top + from.height / 2] : [from.left + from.width / 2, from.bottom];
    const [x2, y2] = beside ? [to.left, to.top + to.height / 2] : [to.left + to.width / 2, to.top];
    const bend = beside ? 0 : Math.max(24, (y2 - y1) / 2), side = beside ? 18 : 0;
    const at = (x, y) => `${x - origin.left} ${y - origin.top}`;
    svg.append(
      node("path", { d: `M${at(x1, y1)}C${at(x1 + side, y1 + bend)} ${at(x2 - side, y2 - bend)} ${at(x2, y2)}` }),
      node("circle", { cx: x2 - origin.left, cy: y2 - origin.top, r: 4 }),
    );
  }
  map.prepend(svg);
}

// The program at the top: what the reader chooses is a run that was recorded, and the link keeps it.
const form = document.querySelector(".front .choices");
function choose(event) {
  const runs = JSON.parse(document.getElementById("runs").textContent);
  const { ranks, shift, without } = Object.fromEntries(new FormData(form));
  const { lines, without: gone, says, widget } = runs[`ring-${ranks}-${shift}-${without}`.replace("--", "-back")];
  const change = form.closest(".change"), figure = document.querySelector(".front .try figure.card");
  change.querySelector(".program").replaceChildren(...lines.map((line, index) => {
    const row = document.createElement("li"), code = document.createElement(index + 1 === gone ? "del" : "code");
    code.textContent = line;
    row.append(code);
    return row;
  }));
  change.querySelector(".says").textContent = says;
  figure.querySelector("script").textContent = JSON.stringify(widget);
  if (event) history.replaceState(null, "", `?ranks=${ranks}&shift=${shift}&without=${without}`); // of another run, no step is kept
  figure.dispatchEvent(new Event("redraw", { bubbles: true }));
}

if (form) {
  form.hidden = false;
  const asked = [...new URLSearchParams(location.search)];
  const boxes = asked.map(([name, value]) => form.querySelector(`[name="${CSS.escape(name)}"][value="${CSS.escape(value)}"]`));
  for (const box of boxes) if (box) box.checked = true;
  const isWrong = asked.some(([name], place) => !boxes[place] && name in form.elements); // the link says what is shown
  if (isWrong || boxes.some(Boolean)) choose(isWrong);
  form.addEventListener("change", choose);
}

if (map) {
  for (const tile of map.querySelectorAll(".tile")) {
    tile.addEventListener("pointerenter", () => join(tile));
    tile.addEventListener("focus", () => join(tile));
    tile.addEventListener("pointerleave", forget);
    tile.addEventListener("blur", forget);
  }
}
