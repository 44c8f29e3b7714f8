// Numbers as people read them: tplab/units.py in JavaScript.
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];
const SECONDS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];

export function plain(number) {
  if (number === 0 || !isFinite(number)) return String(number);
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(number)) + 1e-9));
  const text = (number * (1 + 1e-12)).toFixed(Math.min(digits, 20));
  return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
}

export function bytesText(number) {
  let power = 0;
  for (; number >= 1024 && power < BYTES.length - 1; power++) number /= 1024;
  return `${plain(number)} ${BYTES[power]}`;
}

export function timeText(time, unit, scale = time) {
  if (unit === "steps") return plain(time);
  const size = Math.abs(scale);
  const [name, factor] = SECONDS.find((pair) => size >= pair[1] * 0.9995) ?? SECONDS[size ? 3 : 0];
  return `${plain(time / factor)} ${name}`;
}

export function rangeText(numbers, text = bytesText) {
  let least = Infinity, most = -Infinity;
  for (const number of numbers) {
    if (number < least) least = number;
    if (number > most) most = number;
  }
  const [from, to] = [text(least), text(most)];
  return from === to ? from : `${from} to ${to}`;
}

// Round times from `start` on, about `most` or fewer before `end`.
export function ticks(start, end, most, unit = "s", zero = start) {
  if (!(end > start)) return [start];
  const rough = (end - start) / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough) + 1e-9);
  let step = power * [1, 2, 5, 10].find((nice) => power * nice >= rough * (1 - 1e-9));
  if (unit === "steps") step = Math.max(step, 1);
  const times = [];
  for (let index = Math.ceil((start - zero) / step - 1e-9); zero + index * step <= end + step * 1e-9; index++) {
    times.push(zero + index * step);
  }
  return times;
}
