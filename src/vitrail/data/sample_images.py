"""Sample images: photographs that come with the package (see ``samples/SOURCES.md``), and drawings made by code.

The drawings show a golf ball, a parachute and a church, three of ImageNet's classes, whose photographs may not be
redistributed. They are drawings: a model's answer to them is not its answer to photographs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

SUPERSAMPLING = 3
"""Drawings are made this many times as large, then reduced, which smooths edges."""

Array = NDArray[np.float64]
Color = tuple[int, int, int]
Point = tuple[float, float]
Points = list[Point]


def samples() -> dict[str, Path]:
    """Return the paths of the sample images by name: astronaut, chelsea (a cat) and coffee.

    Example:
        >>> sorted(samples())
        ['astronaut', 'chelsea', 'coffee']
    """
    return {path.stem: path for path in sorted((Path(__file__).parent / "samples").glob("*.jpg"))}


def drawings() -> dict[str, Callable[[], Image.Image]]:
    """Return functions that draw an image, by name.

    Example:
        >>> drawings()["church"]().size
        (600, 420)
    """
    return {"golf-ball": _golf_ball, "parachute": _parachute, "church": _church}


def _golf_ball(size: int = 480) -> Image.Image:
    """Draw a ball with dimples on short grass, lit from the upper left."""
    side = size * SUPERSAMPLING
    image = _gradient(side, side, (98, 142, 74), (52, 104, 40))
    blades = np.random.default_rng(1).normal(0, 16, (side // 6, side // 2, 1)).repeat(3, 2)
    grass = Image.fromarray((blades + 128).clip(0, 255).astype(np.uint8)).resize(
        (side, side), Image.Resampling.BILINEAR
    )
    image = Image.blend(image, grass, 0.22)
    shadow = Image.new("L", (side, side))
    ImageDraw.Draw(shadow).ellipse(_box(side * 0.57, side * 0.80, side * 0.31, side * 0.09), fill=190)
    image.paste((22, 48, 18), mask=shadow.filter(ImageFilter.GaussianBlur(side * 0.02)))

    radius, left, top = 0.33 * side, 0.5 * side, 0.49 * side
    rows, columns = np.mgrid[:side, :side] + 0.5
    x, y = (columns - left) / radius, (rows - top) / radius
    inside = x**2 + y**2 < 1
    normal = np.stack([x, y, np.sqrt(np.maximum(1 - x**2 - y**2, 0))], -1)
    pixels = np.array(image)
    pixels[inside] = _lit(_dimpled(normal, radius, left, top)[inside])
    return _reduced(Image.fromarray(pixels))


def _dimpled(normal: Array, radius: float, left: float, top: float, count: int = 340, reach: float = 0.085) -> Array:
    """Bend the normals (H, W, 3) of a ball to dimples spread evenly over it (a Fibonacci lattice)."""
    turn = math.pi * (3 - math.sqrt(5)) * np.arange(count)
    height = 1 - 2 * (np.arange(count) + 0.5) / count
    ring = np.sqrt(1 - height**2)
    bent = normal.copy()
    for middle in np.stack([np.cos(turn) * ring, height, np.sin(turn) * ring], -1):
        if middle[2] < -reach:  # behind
            continue
        x, y = left + radius * middle[0], top + radius * middle[1]
        near = (slice(*_around(y, radius * reach)), slice(*_around(x, radius * reach)))
        away = normal[near] - middle
        distance = np.linalg.norm(away, axis=-1, keepdims=True)
        bent[near] -= np.where(distance < reach, 5.5 * away * (1 - distance / reach), 0)
    return bent / np.maximum(np.linalg.norm(bent, axis=-1, keepdims=True), 1e-9)


def _around(place: float, reach: float) -> tuple[int, int]:
    return int(place - reach), int(place + reach) + 2


def _lit(normal: Array) -> NDArray[np.uint8]:
    """Shade white by the light on normals (N, 3): soft from one side, a highlight, some green from the grass below."""
    light = np.array([-0.5, -0.62, 0.6]) / np.linalg.norm([-0.5, -0.62, 0.6])
    facing = (0.5 + 0.5 * normal @ light) ** 1.6
    gleam = np.maximum(2 * np.maximum(normal @ light, 0) * normal[:, 2] - light[2], 0) ** 24
    below = np.maximum(normal[:, 1], 0)[:, None] * np.array([6.0, 26.0, 0.0])
    tone = (40 + 208 * facing + 26 * gleam)[:, None] * np.array([1.0, 0.995, 0.97])
    return np.clip(tone + below, 0, 255).astype(np.uint8)


def _parachute(width: int = 420, height: int = 540) -> Image.Image:
    """Draw a striped canopy under a blue sky, with its lines and a person below."""
    wide, high = width * SUPERSAMPLING, height * SUPERSAMPLING
    image = _gradient(wide, high, (52, 118, 196), (176, 212, 240))
    _clouds(image, [(0.2, 0.84, 0.22), (0.86, 0.72, 0.16), (0.72, 0.1, 0.13)])
    draw = ImageDraw.Draw(image)
    middle, rim, top, reach = wide / 2, high * 0.40, high * 0.10, wide * 0.37
    knot = (middle, high * 0.765)
    seams = [math.sin(angle) for angle in np.linspace(-math.pi / 2, math.pi / 2, 10)]
    hem = [(middle + reach * seam, rim + high * 0.035 * math.sqrt(1 - seam**2)) for seam in seams]
    for point in hem:
        draw.line([point, knot], fill=(238, 240, 244), width=SUPERSAMPLING)
    for index, (left, right) in enumerate(pairwise(seams)):
        shade = 1.0 - 0.34 * abs(left + right) / 2 - 0.06 * (left + right > 0)
        color = ((222, 62, 48), (248, 238, 222))[index % 2]
        sides = [_arc(middle, rim, reach * seam, rim - top) for seam in (left, right)]
        sag = [(x, y + high * 0.018 * math.sin(math.pi * t)) for x, y, t in _along(hem[index + 1], hem[index])]
        draw.polygon([*sides[0], *reversed(sides[1]), *sag], fill=_dark(color, shade))
    _person(draw, knot, high * 0.075)
    return _reduced(image)


def _arc(middle: float, rim: float, reach: float, height: float) -> Points:
    """Return the points of a seam from the rim of a canopy to its top."""
    angles = np.linspace(0, math.pi / 2, 24)
    return [(middle + reach * math.cos(angle), rim - height * math.sin(angle)) for angle in angles]


def _along(start: Point, end: Point) -> list[tuple[float, float, float]]:
    steps = np.linspace(0, 1, 12)
    return [(start[0] + (end[0] - start[0]) * t, start[1] + (end[1] - start[1]) * t, float(t)) for t in steps]


def _person(draw: ImageDraw.ImageDraw, knot: Point, tall: float) -> None:
    x, y = knot
    dark, skin = (36, 40, 58), (214, 168, 136)
    limb = round(tall * 0.16)
    for side in (-1, 1):
        draw.line([(x, y + tall * 0.35), (x + side * tall * 0.2, y - tall * 0.05)], fill=dark, width=limb)
        leg = [(x, y + tall * 0.7), (x + side * tall * 0.16, y + tall * 1.0), (x + side * tall * 0.2, y + tall * 1.35)]
        draw.line(leg, fill=dark, width=limb, joint="curve")
    draw.rounded_rectangle((x - tall * 0.17, y + tall * 0.22, x + tall * 0.17, y + tall * 0.8), tall * 0.1, fill=dark)
    draw.ellipse(_box(x, y + tall * 0.08, tall * 0.14, tall * 0.16), fill=skin)
    draw.pieslice(_box(x, y + tall * 0.06, tall * 0.16, tall * 0.17), 180, 360, fill=(196, 60, 50))


def _church(width: int = 600, height: int = 420) -> Image.Image:
    """Draw a white village church with a pointed steeple, on a meadow in the evening."""
    wide, high = width * SUPERSAMPLING, height * SUPERSAMPLING
    image = _gradient(wide, high, (92, 136, 190), (250, 214, 176))
    _clouds(image, [(0.16, 0.2, 0.16), (0.84, 0.3, 0.2)])
    draw = ImageDraw.Draw(image)
    unit, ground = high / 100, high * 0.84
    for color, base, swing, period in (((120, 142, 150), 0.72, 5, 1.6), ((96, 128, 96), 0.79, 4, 2.3)):
        waves = [(x, math.sin(period * x / wide * math.pi + base * 9)) for x in range(0, wide + 9, 9)]
        ridge = [(x, high * base - swing * unit * wave) for x, wave in waves]
        draw.polygon([*ridge, (wide, high), (0, high)], fill=color)
    draw.rectangle((0, ground, wide, high), fill=(112, 146, 72))

    def wall(left: float, top: float, right: float, color: Color) -> None:
        draw.rectangle((wide * 0.5 + left * unit, high * top, wide * 0.5 + right * unit, ground), fill=color)

    def shape(points: Points, color: Color) -> None:
        draw.polygon([(wide * 0.5 + x * unit, high * y) for x, y in points], fill=color)

    white, shaded, slate = (240, 234, 222), (204, 196, 190), (88, 84, 98)
    wall(-8, 0.56, 44, shaded)  # the nave, its long side
    shape([(-8, 0.57), (-1, 0.40), (40, 0.40), (47, 0.57)], slate)
    wall(-24, 0.42, -4, white)  # the tower, two sides
    wall(-8, 0.42, -4, shaded)
    shape([(-26, 0.43), (-15, 0.08), (-2, 0.43)], slate)
    shape([(-9, 0.43), (-15, 0.08), (-2, 0.43)], _dark(slate, 0.8))
    draw.line([(wide * 0.5 - 15 * unit, high * 0.02), (wide * 0.5 - 15 * unit, high * 0.09)], (60, 54, 52), round(unit))
    cross = (wide * 0.5 - 17.4 * unit, high * 0.045, wide * 0.5 - 12.6 * unit, high * 0.045)
    draw.line(cross, (60, 54, 52), round(unit))
    nave = [(x, 0.63, 2.2, 13) for x in (4, 15, 26, 37)]
    for x, top, half, tall in ((-16, 0.47, 1.8, 8), (-16, 0.66, 3.2, 18), *nave):
        _window(draw, wide * 0.5 + x * unit, high * top, half * unit, tall * unit)
    for x in (-62, -51, 58, 69):
        draw.ellipse(_box(wide * 0.5 + x * unit, high * 0.72, 7.5 * unit, 14 * unit), fill=(66, 98, 58))
        draw.ellipse(_box(wide * 0.5 + (x - 1.5) * unit, high * 0.69, 5 * unit, 9 * unit), fill=(84, 118, 68))
    return _reduced(image)


def _window(draw: ImageDraw.ImageDraw, x: float, top: float, half: float, tall: float) -> None:
    """Draw a window, or a door, with a round arch."""
    for grow, color in ((half * 0.3, (176, 166, 156)), (0, (64, 62, 82))):
        draw.pieslice(_box(x, top + half, half + grow, half + grow), 180, 360, fill=color)
        draw.rectangle((x - half - grow, top + half, x + half + grow, top + tall), fill=color)


def _clouds(image: Image.Image, places: list[tuple[float, float, float]]) -> None:
    """Paint soft clouds: center and half-width, as shares of the image."""
    wide, high = image.size
    mask = Image.new("L", image.size)
    draw = ImageDraw.Draw(mask)
    for x, y, half in places:
        for shift, size, lift in ((-0.55, 0.5, 0.0), (-0.1, 0.68, 0.22), (0.42, 0.56, 0.08), (0.8, 0.32, -0.02)):
            reach = half * wide
            box = _box(x * wide + shift * reach, y * high - lift * reach, size * reach, size * reach * 0.42)
            draw.ellipse(box, fill=205)
    image.paste((252, 250, 248), mask=mask.filter(ImageFilter.GaussianBlur(wide * 0.014)))


def _gradient(width: int, height: int, top: Color, bottom: Color) -> Image.Image:
    rows = np.linspace(top, bottom, height)[:, None].repeat(width, 1)
    return Image.fromarray(np.rint(rows).astype(np.uint8))


def _box(x: float, y: float, half_width: float, half_height: float) -> tuple[Point, Point]:
    return (x - half_width, y - half_height), (x + half_width, y + half_height)


def _dark(color: Color, share: float) -> Color:
    red, green, blue = (round(value * share) for value in color)
    return red, green, blue


def _reduced(image: Image.Image) -> Image.Image:
    return image.resize((image.width // SUPERSAMPLING, image.height // SUPERSAMPLING), Image.Resampling.LANCZOS)
