// The controls of one setting: how much merges, by which method, with which schedule.

import { tokensOf } from "./grid.js";
import { choice, fillChoice, h, milliseconds, operations, pills, slider } from "./dom.js";

/** Build the controls of a setting; `end` is "2" for the second one of a comparison, `withModel` offers several models. */
export function settingControls(app, end = "", withModel = false) {
  const { state } = app;
  const name = (key) => `${key}${end}`;
  const info = () => app.infos.get(state[name("model")]);
  const plan = () => info().plans[state[name("by")]];
  const text = (at) => {
    const value = plan().values[at];
    return state[name("by")] === "r" ? `r = ${value}` : `${Math.round(100 * value)} % of the patches`;
  };
  const amount = slider("Merge", plan().values.length - 1, plan().values.indexOf(state[name("value")]), text, (at) =>
    app.update({ [name("value")]: plan().values[at] }), { id: `amount${end}` });
  const by = pills("Amount", [["r", "r tokens a layer"], ["keep", "share kept"]], state[name("by")], (value) => {
    const values = info().plans[value].values;
    app.update({ [name("by")]: value, [name("value")]: value === "r" ? Math.min(8, values.at(-1)) : 0.5 });
  });
  const method = choice("Method", [], "", (value) => app.update({ [name("method")]: value }), { id: `method${end}` });
  const schedule = choice("Schedule", [], "", (value) => app.update({ [name("schedule")]: value }), { id: `schedule${end}` });
  const about = h("p", { class: "soft about" });
  const models = withModel && app.models.length > 1 ? choice("Model", [], "", (value) => app.chooseModel(value, end)) : null;
  const box = h("div", { class: "setting" }, models, amount, by, h("div", { class: "row" }, method, schedule), about);
  return Object.assign(box, {
    show() {
      const own = info();
      if (models) fillChoice(models.querySelector("select"), app.peers().map((one) => [one, one]), own.name);
      const chosen = own.methods.find((one) => one.name === state[name("method")]);
      amount.move(plan().values.indexOf(state[name("value")]), plan().values.length - 1);
      amount.input.disabled = !chosen.amount;
      by.mark(state[name("by")]);
      fillChoice(method.querySelector("select"), own.methods.map((one) => [one.name, one.name]), chosen.name);
      fillChoice(schedule.querySelector("select"), own.schedules.map((one) => [one, one]), state[name("schedule")]);
      schedule.querySelector("select").disabled = !chosen.amount;
      about.textContent =
        chosen.about + (chosen.amount ? "" : " It decides by itself how many tokens merge.") +
        (own.methods.length > 1 ? "" : " Other methods need vitrail web on your own machine.");
    },
  });
}

/** Describe a result's cost in words and numbers: [what, value, compared]. */
export function costRows(result, info) {
  const { before, after } = result.flops;
  const saved = Math.round(100 * (1 - after / before));
  return [
    ["Tokens at the end", `${result.tokens.at(-1)} of ${tokensOf(info)}`, ""],
    ["Multiply-adds", operations(after), saved ? `${saved} % fewer than ${operations(before)}` : "as without merging"],
    [`Time of one ${{ video: "clip", audio: "sound" }[info.modality] ?? "image"}`, milliseconds(result.seconds), "the faster of two passes"],
    ["Cosine with the unmerged output", result.cosine === null ? "–" : result.cosine.toFixed(4), ""],
  ];
}

/** Describe the group of a patch behind a layer. */
export function describeGroup(result, layer, patch, picture) {
  const groups = result.groups[layer];
  const members = [...groups.keys()].filter((other) => groups[other] === groups[patch]);
  const place = `Patch in ${picture.nameOf(patch)}`;
  if (members.length === 1) return `${place}: a token of its own behind layer ${layer}.`;
  const born = result.groups.findIndex((one) => members.some((other) => other !== patch && one[other] === one[patch]));
  const frames = new Set(members.map((member) => picture.place(member)[0])).size;
  const through = frames > 1 ? ` in ${frames} frames` : "";
  return `${place}: one of a group of ${members.length} patches${through} behind layer ${layer}; it first merged in layer ${born}.`;
}
