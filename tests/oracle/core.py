"""A slow, literal implementation of token merging, as a reference for the library.

Everything here is written from the description of the method with explicit loops: one image at a time, one
head at a time, one query at a time, one pair of tokens at a time.  Nothing is shared with the library.  A
token is its vector together with the list of original positions that it represents; its size, its rotary
position and the way back to full length all follow from that list.

Only the vectors are tensors, so gradients flow through everything but the (discrete) choice of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import mul

import torch
from torch import Tensor

Position = tuple[float, ...]
"""Coordinates (row, column), or (frame, row, column), of a token, in whatever unit the model's rotary angles use."""

Rotate = Callable[[Tensor, Position], Tensor]
"""Turns the heads (H, d) of one token to its position."""


def identity(x: Tensor) -> Tensor:
    """Return a vector unchanged: replaces a part that a model does not have."""
    return x


@dataclass(frozen=True)
class Parts:
    """One block of a model, taken apart.  Each callable maps rows (N, D) to rows, one by one."""

    scale: float
    q: Callable[[Tensor], Tensor]  # (N, D) -> (N, H, d)
    k: Callable[[Tensor], Tensor]  # (N, D) -> (N, Hk, d), Hk divides H
    v: Callable[[Tensor], Tensor]  # (N, D) -> (N, Hk, d)
    project: Callable[[Tensor], Tensor]
    feed: Callable[[Tensor], Tensor]
    q_norm: Callable[[Tensor], Tensor] = identity
    k_norm: Callable[[Tensor], Tensor] = identity
    project_with_input: Callable[[Tensor, Tensor], Tensor] | None = None  # also takes the attention's input
    rotate: Rotate | None = None
    inner_norm: Callable[[Tensor], Tensor] = identity  # on the concatenated heads, before the projection
    gate: Callable[[Tensor], Tensor] | None = None  # from the attention's input, multiplies the concatenated heads
    before_attend: Callable[[Tensor], Tensor] = identity
    after_attend: Callable[[Tensor], Tensor] = identity
    before_feed: Callable[[Tensor], Tensor] = identity
    after_feed: Callable[[Tensor], Tensor] = identity
    gain_attend: Callable[[Tensor], Tensor] = identity
    gain_feed: Callable[[Tensor], Tensor] = identity
    bias: Tensor | None = None  # (H, N, N), added to the scores of every pair of original positions


@dataclass(frozen=True)
class Recipe:
    """A model with its images: the tokens entering the first block, the blocks, and what follows."""

    tokens: Tensor  # (B, N, D)
    prefix: int
    blocks: Sequence[Parts]
    finish: Callable[[Tensor], dict[str, Tensor]]
    features: Callable[[Tensor], Tensor]  # the model's own last norm
    positions: Sequence[Position] | None = None  # of the patches, where the model has rotary positions


@dataclass
class Token:
    """A vector and the original positions that it represents."""

    vector: Tensor
    members: list[int]

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass
class Result:
    """The model's outputs, and the tokens after every block at full length."""

    outputs: dict[str, Tensor]
    features: Tensor  # (B, N, D): the last norm of the full-length tokens
    merged: Tensor  # (B, M, D): tokens leaving the last block, not unmerged, before the last norm
    groups: list[list[int]]  # per image, per patch: index of the token that it went into
    sizes: list[list[int]]
    hidden: list[Tensor] = field(default_factory=list)  # (B, N, D) after each block
    lengths: list[int] = field(default_factory=list)  # tokens leaving each block


STEPS: tuple[str, ...] = ("attend", "merge", "feed")
"""The order of events in one block."""


