// The page: what is chosen, the image, and which view shows it. The choice is in the address, so that a link restores it.

import { BackendError, openBackend } from "./backend.js";
import { Compare } from "./compare.js";
import { arrows, fillChoice, h, saveBlob } from "./dom.js";
import { Picture, sideBySide } from "./draw.js";
import { Explore, PAINTS } from "./explore.js";
import { tokensOf } from "./grid.js";
import { pythonOf } from "./python.js";
import { STAGES, Step } from "./step.js";

const VERSION = 2;
const KEPT = 600; // answers that are kept
const find = (id) => document.getElementById(id);

const MEDIA = {
  image: { open: "Open an image…", drop: "or drop one on the page", accept: "image/*", samples: "Sample images" },
  video: { open: "Open a clip…", drop: "mp4, mov, webm, gif … or drop one on the page", accept: "video/*,.gif,.mkv,.avi", samples: "Sample clips" },
  audio: { open: "Open a sound…", drop: "wav, flac, mp3, ogg, or drop one on the page", accept: "audio/*,.flac", samples: "Sample sounds" },
};

const DEFAULTS = {
  tab: "explore", image: "", model: "", method: "tome", by: "r", value: -1, schedule: "constant",
  layer: -1, head: "mean", query: 0, paint: "glass", stage: 0, pair: 0, registers: "off",
  method2: "tome", by2: "r", value2: 0, schedule2: "constant", model2: "",
};
const CHOICES = {
  tab: ["explore", "step", "compare"], paint: PAINTS.map(([name]) => name), stage: STAGES.map(([at]) => Number(at)),
  registers: ["off", "on"], by: ["r", "keep"], by2: ["r", "keep"],
};
const NUMBERS = new Set(["value", "layer", "query", "stage", "pair", "value2"]);

class App {
  state = { ...DEFAULTS };
  answers = new Map(); // what the backend answered, and promises of it
  infos = new Map();
  file = null;
  image = null;
  picture = null;

  async start() {
    this.backend = await openBackend();
    this.say(this.backend.kind === "browser" ? "Loading the model into this browser (about 15 MB) …" : "Loading …");
    const { models, samples } = await this.backend.models();
    this.models = models.map((one) => one.name);
    this.modalities = new Map(models.map((one) => [one.name, one.modality]));
    this.samples = samples;
    this.#readAddress();
    await this.#describe(this.state.model);
    await this.#describe(this.state.model2);
    this.#mend();
    this.panels = { explore: new Explore(this), step: new Step(this), compare: new Compare(this) };
    this.#wire();
    this.#showMedium();
    find("where").textContent =
      this.backend.kind === "browser"
        ? "The model runs in this browser: your images stay on your device."
        : "The model runs on this machine: uploads are kept in memory for a while, and nothing is stored.";
    await this.openSample(this.state.image);
  }

  get info() {
    return this.infos.get(this.state.model);
  }

  // --- what is chosen

  /** Change the choice, show it, and write it into the address. */
  update(changes) {
    Object.assign(this.state, changes);
    const chosen = Object.entries(this.state).filter(([name, value]) => String(value) !== String(DEFAULTS[name]));
    const address = new URLSearchParams(chosen.map(([name, value]) => [name, value])).toString();
    clearTimeout(this.writing);
    this.writing = setTimeout(() => history.replaceState(null, "", address ? `#${address}` : location.pathname + location.search), 120);
    this.show();
  }

