// The first view: the image under the slider, and what the model makes of it.

import { answerBars, byQuestion, normsChart, tokensChart } from "./charts.js";
import { costRows, describeGroup, settingControls } from "./controls.js";
import { card, choice, fill, fillChoice, h, percent, pills, plural, short, slider } from "./dom.js";
import { tokensOf } from "./grid.js";
import { fit, outline, paintColors, paintGlass, paintImage, paintLeads, paintMap, range } from "./draw.js";

export const PAINTS = [
  ["glass", "Stained glass"], ["image", "Original"], ["attention", "Attention"], ["similar", "Nearest patches"],
  ["norms", "Norms"], ["pca", "PCA"],
];
const LEGENDS = {
  glass: "One pane for each token that is left, in the mean color of its patches.",
  image: "What the model sees, with a line between groups.",
  attention: "What the selected token attends to, from nothing (violet) to its largest weight on a patch (yellow).",
  similar: "Cosine of the selected token's features with every patch's; the eight nearest are framed.",
  norms: "Norm of each patch's token, from the smallest (violet) to the largest (yellow).",
  pca: "The three strongest principal components of the patches' features, as red, green and blue.",
};
const LATER = 180; // milliseconds after the last move before the other cards follow

export class Explore {
  constructor(app) {
    this.app = app;
    this.hovered = null;
    this.turn = 0;
    const { info, state } = app;

    this.canvas = h("canvas", { class: "painting", "aria-hidden": "true" });
    this.overlay = h("canvas", {
      class: "overlay", tabIndex: 0, role: "img", id: "stage", "aria-describedby": "patch",
      onpointermove: (event) => this.#hover(this.#patchOf(event)), onpointerleave: () => this.#hover(null),
      onclick: (event) => this.#select(this.#patchOf(event)), onkeydown: (event) => this.#move(event),
    });
    this.legend = h("p", { class: "soft legend" });
    this.patch = h("p", { id: "patch", class: "patch", "aria-live": "polite" });
    this.paint = pills("What is painted", PAINTS, state.paint, (paint) => app.update({ paint }));
    this.controls = settingControls(app);
    this.layer = slider("Layer", info.layers - 1, state.layer, (at) => `${at} (0 to ${app.info.layers - 1})`, (layer) => app.update({ layer }), { id: "layer" });
    this.head = slider("Head", info.heads, 0, (at) => (at ? `${at - 1} (0 to ${app.info.heads - 1})` : "mean of all"), (at) => app.update({ head: at ? String(at - 1) : "mean" }), { id: "head" });
    this.token = choice("Token", [], "", (query) => app.update({ query: Number(query) }), { id: "token" });
    const stage = h("div", { class: "stage-box" },
      this.paint, h("div", { class: "stage" }, this.canvas, this.overlay), this.legend, this.controls,
      h("div", { class: "setting" }, h("div", { class: "row" }, this.layer, this.head), this.token), this.patch,
      h("div", { id: "player", hidden: true }),
    );

    this.answers = h("div", {});
    this.answersCard = card("Answer", this.answers);
    this.chart = h("div", {});
    this.cost = h("dl", { class: "numbers" });
    this.tokens = h("div", { class: "small-maps" });
    this.alike = h("p", { class: "soft" });
    this.norms = h("div", {});
    this.verdict = h("p", { class: "soft" });
    this.registers = h("div", {});
    this.registersOn = pills("Test-time registers", [["off", "Off"], ["on", "On"]], state.registers, (registers) => app.update({ registers }));
    const right = h("div", { class: "cards" },
      this.answersCard,
      card("Tokens and cost", h("p", { class: "soft" }, "Tokens behind each layer; the line is the unmerged model."), this.chart, this.cost),
      card("Special tokens side by side", h("p", { class: "soft" }, "What each attends to in this layer. Choose one to see it large."), this.tokens, this.alike),
      info.views.includes("registers")
        ? card("Test-time registers", h("p", { class: "soft" }, "Moves the neurons of high-norm patches onto an appended token, without training."),
            this.registersOn, this.registers)
        : card("Test-time registers", h("p", { class: "soft" }, "This page runs in your browser and cannot change the model. Run vitrail web on your own machine for them.")),
    );
    const left = h("div", { class: "cards" }, stage, card("Norms of the tokens", this.norms, this.verdict));
    left.lastChild.classList.add("norms");
    document.getElementById("panel-explore").append(h("div", { class: "two" }, left, right));
  }

