"""Contact sheets: several images on one, with captions."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from vitrail._arguments import checked
from vitrail._checks import check_int
from vitrail.data.decode import as_rgb
from vitrail.drawing.theme import LIGHT, rgb
from vitrail.errors import InvalidOption

PAPER, INK = rgb(LIGHT["page"]), rgb(LIGHT["ink"])


@checked
def contact_sheet(
    images: Sequence[Image.Image],
    captions: Sequence[str] = (),
    *,
    columns: int | None = None,
    title: str | None = None,
) -> Image.Image:
    """Arrange images on a sheet, in rows of ``columns`` (all in one row by default), with a title above.

    Each image keeps its resolution; margins and captions, one below each image or none, grow with the images.
    """
    if not images or (captions and len(captions) != len(images)):
        raise InvalidOption(
            f"{len(images)} images and {len(captions)} captions: expected one image or more, and one caption for "
            "each or none"
        )
    if columns is not None:
        check_int("columns", columns)
    images = [as_rgb(image) for image in images]
    columns = min(columns or len(images), len(images))
    wide, high = max(image.width for image in images), max(image.height for image in images)
    unit = max(round(min(wide, high) * 0.04), 4)
    font = ImageFont.load_default(max(round(unit * 1.1), 8))
    line = round(unit * 1.6) if captions else 0
    head = round(unit * 2.2) if title else 0
    rows = -(-len(images) // columns)
    size = (unit + columns * (wide + unit), head + unit + rows * (high + line + unit))
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    if title:
        draw.text((unit, unit / 2 + head / 2), title, fill=INK, font=font, anchor="lm")
    for index, image in enumerate(images):
        x = unit + index % columns * (wide + unit)
        y = head + unit + index // columns * (high + line + unit)
        sheet.paste(image, (x + (wide - image.width) // 2, y + (high - image.height) // 2))
        if captions:
            draw.text((x + wide / 2, y + high + line / 2), captions[index], fill=INK, font=font, anchor="mm")
    return sheet
