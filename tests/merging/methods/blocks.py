"""Random blocks to reduce: protected prefixes and masks, sizes, padding, odd and even lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.merging import Context, MergeState, Method, Reduction

BATCH, HEADS, WIDTH = 3, 2, 4


def block(length: int = 13, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Context:
    """Return the context of a block with random tokens, queries, keys and values, and its attention."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x = draw(BATCH, length, HEADS * WIDTH)
    q, k, v = (draw(BATCH, HEADS, length, WIDTH) for _ in range(3))
    options = {"protected": 1, "class_token": 0, "depth": 12, **options}

    def attend(queries: Sequence[int] | None) -> Tensor:
        size = options.get("size")
        scores = q @ k.transpose(2, 3) / WIDTH**0.5
        weights = (scores if size is None else scores + size.log()[:, None, None].to(dtype)).softmax(-1)
        return weights.mean(2) if queries is None else weights[:, :, list(queries)]

    return Context(0, (1, 1, length), x, project=lambda: (q, k, v), attend=attend, **options)


def mask(*places: list[int], length: int = 13) -> Tensor:
    """Return a protection mask with one row for each list of protected places."""
    found = torch.zeros(len(places), length, dtype=torch.bool)
    for row, chosen in enumerate(places):
        found[row, chosen] = True
    return found


def sizes(*present: int, length: int = 13) -> Tensor:
    """Return sizes from 1 to 3, and 0 behind this many present tokens of each image."""
    found = 1.0 + torch.arange(len(present) * length).view(-1, length) % 3
    return found.double() * (torch.arange(length) < torch.tensor(present).unsqueeze(1))


BLOCKS: dict[str, Context] = {
    "class token": block(),
    "registers": block(protected=3),
    "even": block(12),
    "mask": block(protected=mask([0, 4, 12])),
    "masks": block(protected=mask([0], [0, 5, 6], [0, 1, 11])),
    "sizes": block(size=sizes(13, 13, 13)),
    "padding": block(size=sizes(13, 11, 10), padded=True),
    "padding and masks": block(size=sizes(12, 13, 10), padded=True, protected=mask([0, 3], [0], [0, 9])),
}


def free_places(context: Context, image: int) -> list[int]:
    """Return the positions of the tokens of an image that may merge."""
    return [i for i, free in enumerate(context.mergeable.expand(BATCH, -1)[image].tolist()) if free]


def size_of(context: Context, image: int, place: int) -> float:
    return 1.0 if context.size is None else float(context.size[image, place])


def members(reduction: Reduction, image: int) -> list[list[int]]:
    """Return the positions of the members of each group of an image; none for padding."""
    target = reduction.assignment.target[image].tolist()
    return [[i for i, group in enumerate(target) if group == place] for place in range(reduction.assignment.length)]


def apply(context: Context, reduction: Reduction, method: Method | None = None) -> tuple[Tensor, MergeState]:
    """Return the reduced tokens and the state after the reduction."""
    state = MergeState((1,) * 12, protected=context.protected, size=context.size, padded=context.padded)
    return state.apply(context.x, reduction, method)


def partition(groups: list[list[int]]) -> set[tuple[int, ...]]:
    """Return groups as a set, without the empty ones."""
    return {tuple(sorted(group)) for group in groups if group}


def mean_of(context: Context, image: int, group: list[int]) -> Tensor:
    """Return the mean of some tokens by their sizes, in a loop."""
    total = sum(size_of(context, image, i) for i in group)
    found = torch.zeros_like(context.x[image, 0])
    for i in group:
        found += context.x[image, i] * size_of(context, image, i) / total
    return found


def check_means(context: Context, reduction: Reduction, wanted: list[set[tuple[int, ...]]]) -> None:
    """Assert that the groups of every image are the wanted ones, and their tokens and sizes the means and sums."""
    merged, state = apply(context, reduction)
    assert state.size is not None
    for image, groups in enumerate(wanted):
        found = members(reduction, image)
        assert partition(found) == groups | {(i,) for i in absent(context, image)}
        for place, group in enumerate(found):
            if set(group) - set(absent(context, image)):
                torch.testing.assert_close(merged[image, place], mean_of(context, image, group))
                assert state.size[image, place] == sum(size_of(context, image, i) for i in group)
            else:
                assert state.size[image, place] == 0
                assert not any(found[later] for later in range(place + 1, len(found)) if state.size[image, later])


def absent(context: Context, image: int) -> list[int]:
    """Return the positions that are padding."""
    return [i for i in range(context.x.shape[1]) if size_of(context, image, i) == 0]


def alone(context: Context, image: int) -> set[tuple[int, ...]]:
    """Return the groups of the protected tokens that are present."""
    free, gone = free_places(context, image), absent(context, image)
    return {(i,) for i in range(context.x.shape[1]) if i not in free and i not in gone}