def run(
    recipe: Recipe,
    r: int | Sequence[int],
    *,
    proportional: bool = True,
    order: str = "paper",
    protect: Tensor | None = None,
) -> Result:
    """Run the model on its images and merge `r` pairs in each block."""
    batch, length, _ = recipe.tokens.shape
    depth = len(recipe.blocks)
    counts = [r] * depth if isinstance(r, int) else list(r)
    assert len(counts) == depth
    images = [[Token(recipe.tokens[b, i], [i]) for i in range(length)] for b in range(batch)]
    shields = [shielded(recipe, protect, b) for b in range(batch)]
    hidden, lengths = [], []
    for parts, count in zip(recipe.blocks, counts, strict=True):
        metrics: list[list[list[float]]] = []
        for step in STEPS:
            if step == "attend":
                metrics = [attend(parts, recipe, tokens, proportional) for tokens in images]
            elif step == "feed":
                for tokens in images:
                    feed(parts, tokens)
            else:
                # A batch is one tensor: all its images merge as many pairs as the least mergeable one can.
                least = min(possible(t, s, count) for t, s in zip(images, shields, strict=True))
                images = [
                    merge(tokens, metric, shield, least, order)
                    for tokens, metric, shield in zip(images, metrics, shields, strict=True)
                ]
        hidden.append(torch.stack([full_length(tokens, length) for tokens in images]))
        lengths.append(len(images[0]))
    return Result(
        outputs=recipe.finish(hidden[-1]),
        features=recipe.features(hidden[-1]),
        merged=torch.stack([torch.stack([t.vector for t in tokens]) for tokens in images]),
        groups=[group_of_patches(tokens, recipe.prefix, length) for tokens in images],
        sizes=[[t.size for t in tokens] for tokens in images],
        hidden=hidden,
        lengths=lengths,
    )


def shielded(recipe: Recipe, protect: Tensor | None, image: int) -> set[int]:
    """Original positions that never merge: the prefix, and the patches that the caller's mask names."""
    shield = set(range(recipe.prefix))
    if protect is not None:
        mask = protect if protect.ndim == 1 else protect[image]
        for patch, keep in enumerate(mask.tolist()):
            if keep:
                shield.add(recipe.prefix + patch)
    return shield


def is_shielded(token: Token, shield: set[int]) -> bool:
    """Whether a token represents a protected position (protected tokens are always alone)."""
    return any(member in shield for member in token.members)


def position(token: Token, recipe: Recipe) -> Position | None:
    """Rotary position: the mean over all patches that the token represents; the prefix has none."""
    if recipe.positions is None or token.members[0] < recipe.prefix:
        return None
    axes = zip(*(recipe.positions[m - recipe.prefix] for m in token.members), strict=True)
    return tuple(sum(axis) / len(axis) for axis in axes)


def bias_between(parts: Parts, head: int, query: Token, key: Token) -> Tensor:
    """Position bias of two tokens: the mean over all pairs of positions that they represent."""
    assert parts.bias is not None
    pairs = [parts.bias[head, i, j] for i in query.members for j in key.members]
    return sum(pairs[1:], pairs[0]) / len(pairs)


