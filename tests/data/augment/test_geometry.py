"""Crops and rotations, against torchvision's with the same parameters."""

import math

import pytest
import torch
from torch import Tensor

from vitrail.data.augment.geometry import affine, crop, cubic, random_boxes, warp

v2 = pytest.importorskip("torchvision.transforms.v2.functional", reason="the reference is torchvision's")
BICUBIC = pytest.importorskip("torchvision.transforms").InterpolationMode.BICUBIC

NO_TURN = torch.eye(2, 3)


def waves(count: int, side: int) -> Tensor:
    """Smooth images that are different at every place."""
    place = torch.linspace(0, 3, side)
    phase = torch.rand(count, 3, 1, 1) * 6
    return 0.5 + 0.4 * torch.sin(phase + 2 * place[:, None]) * torch.cos(3 * place[None, :] + phase)


BOXES = [(0, 0, 40, 40), (3, 5, 17, 29), (10, 0, 30, 12), (0, 32, 8, 8), (39, 39, 1, 1), (1, 2, 38, 33)]


@pytest.mark.parametrize("out", [16, 40, 56])
def test_crop_is_torchvisions(out: int) -> None:
    images = torch.rand(len(BOXES), 3, 40, 40)
    start = torch.tensor([box[:2] for box in BOXES]).float()
    size = torch.tensor([box[2:] for box in BOXES]).float()
    flip = torch.tensor([False, True, False, True, False, True])
    made = crop(images, start, size, flip, out)
    for number, (top, left, height, width) in enumerate(BOXES):
        one = v2.resized_crop(images[number], top, left, height, width, [out, out], BICUBIC, antialias=True)
        one = v2.horizontal_flip(one) if flip[number] else one
        torch.testing.assert_close(made[number], one, atol=2e-5, rtol=0)


def test_cubic() -> None:
    at = torch.tensor([0.0, 0.5, 1.0, -1.5, 2.0, 7.0])
    torch.testing.assert_close(cubic(at), torch.tensor([1.0, 0.5625, 0.0, -0.0625, 0.0, 0.0]))


@pytest.mark.parametrize("flipped", [False, True])
def test_warp_without_a_turn_is_the_crop(flipped: bool) -> None:
    images = waves(2, 64)
    start, size = torch.tensor([[0.0, 0.0], [10.0, 20.0]]), torch.tensor([[64.0, 64.0], [48.0, 32.0]])
    flip = torch.tensor([flipped, not flipped])
    made = warp(images, start, size, flip, NO_TURN.expand(2, 2, 3), 48)
    torch.testing.assert_close(made, crop(images, start, size, flip, 48), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("angle", "shear", "shift"),
    [
        (20.0, (0.0, 0.0), (0.0, 0.0)),
        (0.0, (0.2, 0.0), (0.0, 0.0)),
        (0.0, (0.0, 0.0), (0.125, -0.25)),
    ],
)
def test_rotations_equal_torchvision(angle: float, shear: tuple[float, float], shift: tuple[float, float]) -> None:
    images = waves(1, 64)
    whole = torch.zeros(1, 2), torch.full((1, 2), 64.0), torch.tensor([False])
    turn = affine(torch.tensor([math.radians(angle)]), torch.tensor([shear]), torch.tensor([shift]))
    made = warp(images, *whole, turn, 64)
    degrees = [math.degrees(math.atan(shear[0])), math.degrees(math.atan(shear[1]))]
    move = [round(64 * shift[0]), round(64 * shift[1])]
    theirs, full = (
        v2.affine(one, angle, move, 1.0, degrees, interpolation=v2.InterpolationMode.BILINEAR)
        for one in (images, torch.ones_like(images))
    )
    inside = full > 0.999  # the border is filled in another way
    assert inside.float().mean() > 0.5
    assert (made - theirs)[inside].abs().max() < 0.01


def test_a_rotated_box_shows_its_surroundings() -> None:
    """A central box rotated by 90 degrees equals the rotated box; nothing is padded."""
    images = waves(1, 64)
    start, size = torch.tensor([[16.0, 16.0]]), torch.tensor([[32.0, 32.0]])
    turn = affine(torch.tensor([math.pi / 2]), torch.zeros(1, 2), torch.zeros(1, 2))
    made = warp(images, start, size, torch.tensor([False]), turn, 32)
    torch.testing.assert_close(made, images[:, :, 16:48, 16:48].rot90(-1, (2, 3)), atol=1e-4, rtol=0)
    moved = affine(torch.zeros(1), torch.zeros(1, 2), torch.tensor([[0.25, 0.0]]))
    made = warp(images, start, size, torch.tensor([False]), moved, 32)
    torch.testing.assert_close(made, images[:, :, 16:48, 8:40], atol=1e-4, rtol=0)


def test_strong_shrinking_is_antialiased() -> None:
    stripes = (torch.arange(128) % 2).float().expand(1, 3, 128, 128)
    whole = torch.zeros(1, 2), torch.full((1, 2), 128.0), torch.tensor([False])
    made = warp(stripes, *whole, NO_TURN[None], 32)
    assert (made - 0.5).abs().max() < 0.01
    part = torch.zeros(1, 2), torch.full((1, 2), 32.0), torch.tensor([False])
    torch.testing.assert_close(warp(stripes, *part, NO_TURN[None], 32), stripes[:, :, :32, :32])


# ---------------------------------------------------------------- boxes


def test_boxes_follow_the_recipe_of_torchvision() -> None:
    """The same distribution as torchvision's own sampling, by the means and spreads of many boxes."""
    transforms = pytest.importorskip("torchvision.transforms")
    count, side = 4000, 96
    image = torch.zeros(3, side, side)
    theirs = torch.tensor(
        [transforms.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(count)]
    ).float()
    start, size = random_boxes(
        torch.rand(count, 10), torch.rand(count, 10), torch.rand(count, 2), side, (0.08, 1.0), (3 / 4, 4 / 3), side
    )
    ours = torch.cat([start, size], 1)
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 0.03 * side).all()
    assert ((ours.std(0) - theirs.std(0)).abs() < 0.03 * side).all()
    assert torch.equal(ours, ours.round())
    assert (start >= 0).all()
    assert (start + size <= side).all()


def test_the_first_box_that_fits_is_taken() -> None:
    areas = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    ratios = torch.tensor([[1.0, 0.0, 0.5], [1.0, 0.0, 1.0], [0.5, 0.5, 0.5]])
    start, size = random_boxes(areas, ratios, torch.full((3, 2), 0.999999), 32, (0.25, 1.0), (0.5, 2.0), 7)
    assert size.tolist() == [[16, 16], [7, 7], [16, 16]]
    assert start.tolist() == [[16, 16], [25, 25], [16, 16]]
