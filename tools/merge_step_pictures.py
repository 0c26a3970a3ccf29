"""Draw the steps of one merge on a real image: ``docs/images/merge-step-*.png`` and the table of ``merge-step.md``.

Everything is drawn from what the embedded model does: a method that is ToMe, and keeps what it saw in each layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

import vitrail
from vitrail import Assignment, Context, Reduction, ToMe
from vitrail.data import samples
from vitrail.drawing.theme import LIGHT, SERIES, rgb
from vitrail.merging.bipartite import best_edges, similarity

DOCS = Path(__file__).resolve().parents[1] / "docs"
MERGES = 16
SIDE = 640
TABLE = ("<!-- pairs -->\n", "<!-- end of pairs -->")

CREAM, INK, COBALT, RUBY = (rgb(LIGHT[name]) for name in ("page", "ink", "cobalt", "ruby"))
AMBER = rgb(SERIES[1])


class Step(NamedTuple):
    """One layer: keys (N, d), sizes (N,) and the index map of the merge."""

    keys: Tensor
    sizes: Tensor
    assignment: Assignment


class RecordedToMe(ToMe):
    """ToMe that keeps what it merges in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        reduction = super().reduce(context, r)
        keys = context.k.mean(1)[0]
        sizes = torch.ones(len(keys)) if context.size is None else context.size[0]
        self.steps.append(Step(keys, sizes, reduction.assignment))
        return reduction


class Pair(NamedTuple):
    """A source and a destination, as positions in the sequence, with their similarity."""

    source: int
    destination: int
    similarity: float


def record(image: Image.Image) -> tuple[list[Step], int, tuple[int, int]]:
    """Return the steps of all layers, the number of special tokens and the patch grid."""
    model = vitrail.load_model("vitrail:tiny")
    method = RecordedToMe()
    with vitrail.merge(model, r=MERGES, method=method) as merging:
        merging.draw(image)
        return method.steps, merging.layout.num_special, merging.layout.grid[1:]


def pairs(step: Step, special: int) -> tuple[Tensor, list[Pair]]:
    """Return the best similarity of each even token (A,), and the pairs that merge, most similar first."""
    blocked = (torch.arange(len(step.keys)) < special).unsqueeze(0)
    best, partner = best_edges(similarity(step.keys.unsqueeze(0), blocked))
    order = best[0].argsort(descending=True, stable=True)[:MERGES]
    found = [Pair(2 * int(i), 2 * int(partner[0, i]) + 1, float(best[0, i])) for i in order]
    for pair in found:  # what the model did
        assert step.assignment.target[0, pair.source] == step.assignment.target[0, pair.destination]
    return best[0], found


class Canvas:
    """The image, enlarged, with drawings over its patch grid."""

    def __init__(self, image: Image.Image, grid: tuple[int, int], fade: float = 0.0) -> None:
        base = image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        self.image = Image.blend(base, Image.new("RGB", base.size, CREAM), fade)
        self.grid, self.cell = grid, SIDE / grid[0]
        self.draw = ImageDraw.Draw(self.image, "RGBA")

    def box(self, patch: int) -> tuple[float, float, float, float]:
        """Return the corners of a patch."""
        row, column = divmod(patch, self.grid[1])
        return column * self.cell, row * self.cell, (column + 1) * self.cell, (row + 1) * self.cell

    def center(self, patch: int) -> tuple[float, float]:
        """Return the center of a patch."""
        left, top, right, bottom = self.box(patch)
        return (left + right) / 2, (top + bottom) / 2

    def fill(self, patch: int, color: tuple[int, int, int], share: float) -> None:
        """Paint a patch with a share of a color."""
        self.draw.rectangle(self.box(patch), fill=(*color, round(255 * share)))

    def lines(self, color: tuple[int, int, int] = CREAM) -> None:
        """Draw the patch grid."""
        for index in range(1, self.grid[0]):
            at = index * self.cell
            self.draw.line([(0, at), (SIDE, at)], fill=(*color, 170))
            self.draw.line([(at, 0), (at, SIDE)], fill=(*color, 170))

    def label(self, patch: int, text: str, color: tuple[int, int, int] = INK) -> None:
        """Write a short text on a patch."""
        font = ImageFont.load_default(round(self.cell * 0.5))
        self.draw.text(self.center(patch), text, fill=color, font=font, anchor="mm", stroke_width=3, stroke_fill=CREAM)

    def outline(self, cells: list[int], color: tuple[int, int, int], width: int = 4) -> None:
        """Draw the border of a group of patches."""
        height, wide = self.grid
        for patch in cells:
            row, column = divmod(patch, wide)
            left, top, right, bottom = self.box(patch)
            sides = {
                (row - 1, column): ((left, top), (right, top)),
                (row + 1, column): ((left, bottom), (right, bottom)),
                (row, column - 1): ((left, top), (left, bottom)),
                (row, column + 1): ((right, top), (right, bottom)),
            }
            for (r, c), line in sides.items():
                inside = 0 <= r < height and 0 <= c < wide and r * wide + c in cells
                if not inside:
                    self.draw.line(line, fill=color, width=width)


