"""Boundary scores against loops over pixels."""

import math

import pytest
import torch
from torch import Tensor

from vitrail.analysis.downstream.boundary import boundary, boundary_scores
from vitrail.errors import InvalidOption, UnsupportedInput


def outline(mask: Tensor) -> list[tuple[int, int]]:
    """Return the boundary pixels of one mask by its definition."""
    height, width = mask.shape
    found = []
    for row in range(height):
        for column in range(width):
            beside = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
            inside = [(r, c) for r, c in beside if 0 <= r < height and 0 <= c < width]
            if mask[row, column] and not all(bool(mask[r, c]) for r, c in inside):
                found.append((row, column))
    return found


def by_hand(predicted: Tensor, true: Tensor, tolerance: float) -> tuple[float, float, float]:
    """Return precision, recall and F of one image from all distances."""
    first, second = outline(predicted), outline(true)

    def right(of: list[tuple[int, int]], others: list[tuple[int, int]]) -> float:
        near = [any(math.dist(one, other) <= tolerance for other in others) for one in of]
        return sum(near) / len(near) if near else 1.0

    precision, recall = right(first, second), right(second, first)
    return precision, recall, 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@pytest.mark.parametrize("tolerance", [0, 1, 1.5, 2, 3.2])
def test_scores_equal_a_loop_over_pixels(tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    maps = torch.nn.functional.interpolate(
        torch.randn(12, 2, 4, 5, generator=generator), size=(15, 18), mode="bilinear"
    )
    predicted, true = (maps > 0.1).unbind(1)
    scores = boundary_scores(predicted, true, tolerance=tolerance)
    found = torch.stack([scores.precision, scores.recall, scores.f_score], 1)
    expected = torch.tensor([by_hand(a, b, tolerance) for a, b in zip(predicted, true, strict=True)])
    assert torch.allclose(found, expected.double(), atol=1e-6)
    assert 0.02 < expected[:, 2].min() < expected[:, 2].max() < 1.01
    assert all(outline(mask) == [tuple(place) for place in boundary(mask[None])[0].nonzero().tolist()] for mask in true)


def test_masks_without_a_boundary() -> None:
    empty, full = torch.zeros(1, 6, 6, dtype=torch.bool), torch.ones(1, 6, 6, dtype=torch.bool)
    square = empty.clone()
    square[:, 2:4, 2:4] = True
    assert boundary_scores(empty, full).f_score.tolist() == [1.0]  # the border of the image is no boundary
    assert boundary_scores(empty, square).f_score.tolist() == [0.0]
    assert boundary_scores(square, empty).f_score.tolist() == [0.0]


def test_default_tolerance_is_a_share_of_the_diagonal() -> None:
    true = torch.zeros(1, 160, 160, dtype=torch.bool)
    true[:, :, :80] = True
    for shift, expected in ((2, 1.0), (3, 0.0)):
        assert boundary_scores(true.roll(shift, 2) | true, true).f_score.item() == expected


def test_bad_input() -> None:
    mask = torch.zeros(1, 4, 4, dtype=torch.bool)
    with pytest.raises(UnsupportedInput, match="two boolean masks"):
        boundary_scores(mask, mask.float())
    with pytest.raises(UnsupportedInput, match="two boolean masks"):
        boundary_scores(mask, mask[:, :3])
    with pytest.raises(InvalidOption, match="tolerance is a number of pixels"):
        boundary_scores(mask, mask, tolerance=-1)
