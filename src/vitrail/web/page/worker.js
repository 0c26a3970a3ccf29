// The model in this browser: ONNX Runtime Web runs its graph, browser-views.js makes of the outputs what a server sends.

import { BrowserViews } from "./browser-views.js";
import { decode, toInput } from "./pixels.js";
import * as ort from "./vendor/ort.wasm.bundle.min.mjs";

const IMAGES = 24; // images that are kept
let opened;

/** Load the model once; every call waits for it. */
function open() {
  opened ??= (async () => {
    const { info, samples } = await (await fetch("model.json")).json();
    const [graph, runtime] = await Promise.all([bytes("model.onnx"), bytes("vendor/ort-wasm-simd-threaded.wasm.gz")]);
    ort.env.wasm.wasmBinary = await unpack(runtime);
    ort.env.wasm.numThreads = 1;
    ort.env.logLevel = "error";
    const session = await ort.InferenceSession.create(new Uint8Array(graph));
    return { info, samples, views: new BrowserViews(info, (given, names) => run(session, given, names)) };
  })();
  return opened;
}

async function bytes(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name} could not be loaded (${response.status})`);
  return response.arrayBuffer();
}

/** Unpack gzip; a web space that sends a Content-Encoding has had it unpacked already. */
async function unpack(data) {
  const head = new Uint8Array(data, 0, 2);
  if (head[0] !== 0x1f || head[1] !== 0x8b) return data;
  return new Response(new Blob([data]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

async function run(session, { image, size, merges }, names) {
  const feeds = {
    image: new ort.Tensor("float32", image, [1, 3, ...size]),
    merges: new ort.Tensor("int64", BigInt64Array.from(merges, BigInt), [merges.length]),
  };
  const outputs = await session.run(feeds, names);
  return Object.fromEntries(
    Object.entries(outputs).map(([name, { data, dims }]) => [
      name,
      { dims, data: data instanceof BigInt64Array ? Array.from(data, Number) : data },
    ]),
  );
}

const images = new Map();

const calls = {
  async models() {
    const { info, samples } = await open();
    return { models: [{ name: info.name, modality: info.modality }], samples };
  },

  async describe() {
    return (await open()).info;
  },

  async upload(file) {
    const { info } = await open();
    const hash = new Uint8Array(await digest(file));
    const key = Array.from(hash, (byte) => byte.toString(16).padStart(2, "0")).join("");
    if (!images.has(key)) {
      const { pixels, width, height, preview } = await decode(file);
      images.set(key, { preview, input: toInput({ pixels, width, height }, info.input) });
      if (images.size > IMAGES) images.delete(images.keys().next().value);
    }
    return { image: key, preview: images.get(key).preview };
  },
};

/** Hash a file; without a secure context (http on another machine) a plain sum must do. */
async function digest(file) {
  const data = await file.arrayBuffer();
  if (self.crypto?.subtle) return crypto.subtle.digest("SHA-256", data);
  const sum = new Uint32Array([2166136261, data.byteLength]);
  for (const byte of new Uint8Array(data)) sum[0] = Math.imul(sum[0] ^ byte, 16777619);
  return sum.buffer;
}

let queue = Promise.resolve(); // one call at a time: the runtime has one session

self.onmessage = ({ data: { id, call, given } }) => {
  queue = queue.then(async () => {
    try {
      if (call in calls) return self.postMessage({ id, answer: await calls[call](given) });
      const { views } = await open();
      if (!images.has(given.image)) return self.postMessage({ id, error: "gone: upload the image again", gone: true });
      const answer = await views.show(call, { ...given, input: images.get(given.image).input });
      self.postMessage({ id, answer });
    } catch (error) {
      self.postMessage({ id, error: error.message || String(error) });
    }
  });
};