def split(image: Image.Image, grid: tuple[int, int], members: list[list[int]], special: int) -> Canvas:
    """Draw sources (even positions) in cobalt and destinations (odd ones) in amber; tokens by their patches."""
    canvas = Canvas(image, grid, 0.35)
    for position, cells in enumerate(members):
        for patch in cells:
            canvas.fill(patch, AMBER if (position + special) % 2 else COBALT, 0.45)
    for cells in members:
        canvas.outline(cells, CREAM, 2)
    return canvas


def groups_after(step: Step, special: int) -> list[list[int]]:
    """Return the patches of each token after the merge, in the order of the sequence."""
    target = step.assignment.target[0, special:] - special
    return [(target == token).nonzero().flatten().tolist() for token in range(step.assignment.length - special)]


def draw(image: Image.Image, steps: list[Step], special: int, grid: tuple[int, int]) -> dict[str, Image.Image]:
    """Return the pictures by name."""
    step = steps[0]
    best, merged = pairs(step, special)
    single = [[patch] for patch in range(grid[0] * grid[1])]
    plain = Canvas(image, grid)
    plain.lines()

    warmth = Canvas(image, grid, 0.6)
    finite = best[best.isfinite()]
    low, high = float(finite.quantile(0.02)), float(finite.max())
    for index, value in enumerate(best.tolist()):
        patch = 2 * index - special
        if patch >= 0:
            warmth.fill(patch, RUBY, 0.85 * min(max((value - low) / (high - low), 0), 1))
    warmth.lines()

    links = Canvas(image, grid, 0.45)
    links.lines()
    for rank, pair in enumerate(reversed(merged)):
        a, b = pair.source - special, pair.destination - special
        links.fill(a, COBALT, 0.6)
        links.fill(b, AMBER, 0.6)
        links.draw.line([links.center(a), links.center(b)], fill=INK, width=4)
        if rank >= len(merged) - 3:
            links.label(a, str(len(merged) - rank))

    after = groups_after(step, special)
    sizes = Canvas(image, grid, 0.25)
    sizes.lines()
    for cells in after:
        if len(cells) > 1:
            sizes.outline(cells, RUBY)
            for patch in cells:
                sizes.fill(patch, RUBY, 0.25)
            sizes.label(min(cells), str(len(cells)))
    return {
        "patches": plain.image,
        "split": split(image, grid, single, special).image,
        "similarity": warmth.image,
        "pairs": links.image,
        "sizes": sizes.image,
        "next": split(image, grid, after, special).image,
    }


def table(step: Step, special: int, grid: tuple[int, int]) -> str:
    """Return the three most similar pairs as a table."""

    def place(position: int) -> str:
        row, column = divmod(position - special, grid[1])
        return f"{position} (row {row}, column {column})"

    _, merged = pairs(step, special)
    rows = ["| pair | source A | destination B | cosine of keys |", "| --- | --- | --- | ---: |"]
    for number, pair in enumerate(merged[:3], 1):
        a, b = step.keys[pair.source].double(), step.keys[pair.destination].double()
        cosine = float(a @ b / (a.norm() * b.norm()))
        assert abs(cosine - pair.similarity) < 1e-5
        rows.append(f"| {number} | {place(pair.source)} | {place(pair.destination)} | {cosine:.4f} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the pictures, and the table between its markers."""
    source = Image.open(samples()["chelsea"]).convert("RGB")
    side = min(source.size)
    image = source.crop(((source.width - side) // 2, 0, (source.width + side) // 2, side))
    steps, special, grid = record(image)
    for name, picture in draw(image, steps, special, grid).items():
        picture.save(DOCS / "images" / f"merge-step-{name}.jpg", quality=88)
    page = DOCS / "concepts" / "merge-step.md"
    if page.exists():
        text: Any = page.read_text(encoding="utf-8")
        before, rest = text.split(TABLE[0])
        page.write_text(
            before + TABLE[0] + table(steps[0], special, grid) + TABLE[1] + rest.split(TABLE[1])[1], "utf-8"
        )
    else:
        print(table(steps[0], special, grid))  # noqa: T201


if __name__ == "__main__":
    main()
