"""Synthetic images and clips of shapes, with independent labels and motion that no single frame reveals.

Shapes are signed distances from an outline, so edges are smooth at any size. Everything follows from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor

COLORS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "white")
RGB = torch.tensor(
    [
        [0.85, 0.12, 0.12], [0.95, 0.55, 0.10], [0.95, 0.90, 0.20], [0.15, 0.65, 0.20],
        [0.20, 0.80, 0.85], [0.15, 0.25, 0.85], [0.60, 0.20, 0.75], [0.97, 0.97, 0.97],
    ]
)  # fmt: skip

OUTLINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "disc": lambda x, y: torch.hypot(x, y) - 0.9,
    "ring": lambda x, y: (torch.hypot(x, y) - 0.7).abs() - 0.22,
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) - 0.78,
    "triangle": lambda x, y: torch.maximum(x.abs() * 0.866 + y * 0.5, -y) - 0.5,
    "cross": lambda x, y: torch.minimum(
        torch.maximum(x.abs() - 0.3, y.abs() - 0.95), torch.maximum(x.abs() - 0.95, y.abs() - 0.3)
    ),
    "star": lambda x, y: torch.hypot(x, y) - 0.68 - 0.3 * torch.cos(5 * torch.atan2(x, y)),
}
"""Signed distance of a point from the outline of each shape, whose radius is about 1."""

SHAPES = tuple(OUTLINES)

GROUPS = {"round": ("disc", "ring", "star"), "angular": ("square", "triangle", "cross")}
"""Two kinds of outline; a shape belongs to one."""

DIRECTIONS = {"still": (0, 0), "right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
"""Motion as (right, down); rows are counted downwards."""

MOTIONS = tuple(DIRECTIONS)

CHUNK = 512
"""Images rendered at once."""


@dataclass(frozen=True)
class Drawn:
    """Rendered images or clips with their labels.

    Attributes:
        images: (N, 3, S, S), or clips (N, 3, T, S, S), in uint8.
        shape: (N,) index into `SHAPES`.
        color: (N,) index into `COLORS`.
        motion: (N,) index into `MOTIONS`; None for images.
        masks: (N, S, S) True where the shape is; None for clips.
    """

    images: Tensor
    shape: Tensor
    color: Tensor
    motion: Tensor | None = None
    masks: Tensor | None = None

    @property
    def group(self) -> Tensor:
        """Index into `GROUPS` of each shape, (N,)."""
        kinds = [next(kind for kind, own in enumerate(GROUPS.values()) if shape in own) for shape in SHAPES]
        return torch.tensor(kinds)[self.shape]

    def float_masks(self) -> Tensor:
        """Return the masks as floats (N, S, S)."""
        assert self.masks is not None, "clips have no masks"
        return self.masks.float()


@dataclass(frozen=True)
class Scenes:
    """Position, size, rotation and background of each shape before rendering; the image side is 1."""

    shape: Tensor
    rgb: Tensor
    position: Tensor
    radius: Tensor
    angle: Tensor
    background: Tensor

    def draw(self, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Render images (N, 3, S, S) in [0, 1] and the coverage of each pixel by the shape (N, S, S).

        Shapes wrap around at the border, so all positions are equally likely.
        """
        side = self.background.shape[-1]
        axis = (torch.arange(side) + 0.5) / side
        across, down = (axis - one for one in (self.position if position is None else position).T[..., None])
        x, y = (across - across.round())[:, None, :], (down - down.round())[:, :, None]
        scale, turn = self.radius[:, None, None], self.angle[:, None, None]
        u = (x * turn.cos() + y * turn.sin()) / scale
        v = (y * turn.cos() - x * turn.sin()) / scale
        outside = torch.empty(len(self.shape), side, side)
        for number, outline in enumerate(OUTLINES.values()):
            chosen = self.shape == number
            outside[chosen] = outline(u[chosen], v[chosen])
        coverage = (0.5 - outside * scale * side).clamp(0, 1)
        share = coverage[:, None]
        return self.background * (1 - share) + self.rgb[:, :, None, None] * share, coverage


