// Reads what widgets/paper/wire.py packed: a header, and columns as typed arrays.
export async function unpack(view) {
  if (!globalThis.DecompressionStream) {
    throw new Error("this browser is too old for tplab's widgets: take Chrome 111, Firefox 121, Safari 16.4 or a later one");
  }
  const packed = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const kinds = { Int8Array, Uint8Array, Int16Array, Uint16Array, Int32Array, Float32Array, Float64Array };
  for (const [name, [kind, count, offset, differences]] of Object.entries(data.columns)) {
    let column = new kinds[kind](buffer, 4 + length + offset, count);
    if (differences) {
      let sum = 0;
      column = Int32Array.from(column, (step) => (sum += step));
    }
    data[name] = column;
  }
  return data;
}
