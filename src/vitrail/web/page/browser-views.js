// What the page shows of one image, computed from the outputs of the graph: the twin of web/model_views.py.

import { tokensOf } from "./grid.js";

const TOP = 5;
const CHANNELS = 4;
const KEPT = 400; // answers that are kept

export class BrowserViews {
  #kept = new Map();

  constructor(info, run) {
    this.info = info;
    this.run = run;
    this.special = info.special.length;
    this.tokens = tokensOf(info);
    this.layers = [...Array(info.layers).keys()];
  }

  /** Return the answer of a view; `given` has the setting, the input of the image, and what the view needs besides. */
  async show(view, given) {
    const shown = { result: "result", attention: "attention", tokens: "tokensOf", similar: "similar", step: "step" }[view];
    if (!shown) throw new Error(`this page runs in your browser and has no view ${view}; use vitrail web on your machine`);
    const { input, ...rest } = given;
    return this.#keep(JSON.stringify([view, rest]), () => this[shown](given));
  }

  async #keep(key, compute) {
    if (!this.#kept.has(key)) {
      this.#kept.set(key, await compute());
      if (this.#kept.size > KEPT) this.#kept.delete(this.#kept.keys().next().value);
    }
    return this.#kept.get(key);
  }

  merges({ method, by, value, schedule }) {
    if (method !== "tome") throw new Error("this page runs in your browser and knows ToMe alone");
    const plan = this.info.plans[by];
    const merges = plan?.merges[schedule]?.[plan.values.indexOf(value)];
    if (!merges) throw new Error(`this model cannot merge ${by} = ${value} with schedule ${schedule}`);
    return merges;
  }

