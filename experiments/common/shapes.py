"""Pictures and clips that are drawn: labels that are independent of each other, and motion that no frame shows.

Shapes are distances from an outline, so that edges are smooth at any size. Everything follows from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor

COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "white")
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
"""How far a point is outside of each shape, whose radius is about 1."""

SHAPES = tuple(OUTLINES)

GROUPS = {"round": ("disc", "ring", "star"), "angular": ("square", "triangle", "cross")}
"""Two kinds of outline, which a shape decides."""

WAYS = {"still": (0, 0), "right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
"""How shapes move, across and down; rows are counted downwards."""

MOTIONS = tuple(WAYS)

CHUNK = 512
"""Pictures that are drawn at once."""


@dataclass(frozen=True)
class Drawn:
    """What was drawn.

    Attributes:
        images: (N, 3, S, S), or clips (N, 3, T, S, S), in uint8.
        shape: (N,) which of `SHAPES`.
        colour: (N,) which of `COLOURS`.
        motion: (N,) which of `MOTIONS`; None for pictures.
        masks: (N, S, S) where the shape is, of pictures.
    """

    images: Tensor
    shape: Tensor
    colour: Tensor
    motion: Tensor | None = None
    masks: Tensor | None = None

    @property
    def group(self) -> Tensor:
        """Which of `GROUPS` each shape is in, (N,)."""
        kinds = [next(kind for kind, own in enumerate(GROUPS.values()) if shape in own) for shape in SHAPES]
        return torch.tensor(kinds)[self.shape]

    def covered(self) -> Tensor:
        """Give where the shapes are, (N, S, S) from 0 to 1."""
        assert self.masks is not None, "clips have none"
        return self.masks.float()


@dataclass(frozen=True)
class Scenes:
    """Where shapes are, how large and how turned, before they are drawn; the picture's side is 1."""

    shape: Tensor
    rgb: Tensor
    place: Tensor
    radius: Tensor
    angle: Tensor
    ground: Tensor

    def draw(self, place: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draw the pictures (N, 3, S, S) from 0 to 1, and how much of each pixel the shape covers (N, S, S).

        What leaves at one side comes back at the other: a shape is as likely to be at one place as at any other.
        """
        side = self.ground.shape[-1]
        axis = (torch.arange(side) + 0.5) / side
        across, down = (axis - one for one in (self.place if place is None else place).T[..., None])
        x, y = (across - across.round())[:, None, :], (down - down.round())[:, :, None]
        scale, turn = self.radius[:, None, None], self.angle[:, None, None]
        u = (x * turn.cos() + y * turn.sin()) / scale
        v = (y * turn.cos() - x * turn.sin()) / scale
        outside = torch.empty(len(self.shape), side, side)
        for number, outline in enumerate(OUTLINES.values()):
            chosen = self.shape == number
            outside[chosen] = outline(u[chosen], v[chosen])
        covered = (0.5 - outside * scale * side).clamp(0, 1)
        share = covered[:, None]
        return self.ground * (1 - share) + self.rgb[:, :, None, None] * share, covered


def render(count: int, *, side: int = 64, seed: int = 0) -> Drawn:
    """Draw shapes on textured grounds; every pair of a shape and a colour is there equally often."""
    shape, colour = balanced(count, (len(SHAPES), len(COLOURS)), seed)
    images, masks = [], []
    for number, rows in enumerate(torch.arange(count).split(CHUNK)):
        generator = torch.Generator().manual_seed(_mixed(seed, number))
        scene = scenes(shape[rows], colour[rows], side, generator)
        inside = scene.radius[:, None] + scene.place * (1 - 2 * scene.radius[:, None])
        pictures, covered = scene.draw(inside)
        images.append(_grained(pictures, generator))
        masks.append(covered > 0.5)
    return Drawn(torch.cat(images), shape, colour, masks=torch.cat(masks))


def film(count: int, *, frames: int = 8, side: int = 48, seed: int = 0, motion: int | None = None) -> Drawn:
    """Draw clips of one moving shape each; every pair of a shape and a motion is there equally often.

    A shape starts anywhere, and leaves at one side to come back at the other, so at every moment all places are as
    likely for one motion as for any other: a single frame says nothing about it. ``motion`` gives all the same.
    """
    shape, kind = balanced(count, (len(SHAPES), len(MOTIONS)), seed)
    if motion is not None:
        kind = torch.full_like(kind, motion)
    colour = torch.randint(len(COLOURS), (count,), generator=torch.Generator().manual_seed(_mixed(seed, -1)))
    clips = []
    for number, rows in enumerate(torch.arange(count).split(CHUNK)):
        generator = torch.Generator().manual_seed(_mixed(seed, number))
        scene = scenes(shape[rows], colour[rows], side, generator)
        moved = scene.place[:, None] + paths(kind[rows], frames, generator)
        drawn = [_grained(scene.draw(moved[:, frame])[0], generator) for frame in range(frames)]
        clips.append(torch.stack(drawn, 2))
    return Drawn(torch.cat(clips), shape, colour, kind)


def paths(motion: Tensor, frames: int, generator: torch.Generator) -> Tensor:
    """Give how far each shape has moved (N, T, 2), across and down, since the first frame."""
    speed = 0.04 + 0.04 * torch.rand(len(motion), 1, generator=generator)
    return (speed * torch.arange(frames))[:, :, None] * torch.tensor(list(WAYS.values()))[motion][:, None]


def balanced(count: int, sizes: Sequence[int], seed: int) -> tuple[Tensor, ...]:
    """Give labels of each size (N,): all combinations equally often, as far as the count allows, in random order."""
    cells = int(torch.tensor(sizes).prod())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(_mixed(seed, -2)))
    return torch.unravel_index((torch.arange(count) % cells)[order], tuple(sizes))


def scenes(shape: Tensor, colour: Tensor, side: int, generator: torch.Generator) -> Scenes:
    """Draw lots for all but the labels: place, size, turn, the shade of the colour, the ground."""
    count = len(shape)
    lots = torch.rand(count, 4, generator=generator)
    shade = 0.06 * torch.randn(count, 3, generator=generator)
    return Scenes(
        shape=shape,
        rgb=(RGB[colour] + shade).clamp(0, 1),
        place=lots[:, :2],
        radius=0.14 + 0.12 * lots[:, 2],
        angle=2 * pi * lots[:, 3],
        ground=_grounds(count, side, generator),
    )


def _grounds(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw grounds (N, 3, S, S): dull clouds of several sizes, which say nothing about the labels."""
    ground = 0.3 + 0.3 * torch.rand(count, 1, 1, 1, generator=generator)
    ground = ground + 0.04 * torch.randn(count, 3, 1, 1, generator=generator)
    for cells in (3, 7, 15):
        light, hue = (torch.randn(count, colours, cells, cells, generator=generator) for colours in (1, 3))
        ground = ground + F.interpolate(0.09 * light + 0.03 * hue, (side, side), mode="bicubic")
    return ground.clamp(0.05, 0.8)


def _grained(pictures: Tensor, generator: torch.Generator) -> Tensor:
    grain = 0.03 * torch.randn(pictures.shape, generator=generator)
    return ((pictures + grain).clamp(0, 1) * 255).round().byte()


def _mixed(seed: int, number: int) -> int:
    return (seed * 1_000_003 + number + 7) % (1 << 62)
