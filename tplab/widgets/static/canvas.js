// Shared by pictures on a canvas: a box, the hatching of idle time, letters.
export function shape(pen, x, y, width, height, radius) {
  pen.beginPath();
  if (radius) pen.roundRect(x, y, width, Math.max(height, 0.5), Math.min(radius, width / 2));
  else pen.rect(x, y, width, Math.max(height, 0.5));
}

export const LETTERS = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace';
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
