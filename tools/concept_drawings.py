"""Draw the figures of the concept pages: ``docs/images/concept-*.svg``.

Layouts and weights are computed by the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import torch

from vitrail import Role, TokenLayout
from vitrail.drawing.theme import LIGHT, SERIES
from vitrail.merging.attention import proportional_attention
from vitrail.tokens import token_names

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"

CREAM, INK, SOFT, STONE = (LIGHT[name] for name in ("card", "ink", "soft", "rule"))
COBALT, AMBER, RUBY, GREEN = SERIES[:4]
COLORS = {Role.CLASS: RUBY, Role.DISTILLATION: AMBER, Role.REGISTER: COBALT, Role.TASK: GREEN, Role.PATCH: STONE}


class Drawing:
    """An SVG that grows by shapes."""

    def __init__(self, width: int, height: int, about: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f"<title>{escape(about)}</title>",
            f'<rect width="{width}" height="{height}" rx="10" fill="{CREAM}"/>',
            '<g font-family="system-ui, sans-serif">',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, edge: str = "none") -> None:
        shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"'
        self.parts.append(f'<rect {shape} fill="{fill}" stroke="{edge}" stroke-width="2"/>')

    def text(self, x: float, y: float, text: str, size: int = 15, fill: str = INK, anchor: str = "middle") -> None:
        place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
        self.parts.append(f'<text {place} fill="{fill}">{escape(text)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float, color: str = INK, width: float = 2) -> None:
        length = max(((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5, 1)
        right, down = (to_x - x) / length, (to_y - y) / length
        back = to_x - 9 * right, to_y - 9 * down
        wings = [(back[0] - 5 * down, back[1] + 5 * right), (to_x, to_y), (back[0] + 5 * down, back[1] - 5 * right)]
        self.parts.append(
            f'<path d="M{x:g} {y:g} L{to_x:.1f} {to_y:.1f}" stroke="{color}" stroke-width="{width:g}"/>'
            f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in wings)}" fill="{color}"/>'
        )

    def save(self, name: str) -> None:
        text = "\n".join([*self.parts, "</g>", "</svg>", ""])
        (IMAGES / name).write_text(text, encoding="utf-8")


def draw_tokens() -> None:
    """Draw a sequence of tokens with their roles and indices."""
    layout = TokenLayout.of(Role.CLASS, Role.DISTILLATION, (Role.REGISTER, 4), grid=(1, 4, 4))
    names = [*token_names(layout.special), *(f"{row}, {column}" for row in range(4) for column in range(4))]
    drawing = Drawing(920, 250, "Twenty-two tokens in a row: class, distillation, four registers, sixteen patches")
    step, side = 40, 34
    for index, name in enumerate(names):
        role, x = layout.role_of(index), 20 + index * step
        drawing.box(x, 60, side, side, COLORS[role])
        drawing.text(x + side / 2, 82, str(index), 14, INK if role in (Role.PATCH, Role.DISTILLATION) else CREAM)
        if role is Role.PATCH:
            drawing.text(x + side / 2, 112, name, 12, SOFT)
    for role, y in ((Role.CLASS, 48), (Role.DISTILLATION, 28), (Role.REGISTER, 48)):
        indices = layout.indices(role)
        drawing.text(20 + (indices[0] + indices[-1]) / 2 * step + side / 2, y, role.value)
    drawing.text(20 + (layout.patches.start + 7.5) * step + side / 2, 48, "patches, by row and column of the grid")
    lines = [
        (RUBY, "class: its output is classified"),
        (AMBER, "distillation: learns the output of a teacher"),
        (COBALT, "registers: no target, dropped at the output"),
    ]
    for number, (color, text) in enumerate(lines):
        drawing.box(20, 140 + 32 * number, 16, 16, color)
        drawing.text(46, 153 + 32 * number, text, 15, INK, "start")
    drawing.text(480, 153, "Special tokens are protected: they never merge.", 15, INK, "start")
    drawing.text(480, 185, "A merged patch keeps its place in the index map.", 15, INK, "start")
    drawing.save("concept-tokens.svg")


def weights(scores: Sequence[float], sizes: Sequence[float] | None) -> list[float]:
    """Return the attention weights of one query by the library's own attention, whose values are the unit vectors."""
    count = len(scores)
    q, k = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.tensor(scores).double().view(1, 1, count, 1)
    v = torch.eye(count, dtype=torch.float64)[None, None]
    size = None if sizes is None else torch.tensor([list(sizes)]).double()
    return [float(one) for one in proportional_attention(q, k, v, size=size)[0, 0, 0]]


