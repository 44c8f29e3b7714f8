// The bar of an action of a schedule; widgets/paper/action.py draws the same.
import { LETTERS, shape } from "./canvas.js";

const ACTIONS = ["F", "B", "I", "W", "send F", "receive F", "send B", "receive B", "gradient sum", "unshard", "reshard", "step"];

// "F3"; an action without a microbatch has only its name.
export const actionName = (kind, microbatch) => (microbatch >= 0 ? `${ACTIONS[kind]}${microbatch}` : ACTIONS[kind]);

// [y, height] of an action in the row of bars that begins at y: the two of a pair are one above the other.
export const half = ({ joined, rank }, row, y, size) =>
  joined[row] ? [y + size / 2, size / 2] : [y, joined[row + 1] && rank[row + 1] === rank[row] ? size / 2 : size];

const SOLID = [["F"], ["I", "W"], ["I"], ["W"]]; // by kind: a B is an I and a W
const TINTS = [1, 0.42, 0.28, 0.1]; // by microbatch or stage: F solid, B and I tinted, W pale

// An action of a schedule. `by`: what its colour means, its kind, microbatch or stage. tier: the place of its stage
// among its rank's, from 0 to 1; later ones are lighter. `outlined`: only predicted. Its name is written with
// `letters`, in a font that distinguishes I from 1, if there is room between `from` and `to`; otherwise only its kind.
export function actionBar(pen, paint, [x, y, wide, height], action, { by = "kind", outlined = false, from = 0, to = Infinity, letters = pen } = {}) {
  const { kind, microbatch, stage, tier = 0 } = action, large = wide > 5 && height > 5.5;
  const width = Math.max(wide - (wide > 3.5 ? 1 : 0), 0.8), left = x + (wide > 3.5 ? 0.5 : 0);
  const hue = by === "stage" ? paint.hue(stage) : microbatch >= 0 ? paint.hue(microbatch) : paint.work;
  const named = by === "kind" && kind < 4;
  const colour = named ? paint.kinds[SOLID[kind][0]] : hue;
  const tint = (TINTS[kind] ?? 0.28) + (large || kind === 0 ? 0 : 0.15), share = 1 - 0.45 * tier;
  const fills = named ? SOLID[kind].map((name) => paint.lighter(paint.kinds[name], share)) : [tint === 1 ? paint.mix(hue, share) : paint.mix(hue, tint)];
  if (!outlined) {
    pen.fillStyle = paint.paper;
    pen.fillRect(x, y, wide, height);
  }
  pen.save();
  shape(pen, left, y + 0.5, width, height - 1, large ? (outlined ? Math.min(3, width / 4) : 3) : 0);
  if (outlined) {
    pen.fillStyle = large ? paint.paper : paint.mix(colour, height < 4 ? 0.7 : 0.4); // no room for an outline
    pen.fill();
  } else {
    pen.clip();
    fills.forEach((fill, place) => {
      pen.fillStyle = fill;
      pen.fillRect(left + (width * place) / fills.length, y, width / fills.length + 0.5, height);
    });
  }
  pen.restore();
  if (large && (outlined || (!named && kind !== 0))) {
    shape(pen, left, y + 0.5, width, height - 1, outlined ? Math.min(3, width / 4) : 3);
    pen.strokeStyle = outlined ? paint.onPaper(colour) : colour;
    pen.lineWidth = 1;
    pen.setLineDash(kind === 3 && !named ? [3, 2] : []);
    pen.stroke();
    pen.setLineDash([]);
  }
  if (height < 9) return;
  const ink = outlined ? paint.dim : named || kind === 0 ? readable(fills[fills.length - 1]) : paint.ink;
  write(letters, action.name, kind, Math.max(x, from), Math.min(x + wide, to), y + height / 2 + 0.5, height, ink);
}

// The name, centred between two places, smaller if necessary; if there is no room, the letter of its kind.
function write(pen, name, kind, from, to, y, height, ink) {
  const sizes = height >= 18 ? [11, 9.5] : [9.5], room = to - from - 1.5;
  for (const [text, size] of [...sizes.map((size) => [name, size]), ...(kind < 4 ? [[name.slice(0, 1), 9.5]] : [])]) {
    pen.font = `600 ${size}px ${LETTERS}`;
    if (!text || pen.measureText(text).width > room) continue;
    pen.fillStyle = ink;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillText(text, (from + to) / 2, y);
    return;
  }
}

// White or nearly black, whichever is easier to read on a colour.
function readable(colour) {
  const [r, g, b] = colour.match(/\d+/g).map((part) => (part / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.19 ? "#10151f" : "#ffffff";
}