  #outputs(given, names) {
    return this.run({ image: given.input, size: this.info.input.size, merges: this.merges(given.setting) }, names);
  }

  /** Return where each original token is behind each layer. */
  #groups(outputs, layers) {
    const groups = [];
    let now = [...Array(this.tokens).keys()];
    for (const layer of layers) {
      const target = outputs[`target.${layer}`].data;
      now = now.map((token) => target[token]);
      groups.push(now);
    }
    return groups;
  }

  async result(given) {
    const inside = this.layers.flatMap((layer) => [`target.${layer}`, `size.${layer}`]);
    const heads = [...new Set(this.info.readouts.map((one) => one.output))];
    const names = [...new Set(["logits", ...heads, ...inside])];
    const outputs = await this.#outputs(given, names);
    const seconds = [];
    for (let pass = 0; pass < 2; pass++) {
      const start = performance.now();
      await this.#outputs(given, ["logits"]);
      seconds.push((performance.now() - start) / 1e3);
    }
    const plain = await this.#keep(`vector ${given.image}`, async () => {
      const setting = { method: "tome", by: "r", value: 0, schedule: "constant" };
      return (await this.#outputs({ ...given, setting }, ["logits"])).logits.data;
    });
    const sizes = this.layers.map((layer) => numbers(outputs[`size.${layer}`].data));
    return {
      setting: given.setting,
      tokens: sizes.map((one) => one.length),
      groups: this.#groups(outputs, this.layers).map((one) => one.slice(this.special)),
      sizes,
      flops: { before: this.flops(this.layers.map(() => 0)), after: this.flops(this.merges(given.setting)) },
      seconds: Math.min(...seconds),
      heads: this.info.readouts.map((one) => this.#answer(one, outputs)),
      cosine: round(cosine(outputs.logits.data, plain)),
    };
  }

  /** Return multiply-adds, as vitrail's cost model counts them. */
  flops(merges) {
    const { outside, blocks } = this.info.cost;
    let kept = this.tokens;
    let total = outside;
    blocks.forEach(({ attend, feed, pair, feature }, layer) => {
      const half = Math.floor(kept / 2);
      total += kept * attend + kept * kept * pair;
      if (merges[layer]) total += (kept - half) * half * feature;
      kept -= merges[layer];
      total += kept * feed;
    });
    return total;
  }

  #answer({ name, question, output, start, classes }, outputs) {
    const scores = Array.from(outputs[output].data.slice(start, start + classes.length));
    const likely = softmax(scores);
    const order = [...likely.keys()].sort((a, b) => likely[b] - likely[a] || a - b).slice(0, TOP);
    return { name, question, top: order.map((at) => ({ class: classes[at], probability: round(likely[at], 5) })) };
  }

  async attention(given) {
    const { layer, query } = given;
    const before = this.layers.slice(0, layer);
    const names = [`q.${layer}`, `k.${layer}`, ...before.map((one) => `target.${one}`)];
    const outputs = await this.#outputs(given, names);
    const groups = this.#groups(outputs, before).at(-1) ?? [...Array(this.tokens).keys()];
    const [, heads, length, width] = outputs[`k.${layer}`].dims;
    const q = outputs[`q.${layer}`].data;
    const k = outputs[`k.${layer}`].data;
    const members = counts(groups, length);
    const rows = [];
    for (let head = 0; head < heads; head++) {
      const base = head * length * width;
      const asks = base + groups[query] * width;
      const scores = [];
      for (let token = 0; token < length; token++) {
        let sum = 0;
        for (let at = 0; at < width; at++) sum += q[asks + at] * k[base + token * width + at];
        scores.push(sum * this.info.scale + Math.log(members[token]));
      }
      const weights = softmax(scores);
      rows.push(groups.map((token) => round(weights[token] / members[token], 6)));
    }
    return { layer, query, rows };
  }

  /** Return the features of every original token behind a layer, as rows. */
  async #features(given) {
    const layers = this.layers.slice(0, given.layer + 1);
    const { image, setting, layer } = given;
    return this.#keep(JSON.stringify(["features", image, setting, layer]), async () => {
      const name = `tokens.${layer}`;
      const outputs = await this.#outputs(given, [name, ...layers.map((one) => `target.${one}`)]);
      const width = outputs[name].dims[2];
      const groups = this.#groups(outputs, layers).at(-1);
      return groups.map((token) => outputs[name].data.subarray(token * width, (token + 1) * width));
    });
  }

  async tokensOf(given) {
    const features = await this.#features(given);
    const special = features.slice(0, this.special);
    return {
      layer: given.layer,
      norms: features.map((row) => round(Math.sqrt(dot(row, row)))),
      threshold: this.info.thresholds[given.layer],
      colors: pcaColors(features.slice(this.special)),
      cosines: special.map((row) => special.map((other) => round(cosine(row, other)))),
    };
  }

  async similar(given) {
    const features = await this.#features(given);
    const { layer, query } = given;
    return { layer, query, cosines: features.map((row) => round(cosine(row, features[query]))) };
  }

  async step(given) {
    const { layer } = given;
    const before = this.layers.slice(0, layer);
    const merges = this.merges(given.setting)[layer];
    const names = [`k.${layer}`, `target.${layer}`, `attended.${layer}`, ...before.map((one) => `target.${one}`)];
    const outputs = await this.#outputs(given, names);
    const groups = this.#groups(outputs, before).at(-1) ?? [...Array(this.tokens).keys()];
    const [, heads, length, width] = outputs[`k.${layer}`].dims;
    const blank = { layer, tokens: length, groups, merges: 0 };
    if (!merges) return blank;
    const k = outputs[`k.${layer}`].data;
    const keys = [...Array(length).keys()].map((token) =>
      Float32Array.from({ length: width }, (_, at) => {
        let sum = 0;
        for (let head = 0; head < heads; head++) sum += k[(head * length + token) * width + at];
        return sum / heads;
      }),
    );
    const target = outputs[`target.${layer}`].data;
    const { data, dims } = outputs[`attended.${layer}`];
    const pairs = [];
    for (let a = 0; a < length; a += 2) {
      if (a < this.special) continue;
      let b = -1;
      let best = -Infinity;
      for (let other = 1; other < length; other += 2) {
        if (other < this.special) continue;
        const score = cosine(keys[a], keys[other]);
        if (score > best) [b, best] = [other, score];
      }
      if (b >= 0) pairs.push({ a, b, cosine: round(best, 5), merges: target[a] === target[b] });
    }
    pairs.sort((one, other) => other.cosine - one.cosine);
    return {
      ...blank,
      merges: pairs.filter((one) => one.merges).length,
      sizes: counts(groups, length),
      target: Array.from(target),
      pairs,
      values: keys.map((_, token) => numbers(data.slice(token * dims[2], token * dims[2] + CHANNELS))),
      keys: keys.map((row) => numbers(row)),
    };
  }
}

const round = (value, digits = 4) => {
  if (!Number.isFinite(value)) return null;
  return Number(value.toFixed(digits));
};
const numbers = (values, digits = 4) => Array.from(values, (value) => round(value, digits));

function counts(groups, length) {
  const made = Array(length).fill(0);
  for (const token of groups) made[token]++;
  return made;
}

function dot(a, b) {
  let sum = 0;
  for (let at = 0; at < a.length; at++) sum += a[at] * b[at];
  return sum;
}

