// The controls of one setting: how much merges, by which method, with which schedule.

import { choice, fillChoice, h, pills, plural, slider } from "./dom.js";

/** Build the controls of a setting; `end` is "2" for the second one of a comparison. */
export function settingControls(app, end = "") {
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
  const models = app.models.length > 1 && end
    ? choice("Model", app.models.map((one) => [one, one]), state[name("model")], (value) => app.chooseModel(value, end))
    : null;
  const box = h("div", { class: "setting" }, models, amount, by, h("div", { class: "row" }, method, schedule), about);
  return Object.assign(box, {
    show() {
      const own = info();
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
export function costRows(result, info, milliseconds, giga) {
  const start = info.special.length + info.grid[0] * info.grid[1];
  const { before, after } = result.flops;
  const saved = Math.round(100 * (1 - after / before));
  return [
    ["Tokens at the end", `${result.tokens.at(-1)} of ${start}`, ""],
    ["Multiply-adds", `${giga(after)} G`, saved ? `${saved} % fewer than ${giga(before)} G` : "as without merging"],
    ["Time of one image", milliseconds(result.seconds), "the faster of two passes"],
    ["Cosine with the unmerged output", result.cosine === null ? "–" : result.cosine.toFixed(4), ""],
  ];
}

export const describeGroup = (result, layer, patch, columns) => {
  const group = result.groups[layer][patch];
  const count = result.groups[layer].filter((one) => one === group).length;
  const born = result.groups.findIndex((groups) => groups.filter((one) => one === groups[patch]).length > 1);
  const place = `row ${Math.floor(patch / columns)}, column ${patch % columns}`;
  if (count === 1) return `Patch in ${place}: a token of its own behind layer ${layer}.`;
  return `Patch in ${place}: one of a group of ${plural(count, "patch").replace("patchs", "patches")} behind layer ${layer}; it first merged in layer ${born}.`;
};