  #readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const name of Object.keys(DEFAULTS)) {
      if (!given.has(name)) continue;
      const value = NUMBERS.has(name) ? Number(given.get(name)) : given.get(name);
      if (!NUMBERS.has(name) || Number.isFinite(value)) this.state[name] = value;
    }
    if (!this.models.includes(this.state.model)) this.state.model = this.models[0];
    if (!this.peers().includes(this.state.model2)) this.state.model2 = this.state.model;
    for (const [name, known] of Object.entries(CHOICES)) if (!known.includes(this.state[name])) this.state[name] = DEFAULTS[name];
    if (!given.has("value2") && this.state.tab !== "compare") this.state.value2 = 0;
  }

  /** Bring the choice into what a model has: layers, tokens, methods, amounts. */
  #mend() {
    const { state, info } = this;
    const inside = (value, last) => Math.min(last, Math.max(0, Math.round(value)));
    state.layer = state.layer < 0 ? info.layers - 1 : inside(state.layer, info.layers - 1);
    state.query = inside(state.query, tokensOf(info) - 1);
    state.pair = Math.max(0, Math.round(state.pair));
    if (![...Array(info.heads).keys()].map(String).includes(state.head)) state.head = "mean";
    for (const end of ["", "2"]) {
      const own = this.infos.get(state[`model${end}`]) ?? info;
      const method = own.methods.find((one) => one.name === state[`method${end}`]) ?? own.methods[0];
      state[`method${end}`] = method.name;
      if (!own.schedules.includes(state[`schedule${end}`])) state[`schedule${end}`] = own.schedules[0];
      const { values } = own.plans[state[`by${end}`]];
      if (state[`value${end}`] < 0) state[`value${end}`] = state[`by${end}`] === "r" ? 0.75 * values.at(-1) : 0.5;
      if (!values.includes(state[`value${end}`]))
        state[`value${end}`] = values.reduce((best, one) => (Math.abs(one - state[`value${end}`]) < Math.abs(best - state[`value${end}`]) ? one : best));
    }
  }

  /** Return the setting of the page, or of the second one of a comparison (end "2"). */
  setting(end = "", changes = {}) {
    const { state } = this;
    const own = this.infos.get(state[`model${end}`]);
    const method = own.methods.find((one) => one.name === state[`method${end}`]);
    const setting = { method: method.name, by: state[`by${end}`], value: state[`value${end}`], schedule: state[`schedule${end}`], ...changes };
    return method.amount ? setting : { ...setting, by: "", value: 0, schedule: "constant" };
  }

  /** Return the models that take the same samples as the chosen one. */
  peers() {
    return this.models.filter((name) => this.modalities.get(name) === this.modalities.get(this.state.model));
  }

  async #describe(name) {
    if (this.infos.has(name)) return;
    const info = await this.backend.describe(name);
    if (info.version !== VERSION) throw new Error("This page and its backend are of different versions; reload it.");
    this.infos.set(name, info);
  }

  async chooseModel(name, end = "") {
    await this.working("Loading the model …", async () => {
      await this.#describe(name);
      if (end) {
        this.state[`model${end}`] = name;
        this.#mend();
        return this.update({});
      }
      if (this.modalities.get(name) === this.info.modality) return this.#open(this.file, this.isSample ? this.name : "", name);
      const [sample] = this.#samplesOf(name);
      await this.#open(await (await fetch(sample.file)).blob(), sample.name, name);
    });
  }

  // --- the image

  #samplesOf(model) {
    return this.samples.filter((one) => one.modality === this.modalities.get(model));
  }

  async openSample(name) {
    const samples = this.#samplesOf(this.state.model);
    const sample = samples.find((one) => one.name === name) ?? samples[0];
    const missing = name && sample.name !== name;
    await this.working(`Opening ${sample.name} …`, async () => {
      const response = await fetch(sample.file);
      await this.#open(await response.blob(), sample.name);
    });
    if (missing)
      this.say(name.startsWith("file:")
        ? "What this link shows was opened from a file; open it again. Meanwhile, a sample."
        : `This model has no sample of the name in this link; ${sample.name} is open.`);
  }

  async openFile(file) {
    await this.working(`Opening ${file.name} …`, () => this.#open(file, ""));
  }

  /** Open a file for a model; everything changes at once, so that image and model fit each other. */
  async #open(file, name, model = this.state.model) {
    const { image } = await this.backend.upload(file, model);
    this.picture = await Picture.load(await this.backend.preview(image, model), this.infos.get(model));
    const another = model !== this.state.model;
    if (this.infos.get(model).modality !== this.info.modality) Object.assign(this.state, { value: DEFAULTS.value, value2: DEFAULTS.value2, layer: DEFAULTS.layer });
    Object.assign(this, { file, image, name: name || file.name || "upload", isSample: Boolean(name) });
    this.state.model = model;
    if (!this.peers().includes(this.state.model2)) this.state.model2 = model;
    this.#mend();
    if (another) this.#showMedium();
    for (const button of find("samples").children) button.setAttribute("aria-pressed", button.dataset.name === name);
    this.#showPlayer();
    this.update({ image: name || `file:${image.slice(0, 12)}` });
    this.say(name ? `${name} is open.` : `${file.name} is open.`);
  }

  // --- answers

  /** Return a kept answer of a view, or undefined. */
  kept(view, given, end = "") {
    const found = this.answers.get(this.#key(view, given, end));
    return found instanceof Promise ? undefined : found;
  }

  /** Return the answer of a view, from the backend where it is not kept. */
  ask(view, given, end = "") {
    const key = this.#key(view, given, end);
    if (!this.answers.has(key)) {
      const asked = { model: this.state[`model${end}`], image: this.image, ...given };
      const promise = this.#askBackend(view, asked).then(
        (answer) => {
          this.answers.set(key, answer);
          return answer;
        },
        (error) => {
          this.answers.delete(key);
          throw error;
        },
      );
      this.answers.set(key, promise);
      if (this.answers.size > KEPT) this.answers.delete(this.answers.keys().next().value);
    }
    return Promise.resolve(this.answers.get(key));
  }

  #key = (view, given, end) => JSON.stringify([this.state[`model${end}`], this.image, view, given]);

  async #askBackend(view, asked) {
    try {
      return await this.backend.view(view, asked);
    } catch (error) {
      if (!(error instanceof BackendError) || !error.gone || asked.image !== this.image) throw error;
      await this.backend.upload(this.file, asked.model); // it was dropped there; its hash, and so its name, is the same
      return this.backend.view(view, asked);
    }
  }

  // --- the page

  show() {
    if (!this.picture) return;
    for (const [name, panel] of Object.entries(this.panels)) {
      const on = name === this.state.tab;
      find(`panel-${name}`).hidden = !on;
      find(`tab-${name}`).setAttribute("aria-selected", on);
      find(`tab-${name}`).tabIndex = on ? 0 : -1;
      if (on) panel.show();
    }
    if (!find("python").hidden) this.#writePython();
  }

  #wire() {
    const tabs = [...find("tabs").children];
    for (const tab of tabs) tab.addEventListener("click", () => this.update({ tab: tab.id.slice(4) }));
    arrows(find("tabs"), tabs, (tab) => {
      tab.focus();
      tab.click();
    });
    fillChoice(find("model"), this.models.map((name) => [name, name]), this.state.model);
    find("model").addEventListener("change", () => this.chooseModel(find("model").value));
    find("upload").addEventListener("change", () => {
      const [file] = find("upload").files;
      find("upload").value = "";
      if (file) this.openFile(file);
    });
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      const [file] = event.dataTransfer?.files ?? [];
      if (file) this.openFile(file);
    });
    window.addEventListener("hashchange", () => location.reload());
    this.#wireTheme();
    find("save-png").addEventListener("click", () => {
      const shown = document.querySelectorAll("#main [role=tabpanel]:not([hidden]) canvas.painting");
      sideBySide([...shown]).toBlob((blob) => saveBlob(blob, `${this.#fileName()}.png`));
    });
    find("save-json").addEventListener("click", () => {
      const data = { model: this.state.model, image: this.name, choice: this.state, ...this.panels[this.state.tab].data() };
      saveBlob(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }), `${this.#fileName()}.json`);
    });
    find("show-python").addEventListener("click", () => {
      find("python").hidden = !find("python").hidden;
      find("show-python").setAttribute("aria-expanded", !find("python").hidden);
      this.#writePython();
    });
    find("copy-link").addEventListener("click", () => setTimeout(() => this.#copy(location.href, "The link is copied."), 150));
    find("copy-python").addEventListener("click", () => this.#copy(find("python").querySelector("code").textContent, "Copied."));
  }

  /** Show the samples of the chosen model's medium, and what may be opened. */
  #showMedium() {
    const { open, drop, accept, samples } = MEDIA[this.info.modality];
    find("upload-label").textContent = open;
    find("upload-note").textContent = drop;
    find("upload").accept = accept;
    find("samples").setAttribute("aria-label", samples);
    find("samples").replaceChildren(
      ...this.#samplesOf(this.state.model).map(({ name, thumbnail }) =>
        h("button", { type: "button", class: "sample", "data-name": name, "aria-pressed": false, onclick: () => this.openSample(name) },
          h("img", { src: thumbnail, alt: "", width: 52, height: 52, loading: "lazy" }), h("span", {}, name.replaceAll("-", " "))),
      ),
    );
  }

  /** Offer to play a clip or a sound, where the browser can. */
  #showPlayer() {
    const kind = { video: "video", audio: "audio" }[this.info.modality];
    const box = find("player");
    URL.revokeObjectURL(box.firstChild?.src);
    box.hidden = !kind;
    if (!kind) return box.replaceChildren();
    const player = h(kind, { src: URL.createObjectURL(this.file), controls: true, loop: kind === "video", muted: true, "aria-label": `Play ${this.name}` });
    player.muted = kind === "video";
    player.addEventListener("error", () => (box.hidden = true));
    box.replaceChildren(player);
  }

  #wireTheme() {
    const button = find("theme");
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const mark = (on) => {
      document.documentElement.dataset.theme = on ? "dark" : "light";
      button.textContent = on ? "Light colors" : "Dark colors";
    };
    mark(dark.matches);
    dark.addEventListener("change", () => mark(dark.matches));
    button.addEventListener("click", () => mark(document.documentElement.dataset.theme !== "dark"));
  }

  #fileName() {
    const base = this.name.replace(/\.[a-z0-9]+$/i, "").replace(/[^\p{L}\p{N}_-]+/gu, "-").slice(0, 60) || "image";
    return `${base}-${this.state.method}-${this.state.by}${this.state.value}`;
  }

  #writePython() {
    find("python").querySelector("code").textContent = pythonOf(this);
  }

  async #copy(text, done) {
    try {
      await navigator.clipboard.writeText(text);
      this.say(done);
    } catch {
      this.say("This browser does not let the page copy; select the text instead.");
    }
  }

  say(text) {
    find("status").textContent = text;
  }

  /** Show an error until something works again. */
  fail(error) {
    if (!(error instanceof BackendError)) console.error(error);
    find("alert").textContent = error.message || String(error);
    find("alert").hidden = false;
    document.body.classList.remove("working");
  }

  async working(text, work) {
    this.say(text);
    document.body.classList.add("working");
    try {
      await work();
      find("alert").hidden = true;
    } catch (error) {
      this.say("");
      this.fail(error);
    } finally {
      document.body.classList.remove("working");
    }
  }
}

const app = new App();
app.start().catch((error) => app.fail(error));
