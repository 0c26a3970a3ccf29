"""Changes of color and sharpness, against torchvision's own with the same parameters."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from vitrail.data.augment.color import blur, box_mask, erase, gray, jitter, solarize

v2 = pytest.importorskip("torchvision.transforms.v2.functional", reason="the reference is torchvision's")


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(5, 3, 24, 24)


def test_gray(images: torch.Tensor) -> None:
    torch.testing.assert_close(gray(images), v2.rgb_to_grayscale(images))


def test_jitter(images: torch.Tensor) -> None:
    brightness = torch.tensor([0.7, 1.0, 1.3, 1.1, 0.9])
    contrast = torch.tensor([1.3, 1.0, 0.7, 1.2, 1.0])
    saturation = torch.tensor([1.0, 0.7, 1.3, 0.8, 0.0])
    made = jitter(images, brightness, contrast, saturation)
    for number, image in enumerate(images):
        one = v2.adjust_brightness(image, float(brightness[number]))
        one = v2.adjust_contrast(one, float(contrast[number]))
        one = v2.adjust_saturation(one, float(saturation[number]))
        torch.testing.assert_close(made[number], one, atol=1e-5, rtol=0)
    assert torch.equal(jitter(images, *[torch.ones(5)] * 3), images)


def test_the_order_of_jitter_matters_only_by_clipping() -> None:
    images = 0.4 + 0.2 * torch.rand(1, 3, 8, 8)
    made = jitter(images, torch.tensor([1.2]), torch.tensor([0.8]), torch.tensor([1.1]))
    other = v2.adjust_brightness(v2.adjust_contrast(v2.adjust_saturation(images, 1.1), 0.8), 1.2)
    torch.testing.assert_close(made, other, atol=1e-5, rtol=0)


def test_solarize(images: torch.Tensor) -> None:
    torch.testing.assert_close(solarize(images), v2.solarize(images, 128 / 255))


def test_solarize_is_pillows() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(16, 16)
    theirs = torch.from_numpy(np.array(ImageOps.solarize(Image.fromarray(values.numpy()))))
    assert torch.equal((solarize(values / 255) * 255).round().byte(), theirs)


def test_blur(images: torch.Tensor) -> None:
    sigma = torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0])
    made = blur(images, sigma)
    assert torch.equal(made[0], images[0])
    for number in range(1, 5):
        one = v2.gaussian_blur(images[number], [23, 23], [float(sigma[number])] * 2)
        torch.testing.assert_close(made[number], one, atol=1e-5, rtol=0)


def test_erase(images: torch.Tensor) -> None:
    start = torch.tensor([[0, 0], [3, 5], [20, 20], [7, 7], [23, 0]]).float()
    size = torch.tensor([[24, 24], [4, 9], [4, 4], [0, 0], [1, 24]]).float()
    color = torch.rand(5, 3)
    made = erase(images, start, size, color)
    for number, image in enumerate(images):
        place = [*start[number].int().tolist(), *size[number].int().tolist()]
        torch.testing.assert_close(made[number], v2.erase(image, *place, color[number][:, None, None]))


def test_box_mask() -> None:
    inside = box_mask(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 2.0]]), 3, 4)
    assert inside.int().tolist() == [[[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]]
