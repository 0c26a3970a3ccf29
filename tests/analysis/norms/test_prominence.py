"""Prominence of tokens, against loops over patches."""

import math

import numpy as np
import pytest
import torch

from vitrail.analysis.norms import prominence


def by_loops(norms, entry, grid):
    """The definition, patch by patch."""
    time, height, width = grid
    result = np.full(norms.shape, math.nan)
    for image, (values, entered) in enumerate(zip(norms, entry, strict=True)):
        growth = values / entered
        lower = (len(values) - 1) // 2
        medians = np.sort(values)[lower], np.sort(growth)[lower]
        maps = values.reshape(time, height, width)
        for place in range(len(values)):
            t, y, x = np.unravel_index(place, grid)
            around = sorted(
                (
                    maps[t, y + dy, x + dx]
                    for dy in (-1, 0, 1)
                    for dx in (-1, 0, 1)
                    if (dy, dx) != (0, 0) and 0 <= y + dy < height and 0 <= x + dx < width
                ),
                reverse=True,
            )
            ratios = [values[place] / medians[0], growth[place] / medians[1]]
            if len(around) >= 3:
                ratios.append(values[place] / around[2])
            result[image, place] = min(ratios)
    return result


@pytest.mark.parametrize("grid", [(1, 5, 4), (2, 3, 4), (1, 1, 9), (1, 2, 2)])
def test_prominence_is_its_definition(grid):
    rng = np.random.default_rng(0)
    norms, entry = np.exp(rng.standard_normal((2, 3, math.prod(grid))))
    found = prominence(torch.from_numpy(norms), torch.from_numpy(entry), grid)
    np.testing.assert_allclose(found.numpy(), by_loops(norms, entry, grid), rtol=1e-12)


@pytest.mark.parametrize(("patches", "prominent"), [([44], True), ([44, 45], True), ([44, 45, 54, 55], False)])
def test_up_to_two_neighboring_artifacts_stand_out(patches, prominent):
    norms = torch.ones(1, 100)
    norms[:, patches] = 7
    found = prominence(norms, grid=(1, 10, 10))[0, patches]
    assert found.tolist() == [7.0 if prominent else 1.0] * len(patches)


def test_scale_of_images_and_of_the_entry_does_not_matter():
    norms = torch.rand(4, 36) + 1
    entry = torch.rand(4, 36) + 1
    scales = torch.tensor([[1.0], [4.0], [0.25], [1024.0]])
    one, other = (prominence(*pair, (1, 6, 6)) for pair in ((norms, entry), (norms * scales, entry / scales)))
    torch.testing.assert_close(one, other)


def test_norms_that_are_not_finite_or_zero():
    norms = torch.ones(2, 9)
    norms[0, 4], norms[1] = math.nan, 0
    found = prominence(norms, torch.ones(2, 9), (1, 3, 3))
    assert found[0].isnan().tolist() == [place == 4 for place in range(9)]
    assert found[1].tolist() == [0.0] * 9
