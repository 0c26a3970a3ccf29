// Images as a model takes them: decoded, and resized as Pillow does (bicubic, antialiased, rounded to bytes twice).

export const MAX_UPLOAD = 20 * 2 ** 20;
const MAX_PIXELS = 100e6;
const PREVIEW = 1024;

/** Return RGBA pixels of a file, at full size and as a small image to draw. */
export async function decode(file) {
  if (file.size > MAX_UPLOAD) throw new Error(`the upload has more than ${MAX_UPLOAD / 2 ** 20} MiB; scale it down`);
  const [stated, height] = statedSize(new Uint8Array(await file.slice(0, 64).arrayBuffer()));
  if (stated * height > MAX_PIXELS) throw tooLarge(stated, height);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("the upload: not an image, or its header is damaged; expected an image file such as JPEG, PNG or WebP");
  }
  if (bitmap.width * bitmap.height > MAX_PIXELS) throw tooLarge(bitmap.width, bitmap.height);
  const full = draw(bitmap, bitmap.width, bitmap.height);
  const share = Math.min(1, PREVIEW / Math.max(bitmap.width, bitmap.height));
  const small = draw(bitmap, Math.max(1, Math.round(bitmap.width * share)), Math.max(1, Math.round(bitmap.height * share)));
  const pixels = full.getContext("2d").getImageData(0, 0, full.width, full.height).data;
  return { width: bitmap.width, height: bitmap.height, pixels, preview: await small.convertToBlob({ type: "image/png" }) };
}

/** Return the size that a PNG's header states, before anything is decoded. */
function statedSize(head) {
  const isPng = head[0] === 0x89 && head[1] === 0x50 && head[2] === 0x4e && head[3] === 0x47;
  const view = new DataView(head.buffer);
  return isPng && head.length >= 24 ? [view.getUint32(16), view.getUint32(20)] : [0, 0];
}

const tooLarge = (width, height) =>
  new Error(`the upload: the image is too large (${width} × ${height}); expected at most 100 megapixels. Scale it down`);

function draw(bitmap, width, height) {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff"; // transparent images on white, as the server decodes them
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas;
}

/** Return RGBA pixels as a normalized input (3, height, width). */
export function toInput({ pixels, width, height }, { size, mean, std }) {
  const [rows, columns] = size;
  const across = resample(pixels, width, height, columns, 4, 1);
  const bytes = resample(across, height, columns, rows, 4 * columns, columns);
  const plane = rows * columns;
  const made = new Float32Array(3 * plane);
  for (let at = 0; at < plane; at++)
    for (let channel = 0; channel < 3; channel++)
      made[channel * plane + at] = (bytes[4 * at + channel] / 255 - mean[channel]) / std[channel];
  return made;
}

/**
 * Resize one axis of RGBA pixels. Entries along it are `stride` apart; there are `others` lines, each `lines` wide.
 * Horizontally: stride 4, every row on its own. Vertically: stride a row, every column on its own.
 */
function resample(source, length, others, wanted, stride, lines) {
  const horizontal = stride === 4;
  const made = new Uint8ClampedArray(4 * wanted * (horizontal ? others : lines));
  const scale = length / wanted;
  const wide = Math.max(scale, 1);
  for (let to = 0; to < wanted; to++) {
    const center = (to + 0.5) * scale;
    const first = Math.max(0, Math.floor(center - 2 * wide + 0.5));
    const last = Math.min(length, Math.floor(center + 2 * wide + 0.5));
    const weights = [];
    for (let from = first; from < last; from++) weights.push(cubic((from - center + 0.5) / wide));
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    // 22 bits behind the point, as Pillow keeps
    const whole = weights.map((weight) => Math.trunc((weight / total) * 4194304 + (weight < 0 ? -0.5 : 0.5)));
    const count = horizontal ? others : lines;
    for (let line = 0; line < count; line++) {
      const start = horizontal ? line * length * 4 : line * 4;
      const goal = horizontal ? (line * wanted + to) * 4 : (to * lines + line) * 4;
      for (let channel = 0; channel < 3; channel++) {
        let sum = 2097152;
        for (let tap = 0; tap < whole.length; tap++) sum += source[start + (first + tap) * stride + channel] * whole[tap];
        made[goal + channel] = Math.floor(sum / 4194304);
      }
    }
  }
  return made;
}

function cubic(x) {
  const at = Math.abs(x);
  if (at < 1) return (1.5 * at - 2.5) * at * at + 1;
  return at < 2 ? ((-0.5 * at + 2.5) * at - 4) * at + 2 : 0;
}
