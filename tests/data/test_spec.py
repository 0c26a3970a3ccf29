"""Images as a model expects them: the whole image, at its size, normalized."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data import InputSpec, to_tensor
from vitrail.errors import InvalidOption, UnsupportedInput

PLAIN = InputSpec((8, 12), (0, 0, 0), (1, 1, 1))


def test_values_are_normalized_for_each_color() -> None:
    prepared = InputSpec((4, 6), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2))
    batch = to_tensor([Image.new("RGB", (9, 7), (255, 51, 0))], prepared)
    assert batch.shape == (1, 3, 4, 6)
    assert batch.dtype == torch.float32
    expected = torch.tensor([(1 - 0.1) / 0.5, (0.2 - 0.2) / 0.25, (0 - 0.3) / 2])
    torch.testing.assert_close(batch[0], expected.view(3, 1, 1).expand(3, 4, 6))


def test_right_size_passes_through_exactly() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    batch = to_tensor([Image.fromarray(pixels)], PLAIN)
    assert torch.equal((batch[0] * 255).round().to(torch.uint8), torch.from_numpy(pixels).permute(2, 0, 1))


def test_nothing_is_cropped() -> None:
    """Each quarter of the image ends up in the same quarter of the tensor, whatever its shape."""
    pixels = np.zeros((60, 20, 3), dtype=np.uint8)
    pixels[:30, :10], pixels[:30, 10:], pixels[30:, :10] = 80, 160, 240
    batch = to_tensor([Image.fromarray(pixels)], PLAIN)[0, 0] * 255
    corners = [batch[0, 0], batch[0, -1], batch[-1, 0], batch[-1, -1]]
    assert [round(float(corner)) for corner in corners] == [80, 160, 240, 0]


def test_shrinking_is_antialiased() -> None:
    stripes = np.zeros((64, 96, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    inner = to_tensor([Image.fromarray(stripes)], PLAIN)[..., 1:-1]
    assert (inner - 0.5).abs().max() < 0.02


def test_batch_keeps_order_and_takes_any_kind_of_image() -> None:
    images = [Image.new("L", (3, 3), 51), Image.new("RGBA", (5, 2), (0, 0, 0, 0)), Image.new("RGB", (9, 9))]
    batch = to_tensor(images, PLAIN)
    assert batch.shape == (3, 3, 8, 12)
    torch.testing.assert_close(batch.mean((1, 2, 3)), torch.tensor([0.2, 1.0, 0.0]))


def test_one_image_needs_no_list() -> None:
    assert to_tensor(Image.new("RGB", (9, 9)), PLAIN).shape == (1, 3, 8, 12)  # type: ignore[arg-type]


def test_no_images_is_an_error() -> None:
    with pytest.raises(UnsupportedInput, match="no images"):
        to_tensor([], PLAIN)


def test_preprocessing_is_frozen_comparable_and_made_of_tuples() -> None:
    prepared = InputSpec([8, np.int64(12)], [0, 0, 0], [1, 1, 1])  # type: ignore[arg-type]
    assert prepared == PLAIN
    assert hash(prepared) == hash(PLAIN)
    with pytest.raises(dataclasses.FrozenInstanceError):
        prepared.size = (1, 1)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": (0, 4)}, r"size=\(0, 4\)"),
        ({"size": (4,)}, r"size=\(4,\)"),
        ({"size": (4.5, 4)}, "size="),
        ({"mean": (0, 0)}, r"mean=\(0, 0\)"),
        ({"mean": (0, 0, float("nan"))}, "mean="),
        ({"std": (1, 0, 1)}, r"std=\(1, 0, 1\)"),
    ],
)
def test_wrong_preprocessing_is_an_error(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        InputSpec(**{"size": (4, 4), **wrong})  # type: ignore[arg-type]


def test_specifications_of_saved_models_stay_readable() -> None:
    """Models of images were saved with size, mean and std; those of arrays with mean, std and scale."""
    images = InputSpec.from_dict({"size": [8, 12], "mean": [0, 0, 0], "std": [1, 1, 1]})
    assert images == PLAIN
    arrays = InputSpec.from_dict({"mean": [0.5], "std": [2.0], "scale": 255})
    assert (arrays.is_array, arrays.of_bytes, arrays.shape) == (True, True, (1,))
    assert arrays.normalize(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)).eq(0.25).all()
    for spec in (images, arrays):
        assert InputSpec.from_dict(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec
