// Two settings, or two models, beside each other on the same image.

import { answerBars, byQuestion, tokensChart } from "./charts.js";
import { costRows, settingControls } from "./controls.js";
import { h, operations } from "./dom.js";
import { Picture, paintGlass } from "./draw.js";
import { tokensOf } from "./grid.js";

export class Compare {
  constructor(app) {
    this.app = app;
    this.turn = 0;
    this.sides = ["", "2"].map((end, at) => this.#side(end, at ? "Right" : "Left"));
    this.summary = h("p", { class: "summary", "aria-live": "polite", id: "compare-summary" });
    document.getElementById("panel-compare").append(this.summary, h("div", { class: "halves" }, ...this.sides.map((side) => side.box)));
  }

  #side(end, title) {
    const canvas = h("canvas", { class: "painting", role: "img", id: `compare${end}` });
    const controls = settingControls(this.app, end, true);
    const [answer, chart, cost] = [h("div", {}), h("div", {}), h("dl", { class: "numbers" })];
    const heading = h("h2", {}, title);
    const box = h("section", { class: "card", "aria-label": title }, heading, h("div", { class: "stage" }, canvas), controls, answer, chart, cost);
    return { end, title, canvas, controls, answer, chart, cost, heading, box };
  }

  data() {
    return { left: this.results?.[0], right: this.results?.[1] };
  }

  show() {
    const { app } = this;
    const turn = ++this.turn;
    for (const side of this.sides) side.controls.show();
    Promise.all(this.sides.map((side) => this.#fill(side, turn))).then(
      (results) => turn === this.turn && this.#conclude(results),
      (error) => turn === this.turn && app.fail(error),
    );
  }

  async #fill({ end, title, canvas, answer, chart, cost, heading }, turn) {
    const { app } = this;
    const info = app.infos.get(app.state[`model${end}`]);
    const setting = app.setting(end);
    const ask = async (one) => app.kept("result", { setting: one }, end) ?? (await app.ask("result", { setting: one }, end));
    const result = await ask(setting);
    const plain = await ask({ method: "tome", by: "r", value: 0, schedule: "constant" });
    const picture = info === app.info ? app.picture : await this.#pictureFor(info);
    if (turn !== this.turn) return result;
    document.getElementById("alert").hidden = true;
    heading.textContent = app.models.length > 1 ? `${title}: ${info.name}` : title;
    paintGlass(canvas, picture, result.groups.at(-1));
    canvas.setAttribute("aria-label", `${title}: ${new Set(result.groups.at(-1)).size} groups, ${describe(setting)}.`);
    canvas.dataset.shown = JSON.stringify(setting);
    const [answers, unmerged] = [byQuestion(result.heads), byQuestion(plain.heads)];
    answer.replaceChildren(...answers.flatMap(([main], at) => [
      answers.length > 1 ? h("p", { class: "soft" }, main.question) : "",
      answerBars(unmerged[at][0].top, main.top, answers.length > 1 ? 2 : 4)]));
    chart.replaceChildren(tokensChart(result.tokens, tokensOf(info), -1));
    cost.replaceChildren(...costRows(result, info).flatMap(([what, value, note]) => [
      h("dt", {}, what), h("dd", {}, h("b", {}, value), note && h("span", { class: "soft" }, ` ${note}`))]));
    return { ...result, picture };
  }

  async #pictureFor(info) {
    const { app } = this;
    const key = `${app.image} ${info.name}`;
    if (this.pictureKey !== key) [this.pictureKey, this.second] = [key, await Picture.load(await app.backend.preview(app.image, info.name), info)];
    return this.second;
  }

  #conclude(results) {
    this.results = results.map(({ picture, ...result }) => result);
    const [left, right] = results;
    const [first, second] = results.map((result) => result.groups.at(-1));
    const grids = ["", "2"].map((end) => String(this.app.infos.get(this.app.state[`model${end}`]).grid));
    const parts = [`Left ${left.tokens.at(-1)} tokens, right ${right.tokens.at(-1)}`];
    parts.push(`${operations(left.flops.after)} against ${operations(right.flops.after)} multiply-adds`);
    if (left.heads.length && right.heads.length) {
      const [one, other] = results.map((result) => byQuestion(result.heads).map(([main]) => main.top[0].class).join(", "));
      parts.push(one === other ? `both answer ${one}` : `left answers ${one}, right ${other}`);
    }
    if (grids[0] === grids[1]) {
      const apart = borders(first, second, this.app.picture);
      parts.push(`${apart.differ} of ${apart.all} borders between patches differ`);
    }
    this.summary.textContent = `${parts.join("; ")}.`;
  }
}

const describe = ({ method, by, value, schedule }) =>
  by ? `${method}, ${by === "r" ? `r ${value}` : `${Math.round(100 * value)} % kept`}, ${schedule}` : method;

/** Count the borders between neighboring patches, also through time, that are there in one grouping and not in the other. */
function borders(first, second, picture) {
  let [differ, all] = [0, 0];
  first.forEach((_, patch) => {
    for (const next of [picture.beside(patch, 0, 1), picture.beside(patch, 1, 0), picture.later(patch)]) {
      if (next < 0) continue;
      all++;
      if ((first[patch] === first[next]) !== (second[patch] === second[next])) differ++;
    }
  });
  return { differ, all };
}