const cosine = (a, b) => dot(a, b) / Math.sqrt(Math.max(dot(a, a) * dot(b, b), 1e-30));

function softmax(scores) {
  const top = Math.max(...scores);
  const made = scores.map((score) => Math.exp(score - top));
  const total = made.reduce((sum, one) => sum + one, 0);
  return made.map((one) => one / total);
}

/** Return features as colors: their three strongest components, from the 1st to the 99th percentile. */
function pcaColors(features) {
  const width = features[0].length;
  const mean = Float64Array.from({ length: width }, (_, at) => features.reduce((sum, row) => sum + row[at], 0) / features.length);
  const centered = features.map((row) => Float64Array.from(row, (value, at) => value - mean[at]));
  const coordinates = components(centered, 3).map((direction) => centered.map((row) => dot(row, direction)));
  const scaled = coordinates.map((values) => {
    const [low, high] = [percentile(values, 1), percentile(values, 99)];
    const flat = high - low <= 1e-6 * Math.max(Math.abs(high), Math.abs(low));
    return values.map((value) => (flat ? 0.5 : Math.min(1, Math.max(0, (value - low) / (high - low)))));
  });
  return features.map((_, at) => scaled.map((values) => round(values[at], 3)));
}

/** Return the strongest principal directions of centered rows, each with its largest entry positive. */
function components(rows, count) {
  const width = rows[0].length;
  const block = Math.min(width, count + 5);
  let basis = [...Array(block).keys()].map((seed) =>
    Float64Array.from({ length: width }, (_, at) => Math.sin(1 + at * (seed + 1) * 1.618 + seed)),
  );
  orthonormalize(basis);
  for (let turn = 0; turn < 60; turn++) {
    basis = basis.map((direction) => timesCovariance(rows, direction));
    orthonormalize(basis);
  }
  const images = basis.map((direction) => timesCovariance(rows, direction));
  const small = basis.map((one) => images.map((other) => dot(one, other)));
  const { values, vectors } = symmetricEigen(small);
  const order = [...values.keys()].sort((a, b) => values[b] - values[a]).slice(0, count);
  return order.map((at) => {
    const made = new Float64Array(width);
    basis.forEach((direction, index) => direction.forEach((value, place) => (made[place] += vectors[index][at] * value)));
    const largest = made.reduce((best, value) => (Math.abs(value) > Math.abs(best) ? value : best), 0);
    return largest < 0 ? made.map((value) => -value) : made;
  });
}

function timesCovariance(rows, direction) {
  const made = new Float64Array(direction.length);
  for (const row of rows) {
    const along = dot(row, direction);
    for (let at = 0; at < made.length; at++) made[at] += along * row[at];
  }
  return made;
}

function orthonormalize(basis) {
  basis.forEach((direction, index) => {
    for (const other of basis.slice(0, index)) {
      const along = dot(direction, other);
      direction.forEach((_, at) => (direction[at] -= along * other[at]));
    }
    const norm = Math.sqrt(dot(direction, direction)) || 1;
    direction.forEach((_, at) => (direction[at] /= norm));
  });
}

/** Return eigenvalues, and eigenvectors as columns, of a small symmetric matrix (Jacobi's rotations). */
function symmetricEigen(given) {
  const size = given.length;
  const matrix = given.map((row) => [...row]);
  const vectors = given.map((_, row) => given.map((__, column) => (row === column ? 1 : 0)));
  for (let sweep = 0; sweep < 30; sweep++)
    for (let p = 0; p < size; p++)
      for (let q = p + 1; q < size; q++) {
        if (Math.abs(matrix[p][q]) < 1e-300) continue;
        const angle = 0.5 * Math.atan2(2 * matrix[p][q], matrix[q][q] - matrix[p][p]);
        const [c, s] = [Math.cos(angle), Math.sin(angle)];
        for (let k = 0; k < size; k++) {
          const [kp, kq] = [matrix[k][p], matrix[k][q]];
          [matrix[k][p], matrix[k][q]] = [c * kp - s * kq, s * kp + c * kq];
        }
        for (let k = 0; k < size; k++) {
          const [pk, qk] = [matrix[p][k], matrix[q][k]];
          [matrix[p][k], matrix[q][k]] = [c * pk - s * qk, s * pk + c * qk];
          const [vp, vq] = [vectors[k][p], vectors[k][q]];
          [vectors[k][p], vectors[k][q]] = [c * vp - s * vq, s * vp + c * vq];
        }
      }
  return { values: matrix.map((row, at) => row[at]), vectors };
}

function percentile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  const at = ((sorted.length - 1) * share) / 100;
  const low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}
