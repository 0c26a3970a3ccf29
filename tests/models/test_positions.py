"""Positions of patches: learned and resampled, sines and cosines, rotary."""

from __future__ import annotations

import math

import pytest
import torch

from tests.models.mixes import built, random_images
from vitrail.models import ViTConfig
from vitrail.models.position import coordinates, resample, rotary_table, rotate, sincos_table

LIKE = torch.zeros(1, dtype=torch.float64)


def test_coordinates_count_in_patches() -> None:
    flat = coordinates((1, 2, 3), 2, LIKE.device, LIKE.dtype)
    assert flat.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert coordinates((2, 1, 2), 3, LIKE.device, LIKE.dtype).tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize(("axes", "grid", "width"), [(2, (1, 4, 5), 8), (3, (2, 3, 4), 12), (2, (1, 4, 5), 10)])
def test_rotary_scores_depend_on_distance_alone(axes: int, grid: tuple[int, int, int], width: int) -> None:
    table = rotary_table(grid, width, axes, LIKE)
    where = coordinates(grid, axes, LIKE.device, LIKE.dtype)
    q, k = torch.randn(2, 1, 1, 1, width, dtype=torch.float64).expand(2, 1, 1, len(where), width)
    scores = (rotate(q, table) @ rotate(k, table).transpose(-1, -2))[0, 0]
    by_distance: dict[tuple[float, ...], float] = {}
    for i in range(len(where)):
        for j in range(len(where)):
            known = by_distance.setdefault(tuple((where[i] - where[j]).tolist()), float(scores[i, j]))
            assert scores[i, j] == pytest.approx(known, abs=1e-12)
    assert len({round(value, 9) for value in by_distance.values()}) == len(by_distance)


def test_rotary_keeps_norms_and_special_tokens() -> None:
    table = rotary_table((1, 3, 3), 8, 2, LIKE)
    x = torch.randn(2, 2, 11, 8, dtype=torch.float64)
    y = rotate(x, table)
    assert torch.equal(y[:, :, :2], x[:, :, :2])
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(y[:, :, 2], x[:, :, 2])  # the patch at (0, 0)
    assert not torch.allclose(y[:, :, 3], x[:, :, 3])
    assert rotate(x.bfloat16(), table.float()).dtype == torch.bfloat16


def test_rotary_positions_reach_the_model_and_any_size() -> None:
    config = ViTConfig(image_size=16, patch_size=4, width=16, depth=2, heads=2, num_classes=3, position="rotary")
    model = built(config)
    assert model.pos_embed is None
    x = random_images(config)
    with torch.no_grad():
        moved = torch.roll(x, (4, 8), (2, 3))  # whole patches move
        assert not torch.allclose(model(x), model(moved))
        assert model(random_images(config, size=(8, 24))).shape == (2, 3)


def test_without_position_the_order_of_patches_does_not_matter() -> None:
    config = ViTConfig(image_size=16, patch_size=4, width=16, depth=2, heads=2, num_classes=3, position="none")
    model = built(config)
    x = random_images(config)
    with torch.no_grad():
        torch.testing.assert_close(model(x), model(torch.roll(x, (4, 8), (2, 3))))


def test_sincos_values() -> None:
    table = sincos_table((1, 3, 4), 16, 2, LIKE)
    assert table.shape == (1, 12, 16)
    row, column, band = 2, 3, 1
    wave = 10_000 ** (-band / 4)
    patch = table[0, row * 4 + column]
    expected = [math.sin(row * wave), math.cos(row * wave), math.sin(column * wave), math.cos(column * wave)]
    assert [float(patch[i]) for i in (band, 4 + band, 8 + band, 12 + band)] == pytest.approx(expected)
    assert len({tuple(row.tolist()) for row in table[0]}) == 12
    assert sincos_table((2, 3, 4), 16, 3, LIKE).shape == (1, 24, 16)  # four channels are left over


def test_sincos_models_have_no_position_parameters() -> None:
    config = ViTConfig(image_size=16, patch_size=4, width=16, depth=1, heads=2, num_classes=3, position="sincos")
    model = built(config)
    assert model.pos_embed is None
    assert model.no_weight_decay() == {"tokens.cls"}
    with torch.no_grad():
        x = random_images(config)
        assert not torch.allclose(model(x), model(torch.roll(x, (4, 8), (2, 3))))


def test_resampling_space_and_time() -> None:
    flat = torch.full((1, 12, 5), 0.7, dtype=torch.float64)
    assert resample(flat, (1, 3, 4), (1, 3, 4)) is flat
    for new in ((1, 5, 2), (1, 4, 3), (3, 3, 4), (4, 6, 6)):
        result = resample(flat, (1, 3, 4), new)
        assert result.shape == (1, math.prod(new), 5)
        assert result.dtype == torch.float64
        torch.testing.assert_close(result, torch.full_like(result, 0.7), rtol=1e-6, atol=0)
    # Two frames, 0 and 1, become four: linear, with half a frame of margin.
    frames = torch.tensor([0.0, 1.0]).reshape(1, 2, 1)
    assert resample(frames, (2, 1, 1), (4, 1, 1)).flatten().tolist() == [0.0, 0.25, 0.75, 1.0]
    # Each patch keeps to its own place while the number of frames changes.
    places = torch.arange(6.0).reshape(1, 6, 1).repeat(1, 2, 1)
    assert resample(places, (2, 2, 3), (3, 2, 3)).flatten().tolist() == list(range(6)) * 3
