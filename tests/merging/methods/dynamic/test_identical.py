"""Merging of patches with equal pixels against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.merging.methods.loops import assert_in_place, context, groups_after
from tests.models.mixes import SMALL, built
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.merging.methods.dynamic import Identical
from vitrail.models import ViTConfig


def by_hand(
    patches: Tensor, tolerance: float, unit: int, special: int, cap: int, fixed: set[int]
) -> set[frozenset[int]]:
    """Groups of patches (t, h, w, values), each joined to its left, upper or earlier neighbor."""
    t, h, w = patches.shape[:3]

    def equal(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
        """Whether the units that start at two patches are equal."""
        for i in range(unit):
            for j in range(unit):
                one, other = patches[a[0], a[1] + i, a[2] + j], patches[b[0], b[1] + i, b[2] + j]
                if float((one - other).abs().max()) > tolerance:
                    return False
        return True

    parent: dict[int, int] = {}
    for step in range(t):
        for row in range(h // unit * unit):
            for column in range(w // unit * unit):
                start = (step, row - row % unit, column - column % unit)
                for back in ((0, 0, unit), (0, unit, 0), (1, 0, 0)):
                    other = tuple(a - b for a, b in zip(start, back, strict=True))
                    if min(other) >= 0 and equal(start, other):
                        me = special + (step * h + row) * w + column
                        it = special + ((step - back[0]) * h + row - back[1]) * w + column - back[2]
                        if not {me, it} & fixed and len(parent) < cap:
                            parent[me] = it
                        break
    groups: dict[int, set[int]] = {}
    for token in range(special + t * h * w):
        root = token
        while root in parent:
            root = parent[root]
        groups.setdefault(root, set()).add(token)
    return {frozenset(members) for members in groups.values()}


@pytest.mark.parametrize("grid", [(1, 6, 6), (1, 5, 7), (3, 4, 5), (1, 1, 9)])
@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("tolerance", [0.0, 0.6])
def test_equal_neighbors_merge(grid: tuple[int, int, int], unit: int, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(5)
    t, h, w = grid
    coarse = torch.randint(0, 2, (2, 1, t, -(-h // 2), -(-w // 2)), generator=generator).double().repeat(1, 3, 1, 1, 1)
    flat = coarse.repeat_interleave(2, 3).repeat_interleave(2, 4)[..., :h, :w]
    flat[:, :, :, 2:, 4:] += torch.randint(0, 2, (2, 1, t, h, w), generator=generator)[:, :, :, 2:, 4:] * 0.5
    video = flat.repeat_interleave(2, 2).repeat_interleave(4, 3).repeat_interleave(4, 4)
    inputs = video if t > 1 else video[:, :, 0]
    method = Identical(tolerance, unit=unit)
    links = method.maps(inputs, grid)
    guide = {name: torch.cat([torch.zeros(2, 1), values], 1) for name, values in links.items()}
    x = torch.zeros(2, 1 + t * h * w, 3)
    mask = torch.rand(2, x.shape[1], generator=generator) < 0.1
    merged = 0
    for protected, cap in ((1, 1000), (1, 4), (mask, 1000)):
        found = method.reduce(context(x, grid=grid, protected=protected, guide=guide), cap)
        assert_in_place(found)
        for image in range(2):
            fixed = {0} if isinstance(protected, int) else {0} | set(protected[image].nonzero()[:, 0].tolist())
            patches = flat[image].permute(1, 2, 3, 0)
            wanted = by_hand(patches, tolerance, unit, 1, cap, fixed)
            assert groups_after(found, image) == wanted
            merged += 1 + t * h * w - len(wanted)
    assert merged > 10 or (unit, grid[1]) == (2, 1)
    found = method.reduce(context(x, grid=grid, protected=1, guide=guide), torch.tensor([2, 0]))
    assert [1 + t * h * w - len(groups_after(found, image)) for image in (0, 1)][1] == 0
    assert method.reduce(context(x, layer=1, grid=grid, guide=guide), 9) is None


def test_a_page_in_a_model() -> None:
    config = ViTConfig(**{**SMALL, "image_size": 32, "depth": 3})
    model = built(config)
    page = torch.ones(2, 3, 32, 32, dtype=torch.float64)
    page[0, :, 8:12] = torch.randn(3, 4, 32)
    page[1, :, :, 12:] = torch.randn(3, 32, 20)
    with torch.no_grad(), vitrail.merge(model, method="identical") as merging:
        with merging.track() as trace:
            full = model.forward_features(page)
            together = trace.groups
        assert trace.tokens_per_layer.tolist() == [[1 + 2 + 8] * 3, [1 + 1 + 40] * 3]
        assert sorted(trace.sizes[0].tolist()) == [0] * 31 + [1] * 9 + [16, 40]
        assert full.shape[1] == 65
        assert torch.equal(together[0].view(8, 8)[3:].unique(), together[0].view(8, 8)[7, 7:])
        alone = torch.cat([model.forward_features(image[None]) for image in page])
        torch.testing.assert_close(full, alone, rtol=0, atol=1e-12)
    with torch.no_grad(), vitrail.merge(model, r=[5, 0, 0], method="identical") as merging, merging.track() as trace:
        model(page)
    assert trace.tokens_per_layer.tolist() == [[60] * 3] * 2


def test_nothing_changes_without_equal_patches() -> None:
    config = ViTConfig(**SMALL)
    model = built(config)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        before = model(x)
        with vitrail.merge(model, method="identical"):
            torch.testing.assert_close(model(x), before, rtol=0, atol=1e-12)


def test_inputs_that_do_not_divide_into_patches() -> None:
    with pytest.raises(UnsupportedInput, match="overlap"):
        Identical().maps(torch.zeros(1, 3, 30, 32), (1, 4, 4))
    with pytest.raises(UnsupportedInput, match="overlap"):
        Identical().maps(torch.zeros(1, 30, 32), (1, 4, 4))


@pytest.mark.parametrize("options", [{"tolerance": -1}, {"tolerance": True}, {"unit": 0}, {"unit": 1.5}])
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        Identical(**options)


def test_options_make_the_same_method_again() -> None:
    for options in ({}, {"tolerance": 0.1, "unit": 2, "bucket": 4}):
        assert Identical(**options).options == options
