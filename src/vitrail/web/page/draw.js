// Painting on the patch grid: stained glass, maps of values, colors of features.

const SIDE = 768; // longest side of a painting, in pixels
const SHEET = 1152; // the same for the frames of a clip
const LEAD = "#16141a";
const MARK = "#efe6d2"; // color of times and frequencies

/**
 * What a model sees of a sample, where its patches are, and the mean color of each: an image, the frames of a clip as
 * tiles from left to right, or a spectrogram with axes. Patches count as the model's tokens do: by frame, row, column.
 */
export class Picture {
  static async load({ url, times = [], x = [], y = [] }, { grid, modality }) {
    const image = new Image();
    image.src = url;
    await image.decode();
    return new Picture(image, grid, modality, { times, x, y });
  }

  constructor(image, [steps, rows, columns], modality, marks) {
    Object.assign(this, { steps, rows, columns, modality, times: marks.times });
    this.risesUp = modality === "audio"; // the lowest band is the first row, and below
    const size = [image.naturalWidth, image.naturalHeight / steps];
    this.across = steps === 1 ? 1 : bestColumns(steps, size[0] / size[1]);
    const down = Math.ceil(steps / this.across);
    this.gap = steps === 1 ? 0 : 12;
    this.margin = modality === "audio" ? { left: 80, top: 14, bottom: 34, right: 14 } : { left: this.gap, top: this.gap, bottom: 0, right: 0 };
    this.head = marks.times.length ? 34 : 0; // room for the time above a frame
    this.text = steps === 1 ? 19 : 27; // size of letters
    const longest = steps === 1 ? SIDE : SHEET;
    const share = longest / Math.max(size[0] * this.across, size[1] * down);
    this.tile = [Math.max(columns, Math.round(size[0] * share)), Math.max(rows, Math.round(size[1] * share))];
    this.width = this.margin.left + this.across * (this.tile[0] + this.gap) + this.margin.right;
    this.height = this.margin.top + down * (this.tile[1] + this.head + this.gap) + this.margin.bottom;
    this.marks = this.#marks(marks);
    this.frames = this.#frames(image);
    this.means = this.#means();
    this.gray = this.#gray();
  }

  get patches() {
    return this.steps * this.rows * this.columns;
  }