def draw_sizes() -> None:
    """Draw how much attention three equal keys get: apart, as one token, and as one token of size 3."""
    rows = [
        ("four tokens", weights([1, 1, 1, 1.5], None), ["sky", "sky", "sky", "bird"]),
        ("merged, size ignored", weights([1, 1.5], None), ["sky", "bird"]),
        ("merged, size 3 counted", weights([1, 1.5], [3, 1]), ["sky ×3", "bird"]),
    ]
    drawing = Drawing(760, 250, "Attention to the sky and a bird: 65 %, 38 % and again 65 % on the sky")
    drawing.text(20, 34, "Attention of one query, as shares of its whole", 15, SOFT, "start")
    for number, (title, shares, names) in enumerate(rows):
        y, x, wide = 52 + 64 * number, 210.0, 520
        drawing.text(195, y + 27, title, 15, INK, "end")
        for share, name in zip(shares, names, strict=True):
            color = AMBER if name == "bird" else COBALT
            drawing.box(x, y, share * wide - 2, 42, color)
            drawing.text(x + share * wide / 2, y + 27, f"{name} {share:.0%}", 14, INK if name == "bird" else CREAM)
            x += share * wide
    drawing.save("concept-sizes.svg")


def draw_registers() -> None:
    """Sketch patches with artifacts, and the same with registers."""
    drawing = Drawing(
        760, 300, "A grid of patches with three high-norm ones, and the same grid without, beside registers"
    )
    bright = {(1, 6), (2, 1), (5, 7)}
    for left, title, registers in ((30, "without registers", 0), (410, "with registers", 4)):
        drawing.text(left + 110, 32, title, 16)
        for row in range(8):
            for column in range(8):
                is_object = 2 <= row <= 6 and 3 <= column <= 5
                spare = (row, column) in bright and not registers
                fill = RUBY if spare else COBALT if is_object else STONE
                drawing.box(left + 28 * column, 46 + 28 * row, 25, 25, fill)
        for number in range(registers):
            drawing.box(left + 250, 46 + 28 * number, 25, 25, RUBY)
        if registers:
            drawing.text(left + 262, 176, "registers", 13, SOFT)
    drawing.box(30, 276, 12, 12, RUBY)
    drawing.text(50, 287, "holds what concerns the whole image", 13, INK, "start")
    drawing.box(310, 276, 12, 12, COBALT)
    drawing.text(330, 287, "object", 13, INK, "start")
    drawing.box(400, 276, 12, 12, STONE)
    drawing.text(420, 287, "background      (a sketch, no measurement)", 13, INK, "start")
    drawing.save("concept-registers.svg")


def draw_class_attention() -> None:
    """Draw the two stages of CaiT."""
    drawing = Drawing(
        880, 240, "Patches pass through all blocks; then a class token alone gathers from them in two layers"
    )
    for block in range(4):
        x = 84 + 96 * block
        drawing.box(x, 50, 72, 84, LIGHT["rail"], INK)
        drawing.text(x + 36, 82, "attend", 14)
        drawing.text(x + 36, 112, "feed", 14)
        drawing.arrow(x + 73, 92, x + 95, 92)
    drawing.arrow(24, 92, 82, 92)
    drawing.text(50, 80, "patches", 13, SOFT)
    drawing.text(264, 36, "patch stage: × depth", 15)
    drawing.text(470, 80, "patches, no longer updated", 13, SOFT, "start")
    drawing.text(690, 36, "class-attention stage: × 2", 15)
    for block in range(2):
        x = 580 + 124 * block
        drawing.box(x, 130, 96, 70, LIGHT["note"], RUBY)
        drawing.text(x + 48, 158, "gather", 14)
        drawing.text(x + 48, 184, "feed", 14)
        drawing.arrow(x + 48, 92, x + 48, 128, COBALT)
        drawing.text(x + 56, 116, "keys, values", 12, COBALT, "start")
        drawing.arrow(x + 97, 165, x + 122, 165, RUBY)
    drawing.parts.append(f'<path d="M462 92 H752" stroke="{COBALT}" stroke-width="2"/>')
    drawing.arrow(490, 165, 578, 165, RUBY)
    drawing.text(440, 170, "class token", 14, RUBY)
    drawing.text(852, 170, "head", 14)
    drawing.text(440, 222, "one query instead of N: the stage costs little", 14, SOFT)
    drawing.save("concept-class-attention.svg")


DRAWINGS: tuple[Callable[[], None], ...] = (draw_tokens, draw_sizes, draw_registers, draw_class_attention)

if __name__ == "__main__":
    for draw in DRAWINGS:
        draw()
