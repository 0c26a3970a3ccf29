"""Token merging inside windows, as a reference: the loops of `tests.oracle.core`, one window and one region at a time.

A window is a list of cells, each the index of a token or None for padding; which cells see each other is the library's
own mask. Cells that see each other are a region, and tokens merge with those of their region alone. Padding is never a
query and never merges; it is a key with what the block computes from zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracle.core import Parts, Token, feed, matching_metric, merge, possible

Cells = list[int | None]


@dataclass(frozen=True)
class Window:
    """One window of a block.

    Attributes:
        cells: index of the token in each cell, None for padding.
        seen: (cells, cells), whether they see each other.
    """

    cells: Cells
    seen: Tensor

    def regions(self) -> list[list[int]]:
        """Cells that see each other, in order."""
        found: list[list[int]] = []
        for cell in range(len(self.cells)):
            home = next((region for region in found if bool(self.seen[region[0], cell])), None)
            if home is None:
                found.append([cell])
            else:
                home.append(cell)
        return found


@dataclass(frozen=True)
class Block:
    """A block that merges: its parts, its windows, and its position bias.

    Attributes:
        bias: (H, cells, cells), or None.
        vectors: (cells, cells, d), whose product with a query is a bias, or None.
        mix: computes the queries (q), keys (k) or values (v) of all cells (cells, H, d) from those of their neighbors,
            where every token stands in the cells of its members; a token has the mean over its members.
        residual: whether queries are added to what attention returns.
    """

    parts: Parts
    windows: list[Window]
    bias: Tensor | None = None
    vectors: Tensor | None = None
    mix: Callable[[Tensor, str], Tensor] | None = None
    residual: bool = False

    def key(self) -> list[tuple[Cells, list[list[bool]]]]:
        """What must be the same for tokens to stay merged."""
        return [(window.cells, window.seen.tolist()) for window in self.windows]


Step = Block | Callable[[Tensor], Tensor]
"""A block, or what the library computes by itself on all tokens (N, D) of an image: patch merging, a pooled block."""


def run(steps: Sequence[Step], tokens: Tensor, counts: Sequence[int], *, proportional: bool = True) -> Tensor:
    """Run the steps on the tokens (N, D) of one image; ``counts`` has the merges of each block."""
    wanted, index = list(counts), 0
    while index < len(steps):
        step = steps[index]
        if not isinstance(step, Block):
            tokens = step(tokens)
            index += 1
            continue
        blocks = [step]
        while index + len(blocks) < len(steps):
            following = steps[index + len(blocks)]
            if not isinstance(following, Block) or following.key() != step.key():
                break
            blocks.append(following)
        own, wanted = wanted[: len(blocks)], wanted[len(blocks) :]
        tokens = _run_same_windows(blocks, tokens, own, proportional)
        index += len(blocks)
    return tokens


def _run_same_windows(blocks: list[Block], tokens: Tensor, counts: list[int], proportional: bool) -> Tensor:
    rows: list[Tensor | None] = [None] * len(tokens)
    held = [
        (window, region, [cell for cell in region if window.cells[cell] is not None])
        for window in blocks[0].windows
        for region in window.regions()
    ]
    largest = max(len(real) for _, _, real in held)
    for window, region, real in held:
        if not real:
            continue
        empty = [cell for cell in region if cell not in real]
        present = [Token(tokens[window.cells[cell]], [cell]) for cell in real]  # type: ignore[index]
        for block, count in zip(blocks, counts, strict=True):
            metric = _attend(block, present, empty, proportional)
            least = possible(present, set(), count * len(real) // largest)
            present = merge(present, metric, set(), least, "paper")
            feed(block.parts, present)
        for token in present:
            for cell in token.members:
                rows[window.cells[cell]] = token.vector  # type: ignore[index]
    assert all(row is not None for row in rows)
    return torch.stack(rows)  # type: ignore[arg-type]


def _attend(block: Block, tokens: list[Token], empty: list[int], proportional: bool) -> list[list[float]]:
    parts = block.parts
    x = torch.stack([token.vector for token in tokens])
    y = parts.before_attend(x)
    padded = torch.cat([y, y.new_zeros(len(empty), y.shape[1])])
    q = parts.q_norm(parts.q(y))
    k, v = parts.k_norm(parts.k(padded)), parts.v(padded)
    if block.mix is not None:
        q, k, v = (_mixed(block.mix, one, name, tokens) for name, one in (("q", q), ("k", k), ("v", v)))
    metric = matching_metric(k[: len(tokens)])
    keys = [*(token.members for token in tokens), *([cell] for cell in empty)]
    sizes = [*(token.size for token in tokens), *(1 for _ in empty)]
    weight = x.new_tensor([math.log(size) if proportional else 0.0 for size in sizes])
    out = []
    for head in range(q.shape[1]):
        logits = (q[:, None, head] * k[None, :, head]).sum(-1) * parts.scale + weight
        if block.bias is not None:
            table = block.bias[head].tolist()
            logits = logits + x.new_tensor(
                [[_mean([table[i][j] for i in token.members for j in key]) for key in keys] for token in tokens]
            )
        if block.vectors is not None:
            rows = []
            for query, token in zip(q[:, head], tokens, strict=True):
                pairs = [torch.stack([block.vectors[i, j] for i in token.members for j in key]).mean(0) for key in keys]
                rows.append(torch.stack([(query * vector).sum() for vector in pairs]))
            logits = logits + torch.stack(rows)
        weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        shares = weights / weights.sum(-1, keepdim=True)
        out.append((shares[..., None] * v[None, :, head]).sum(1) + (q[:, head] if block.residual else 0))
    x = x + parts.gain_attend(parts.after_attend(parts.project(torch.cat(out, -1))))
    for token, vector in zip(tokens, x, strict=True):
        token.vector = vector
    return metric


def _mixed(mix: Callable[[Tensor, str], Tensor], x: Tensor, name: str, tokens: list[Token]) -> Tensor:
    """Return what a block mixes on the grid, for each token the mean over the cells of its members."""
    cells: list[Tensor | None] = [None] * sum(len(token.members) for token in tokens)
    for vector, token in zip(x, tokens, strict=True):
        for cell in token.members:
            cells[cell] = vector
    mixed = mix(torch.stack(cells), name)  # type: ignore[arg-type]
    return torch.stack([torch.stack([mixed[cell] for cell in token.members]).mean(0) for token in tokens])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def windows_of(indices: Tensor, seen: Tensor | None) -> list[Window]:
    """Windows from one more than the token's index in each cell (windows, cells), 0 for padding, and their masks."""
    return [
        Window(
            [None if one == 0 else one - 1 for one in own.tolist()],
            torch.ones(len(own), len(own), dtype=torch.bool) if seen is None else seen[place],
        )
        for place, own in enumerate(indices.long())
    ]


def numbered(height: int, width: int) -> Tensor:
    """One more than the index of each token, as a map (1, h, w, 1)."""
    return torch.arange(1.0, height * width + 1, dtype=torch.float64).view(1, height, width, 1)