  /** Return left and top of a frame. */
  #corner(step) {
    const row = Math.floor(step / this.across);
    return [
      this.margin.left + (step % this.across) * (this.tile[0] + this.gap),
      this.margin.top + row * (this.tile[1] + this.head + this.gap) + this.head,
    ];
  }

  /** Return texts, each with its place and alignment. */
  #marks({ times, x, y }) {
    const [left, top] = this.#corner(0);
    const [width, height] = this.tile;
    return [
      ...times.map((time, step) => [`${time.toFixed(2)} s`, this.#corner(step)[0], this.#corner(step)[1] - 8, "left"]),
      ...x.map(([share, text]) => [text, left + share * width, top + height + 24, share > 0.97 ? "right" : "center"]),
      ...y.map(([share, text]) => [text, left - 10, top + (1 - share) * height + 6, "right"]),
    ];
  }

  #canvas() {
    const canvas = document.createElement("canvas");
    canvas.width = this.width;
    canvas.height = this.height;
    return [canvas, canvas.getContext("2d", { willReadFrequently: true })];
  }

  /** Return the frames at their places, nothing between them. */
  #frames(image) {
    const [canvas, context] = this.#canvas();
    const high = image.naturalHeight / this.steps;
    context.imageSmoothingEnabled = this.modality !== "audio";
    for (let step = 0; step < this.steps; step++)
      context.drawImage(image, 0, step * high, image.naturalWidth, high, ...this.#corner(step), ...this.tile);
    return canvas;
  }

  /** Return sums of red, green and blue of each patch, and its number of pixels. */
  #means() {
    const { data } = this.frames.getContext("2d").getImageData(0, 0, this.width, this.height);
    return Array.from({ length: this.patches }, (_, patch) => {
      const [left, top, width, height] = this.cell(patch);
      const sum = [0, 0, 0, width * height];
      for (let y = top; y < top + height; y++)
        for (let at = 4 * (y * this.width + left); at < 4 * (y * this.width + left + width); at += 4) {
          sum[0] += data[at];
          sum[1] += data[at + 1];
          sum[2] += data[at + 2];
        }
      return sum;
    });
  }

  #gray() {
    const [canvas, context] = this.#canvas();
    const made = this.frames.getContext("2d").getImageData(0, 0, this.width, this.height);
    for (let at = 0; at < made.data.length; at += 4) {
      const light = 0.299 * made.data[at] + 0.587 * made.data[at + 1] + 0.114 * made.data[at + 2];
      made.data[at] = made.data[at + 1] = made.data[at + 2] = light;
    }
    context.putImageData(made, 0, 0);
    return canvas;
  }

  /** Return frame, row and column of a patch. */
  place(patch) {
    const inside = patch % (this.rows * this.columns);
    return [Math.floor(patch / (this.rows * this.columns)), Math.floor(inside / this.columns), inside % this.columns];
  }

  /** Return left, top, width and height of a patch. */
  cell(patch) {
    const [step, row, column] = this.place(patch);
    const [left, top] = this.#corner(step);
    const shown = this.risesUp ? this.rows - 1 - row : row;
    const edge = (at, count, pixels) => Math.round((at * pixels) / count);
    const [x, y] = [edge(column, this.columns, this.tile[0]), edge(shown, this.rows, this.tile[1])];
    return [left + x, top + y, edge(column + 1, this.columns, this.tile[0]) - x, edge(shown + 1, this.rows, this.tile[1]) - y];
  }

  /** Return the patch beside another one in its frame, as it is seen; -1 at the border. */
  beside(patch, down, right) {
    const [step, row, column] = this.place(patch);
    const [y, x] = [row + (this.risesUp ? -down : down), column + right];
    return y < 0 || y >= this.rows || x < 0 || x >= this.columns ? -1 : (step * this.rows + y) * this.columns + x;
  }

  /** Return the patch at the same place in the next frame; -1 behind the last. */
  later(patch) {
    const next = patch + this.rows * this.columns;
    return next < this.patches ? next : -1;
  }

  /** Return the patch at a place, given as shares of width and height; the nearest one if there is none. */
  patchAt(x, y) {
    const clamp = (value, last) => Math.min(last, Math.max(0, Math.floor(value)));
    const [px, py] = [x * this.width - this.margin.left, y * this.height - this.margin.top];
    const down = Math.ceil(this.steps / this.across);
    const tiles = [clamp(px / (this.tile[0] + this.gap), this.across - 1), clamp(py / (this.tile[1] + this.head + this.gap), down - 1)];
    const step = Math.min(this.steps - 1, tiles[1] * this.across + tiles[0]);
    const [left, top] = this.#corner(step);
    const column = clamp(((x * this.width - left) / this.tile[0]) * this.columns, this.columns - 1);
    const shown = clamp(((y * this.height - top) / this.tile[1]) * this.rows, this.rows - 1);
    return (step * this.rows + (this.risesUp ? this.rows - 1 - shown : shown)) * this.columns + column;
  }

  /** Say where a patch is. */
  nameOf(patch) {
    const [step, row, column] = this.place(patch);
    if (this.steps > 1) return `frame ${step} (${(this.times[step] ?? 0).toFixed(2)} s), row ${row}, column ${column}`;
    return this.risesUp ? `row ${row} from below, column ${column}` : `row ${row}, column ${column}`;
  }
}

/** Return how many frames of a clip stand side by side: whole rows where possible, wider than high. */
function bestColumns(steps, aspect) {
  const cost = (columns) => {
    const rows = Math.ceil(steps / columns);
    return Math.abs(Math.log((columns * aspect) / rows / 1.5)) + (2 * (columns * rows - steps)) / steps;
  };
  return [...Array(steps).keys()].map((at) => at + 1).reduce((best, one) => (cost(one) < cost(best) ? one : best));
}

export function fit(canvas, picture) {
  if (canvas.width !== picture.width || canvas.height !== picture.height) {
    canvas.width = picture.width;
    canvas.height = picture.height;
  }
  return canvas.getContext("2d");
}

/** Return the context of a canvas with what is around the patches: lead, and marks of time and frequency. */
function begin(canvas, picture) {
  const context = fit(canvas, picture);
  context.fillStyle = LEAD;
  context.fillRect(0, 0, picture.width, picture.height);
  context.fillStyle = MARK;
  context.font = `500 ${picture.text}px system-ui, sans-serif`;
  for (const [text, x, y, align] of picture.marks) {
    context.textAlign = align;
    context.fillText(text, x, y);
  }
  return context;
}

/** Return paintings as one, from left to right. */
export function sideBySide(canvases) {
  if (canvases.length === 1) return canvases[0];
  const made = document.createElement("canvas");
  const gap = 16;
  made.width = canvases.reduce((sum, canvas) => sum + canvas.width + gap, -gap);
  made.height = Math.max(...canvases.map((canvas) => canvas.height));
  let left = 0;
  for (const canvas of canvases) {
    made.getContext("2d").drawImage(canvas, left, 0);
    left += canvas.width + gap;
  }
  return made;
}

