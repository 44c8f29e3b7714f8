// Python for a lab of a page, or for its cells: Pyodide and tplab from this site, NumPy too, or from
// the CDN that Pyodide is released on.
// Questions come as messages and are answered in their order; until Python is there, it says how far it is.
import { loadPyodide } from "./pyodide.mjs";

const here = (name) => new URL(name, import.meta.url).href;
let host = "";
const tell = (message) => self.postMessage(message);

// Says how much of the large files has come. `sizes` are their bytes.
function countDownloads(sizes, text) {
  const fetched = self.fetch, total = Object.values(sizes).reduce((a, b) => a + b, 0);
  let come = 0, told = 0;
  const count = new Set(Object.keys(sizes).map(here));
  self.fetch = async (address, ...more) => {
    const response = await fetched(address, ...more);
    if (!count.has(new URL(address.url ?? address, import.meta.url).href) || !response.body) return response;
    const counter = new TransformStream({
      transform(part, out) {
        come += part.byteLength;
        const share = come / total;
        if (share === 1 || share - told >= 0.02) {
          told = share;
          tell({ progress: { text: share < 1 ? text : "Python is starting.", share } });
        }
        out.enqueue(part);
      },
    });
    const { status, statusText, headers } = response;
    return new Response(response.body.pipeThrough(counter), { status, statusText, headers });
  };
}

// What failed, for the page, which says it in words.
class Failure extends Error {
  constructor(what, cause) {
    super(String(cause?.message ?? cause));
    this.what = what;
  }
}

async function step(what, promise) {
  try {
    return await promise;
  } catch (error) {
    throw new Failure(what, error);
  }
}

// For a lab: NumPy, and those files of tplab that it needs. For cells: all that tplab imports, and IPython.
async function start(forCells) {
  const about = await step("python", fetch(here("about.json")).then((response) => response.json()));
  const numpyFrom = about.numpyFrom || here(".");
  host = new URL(numpyFrom).host;
  const text = `Python is loading: ${Math.ceil(about.bytes / 1e6)} MB, which the browser keeps.`;
  tell({ progress: { text, share: 0 } });
  countDownloads(about.counted, text);
  const packages = forCells ? { lockFileURL: here("lite-lock.json") } : { packageBaseUrl: numpyFrom };
  const python = await step("python", loadPyodide({ indexURL: here("."), ...packages }));
  tell({ progress: { text: `NumPy is loading from ${host}.`, share: 1 } });
  await step("numpy", loadNumPy(python, forCells ? "tplab" : "numpy"));
  tell({ progress: { text: "tplab is starting.", share: 1 } });
  if (forCells) {
    const code = await step("python", fetch(here("cells.py")).then((response) => response.text()));
    cells = await step("tplab", Promise.resolve().then(() => python.runPython(`${code}\nCells`)(say)));
    return python;
  }
  const sources = await step("python", fetch(here("tplab.zip")).then((response) => response.arrayBuffer()));
  python.unpackArchive(sources, "zip", { extractDir: "/tplab" });
  python.runPython("import sys; sys.path.insert(0, '/tplab')");
  return python;
}

const say = (text, buffers) => tell({ ...JSON.parse(text), buffers: buffers.toJs() });

async function loadNumPy(python, wanted) {
  const said = [];
  await python.loadPackage(wanted, { messageCallback: () => {}, errorCallback: (text) => said.push(text) });
  if (!python.loadedPackages.numpy) throw new Error(said.join("; ") || "it did not come");
}

let starting = null, bench = null, cells = null, turn = Promise.resolve();

// room: the folder of tplab.widgets that computes this lab.
async function answer({ first, room, question }) {
  const python = await (starting ??= start(false));
  try {
    bench ??= python.runPython(`import json\nfrom tplab.widgets.${room}.workbench import Workbench
lambda first: Workbench(json.loads(first))`)(JSON.stringify(first));
    const found = bench.reply(JSON.stringify(question));
    const [text, board] = found.toJs();
    found.destroy();
    tell({ ...JSON.parse(text), board: board.length ? board : null });
  } catch (error) {
    throw new Failure("tplab", error);
  }
}

// A cell is run, or a widget that a cell has shown hears from the page.
async function work({ cell, source, comm, data }) {
  await (starting ??= start(true));
  try {
    if (comm) cells.hear(comm, data);
    else cells.run(cell, source);
  } catch (error) {
    throw new Failure("tplab", error);
  }
}

self.onmessage = ({ data }) => {
  turn = turn.then(() => (data.room ? answer(data) : work(data))).catch((error) => tell({ failed: { what: error.what ?? "python", why: error.message, host } }));
};
