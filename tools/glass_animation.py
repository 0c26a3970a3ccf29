"""Draw the README's animation, ``docs/images/slider.gif``: stained glass while a slider moves through ``r``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

import vitrail
from vitrail.data import read_image, samples
from vitrail.data.sample_files import drawings

TARGET = Path(__file__).resolve().parents[1] / "docs" / "images" / "slider.gif"
SIDE, GAP, FOOT = 232, 14, 62
MOST = 19
CREAM, INK, SOFT, COBALT = (250, 246, 236), (34, 32, 38), (176, 170, 158), (34, 74, 168)


def square(path: Path) -> Image.Image:
    """Return the middle of an image as a square."""
    image = read_image(path)
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def frame(model: Any, images: list[Image.Image], r: int) -> Image.Image:
    """Return the images merged by r tokens per block, over the slider."""
    with vitrail.merge(model, r=r) as merging:
        panes = merging.draw(images) if r else images
        left, before = merging.tokens_per_layer()[-1], merging.layout.num_tokens
        share = merging.flops() / merging.flops(merged=False)
    width = len(images) * (SIDE + GAP) + GAP
    sheet = Image.new("RGB", (width, SIDE + 2 * GAP + FOOT), CREAM)
    for index, pane in enumerate(panes):
        sheet.paste(pane, (GAP + index * (SIDE + GAP), GAP))
    draw, y = ImageDraw.Draw(sheet), SIDE + 2 * GAP + 8
    start, end = GAP + 8, width - GAP - 8
    at = start + (end - start) * r / MOST
    draw.line([(start, y), (end, y)], fill=SOFT, width=4)
    draw.line([(start, y), (at, y)], fill=COBALT, width=4)
    draw.ellipse((at - 8, y - 8, at + 8, y + 8), fill=COBALT)
    text = f"r = {r}: {left} of {before} tokens are left, {share:.0%} of the multiply-adds"
    draw.text((width / 2, y + 32), text, fill=INK, font=ImageFont.load_default(20), anchor="mm")
    return sheet


def main() -> None:
    """Write the animation: up, a pause, and back."""
    model = vitrail.load_model("vitrail:tiny")
    images = [square(path) for path in (samples()["coffee"], samples()["chelsea"], drawings()["cassette-player"])]
    frames = [frame(model, images, r) for r in range(MOST + 1)]
    palette = [one.quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE) for one in frames]
    order = [*range(MOST + 1), *range(MOST - 1, 0, -1)]
    times = [1200 if r == 0 else 1600 if r == MOST else 700 if r == 16 else 140 for r in order]
    palette[0].save(
        TARGET, save_all=True, append_images=[palette[r] for r in order[1:]], duration=times, loop=0, optimize=True
    )


if __name__ == "__main__":
    main()
