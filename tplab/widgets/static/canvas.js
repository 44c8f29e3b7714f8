// What charts on a canvas share: a bar, and the hatching of idle time.
export function shape(pen, x, y, width, height, radius) {
  pen.beginPath();
  if (radius) pen.roundRect(x, y, width, Math.max(height, 0.5), Math.min(radius, width / 2));
  else pen.rect(x, y, width, Math.max(height, 0.5));
}

const LETTERS = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace';
const ACTIONS = ["F", "B", "I", "W", "send F", "receive F", "send B", "receive B", "gradient sum", "unshard", "reshard", "step"];

// "F3"; what has no microbatch, by its name alone.
export const actionName = (kind, microbatch) => (microbatch >= 0 ? `${ACTIONS[kind]}${microbatch}` : ACTIONS[kind]);

// An action of a schedule, in the colour of its microbatch: F solid, B and I tinted, W pale and dashed; `outlined` is
// one that was predicted only. A line along `under` of its width tells which of its rank's stages it is of. Its name is
// written where there is room between `from` and `to`, in letters that tell I from 1.
export function actionBar(pen, paint, [x, y, wide, height], kind, microbatch, name, under = 0, outlined = false, [from, to] = [0, Infinity]) {
  const width = Math.max(wide - 1, 0.8), colour = microbatch >= 0 ? paint.hue(microbatch) : paint.work;
  const large = width > 5 && height > 5.5, edged = large && (outlined || kind !== 0);
  pen.fillStyle = paint.paper;
  if (!outlined) pen.fillRect(x, y, wide, height);
  const tint = (kind === 0 ? 1 : kind === 1 ? 0.42 : kind === 3 ? 0.1 : 0.28) + (large || kind === 0 ? 0 : 0.15);
  if (!outlined) pen.fillStyle = tint === 1 ? colour : paint.mix(colour, tint);
  else if (!large) pen.fillStyle = paint.mix(colour, height < 4 ? 0.7 : 0.4); // no room for an outline
  shape(pen, x + 0.5, y + 0.5, width, height - 1, large ? (outlined ? Math.min(3, width / 4) : 3) : 0);
  pen.fill();
  if (edged) {
    pen.strokeStyle = outlined ? paint.onPaper(colour) : colour;
    pen.lineWidth = 1;
    pen.setLineDash(kind === 3 ? [3, 2] : []);
    pen.stroke();
    pen.setLineDash([]);
  }
  if (under > 0 && large && height >= 9 && !outlined) {
    pen.fillStyle = kind === 0 ? "#ffffff" : paint.onPaper(colour);
    pen.fillRect(x + 2.5, y + height - 4, Math.max((width - 4) * under, 1), 1.5);
  }
  if (height < 9) return;
  const start = Math.max(x, from), room = Math.min(x + wide, to) - start;
  pen.font = `${kind === 0 && !outlined ? 600 : 500} ${height >= 18 ? 11 : 9.5}px ${LETTERS}`;
  pen.fillStyle = outlined ? paint.dim : kind === 0 ? "#ffffff" : paint.ink;
  pen.textAlign = "center";
  const shown = [name, kind < 4 ? name.slice(1) : ""].find((part) => part && pen.measureText(part).width < room - 3);
  if (shown) pen.fillText(shown, start + room / 2, y + height / 2 + 0.5);
}

export function hatch(pen, colour, ratio) {
  const tile = document.createElement("canvas"), size = 6 * ratio;
  tile.width = tile.height = Math.round(size);
  const lines = tile.getContext("2d");
  lines.strokeStyle = colour;
  lines.lineWidth = 1.3 * ratio;
  for (const shift of [-1, 0, 1]) {
    lines.beginPath();
    lines.moveTo(shift * tile.width - 1, tile.height + 1);
    lines.lineTo((shift + 1) * tile.width + 1, -1);
    lines.stroke();
  }
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform?.(new DOMMatrix().scale(1 / ratio));
  return pattern;
}
