// The lines of Python that compute what the page shows.

/** Return a program for what is shown. */
export function pythonOf(app) {
  const { tab, paint, layer, model } = app.state;
  const name = JSON.stringify(app.name);
  const file = app.isSample ? ["from vitrail.web.samples import save_sample", `file = save_sample(${name})`] : [`file = ${name}`];
  const start = ["import vitrail", ...file, `model = vitrail.load_model(${JSON.stringify(model)}).eval()`];
  if (tab === "compare") return [...start, ...compared(app)].join("\n");
  const shows = tab === "step" ? "step" : paint;
  const stops = shows === "glass" || shows === "image" ? layer : undefined;
  return [...start, `merging = vitrail.merge(model, ${optionsOf(app, "", stops)})`, ...VIEWS[shows](app.state, app.info), ...registers(app.state)].join("\n");
}

const registers = ({ tab, registers, layer }) =>
  tab === "explore" && registers === "on"
    ? [
        "merging.remove()",
        "with vitrail.test_time_registers(model, file):",
        `    with_registers = vitrail.record(model, file, "norms", layers=${layer}).norms[${layer}][0]`,
      ]
    : [];

const GLASS = ['merging.draw(file)[0].save("glass.png")'];

const VIEWS = {
  glass: () => GLASS,
  image: () => GLASS,
  attention: ({ layer, query, head }) => [
    `rows = vitrail.record(model, file, "attention", layers=${layer}, queries=[${query}]).attention[${layer}]`,
    `weights = rows[0, ${head === "mean" ? ":, 0].mean(0)" : `${head}, 0]`}  # on every token, special ones first`,
  ],
  similar: ({ layer, query }) => [
    `tokens = vitrail.record(model, file, "tokens", layers=${layer}).tokens[${layer}][0]`,
    `cosines = (tokens @ tokens[${query}]) / (tokens.norm(dim=-1) * tokens[${query}].norm())`,
  ],
  norms: ({ layer }) => [`norms = vitrail.record(model, file, "norms", layers=${layer}).norms[${layer}][0]`],
  pca: ({ layer }, info) => [
    "from vitrail.analysis.features import pca_maps",
    `tokens = vitrail.record(model, file, "tokens", layers=${layer}).tokens[${layer}]`,
    `colors = pca_maps(tokens[:, ${info.special.length}:], (${info.grid.join(", ")}))[0]`,
  ],
  step: ({ layer }) => [
    `keys = vitrail.record(model, file, "k", layers=${layer}).k[${layer}][0].mean(0)  # mean over heads`,
    "keys = keys / keys.norm(dim=-1, keepdim=True)  # of the token that each position belongs to",
    "cosines = keys @ keys.T",
  ],
};

function compared(app) {
  const { model, model2 } = app.state;
  const other = model2 === model ? [] : [`model = vitrail.load_model(${JSON.stringify(model2)}).eval()`];
  const draw = (end, file) => [
    `with vitrail.merge(model, ${optionsOf(app, end)}) as merging:`,
    `    merging.draw(file)[0].save(${JSON.stringify(file)})`,
  ];
  return [...draw("", "left.png"), ...other, ...draw("2", "right.png")];
}

/** Return the arguments of vitrail.merge; `stops` is the layer behind which the page shows the groups. */
function optionsOf(app, end, stops) {
  const { method, by, value, schedule } = app.setting(end);
  const info = app.infos.get(app.state[`model${end}`]);
  if (stops !== undefined && stops < info.layers - 1 && method === "tome") {
    const { values, merges } = info.plans[by];
    const kept = merges[schedule][values.indexOf(value)].map((count, layer) => (layer <= stops ? count : 0));
    return `r=[${kept.join(", ")}]`; // the layers behind the shown one merge nothing
  }
  const options = [by && `${by}=${value}`, schedule !== "constant" && `schedule="${schedule}"`, method !== "tome" && `method="${method}"`];
  return options.filter(Boolean).join(", ");
}