def attend(parts: Parts, recipe: Recipe, tokens: list[Token], proportional: bool) -> list[list[float]]:
    """Add the attention's output to every token; return the unit vectors that the matching compares."""
    x = torch.stack([t.vector for t in tokens])
    y = parts.before_attend(x)
    q, k, v = parts.q_norm(parts.q(y)), parts.k_norm(parts.k(y)), parts.v(y)
    metric = matching_metric(k)
    if parts.rotate is not None:
        places = [position(t, recipe) for t in tokens]
        q = torch.stack([row if p is None else parts.rotate(row, p) for row, p in zip(q, places, strict=True)])
        k = torch.stack([row if p is None else parts.rotate(row, p) for row, p in zip(k, places, strict=True)])
    bias = x.new_tensor([math.log(t.size) if proportional else 0.0 for t in tokens])
    heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    out = []
    for h in range(heads):
        # Sums and no matrix products: equal tokens have equal results, wherever they are.
        logits = (q[:, None, h] * k[None, :, h // shared]).sum(-1) * parts.scale + bias
        if parts.bias is not None:
            rows = [torch.stack([bias_between(parts, h, query, key) for key in tokens]) for query in tokens]
            logits = logits + torch.stack(rows)
        weights = torch.exp(logits - logits.amax(-1, keepdim=True).detach())
        shares = weights / weights.sum(-1, keepdim=True)
        out.append((shares[..., None] * v[None, :, h // shared]).sum(1))
    mixed = parts.inner_norm(torch.cat(out, -1))
    if parts.gate is not None:
        mixed = mixed * parts.gate(y)
    projected = parts.project(mixed) if parts.project_with_input is None else parts.project_with_input(mixed, y)
    x = x + parts.gain_attend(parts.after_attend(projected))
    for token, vector in zip(tokens, x, strict=True):
        token.vector = vector
    return metric


def matching_metric(keys: Tensor) -> list[list[float]]:
    """Return the mean of the keys (N, H, d) over the heads, normalized to unit vectors."""
    metric = []
    for token in keys.detach().tolist():
        mean = [sum(column) / len(token) for column in zip(*token, strict=True)]
        norm = math.sqrt(sum(c * c for c in mean))
        metric.append([c / norm for c in mean])
    return metric


def feed(parts: Parts, tokens: list[Token]) -> None:
    """Add the feed-forward half's output to every token."""
    x = torch.stack([t.vector for t in tokens])
    x = x + parts.gain_feed(parts.after_feed(parts.feed(parts.before_feed(x))))
    for token, vector in zip(tokens, x, strict=True):
        token.vector = vector


def edges(tokens: list[Token], metric: list[list[float]], shield: set[int]) -> list[tuple[float, int, int]]:
    """For every free token at an even place: its most similar free one at an odd place, first of equals."""
    found = []
    for a in range(0, len(tokens), 2):
        best: tuple[float, int, int] | None = None
        for b in range(1, len(tokens), 2):
            if is_shielded(tokens[a], shield) or is_shielded(tokens[b], shield):
                continue
            score = sum(map(mul, metric[a], metric[b]))
            if best is None or score > best[0]:
                best = (score, a, b)
        if best is not None:
            found.append(best)
    return found


def possible(tokens: list[Token], shield: set[int], wanted: int) -> int:
    """How many pairs can merge: never more than half of the free tokens, never more than there are edges."""
    free = sum(not is_shielded(t, shield) for t in tokens)
    flat = [[0.0] for _ in tokens]
    return min(wanted, free // 2, len(edges(tokens, flat, shield)))


def merge(tokens: list[Token], metric: list[list[float]], shield: set[int], count: int, order: str) -> list[Token]:
    """Merge the `count` most similar edges (the first of equals) and put what is left in order."""
    if count <= 0:
        return tokens
    chosen = sorted(edges(tokens, metric, shield), key=lambda e: (-e[0], e[1]))[:count]
    target = {a: b for _, a, b in chosen}
    left = []
    for place, token in enumerate(tokens):
        if place in target:
            continue
        joining = [token] + [tokens[a] for a in sorted(target) if target[a] == place]
        total = sum(t.size for t in joining)
        vector = sum((t.size * t.vector for t in joining[1:]), joining[0].size * joining[0].vector) / total
        left.append((place, Token(vector, sorted(m for t in joining for m in t.members))))
    arrange = {"paper": paper_order, "original": original_order}[order]
    return arrange(left, shield)


def paper_order(left: list[tuple[int, Token]], shield: set[int]) -> list[Token]:
    """Protected tokens first, then what is left at even places, then the odd places."""
    protected = [t for _, t in left if is_shielded(t, shield)]
    even = [t for place, t in left if place % 2 == 0 and not is_shielded(t, shield)]
    odd = [t for place, t in left if place % 2 == 1 and not is_shielded(t, shield)]
    return protected + even + odd


def original_order(left: list[tuple[int, Token]], shield: set[int]) -> list[Token]:
    """Sort by the first original position that each token represents."""
    return sorted((t for _, t in left), key=lambda t: min(t.members))


def full_length(tokens: list[Token], length: int) -> Tensor:
    """Return for every original position the vector of the token that represents it: (N, D)."""
    rows: list[Tensor | None] = [None] * length
    for token in tokens:
        for member in token.members:
            assert rows[member] is None, "a position belongs to two tokens"
            rows[member] = token.vector
    return torch.stack([row for row in rows if row is not None])


def group_of_patches(tokens: list[Token], prefix: int, length: int) -> list[int]:
    """For every patch: the place, in the merged sequence, of the token that represents it."""
    place = {member: i for i, token in enumerate(tokens) for member in token.members}
    return [place[prefix + patch] for patch in range(length - prefix)]