export function paintImage(canvas, picture) {
  begin(canvas, picture).drawImage(picture.frames, 0, 0);
}

/** Paint each group in its mean color, with leads between groups, as vitrail's stained glass is drawn. */
export function paintGlass(canvas, picture, groups) {
  const context = begin(canvas, picture);
  const sums = new Map();
  groups.forEach((group, patch) => {
    const sum = sums.get(group) ?? [0, 0, 0, 0];
    picture.means[patch].forEach((value, at) => (sum[at] += value));
    sums.set(group, sum);
  });
  groups.forEach((group, patch) => {
    const [red, green, blue, count] = sums.get(group);
    context.fillStyle = `rgb(${red / count} ${green / count} ${blue / count})`;
    context.fillRect(...picture.cell(patch));
  });
  paintLeads(context, picture, groups, LEAD, 1);
}

/** Draw lines between patches of different groups. */
export function paintLeads(context, picture, groups, color, times) {
  const [, , wide, high] = picture.cell(0);
  context.strokeStyle = color;
  context.lineCap = context.lineJoin = "round";
  context.lineWidth = times * Math.max(1, Math.min(0.1 * Math.min(wide, high), 0.006 * Math.min(picture.width, picture.height)));
  context.beginPath();
  groups.forEach((group, patch) => {
    const [left, top, width, height] = picture.cell(patch);
    const [right, below] = [picture.beside(patch, 0, 1), picture.beside(patch, 1, 0)];
    if (right >= 0 && groups[right] !== group) line(context, left + width, top, left + width, top + height);
    if (below >= 0 && groups[below] !== group) line(context, left, top + height, left + width, top + height);
  });
  context.stroke();
}

/** Outline the patches for which `inside` is true, on both sides of their border. */
export function outline(context, picture, inside, color, width = 5) {
  const path = new Path2D();
  for (let patch = 0; patch < picture.patches; patch++) {
    if (!inside(patch)) continue;
    const [left, top, wide, high] = picture.cell(patch);
    const ends = (down, right) => picture.beside(patch, down, right) < 0 || !inside(picture.beside(patch, down, right));
    if (ends(-1, 0)) line(path, left, top, left + wide, top);
    if (ends(1, 0)) line(path, left, top + high, left + wide, top + high);
    if (ends(0, -1)) line(path, left, top, left, top + high);
    if (ends(0, 1)) line(path, left + wide, top, left + wide, top + high);
  }
  context.lineCap = "round";
  for (const [stroke, thick] of [["rgb(10 8 14 / .8)", width + 4], [color, width]]) {
    context.strokeStyle = stroke;
    context.lineWidth = thick;
    context.stroke(path);
  }
}

function line(path, fromX, fromY, toX, toY) {
  path.moveTo(fromX, fromY);
  path.lineTo(toX, toY);
}

/** Paint values of the patches, from `low` to `high`, over the gray image. */
export function paintMap(canvas, picture, values, low, high) {
  const context = begin(canvas, picture);
  values.forEach((value, patch) => {
    context.fillStyle = colorOf(high > low ? (value - low) / (high - low) : 0);
    context.fillRect(...picture.cell(patch));
  });
  overlayGray(context, picture, 0.4);
}

export function paintColors(canvas, picture, colors) {
  const context = begin(canvas, picture);
  colors.forEach((color, patch) => {
    context.fillStyle = `rgb(${color.map((value) => Math.round(255 * value)).join(" ")})`;
    context.fillRect(...picture.cell(patch));
  });
}

export function overlayGray(context, picture, alpha) {
  context.globalCompositeOperation = "soft-light";
  context.globalAlpha = alpha;
  context.drawImage(picture.gray, 0, 0);
  context.globalCompositeOperation = "source-over";
  context.globalAlpha = 1;
}

// Viridis, the map of all drawings and plots (vitrail/drawing/colors.py)
const STOPS = [
  [68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142],
  [31, 158, 137], [53, 183, 121], [109, 205, 89], [180, 222, 44], [253, 231, 37],
];

export function colorOf(share) {
  const at = Math.min(1, Math.max(0, share)) * (STOPS.length - 1);
  const low = Math.min(STOPS.length - 2, Math.floor(at));
  return `rgb(${STOPS[low].map((value, channel) => Math.round(value + (at - low) * (STOPS[low + 1][channel] - value))).join(" ")})`;
}

/** Return the largest and smallest value. */
export const range = (values) => [Math.min(...values), Math.max(...values)];
