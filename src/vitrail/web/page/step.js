// One merge, step by step: the numbers of one layer, so that they can be checked by hand.

import { pairsChart } from "./charts.js";
import { h, pills, plural, slider } from "./dom.js";
import { fit, outline, overlayGray, paintGlass, paintImage, paintLeads, paintMap, range } from "./draw.js";

export const STAGES = [["0", "1 Tokens"], ["1", "2 Split"], ["2", "3 Similarity"], ["3", "4 Pairs"], ["4", "5 Merge"]];
const A = "36 86 184";
const B = "224 154 43";

export class Step {
  constructor(app) {
    this.app = app;
    this.turn = 0;
    this.canvas = h("canvas", {
      class: "painting", role: "img", id: "step-stage", tabIndex: 0,
      onclick: (event) => this.#pick(event),
    });
    this.stages = pills("Steps of one merge", STAGES, "0", (stage) => app.update({ stage: Number(stage) }));
    this.layer = slider("Layer", app.info.layers - 1, app.state.layer, (at) => `${at}`, (layer) => app.update({ layer, pair: 0 }), { id: "step-layer" });
    this.text = h("div", { class: "explain", "aria-live": "polite" });
    this.back = h("button", { type: "button", onclick: () => this.#go(-1) }, "← Back");
    this.next = h("button", { type: "button", class: "primary", id: "step-next", onclick: () => this.#go(1) }, "Next →");
    document.getElementById("panel-step").append(
      h("div", { class: "two" },
        h("div", { class: "stage-box" }, this.stages, h("div", { class: "stage" }, this.canvas), this.layer, h("div", { class: "buttons" }, this.back, this.next)),
        h("section", { class: "card wide" }, this.text),
      ),
    );
  }

  data() {
    return { step: this.step };
  }

  show() {
    const { app } = this;
    const { state, info } = app;
    const turn = ++this.turn;
    this.layer.move(state.layer, info.layers - 1);
    this.stages.mark(String(state.stage));
    this.back.disabled = state.stage === 0 && state.layer === 0;
    this.next.disabled = state.stage >= 4 && state.layer === info.layers - 1;
    this.next.textContent = state.stage >= 4 ? "Next layer →" : "Next →";
    const setting = app.setting();
    if (setting.method !== "tome" || (setting.by === "r" && setting.value === 0)) {
      this.step = null;
      paintImage(this.canvas, app.picture);
      this.text.replaceChildren(
        h("h2", {}, "Nothing to walk through"),
        h("p", {}, setting.method === "tome" ? "With r = 0 nothing merges." : `This view explains ToMe, and ${setting.method} is chosen.`),
        h("button", { type: "button", class: "primary", onclick: () => app.update({ method: "tome", by: "r", value: 8 }) }, "Take ToMe with r = 8"),
      );
      return;
    }
    app.ask("step", { setting, layer: state.layer }).then(
      (step) => {
        if (turn !== this.turn) return;
        this.step = step;
        this.#paint();
      },
      (error) => app.fail(error),
    );
  }

  #go(by) {
    const { state, info } = this.app;
    const stage = state.stage + by;
    if (stage < 0) return this.app.update({ stage: 4, layer: Math.max(0, state.layer - 1), pair: 0 });
    if (stage > 4) return this.app.update({ stage: 0, layer: Math.min(info.layers - 1, state.layer + 1), pair: 0 });
    this.app.update({ stage });
  }

  #pick(event) {
    const { app, step } = this;
    if (!step?.pairs) return;
    const box = this.canvas.getBoundingClientRect();
    const patch = app.picture.patchAt((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    const token = step.groups[app.info.special.length + patch];
    const at = step.pairs.findIndex((pair) => pair.a === token);
    const other = step.pairs.findIndex((pair) => pair.b === token && pair.merges);
    const found = at >= 0 ? at : other;
    if (found >= 0) app.update({ pair: found, stage: Math.max(2, app.state.stage) });
    else app.say(`Token ${token} is in B, and nothing merges into it in this layer.`);
  }

  #paint() {
    const { app, step } = this;
    const { picture, info, state } = app;
    const special = info.special.length;
    const groups = step.groups.slice(special);
    const titled = (title, ...children) => {
      this.text.replaceChildren(h("h2", {}, title), ...children);
      this.canvas.setAttribute("aria-label", `${title}. ${this.text.querySelector("p")?.textContent ?? ""}`);
    };
    this.canvas.dataset.shown = JSON.stringify([state.stage, state.layer, state.pair]);
    if (!step.pairs) {
      paintGlass(this.canvas, picture, groups);
      return titled(`Layer ${step.layer}: nothing merges`, h("p", {}, `${step.tokens} tokens enter this layer, and as many leave it.`));
    }
    const pair = step.pairs[Math.min(state.pair, step.pairs.length - 1)];
    const own = (token) => (patch) => groups[patch] === token;
    const context = fit(this.canvas, picture);
    const kinds = (share) => {
      paintImage(this.canvas, picture);
      groups.forEach((token, patch) => {
        context.fillStyle = `rgb(${token % 2 ? B : A} / ${share})`;
        context.fillRect(...picture.cell(patch));
      });
      paintLeads(context, picture, groups, "rgb(20 17 28 / .85)", 0.7);
    };
    const shows = [
      () => {
        paintImage(this.canvas, picture);
        paintLeads(context, picture, groups, "rgb(246 239 224 / .8)", 0.7);
        const merged = groups.length - new Set(groups).size;
        titled(`Layer ${step.layer}: ${step.tokens} tokens enter`,
          h("p", {}, `${plural(special, "special token")} in front, and ${step.tokens - special} tokens for ${groups.length} patches` +
            (merged ? `: ${merged} have merged in earlier layers. A line runs between tokens.` : ", one for each: nothing has merged yet.")),
          h("p", {}, "Attention runs first, with all of them. The keys that it computes anyway say which tokens are alike: each token's key is averaged over the heads."),
          h("p", { class: "soft" }, "The merge sits between attention and the MLP. Special tokens are protected: they never merge."));
      },
      () => {
        kinds(0.62);
        const a = step.pairs.length;
        titled("Every second token is a source",
          h("p", {}, "Positions in the sequence alternate: even ones are A (cobalt), odd ones are B (amber). The special tokens count in the alternation, and stay out of it otherwise."),
          h("p", {}, `So ${a} tokens of A look for a partner among ${step.tokens - special - a} tokens of B. No token looks among its own kind, so every similarity is computed once: ${a} × ${step.tokens - special - a} = ${(a * (step.tokens - special - a)).toLocaleString("en")} instead of all pairs, ${(((step.tokens - special) * (step.tokens - special - 1)) / 2).toLocaleString("en")}. That is small beside attention, and still grows with the square of the number of tokens.`),
          h("p", { class: "soft" }, "Behind the first merge the order is: special tokens, the A tokens that are left, then B. So neighbors in the sequence need not be neighbors in the image."));
      },
      () => {
        const scores = groups.map((token) => (token % 2 ? cosine(step.keys[pair.a], step.keys[token]) : null));
        const [low, high] = range(scores.filter((score) => score !== null));
        paintMap(this.canvas, picture, scores.map((score) => score ?? low), low, high);
        groups.forEach((token, patch) => {
          if (token % 2) return;
          context.fillStyle = "rgb(20 17 28 / .72)";
          context.fillRect(...picture.cell(patch));
        });
        outline(context, picture, own(pair.a), "#7ea6ff", 5);
        outline(context, picture, own(pair.b), "#f0b35a", 5);
        const [x, y] = [step.keys[pair.a], step.keys[pair.b]];
        titled(`Token ${pair.a} looks for a partner`,
          h("p", {}, `Its key is compared with every key in B; brighter is more similar (${low.toFixed(2)} to ${high.toFixed(2)}), and A is dark. The best is token ${pair.b}.`),
          formula(`cos = a·b / (|a| |b|) = ${dot(x, y).toFixed(3)} / (${norm(x).toFixed(3)} × ${norm(y).toFixed(3)}) = ${(dot(x, y) / norm(x) / norm(y)).toFixed(4)}`),
          this.#vectors(pair, step.keys, `The keys, ${x.length} numbers each; the first eight`, 8),
          h("p", { class: "soft" }, "Choose another token in the image, or in step 4."));
      },
      () => {
        kinds(0.34);
        this.#lines(context, groups, step.pairs, pair);
        titled(`The ${step.merges} best pairs merge`,
          h("p", {}, "Each token of A has one best partner. These edges are sorted, and the best r merge; the others stay as they are. A token of B may receive several."),
          pairsChart(step.pairs, pair), this.#table(pair));
      },
      () => {
        const target = groups.map((token) => step.target[token]);
        paintGlass(this.canvas, picture, target);
        outline(context, picture, (patch) => target[patch] === step.target[pair.b], "#fff7e0", 4);
        const members = [...step.target.keys()].filter((token) => step.target[token] === step.target[pair.b]);
        titled(`${step.tokens} − ${step.merges} = ${step.tokens - step.merges} tokens leave`, ...this.#means(members, pair));
      },
    ];
    shows[Math.min(4, Math.max(0, state.stage))]();
  }

  #table(chosen) {
    const { step, app } = this;
    const shown = step.pairs.slice(0, Math.max(12, step.merges + 3));
    const rows = shown.map((pair, at) =>
      h("tr", { class: `${pair === chosen ? "chosen" : ""} ${pair.merges ? "" : "pale"}` },
        h("td", {}, h("button", { type: "button", class: "quiet", "aria-label": `Choose the pair of ${pair.a} and ${pair.b}`, onclick: () => app.update({ pair: at }) }, String(at + 1))),
        h("td", {}, String(pair.a)), h("td", {}, String(pair.b)), h("td", {}, pair.cosine.toFixed(4)), h("td", {}, pair.merges ? "merges" : "stays")),
    );
    return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Pairs" },
      h("table", {}, h("thead", {}, h("tr", {}, ...["rank", "A", "B", "cosine", "result"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, ...rows)));
  }

  #vectors(pair, vectors, caption, count) {
    const row = (name, token) =>
      h("tr", {}, h("th", { scope: "row" }, `${name} ${token}`), ...vectors[token].slice(0, count).map((value) => h("td", {}, value.toFixed(2))));
    return h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": caption }, h("table", {}, h("caption", {}, caption), h("tbody", {}, row("a", pair.a), row("b", pair.b))));
  }

  #means(members, pair) {
    const { step } = this;
    if (members.length === 1)
      return [h("p", {}, `Token ${pair.a} is not among the best pairs: it stays, and so does ${pair.b}. Choose a pair that merges in step 4 to see a mean.`)];
    const sizes = members.map((token) => step.sizes[token]);
    const total = sizes.reduce((sum, size) => sum + size, 0);
    const rows = members.map((token, at) =>
      h("tr", {}, h("th", { scope: "row" }, String(token)), h("td", {}, String(sizes[at])), ...step.values[token].map((value) => h("td", {}, value.toFixed(3)))));
    const means = step.values[0].map((_, channel) => members.reduce((sum, token, at) => sum + sizes[at] * step.values[token][channel], 0) / total);
    const example = members.map((token, at) => `${sizes[at]} × ${step.values[token][0].toFixed(3)}`).join(" + ");
    return [
      h("p", {}, `The framed token is made of ${plural(members.length, "token")}. Its value is their mean, weighted by size, and its size is their sum: ${sizes.join(" + ")} = ${total}.`),
      formula(`first channel: (${example}) / ${total} = ${means[0].toFixed(3)}`),
      h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Values of the members" },
        h("table", {},
          h("caption", {}, "Values between attention and the MLP, first channels"),
          h("thead", {}, h("tr", {}, ...["token", "size", ...means.map((_, at) => `channel ${at}`)].map((text) => h("th", { scope: "col" }, text)))),
          h("tbody", {}, ...rows, h("tr", { class: "chosen" }, h("th", { scope: "row" }, "mean"), h("td", {}, String(total)), ...means.map((value) => h("td", {}, value.toFixed(3))))))),
      h("p", {}, "In the next layer attention adds log(size) to the score of each key, so that a token of size s counts as s tokens."),
      h("p", { class: "soft" }, `Often quoted wrongly: r is a number of tokens in each layer, not a share (r = 2 in 12 layers takes 24 of 256 tokens away, 9 %, not 98 %); and the cost falls with the tokens of every layer, so merging evenly down to a share of the tokens saves less than that share.`),
    ];
  }

  #lines(context, groups, pairs, chosen) {
    const centers = new Map();
    groups.forEach((token, patch) => {
      const [left, top, wide, high] = this.app.picture.cell(patch);
      const sum = centers.get(token) ?? [0, 0, 0];
      centers.set(token, [sum[0] + left + wide / 2, sum[1] + top + high / 2, sum[2] + 1]);
    });
    const at = (token) => {
      const [x, y, count] = centers.get(token);
      return [x / count, y / count];
    };
    for (const pair of pairs.filter((one) => one.merges || one === chosen).reverse()) {
      context.beginPath();
      context.moveTo(...at(pair.a));
      context.lineTo(...at(pair.b));
      context.lineCap = "round";
      for (const [color, width] of [["rgb(20 17 28)", 9], [pair === chosen ? "#ff5c7a" : "#fff7e0", 5]]) {
        context.strokeStyle = color;
        context.lineWidth = width;
        context.stroke();
      }
      context.beginPath();
      context.arc(...at(pair.b), 6, 0, 7);
      context.fillStyle = pair === chosen ? "#ff5c7a" : "#f0b35a";
      context.fill();
      context.lineWidth = 2;
      context.strokeStyle = "rgb(20 17 28)";
      context.stroke();
    }
    overlayGray(context, this.app.picture, 0);
  }
}

const formula = (text) => h("p", { class: "formula" }, text);
const dot = (a, b) => a.reduce((sum, value, at) => sum + value * b[at], 0);
const norm = (a) => Math.sqrt(dot(a, a));
const cosine = (a, b) => dot(a, b) / (norm(a) * norm(b));