  data() {
    return { setting: this.app.setting(), result: this.result, shown: this.shown, registers: this.registersShown };
  }

  /** Show the present choice: at once what is kept, the rest as it comes. */
  show() {
    const { app } = this;
    const { info, state } = app;
    if (this.forModel !== state.model || this.forImage !== app.image) this.#reset();
    this.controls.show();
    this.layer.move(state.layer, info.layers - 1);
    this.paint.mark(state.paint);
    this.registersOn.mark(state.registers);
    this.head.move(state.head === "mean" ? 0 : Number(state.head) + 1, info.heads);
    const special = info.special.length;
    const tokens = info.special.map((one, at) => [String(at), one.name]);
    const patch = state.query - special;
    if (patch >= 0) tokens.push([String(state.query), `patch ${app.picture.place(patch).slice(info.grid[0] > 1 ? 0 : 1).join(", ")}`]);
    fillChoice(this.token.querySelector("select"), tokens, String(state.query));

    const result = app.kept("result", { setting: app.setting() });
    const turn = ++this.turn;
    if (result) this.#withResult(result, turn);
    else app.ask("result", { setting: app.setting() }).then((found) => turn === this.turn && this.#withResult(found, turn), (error) => app.fail(error));
  }

  #reset() {
    this.forModel = this.app.state.model;
    this.forImage = this.app.image;
    this.hovered = null;
  }

  #withResult(result, turn) {
    const { app } = this;
    this.result = result;
    document.getElementById("alert").hidden = true;
    this.#paintGroups(result, turn);
    this.#writeAnswer(result);
    this.chart.replaceChildren(tokensChart(result.tokens, tokensOf(app.info), app.state.layer));
    this.cost.replaceChildren(
      ...costRows(result, app.info).flatMap(([what, value, note]) => [
        h("dt", {}, what), h("dd", {}, h("b", {}, value), note && h("span", { class: "soft" }, ` ${note}`)),
      ]),
    );
    clearTimeout(this.later);
    this.later = setTimeout(() => this.#showDetails(turn).catch((error) => turn === this.turn && app.fail(error)), LATER);
  }

  // --- the painting