def render_images(count: int, *, side: int = 64, seed: int = 0) -> Drawn:
    """Render shapes on textured backgrounds; every pair of shape and color occurs equally often."""
    shape, color = balanced_labels(count, (len(SHAPES), len(COLORS)), seed)
    images, masks = [], []
    for number, rows in enumerate(torch.arange(count).split(CHUNK)):
        generator = torch.Generator().manual_seed(_seed_for(seed, number))
        scene = sample_scenes(shape[rows], color[rows], side, generator)
        inside = scene.radius[:, None] + scene.position * (1 - 2 * scene.radius[:, None])
        rendered, coverage = scene.draw(inside)
        images.append(_add_noise(rendered, generator))
        masks.append(coverage > 0.5)
    return Drawn(torch.cat(images), shape, color, masks=torch.cat(masks))


def render_clips(
    count: int, *, frames: int = 8, side: int = 48, seed: int = 0, motion: int | None = None, texture: float = 1.0
) -> Drawn:
    """Render clips of one moving shape each; every pair of shape and motion occurs equally often.

    Shapes start anywhere and wrap around, so in every frame all positions are equally likely whatever the motion: a
    single frame does not reveal it. With ``motion`` all clips have that one. ``texture`` is the contrast of the clouds
    in the background and of the noise.
    """
    shape, kind = balanced_labels(count, (len(SHAPES), len(MOTIONS)), seed)
    if motion is not None:
        kind = torch.full_like(kind, motion)
    color = torch.randint(len(COLORS), (count,), generator=torch.Generator().manual_seed(_seed_for(seed, -1)))
    clips = []
    for number, rows in enumerate(torch.arange(count).split(CHUNK)):
        generator = torch.Generator().manual_seed(_seed_for(seed, number))
        scene = sample_scenes(shape[rows], color[rows], side, generator, texture)
        positions = scene.position[:, None] + displacements(kind[rows], frames, generator)
        drawn = [_add_noise(scene.draw(positions[:, frame])[0], generator, texture) for frame in range(frames)]
        clips.append(torch.stack(drawn, 2))
    return Drawn(torch.cat(clips), shape, color, kind)


def displacements(motion: Tensor, frames: int, generator: torch.Generator) -> Tensor:
    """Return the displacement (N, T, 2) of each shape since the first frame, to the right and down."""
    speed = 0.04 + 0.04 * torch.rand(len(motion), 1, generator=generator)
    return (speed * torch.arange(frames))[:, :, None] * torch.tensor(list(DIRECTIONS.values()))[motion][:, None]


def balanced_labels(count: int, sizes: Sequence[int], seed: int) -> tuple[Tensor, ...]:
    """Return one label tensor (N,) per size, all combinations equally often if ``count`` allows, in random order."""
    cells = int(torch.tensor(sizes).prod())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(_seed_for(seed, -2)))
    return torch.unravel_index((torch.arange(count) % cells)[order], tuple(sizes))


def sample_scenes(shape: Tensor, color: Tensor, side: int, generator: torch.Generator, texture: float = 1.0) -> Scenes:
    """Sample everything but the labels: position, size, rotation, shade of the color, background."""
    count = len(shape)
    uniform = torch.rand(count, 4, generator=generator)
    shade = 0.06 * torch.randn(count, 3, generator=generator)
    return Scenes(
        shape=shape,
        rgb=(RGB[color] + shade).clamp(0, 1),
        position=uniform[:, :2],
        radius=0.14 + 0.12 * uniform[:, 2],
        angle=2 * pi * uniform[:, 3],
        background=_backgrounds(count, side, generator, texture),
    )


def _backgrounds(count: int, side: int, generator: torch.Generator, texture: float) -> Tensor:
    """Sample backgrounds (N, 3, S, S): dull clouds of several scales, independent of the labels."""
    background = 0.3 + 0.3 * torch.rand(count, 1, 1, 1, generator=generator)
    background = background + 0.04 * torch.randn(count, 3, 1, 1, generator=generator)
    for cells in (3, 7, 15):
        light, hue = (torch.randn(count, channels, cells, cells, generator=generator) for channels in (1, 3))
        background = background + texture * F.interpolate(0.09 * light + 0.03 * hue, (side, side), mode="bicubic")
    return background.clamp(0.05, 0.8)


def _add_noise(images: Tensor, generator: torch.Generator, strength: float = 1.0) -> Tensor:
    noise = 0.03 * strength * torch.randn(images.shape, generator=generator)
    return ((images + noise).clamp(0, 1) * 255).round().byte()


def _seed_for(seed: int, number: int) -> int:
    return (seed * 1_000_003 + number + 7) % (1 << 62)
