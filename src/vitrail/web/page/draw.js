// Painting on the patch grid: stained glass, maps of values, colors of features.

const SIDE = 768; // longest side of a painting, in pixels
const LEAD = "#16141a";

/** The image of a stage, and the mean color of each of its patches. */
export class Picture {
  static async load(url, grid) {
    const image = new Image();
    image.src = url;
    await image.decode();
    return new Picture(image, grid);
  }

  constructor(image, [rows, columns]) {
    this.image = image;
    this.rows = rows;
    this.columns = columns;
    const share = SIDE / Math.max(image.naturalWidth, image.naturalHeight);
    this.width = Math.max(columns, Math.round(image.naturalWidth * share));
    this.height = Math.max(rows, Math.round(image.naturalHeight * share));
    this.means = this.#means();
    this.gray = this.#gray();
  }

  #canvas() {
    const canvas = document.createElement("canvas");
    canvas.width = this.width;
    canvas.height = this.height;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(this.image, 0, 0, this.width, this.height);
    return [canvas, context];
  }

  #means() {
    const [, context] = this.#canvas();
    const { data } = context.getImageData(0, 0, this.width, this.height);
    const sums = Array.from({ length: this.rows * this.columns }, () => [0, 0, 0, 0]);
    for (let y = 0; y < this.height; y++) {
      const row = Math.floor(((y + 0.5) * this.rows) / this.height) * this.columns;
      for (let x = 0; x < this.width; x++) {
        const sum = sums[row + Math.floor(((x + 0.5) * this.columns) / this.width)];
        const at = 4 * (y * this.width + x);
        sum[0] += data[at];
        sum[1] += data[at + 1];
        sum[2] += data[at + 2];
        sum[3]++;
      }
    }
    return sums;
  }

  #gray() {
    const [canvas, context] = this.#canvas();
    const { data } = context.getImageData(0, 0, this.width, this.height);
    const made = context.createImageData(this.width, this.height);
    for (let at = 0; at < data.length; at += 4) {
      const light = 0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2];
      made.data[at] = made.data[at + 1] = made.data[at + 2] = light;
      made.data[at + 3] = 255;
    }
    context.putImageData(made, 0, 0);
    return canvas;
  }

  /** Return left, top, width and height of a patch. */
  cell(patch) {
    const [row, column] = [Math.floor(patch / this.columns), patch % this.columns];
    const edge = (at, count, pixels) => Math.round((at * pixels) / count);
    const [left, top] = [edge(column, this.columns, this.width), edge(row, this.rows, this.height)];
    return [left, top, edge(column + 1, this.columns, this.width) - left, edge(row + 1, this.rows, this.height) - top];
  }

  patchAt(x, y) {
    const column = Math.min(this.columns - 1, Math.max(0, Math.floor(x * this.columns)));
    return Math.min(this.rows - 1, Math.max(0, Math.floor(y * this.rows))) * this.columns + column;
  }
}

export function fit(canvas, picture) {
  if (canvas.width !== picture.width || canvas.height !== picture.height) {
    canvas.width = picture.width;
    canvas.height = picture.height;
  }
  return canvas.getContext("2d");
}

export function paintImage(canvas, picture) {
  fit(canvas, picture).drawImage(picture.image, 0, 0, picture.width, picture.height);
}

/** Paint each group in its mean color, with leads between groups, as vitrail's stained glass is drawn. */
export function paintGlass(canvas, picture, groups) {
  const context = fit(canvas, picture);
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
  const { rows, columns } = picture;
  const [, , wide, high] = picture.cell(0);
  context.strokeStyle = color;
  context.lineCap = context.lineJoin = "round";
  context.lineWidth = times * Math.max(1, Math.min(0.1 * Math.min(wide, high), 0.006 * Math.min(picture.width, picture.height)));
  context.beginPath();
  for (let patch = 0; patch < rows * columns; patch++) {
    const [left, top, width, height] = picture.cell(patch);
    if ((patch + 1) % columns && groups[patch] !== groups[patch + 1]) line(context, left + width, top, left + width, top + height);
    if (patch + columns < rows * columns && groups[patch] !== groups[patch + columns])
      line(context, left, top + height, left + width, top + height);
  }
  context.stroke();
}

/** Outline the patches for which `inside` is true, on both sides of their border. */
export function outline(context, picture, inside, color, width = 5) {
  const { rows, columns } = picture;
  const path = new Path2D();
  for (let patch = 0; patch < rows * columns; patch++) {
    if (!inside(patch)) continue;
    const [left, top, wide, high] = picture.cell(patch);
    const [row, column] = [Math.floor(patch / columns), patch % columns];
    if (row === 0 || !inside(patch - columns)) line(path, left, top, left + wide, top);
    if (row === rows - 1 || !inside(patch + columns)) line(path, left, top + high, left + wide, top + high);
    if (column === 0 || !inside(patch - 1)) line(path, left, top, left, top + high);
    if (column === columns - 1 || !inside(patch + 1)) line(path, left + wide, top, left + wide, top + high);
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
  const context = fit(canvas, picture);
  values.forEach((value, patch) => {
    context.fillStyle = colorOf(high > low ? (value - low) / (high - low) : 0);
    context.fillRect(...picture.cell(patch));
  });
  overlayGray(context, picture, 0.4);
}

export function paintColors(canvas, picture, colors) {
  const context = fit(canvas, picture);
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

// ink, cobalt, ruby, amber, cream: lightness rises all the way
const STOPS = [
  [20, 17, 30],
  [33, 66, 150],
  [150, 44, 100],
  [222, 130, 40],
  [252, 240, 205],
];

export function colorOf(share) {
  const at = Math.min(1, Math.max(0, share)) * (STOPS.length - 1);
  const low = Math.min(STOPS.length - 2, Math.floor(at));
  return `rgb(${STOPS[low].map((value, channel) => Math.round(value + (at - low) * (STOPS[low + 1][channel] - value))).join(" ")})`;
}

/** Return the largest and smallest value. */
export const range = (values) => [Math.min(...values), Math.max(...values)];
