"""Draw the sample images of objects that the embedded model knows: ``src/vitrail/data/samples/drawn/``.

Photographs of ImageNet's classes may not be redistributed; drawings of ours may. Shapes are drawn at four times the
size, with light
from the upper left, and get some grain, as photographs have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

FOLDER = Path(__file__).resolve().parents[1] / "src" / "vitrail" / "data" / "samples" / "drawn"
SIDE, OVER = 384, 4
Color = tuple[int, int, int]


class Scene:
    """A drawing in coordinates from 0 to 100, with shadows and shading."""

    def __init__(self, top: Color, bottom: Color, seed: int) -> None:
        self.size, self.rng = SIDE * OVER, np.random.default_rng(seed)
        share = np.linspace(0, 1, self.size)[:, None, None]
        sky = np.array(top) * (1 - share) + np.array(bottom) * share
        self.image = Image.fromarray(np.broadcast_to(sky, (self.size, self.size, 3)).astype(np.uint8))

    def at(self, *values: float) -> list[float]:
        """Return coordinates in pixels."""
        return [value * self.size / 100 for value in values]

    def box(
        self, x0: float, y0: float, x1: float, y1: float, color: Color, radius: float = 0, shade: float = 0.25
    ) -> None:
        """Draw a box with rounded corners, lighter at the upper left by a share."""
        mask = Image.new("L", self.image.size)
        ImageDraw.Draw(mask).rounded_rectangle(self.at(x0, y0, x1, y1), self.at(radius)[0], fill=255)
        self._paint(mask, color, shade)

    def shape(self, points: list[tuple[float, float]], color: Color, shade: float = 0.2) -> None:
        """Draw a polygon."""
        mask = Image.new("L", self.image.size)
        ImageDraw.Draw(mask).polygon([tuple(self.at(*point)) for point in points], fill=255)  # type: ignore[misc]
        self._paint(mask, color, shade)

    def disk(self, x: float, y: float, r: float, color: Color, shade: float = 0.3, squeeze: float = 1.0) -> None:
        """Draw a disk, or an ellipse."""
        mask = Image.new("L", self.image.size)
        ImageDraw.Draw(mask).ellipse(self.at(x - r, y - r * squeeze, x + r, y + r * squeeze), fill=255)
        self._paint(mask, color, shade)

    def line(self, points: list[tuple[float, float]], color: Color, width: float) -> None:
        """Draw a line with round corners."""
        draw = ImageDraw.Draw(self.image)
        path = [tuple(self.at(*point)) for point in points]
        draw.line(path, fill=color, width=round(self.at(width)[0]), joint="curve")  # type: ignore[arg-type]

    def shadow(self, x: float, y: float, wide: float, high: float, strength: float = 0.5) -> None:
        """Draw a soft shadow on the ground."""
        mask = Image.new("L", self.image.size)
        ImageDraw.Draw(mask).ellipse(self.at(x - wide, y - high, x + wide, y + high), fill=round(255 * strength))
        mask = mask.filter(ImageFilter.GaussianBlur(self.at(1.5)[0]))
        self.image.paste((18, 18, 20), mask=mask)

    def _paint(self, mask: Image.Image, color: Color, shade: float) -> None:
        box = mask.getbbox()
        if box is None:
            return
        width, height = box[2] - box[0], box[3] - box[1]
        across, down = np.linspace(1, -1, width)[None], np.linspace(1, -1, height)[:, None]
        light = 1 + shade * (0.6 * down + 0.4 * across)
        painted = np.clip(np.array(color) * light[..., None], 0, 255).astype(np.uint8)
        self.image.paste(Image.fromarray(painted), box[:2], mask.crop(box))

    def finished(self) -> Image.Image:
        """Return the drawing at its final size, with grain."""
        small = np.asarray(self.image.resize((SIDE, SIDE), Image.Resampling.LANCZOS), dtype=np.float64)
        grain = self.rng.normal(0, 3.5, (SIDE, SIDE, 1)) + self.rng.normal(0, 1.5, small.shape)
        return Image.fromarray(np.clip(small + grain, 0, 255).astype(np.uint8))


def gas_pump() -> Image.Image:
    """Draw a pump of a filling station."""
    scene = Scene((158, 190, 222), (205, 214, 220), 1)
    scene.box(0, 78, 100, 100, (128, 126, 122), 0, 0.1)
    scene.box(0, 6, 100, 15, (200, 40, 36), 0, 0.1)
    scene.box(0, 15, 100, 18, (236, 234, 228), 0, 0.1)
    scene.box(6, 18, 11, 79, (190, 190, 188))
    scene.shadow(50, 90, 30, 4)
    scene.box(26, 84, 72, 90, (108, 108, 110), 1)
    scene.box(31, 26, 67, 85, (206, 38, 34), 2.5, 0.35)
    scene.box(31, 26, 67, 34, (238, 236, 230), 2.5)
    scene.box(35, 38, 63, 55, (34, 38, 40), 1)
    for row, color in ((40, (186, 210, 150)), (45.5, (186, 210, 150)), (51, (150, 170, 124))):
        scene.box(37, row, 55, row + 3.4, color, 0.4)
        scene.box(57, row, 61, row + 3.4, (220, 220, 214), 0.4)
    scene.box(37, 59, 61, 68, (240, 232, 210), 0.6)
    for column, color in ((38.5, (36, 120, 60)), (46, (232, 190, 40)), (53.5, (30, 30, 34))):
        scene.box(column, 60.5, column + 6, 66.5, color, 0.4)
    scene.box(35, 71, 63, 82, (170, 28, 26), 1)
    scene.line([(67, 40), (74, 44), (77, 56), (76, 70), (70, 78), (66, 74)], (26, 26, 28), 2.4)
    scene.box(66, 36, 74, 41, (60, 60, 64), 1)
    scene.box(70, 30, 74, 40, (34, 34, 38), 1)
    return scene.finished()


def cassette_player() -> Image.Image:
    """Draw a portable stereo with a cassette deck."""
    scene = Scene((176, 152, 122), (124, 92, 62), 2)
    scene.box(0, 66, 100, 100, (128, 88, 54), 0, 0.2)
    scene.shadow(50, 80, 46, 5)
    scene.line([(20, 34), (22, 22), (78, 22), (80, 34)], (44, 46, 50), 2.6)
    scene.box(6, 32, 94, 80, (62, 64, 70), 2.5, 0.35)
    scene.box(8, 34, 92, 43, (176, 178, 180), 1)
    scene.box(22, 36, 78, 41, (28, 30, 32), 0.6)
    for tick in range(24, 78, 3):
        scene.line([(tick, 37), (tick, 39 if tick % 2 else 40)], (214, 208, 180), 0.35)
    scene.line([(46, 36.3), (46, 40.7)], (220, 60, 40), 0.6)
    for x in (22, 78):
        scene.disk(x, 61, 14.5, (150, 152, 156))
        scene.disk(x, 61, 13, (30, 31, 34))
        scene.disk(x, 61, 9, (48, 50, 54))
        scene.disk(x, 61, 4, (22, 23, 25))
    scene.box(38, 46, 62, 66, (168, 170, 174), 1)
    scene.box(40, 48, 60, 63, (36, 38, 42), 0.8)
    scene.box(42, 50, 58, 61, (214, 206, 186), 0.6)
    scene.box(44, 53, 56, 58, (52, 46, 42), 1.5)
    for x in (46.5, 53.5):
        scene.disk(x, 55.5, 1.9, (236, 234, 228))
        scene.disk(x, 55.5, 0.8, (60, 58, 56))
    for key in range(6):
        scene.box(38.4 + 4 * key, 69, 41.8 + 4 * key, 74, (196, 198, 200) if key else (190, 50, 44), 0.4)
    for knob in (12, 17, 83, 88):
        scene.disk(knob, 38.5, 1.9, (90, 92, 96))
    return scene.finished()


def garbage_truck() -> Image.Image:
    """Draw a garbage truck from its side."""
    scene = Scene((150, 188, 224), (214, 222, 224), 3)
    scene.box(0, 70, 100, 100, (108, 108, 110), 0, 0.1)
    scene.box(0, 66, 100, 71, (168, 164, 156), 0, 0.1)
    scene.shadow(50, 82, 46, 4)
    scene.shape([(34, 26), (78, 24), (92, 34), (95, 66), (34, 68)], (52, 122, 66), 0.3)
    scene.shape([(78, 24), (92, 34), (95, 66), (83, 67), (78, 44)], (40, 96, 52), 0.25)
    for x in (42, 50, 58, 66, 74):
        scene.line([(x, 27), (x, 66)], (40, 100, 54), 0.8)
    scene.box(34, 64, 95, 71, (44, 46, 48), 0.5)
    scene.shape([(6, 48), (12, 34), (32, 34), (32, 72), (5, 72)], (236, 236, 230), 0.3)
    scene.shape([(9, 48), (14, 37), (24, 37), (24, 50), (9, 50)], (58, 78, 96), 0.4)
    scene.box(25.5, 38, 31, 50, (66, 88, 106), 0.5)
    scene.box(4, 66, 32, 73, (60, 62, 64), 0.6)
    scene.disk(7, 63, 1.8, (250, 244, 200))
    scene.box(85, 58, 97, 70, (52, 54, 56), 0.6)
    scene.box(14, 31, 24, 34, (240, 170, 40), 0.8)
    for x in (16, 66, 82):
        scene.disk(x, 75, 7, (26, 26, 28))
        scene.disk(x, 75, 3.6, (150, 152, 154))
        scene.disk(x, 75, 1.2, (70, 72, 74))
    return scene.finished()


DRAWINGS: dict[str, Callable[[], Image.Image]] = {
    "gas-pump": gas_pump,
    "cassette-player": cassette_player,
    "garbage-truck": garbage_truck,
}


def main(folder: Path = FOLDER) -> None:
    """Write the drawings."""
    for name, draw in DRAWINGS.items():
        draw().save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
