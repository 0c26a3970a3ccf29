"""Random inputs of a method, with every kind of protection, sizes and padding, and what loops need of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from vitrail.merging import Assignment, Context, MergeState, Method, Reduction


class Case(NamedTuple):
    length: int = 12
    protected: str = "front"
    sizes: bool = False
    padded: bool = False
    heads: int = 2


CASES = {
    "plain": Case(),
    "odd": Case(13),
    "one special token": Case(13, "one"),
    "none special": Case(11, "none"),
    "sizes": Case(14, sizes=True),
    "mask": Case(16, "mask"),
    "masks": Case(17, "masks", sizes=True),
    "padding": Case(15, padded=True, sizes=True),
    "padding and masks": Case(16, "masks", padded=True, sizes=True),
    "three heads": Case(heads=3),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def context_of(
    case: Case, seed: int = 0, batch: int = 3, dtype: torch.dtype = torch.float64, **options: Any
) -> Context:
    """Return the context of a block with random tokens, projections, sizes and attention."""
    make = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64).to(dtype)

    n = case.length
    x = draw(batch, n, 7) + 0.5 * draw(batch, 1, 7)
    q, k, v = draw(3, batch, case.heads, n, 5)
    received = torch.rand(batch, case.heads, n, generator=make, dtype=torch.float64).to(dtype) + 0.01
    size = torch.randint(1, 6, (batch, n), generator=make).to(dtype) if case.sizes else None
    if case.padded:
        assert size is not None
        for image in range(batch):
            size[image, n - image :] = 0
    protected: int | Tensor = {"front": 2, "one": 1, "none": 0}.get(case.protected, 0)
    if case.protected in ("mask", "masks"):
        protected = torch.rand(1 if case.protected == "mask" else batch, n, generator=make) < 0.25
        protected[:, 0] = True
        protected[:, -3:] = False
    return Context(
        options.pop("layer", 1), options.pop("grid", (1, 1, n)), x, size, protected, padded=case.padded,
        depth=options.pop("depth", 4), project=lambda: (q, k, v), attend=lambda _: received, **options,
    )  # fmt: skip


def free_of(context: Context, image: int) -> list[int]:
    """Return the positions of one image's tokens that may merge."""
    mask = context.protected
    length = context.x.shape[1]
    blocked = [i < mask if isinstance(mask, int) else bool(mask[image % len(mask), i]) for i in range(length)]
    return [i for i in range(length) if not blocked[i] and (context.size is None or context.size[image, i] > 0)]


def unit(features: Tensor) -> list[Tensor]:
    """Return the tokens (N, D) of one image as vectors of length 1."""
    return [row / row.square().sum().sqrt() for row in features.double()]


def groups_of(assignment: Assignment, context: Context, image: int) -> set[frozenset[int]]:
    """Return the groups of one image as sets of positions, without padding."""
    places: dict[int, set[int]] = {}
    for position, place in enumerate(assignment.target[image].tolist()):
        if context.size is None or context.size[image, position] > 0:
            places.setdefault(place, set()).add(position)
    return {frozenset(group) for group in places.values()}


def check_places(assignment: Assignment, context: Context) -> None:
    """Assert that protected tokens are alone and in front, in their order, and that padding is behind."""
    for image, target in enumerate(assignment.target.tolist()):
        present = [i for i in range(len(target)) if context.size is None or context.size[image, i] > 0]
        mask = context.protected
        alone = [i for i in present if i not in free_of(context, image)]
        assert [target[i] for i in alone] == list(range(len(alone))), mask
        used = {target[i] for i in present}
        assert used == set(range(len(used)))


def merged(method: Method, context: Context, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """Return the merged tokens and their sizes."""
    x, state = MergeState((0,), size=context.size, protected=context.protected).apply(context.x, reduction, method)
    assert state.size is not None
    return x, state.size