  #paintGroups(result, turn) {
    const { app } = this;
    const { picture, state, info } = app;
    const groups = result.groups[state.layer];
    const panes = ["glass", "image"].includes(state.paint);
    this.legend.textContent = LEGENDS[state.paint] + (panes ? throughTime(groups, picture) : "");
    fit(this.overlay, picture);
    if (state.paint === "glass") paintGlass(this.canvas, picture, groups);
    else if (state.paint === "image") {
      paintImage(this.canvas, picture);
      paintLeads(this.canvas.getContext("2d"), picture, groups, "rgb(246 239 224 / .75)", 0.7);
    } else this.#paintValues(turn).catch((error) => turn === this.turn && app.fail(error));
    if (panes) this.shown = undefined;
    this.canvas.dataset.shown = JSON.stringify([state.paint, app.setting(), state.layer]);
    const left = new Set(groups).size;
    this.overlay.setAttribute("aria-label",
      `${app.name}: ${LEGENDS[state.paint]} ${groups.length} patches in ${left} groups behind layer ${state.layer}. Arrow keys move from patch to patch${info.grid[0] > 1 ? ", page keys from frame to frame" : ""}.`);
    this.#paintOverlay();
    this.#describe(state.query - info.special.length);
  }

  async #paintValues(turn) {
    const { app } = this;
    const { state, info, picture } = app;
    const special = info.special.length;
    const given = { setting: app.setting(), layer: state.layer };
    const view = { attention: "attention", similar: "similar", norms: "tokens", pca: "tokens" }[state.paint];
    if (["attention", "similar"].includes(view)) given.query = state.query;
    const answer = app.kept(view, given) ?? (await app.ask(view, given));
    if (turn !== this.turn) return;
    this.shown = answer;
    if (state.paint === "pca") paintColors(this.canvas, picture, answer.colors);
    else {
      const values = this.#valuesOf(answer).slice(special);
      const [low, high] = range(values);
      paintMap(this.canvas, picture, values, state.paint === "attention" ? 0 : low, high);
      if (state.paint === "similar") this.#frameNearest(values, state.query - special);
    }
    this.canvas.dataset.values = JSON.stringify([state.paint, state.layer, state.query, state.head]);
  }

  #valuesOf(answer) {
    if (answer.norms) return answer.norms;
    return answer.rows ? headRow(answer, this.app.state.head) : answer.cosines;
  }

  #frameNearest(values, own) {
    const { picture } = this.app;
    const order = [...values.keys()].filter((patch) => patch !== own).sort((a, b) => values[b] - values[a]).slice(0, 8);
    const nearest = new Set(order);
    outline(this.canvas.getContext("2d"), picture, (patch) => nearest.has(patch), "#f0b35a", 3);
  }

  /** Light up the group under the pointer, and frame the selected patch. */
  #paintOverlay() {
    const { picture, state, info } = this.app;
    const context = fit(this.overlay, picture);
    context.clearRect(0, 0, picture.width, picture.height);
    const groups = this.result?.groups[state.layer];
    const selected = state.query - info.special.length;
    const lit = this.hovered ?? (selected >= 0 && state.query > 0 ? selected : null); // 0 is where a page starts
    if (groups && lit !== null) {
      const inside = (patch) => groups[patch] === groups[lit];
      if (state.paint === "glass" || state.paint === "image") {
        context.fillStyle = "rgb(12 9 18 / .5)";
        groups.forEach((_, patch) => inside(patch) || context.fillRect(...picture.cell(patch)));
      }
      outline(context, picture, inside, "#fff7e0", 3.5);
    }
    if (selected >= 0 && state.query > 0) outline(context, picture, (patch) => patch === selected, "#f0b35a", 4);
  }

  #patchOf(event) {
    const box = this.overlay.getBoundingClientRect();
    return this.app.picture.patchAt((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
  }

  #hover(patch) {
    if (!this.result || patch === this.hovered) return;
    this.hovered = patch;
    this.#paintOverlay();
    this.#describe(patch ?? this.app.state.query - this.app.info.special.length);
  }

  #select(patch) {
    const { state, info } = this.app;
    const query = info.special.length + patch;
    this.hovered = null;
    this.app.update({ query: query === state.query ? 0 : query });
  }

  #move(event) {
    const { state, info, picture } = this.app;
    const [steps, rows, columns] = info.grid;
    const special = info.special.length;
    if (event.key === "Escape") return this.app.update({ query: 0 });
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    const through = { PageDown: 1, PageUp: -1 }[event.key];
    if (!move && !(through && steps > 1)) return;
    event.preventDefault();
    if (state.query < special) return this.app.update({ query: special + Math.floor(rows / 2) * columns + Math.floor(columns / 2) });
    const now = state.query - special;
    const next = move ? picture.beside(now, ...move) : now + through * rows * columns;
    if (next >= 0 && next < picture.patches) this.app.update({ query: special + next });
  }

  #describe(patch) {
    const { state, info } = this.app;
    if (!this.result) return;
    this.patch.textContent = patch >= 0
      ? describeGroup(this.result, state.layer, patch, this.app.picture)
      : "Point at a patch to see its group; click it, or use the arrow keys, to select it.";
  }

  // --- the cards

  async #writeAnswer(result) {
    const { app } = this;
    const plain = { ...app.setting(), method: "tome", by: "r", value: 0, schedule: "constant" };
    const turn = this.turn;
    const before = app.kept("result", { setting: plain }) ?? (await app.ask("result", { setting: plain }).catch(() => null));
    if (!before || turn !== this.turn) return;
    if (!result.heads.length) {
      this.answers.replaceChildren(h("p", {}, "This model has no classes; its cost and cosine are below."));
      return;
    }
    const unmerged = byQuestion(before.heads);
    const answers = byQuestion(result.heads);
    fill(this.answers,
      ...answers.flatMap((heads, at) => answerTo(heads, unmerged[at][0], answers.length > 1)),
      h("p", { class: "soft" }, "Bars: with merging. Marks: without."),
      h("p", { class: "soft" }, knows(app.info.questions)),
    );
  }

  async #showDetails(turn) {
    const { app } = this;
    const { info, state } = app;
    const given = { setting: app.setting(), layer: state.layer };
    const special = info.special.length;
    const answer = await app.ask("tokens", given);
    if (turn !== this.turn) return;
    const patches = answer.norms.slice(special);
    const { threshold, verdict, reason, images } = answer.threshold;
    this.norms.replaceChildren(normsChart(patches, answer.norms.slice(0, special), info.special.map((one) => one.name), threshold));
    const above = threshold === null ? 0 : patches.filter((norm) => norm > threshold).length;
    this.verdict.textContent =
      `Triangles are special tokens. Detector, on ${images} samples, layer ${state.layer}: ${{ artifacts: "artifact tokens", none: "no artifact tokens", uncertain: "uncertain" }[verdict]} (${reason}).` +
      (threshold === null ? "" : ` ${above} of ${patches.length} patches here are above the threshold.`);

    const rows = await Promise.all(info.special.map((_, query) => app.ask("attention", { ...given, query })));
    if (turn !== this.turn) return;
    this.tokens.replaceChildren(
      ...info.special.map((one, at) => {
        const canvas = h("canvas", { "aria-hidden": "true" });
        const values = headRow(rows[at], state.head);
        paintMap(canvas, app.picture, values.slice(special), 0, Math.max(...values.slice(special)));
        const share = values.slice(special).reduce((sum, value) => sum + value, 0);
        return h("button", {
          type: "button", class: "map", "aria-pressed": state.query === at, title: one.role,
          onclick: () => app.update({ query: at, paint: "attention" }),
        }, canvas, h("span", {}, one.name), h("span", { class: "soft" }, `${Math.round(100 * share)} % on patches`));
      }),
    );
    const first = answer.cosines[0] ?? [];
    this.alike.textContent = first.length > 1
      ? `Cosine with ${info.special[0].name} behind this layer: ${info.special.slice(1).map((one, at) => `${one.name} ${first[at + 1].toFixed(3)}`).join(", ")}.`
      : first.length ? "This model has one special token." : "This model has no special tokens.";
    await this.#showRegisters();
    await this.#computeAhead(turn);
  }

  /** Compute the results of the slider's other positions, the nearest first, so that moving it repaints at once. */
  async #computeAhead(turn) {
    const { app } = this;
    const setting = app.setting();
    if (!setting.by) return;
    const { values } = app.info.plans[setting.by];
    const here = values.indexOf(setting.value);
    const order = values.map((value, at) => [Math.abs(at - here), value]).sort((a, b) => a[0] - b[0]);
    for (const [, value] of order) {
      if (turn !== this.turn) return;
      await app.ask("result", { setting: { ...setting, value } }).catch(() => null);
    }
    this.canvas.dataset.ahead = JSON.stringify([app.image, setting.method, setting.by, setting.schedule]);
  }

  /** Show the norms without and with test-time registers, or why there are none; once for each image and layer. */
  async #showRegisters() {
    const { app } = this;
    const { state } = app;
    const wanted = state.registers === "on" ? JSON.stringify([state.model, app.image, state.layer]) : "";
    if (wanted === this.registersFor || !app.info.views.includes("registers")) return;
    this.registersFor = wanted;
    this.registersShown = undefined;
    this.registers.replaceChildren(...(wanted ? [h("p", { class: "soft" }, "Looking for register neurons …")] : []));
    if (!wanted) return;
    try {
      const answer = await app.ask("registers", { layer: state.layer });
      if (wanted !== this.registersFor) return;
      this.registersShown = answer;
      this.registers.replaceChildren(...this.#registerMaps(answer));
    } catch (error) {
      if (wanted === this.registersFor) this.registers.replaceChildren(h("p", { class: "note", role: "status" }, error.message));
    }
  }

  #registerMaps(answer) {
    const [low, high] = range([...answer.before, ...answer.after]);
    const map = (values, text) => {
      const canvas = h("canvas", { "aria-hidden": "true" });
      paintMap(canvas, this.app.picture, values, low, high);
      return h("figure", { class: "map" }, canvas, h("figcaption", {}, `${text}: largest norm ${short(Math.max(...values))}`));
    };
    const layers = Object.keys(answer.neurons);
    const count = Object.values(answer.neurons).flat().length;
    const heads = answer.heads.before.map((head, at) => [head.top[0], answer.heads.after[at].top[0]])[0];
    return [
      h("div", { class: "small-maps wide" }, map(answer.before, "without"), map(answer.after, "with a register")),
      h("p", { class: "soft" }, `${plural(count, "neuron")} moved, of layers ${layers.join(", ")}; the register's norm behind layer ${answer.layer} is ${answer.register.map(short).join(", ")}. Unmerged model.` +
        (heads ? ` Answer without: ${heads[0].class} ${percent(heads[0].probability)}, with: ${heads[1].class} ${percent(heads[1].probability)}.` : "")),
    ];
  }
}

