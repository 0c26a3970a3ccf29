"""Mixup and cutmix: against torchvision's arithmetic, image by image, and against the Beta distribution."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vitrail.data.augment.mix import Mix, beta
from vitrail.data.loading.order import generator
from vitrail.errors import InvalidOption


@pytest.fixture
def images() -> Tensor:
    return torch.rand(8, 3, 12, 20)


def test_nothing_by_default(images: Tensor) -> None:
    mixed = Mix()(images, generator("cpu", 0))
    assert mixed.images is images
    assert mixed.partner is None
    assert mixed.share.tolist() == [1.0] * 8


def test_mixup(images: Tensor) -> None:
    mixed = Mix(mixup=0.8)(images, generator("cpu", 0))
    assert mixed.partner is not None
    assert mixed.partner.tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
    assert len(mixed.share.unique()) == 8  # each has its own
    for number, (own, partner) in enumerate(zip(mixed.share.tolist(), mixed.partner.tolist(), strict=True)):
        expected = own * images[number] + (1 - own) * images[partner]
        torch.testing.assert_close(mixed.images[number], expected)


def boxed(image: Tensor, other: Tensor, share: float, place: tuple[float, float]) -> tuple[Tensor, float]:
    """As torchvision's CutMix: a box around a pixel, cut off at the border; and what is left of the first image."""
    height, width = image.shape[-2:]
    row, column = int(place[0] * height), int(place[1] * width)
    reach = 0.5 * (1 - share) ** 0.5
    down, across = int(reach * height), int(reach * width)
    top, bottom = max(row - down, 0), min(row + down, height)
    left, right = max(column - across, 0), min(column + across, width)
    made = image.clone()
    made[:, top:bottom, left:right] = other[:, top:bottom, left:right]
    return made, 1 - (bottom - top) * (right - left) / (height * width)


def test_cutmix(images: Tensor) -> None:
    numbers = torch.rand(8, 6)
    shares = torch.rand(8, 2)
    mixed = Mix(cutmix=1.0).apply(images, numbers, shares)
    for number in range(8):
        place = (float(numbers[number, 2]), float(numbers[number, 3]))
        expected, left = boxed(images[number], images[number ^ 1], float(shares[number, 1]), place)
        assert torch.equal(mixed.images[number], expected)
        assert float(mixed.share[number]) == pytest.approx(left, abs=1e-6)


@pytest.mark.parametrize("shape", [(8, 1, 12, 20), (8, 2, 5, 12, 20)])
def test_any_shape_is_mixed_as_its_slices_are(shape: tuple[int, ...]) -> None:
    """The same share and the same box for every channel and every moment."""
    values, numbers, shares = torch.rand(shape), torch.rand(8, 6), torch.rand(8, 2)
    mix = Mix(0.8, 1.0)
    mixed = mix.apply(values, numbers, shares)
    assert mixed.images.shape == shape
    slices = values.flatten(1, -3)
    for number in range(slices.shape[1]):
        alone = mix.apply(slices[:, number, None], numbers, shares)
        assert torch.equal(mixed.images.flatten(1, -3)[:, number, None], alone.images)
        assert torch.equal(mixed.share, alone.share)


def test_both_and_how_often() -> None:
    images = torch.rand(2000, 1, 4, 4)
    mixed = Mix(0.8, 1.0, probability=0.5, switch=0.25)(images, generator("cpu", 2))
    other = images.view(-1, 2, 1, 4, 4).flip(1).view_as(images)
    same = (mixed.images == images).flatten(1).all(1)
    cut = ((mixed.images == images) | (mixed.images == other)).flatten(1).all(1) & ~same
    assert torch.equal(mixed.images[mixed.share == 1], images[mixed.share == 1])
    assert 0.47 < same.float().mean() < 0.58  # some boxes of cutmix are empty
    assert 0.08 < cut.float().mean() < 0.15
    assert 0.34 < (~same & ~cut).float().mean() < 0.41


def test_the_same_for_any_world_size(images: Tensor) -> None:
    mix = Mix(0.8, 1.0, probability=0.8)
    whole = mix(images, generator("cpu", 3))
    parts = [mix(images[at : at + 2], generator("cpu", 3), slice(at, at + 2), 8) for at in (0, 2, 4, 6)]
    assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
    assert torch.equal(torch.cat([part.share for part in parts]), whole.share)


def test_compiles_as_one_graph_for_any_image(images: Tensor) -> None:
    numbers, shares = torch.rand(8, 6), torch.rand(8, 2)
    mix = Mix(0.8, 1.0)
    compiled = torch.compile(mix.apply, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(images, numbers, shares), mix.apply(images, numbers, shares), strict=True):
        torch.testing.assert_close(one, other)
    meta = mix.apply(images.to("meta"), numbers.to("meta"), shares.to("meta"))
    assert meta.images.shape == images.shape


def test_precision_stays(images: Tensor) -> None:
    assert Mix(0.8, 1.0)(images.bfloat16(), generator("cpu", 0)).images.dtype == torch.bfloat16


# ---------------------------------------------------------------- the Beta distribution


@pytest.mark.parametrize("alpha", [0.2, 0.3, 0.8, 1.0, 2.0, 8.0])
def test_beta_is_the_inverse_of_its_distribution(alpha: float) -> None:
    stats = pytest.importorskip("scipy.stats", reason="the reference is scipy's")
    numbers = torch.rand(5000) / 2
    found = beta(numbers, alpha)
    back = torch.from_numpy(stats.beta(alpha, alpha).cdf(found.double().numpy()))
    assert (back - numbers).abs().max() < 1e-5
    torch.testing.assert_close(beta(1 - numbers, alpha), 1 - found, atol=1e-4, rtol=0)
    assert beta(torch.tensor([0.0, 0.5, 1.0]), alpha).tolist() == pytest.approx([0.0, 0.5, 1.0], abs=1e-3)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("given", [{"mixup": -0.1}, {"cutmix": float("nan")}, {"probability": 1.1}, {"switch": -1.0}])
def test_refusals(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(given))):
        Mix(**given)


def test_pairs_need_two(images: Tensor) -> None:
    with pytest.raises(InvalidOption, match="7 images"):
        Mix(0.8)(images[:7], generator("cpu", 0))
    with pytest.raises(InvalidOption, match="mixed in pairs"):
        Mix(0.8)(images[1:3], generator("cpu", 0), slice(1, 3), 8)
