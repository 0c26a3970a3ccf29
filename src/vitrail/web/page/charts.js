// Small charts as SVG. Colors come from the style sheet; each chart says in words what it shows.

import { h, percent, plural, s, short } from "./dom.js";

/** Return the tokens that leave each layer, over those of the unmerged model. */
export function tokensChart(tokens, start, chosen) {
  const [width, height, bottom, left] = [420, 150, 20, 30];
  const step = (width - left) / tokens.length;
  const y = (count) => 8 + (1 - count / start) * (height - bottom - 8);
  const bars = tokens.map((count, layer) =>
    s("g", {},
      s("rect", {
        x: left + layer * step + 1.5, y: y(count), width: step - 3, height: Math.max(0, height - bottom - y(count)),
        rx: 2, class: layer === chosen ? "bar chosen" : "bar",
      }),
      tokens.length <= 16 || layer === chosen || layer === tokens.length - 1
        ? s("text", { x: left + (layer + 0.5) * step, y: Math.min(y(count) + 13, height - bottom - 3), class: "inside" }, String(count))
        : null,
    ),
  );
  const every = tokens.length > 16 ? 4 : 1;
  const ticks = tokens.map((_, layer) =>
    layer % every ? null : s("text", { x: left + (layer + 0.5) * step, y: height - 6, class: "tick" }, String(layer)),
  );
  return s("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img", class: "chart",
    "aria-label": `Tokens behind each layer, from ${start} at the start: ${tokens.join(", ")}.`,
  },
    s("line", { x1: left, x2: width, y1: y(start), y2: y(start), class: "before" }),
    s("text", { x: left - 4, y: y(start) + 4, class: "tick end" }, String(start)),
    s("text", { x: left - 4, y: height - bottom + 1, class: "tick end" }, "0"),
    ...bars, ...ticks,
  );
}

/** Return the predictions of each question, its main one first. */
export function byQuestion(heads) {
  return [...new Set(heads.map((head) => head.question))].map((question) => heads.filter((head) => head.question === question));
}

/** Return the likely classes before and after, most likely after first. */
export function answerBars(before, after, most = 4) {
  const was = new Map(before.map((one) => [one.class, one.probability]));
  const first = after[0];
  const changed = before.length && before[0].class !== first.class;
  const rows = after.slice(0, most).map((one, at) =>
    h("li", { class: at === 0 ? "first" : "" },
      h("span", { class: "class" }, one.class),
      h("span", { class: "number" }, percent(one.probability)),
      bar(one.probability, was.get(one.class), at === 0 && changed),
    ),
  );
  return h("ul", { class: "answers" }, ...rows);
}

function bar(share, before, changed) {
  const x = (value) => 1 + 298 * value;
  return s("svg", { viewBox: "0 0 300 12", preserveAspectRatio: "none", class: "share", "aria-hidden": "true" },
    s("rect", { x: 0, y: 0, width: 300, height: 12, class: "rail" }),
    s("rect", { x: 0, y: 0, width: Math.max(1, x(share)), height: 12, class: changed ? "fill changed" : "fill" }),
    before === undefined ? null : s("line", { x1: x(before), x2: x(before), y1: 0, y2: 12, class: "mark" }),
  );
}

/** Return a histogram of the patches' norms, with the special tokens and the detector's threshold. */
export function normsChart(patches, special, names, threshold) {
  const [width, height, bottom] = [420, 150, 22];
  const values = [...patches, ...special, threshold ?? patches[0]];
  const [low, high] = [Math.min(...values) * 0.97, Math.max(...values) * 1.03];
  const x = (value) => 4 + ((value - low) / (high - low)) * (width - 8);
  const bins = Array(36).fill(0);
  for (const value of patches) bins[Math.min(35, Math.floor(((value - low) / (high - low)) * 36))]++;
  const most = Math.max(...bins);
  const bars = bins.map((count, at) =>
    count
      ? s("rect", {
          x: 4 + (at * (width - 8)) / 36 + 0.7, width: (width - 8) / 36 - 1.4,
          y: height - bottom - (count / most) * (height - bottom - 26), height: (count / most) * (height - bottom - 26), class: "bar",
        })
      : null,
  );
  const marks = special.map((value, at) =>
    s("g", {}, s("title", {}, `${names[at]}: ${short(value)}`), s("path", { d: `M${x(value)} ${height - bottom} l-4 8 h8 z`, class: "special" })),
  );
  const line = threshold === null ? null : s("g", {},
    s("line", { x1: x(threshold), x2: x(threshold), y1: 14, y2: height - bottom, class: "limit" }),
    s("text", { x: x(threshold), y: 10, class: "tick" }, `threshold ${short(threshold)}`),
  );
  return s("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img", class: "chart",
    "aria-label": `Norms of ${plural(patches.length, "patch token")} from ${short(Math.min(...patches))} to ${short(Math.max(...patches))}; ${names.map((name, at) => `${name} ${short(special[at])}`).join(", ")}.`,
  },
    ...bars, s("line", { x1: 0, x2: width, y1: height - bottom, y2: height - bottom, class: "axis" }), ...marks, line,
    s("text", { x: 4, y: height - 2, class: "tick start" }, short(low)),
    s("text", { x: width - 4, y: height - 2, class: "tick end" }, short(high)),
  );
}

/** Return the best cosine of every source in order, those that merge filled. */
export function pairsChart(pairs, chosen) {
  const [width, height] = [420, 120];
  const cosines = pairs.map((pair) => pair.cosine);
  const low = Math.min(...cosines, 0.999);
  const x = (at) => 2 + (at * (width - 4)) / pairs.length;
  const y = (value) => 8 + ((1 - value) / Math.max(1 - low, 1e-6)) * (height - 28);
  const dots = pairs.map((pair, at) =>
    s("rect", {
      x: x(at), y: y(pair.cosine), width: Math.max(1.5, (width - 4) / pairs.length - 1), height: height - 18 - y(pair.cosine),
      class: pair === chosen ? "bar chosen" : pair.merges ? "bar" : "bar pale",
    }),
  );
  const merged = pairs.filter((pair) => pair.merges).length;
  return s("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img", class: "chart",
    "aria-label": `The best cosine of each of ${plural(pairs.length, "token")} in A, from ${Math.max(...cosines).toFixed(3)} down to ${low.toFixed(3)}; the first ${merged} merge.`,
  },
    ...dots,
    s("line", { x1: x(merged), x2: x(merged), y1: 4, y2: height - 18, class: "limit" }),
    s("text", { x: 2, y: height - 4, class: "tick start" }, `${merged} merge`),
    s("text", { x: width - 2, y: height - 4, class: "tick end" }, `${pairs.length - merged} stay; lowest cosine ${low.toFixed(2)}`),
  );
}