/** Return the answer to one question, named if there are several: what became of it, the likely classes, single heads. */
function answerTo([main, ...others], before, several) {
  const [was, now] = [before.top[0], main.top[0]];
  const same = was.class === now.class;
  const verdict = same ? `Still ${now.class}` : `${was.class} became ${now.class}`;
  return [
    h("p", { class: same ? "verdict" : "verdict changed" },
      several ? h("span", { class: "question" }, main.question) : null, verdict,
      h("span", { class: "soft" }, same ? ` ${change(was.probability, now.probability)}` : " merging changed the answer")),
    answerBars(before.top, main.top, several ? 3 : 4),
    others.length
      ? h("p", { class: "soft" }, "By head: ", others.map((head) => `${head.name} ${head.top[0].class} ${(100 * head.top[0].probability).toFixed(1)} %`).join(" · "))
      : null,
  ];
}

/** Return one head's attention row, or the mean over heads. */
function headRow({ rows }, head) {
  if (head !== "mean") return rows[Number(head)];
  return rows[0].map((_, at) => rows.reduce((sum, row) => sum + row[at], 0) / rows.length);
}

/** Say how many groups of a clip reach through time, which leads between the patches of a frame do not show. */
function throughTime(groups, picture) {
  const first = new Map();
  const through = new Set(groups.filter((group, patch) => {
    const [frame] = picture.place(patch);
    if (!first.has(group)) first.set(group, frame);
    return first.get(group) !== frame;
  }));
  return through.size ? ` Groups in several frames: ${through.size}; point at a patch to light up all of its group.` : "";
}

/** Say which classes there are: a model answers one of them, whatever the image shows. */
function knows(questions) {
  if (!questions.length) return "";
  const several = questions.length > 1;
  const listed = questions.map(({ name, classes }) =>
    `one of ${classes.length} classes${several ? ` for ${name}` : ""}${classes.length > 12 ? "" : ` (${classes.join(", ")})`}`);
  return `Whatever is shown, the answer is ${listed.join(", ")}.`;
}

const change = (before, now) => {
  const points = 100 * (now - before);
  return Math.abs(points) < 0.05 ? "with the same confidence" : `${points > 0 ? "+" : "−"}${Math.abs(points).toFixed(1)} points of confidence`;
};
