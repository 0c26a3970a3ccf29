"""Augmentation of a batch: order of steps, equal for any world size, compilable."""

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from tests.extras import always
from vitrail.data.augment import images as augment
from vitrail.data.augment.images import DRAWS, Augment, Strength
from vitrail.data.loading.order import generator
from vitrail.errors import InvalidOption

STRENGTHS = ["none", "flip", "light", "medium", "strong"]
AS_IT_IS: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (12, 3, 40, 40), dtype=torch.uint8)


def numbers(count: int, **given: float | list[float]) -> Tensor:
    """Numbers as they are drawn, with some of them given: by default the whole image, unchanged."""
    usual = {"area": 1.0, "ratio": 0.5, "flip": 1.0, "choice": 0.99, "blur": 0.0, "warped": 1.0, "erased": 1.0}
    table = torch.full((count, sum(DRAWS.values())), 0.5)
    found = dict(zip(DRAWS, table.split([*DRAWS.values()], 1), strict=True))
    for name, value in (usual | given).items():
        found[name].copy_(torch.tensor(value))
    return table


@pytest.mark.parametrize("strength", STRENGTHS)
def test_shapes_and_range(images: Tensor, strength: Strength) -> None:
    made = Augment(strength, 32)(images, generator("cpu", 0))
    assert (made.shape, made.dtype) == ((12, 3, 32, 32), torch.float32)
    assert made.is_contiguous()
    assert -1 <= made.min() < made.max() <= 1


@pytest.mark.parametrize("strength", STRENGTHS)
def test_the_same_for_any_world_size(images: Tensor, strength: Strength) -> None:
    augment = Augment(strength, 32)
    whole = augment(images, generator("cpu", 5, 1))
    parts = [augment(images[at : at + 4], generator("cpu", 5, 1), slice(at, at + 4), 12) for at in (0, 4, 8)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=0)
    other = augment(images, generator("cpu", 5, 2))
    assert torch.equal(other, whole) == (strength == "none")


def test_nothing_else_is_random(images: Tensor) -> None:
    augment = Augment("strong", 32, erasing=0.5)
    before = torch.get_rng_state()
    first = augment(images, generator("cpu", 1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert torch.equal(augment(images, generator("cpu", 1)), first)


def test_plain(images: Tensor) -> None:
    augment = Augment("strong", 40, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    expected = (images / 255 - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([0.5, 0.6, 0.7]).view(
        3, 1, 1
    )
    torch.testing.assert_close(augment.plain(images), expected)
    small = Augment("none", 24, **AS_IT_IS)
    expected = F.interpolate(images / 255, (24, 24), mode="bicubic", antialias=True).clamp(0, 1)
    torch.testing.assert_close(small.plain(images), expected)
    torch.testing.assert_close(small(images, generator("cpu", 0)), expected)


# ---------------------------------------------------------------- each draw does its part


@pytest.mark.parametrize("strength", STRENGTHS)
def test_neutral_augmentation_parameters_change_nothing(images: Tensor, strength: Strength) -> None:
    made = Augment(strength, 40, **AS_IT_IS).apply(images, numbers(12))
    # The least blur is a tenth of a pixel at 224, and no more than rounding.
    torch.testing.assert_close(made, images / 255, atol=1e-5, rtol=0)


@pytest.mark.parametrize("strength", ["flip", "light", "strong"])
def test_flip(images: Tensor, strength: Strength) -> None:
    made = Augment(strength, 40, **AS_IT_IS).apply(images, numbers(12, flip=[[0.4], [0.6]] * 6))
    torch.testing.assert_close(made[0::2], images[0::2].flip(-1) / 255, atol=1e-5, rtol=0)
    torch.testing.assert_close(made[1::2], images[1::2] / 255, atol=1e-5, rtol=0)


def test_choice_of_three(images: Tensor) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2.functional", reason="the reference is torchvision's")
    augment = Augment("medium", 40, **AS_IT_IS, jitter=0.0)
    made = augment.apply(images, numbers(12, choice=[[0.1], [0.5], [0.9]] * 4, blur=1.0))
    scaled = images / 255
    torch.testing.assert_close(made[0::3], v2.rgb_to_grayscale(scaled[0::3], 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(made[1::3], v2.solarize(scaled[1::3], 128 / 255), atol=1e-5, rtol=0)
    sigma = 2.0 * 40 / 224
    torch.testing.assert_close(made[2::3], v2.gaussian_blur(scaled[2::3], [9, 9], [sigma, sigma]), atol=1e-5, rtol=0)


def test_jitter_spans_its_range(images: Tensor) -> None:
    augment = Augment("medium", 40, **AS_IT_IS, jitter=0.2)
    for drawn, factor in ((0.0, 0.8), (1.0, 1.2)):
        made = augment.apply(images, numbers(12, jitter=[drawn, 0.5, 0.5]))
        torch.testing.assert_close(made, (images / 255 * factor).clamp(0, 1), atol=1e-5, rtol=0)


def test_crops_are_no_smaller_than_requested() -> None:
    """A ramp from left to right shows how wide a crop is."""
    ramp = torch.arange(0, 240, 4, dtype=torch.uint8).expand(64, 3, 60, 60)
    made = Augment("light", 60, **AS_IT_IS, crop_min=0.5, ratio=(1.0, 1.0))(ramp, generator("cpu", 3))
    width = (made[..., 0].mean((1, 2)) - made[..., -1].mean((1, 2))).abs() * 255 / 4 / 60
    assert width.min() > 0.5**0.5 - 0.05
    assert width.max() <= 1


def test_erasing() -> None:
    white = torch.full((400, 3, 16, 16), 255, dtype=torch.uint8)
    made = Augment("none", 16, **AS_IT_IS, erasing=0.25)(white, generator("cpu", 0))
    holes = (made != 1).any(1)
    area = holes.flatten(1).float().mean(1)
    assert 0.2 < (area > 0).float().mean() < 0.3
    assert area.max() < 0.4
    assert (Augment("medium", 16, jitter=0.0, erasing=None)._erased, Augment("strong", 16)._erased) == (0.0, 0.25)
    assert Augment("strong", 16, erasing=0.0)._erased == 0


# ---------------------------------------------------------------- speed and errors


@pytest.mark.parametrize("strength", always(["strong"], ["medium", "strong"]))
def test_compiles_as_one_graph_for_any_image(images: Tensor, strength: Strength) -> None:
    """The compiler traces one graph for any image: no shape depends on a value, and none is read back."""
    own = Augment(strength, 32)
    table = torch.rand(12, sum(DRAWS.values()))
    compiled = torch.compile(Augment.apply, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(own, images, table), own.apply(images, table))


def test_compiled_results_are_the_same(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal augmentation of another run is not compiled again."""
    monkeypatch.setattr(augment, "compiled", cache(partial(torch.compile, backend="aot_eager")))

    def made(compiled: bool) -> Tensor:
        return Augment("light", 32, compiled=compiled)(images, torch.Generator().manual_seed(0))

    torch.testing.assert_close(made(compiled=True), made(compiled=False))
    before = counters["stats"]["unique_graphs"]
    made(compiled=True)
    assert counters["stats"]["unique_graphs"] == before > 0


@pytest.mark.parametrize("strength", STRENGTHS)
def test_no_number_is_read_back_from_the_device(images: Tensor, strength: Strength) -> None:
    """On a device without numbers, reading one or making a shape of one is an error."""
    with torch.device("meta"):
        table = torch.rand(12, sum(DRAWS.values()))
    made = Augment(strength, 32).apply(images.to("meta"), table)
    assert made.shape == (12, 3, 32, 32)


def test_autocast_leaves_it_exact(images: Tensor) -> None:
    augment = Augment("medium", 32)
    with torch.autocast("cpu", torch.bfloat16):
        made = augment(images, generator("cpu", 0))
    assert made.dtype == torch.float32
    assert torch.equal(made, augment(images, generator("cpu", 0)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strength": "wild"}, "strength='wild': expected one of none, flip"),
        ({"size": 0}, "size=0"),
        ({"crop_min": 0.0}, "crop_min=0.0"),
        ({"ratio": (1.2, 1.3)}, "ratio="),
        ({"jitter": 1.0}, "jitter=1.0"),
        ({"erasing": 1.5}, "erasing=1.5"),
        ({"std": (1.0, 0.0, 1.0)}, "std above 0"),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        Augment(**({"strength": "light", "size": 8} | given))


def test_rows_must_fit(images: Tensor) -> None:
    with pytest.raises(InvalidOption, match="4 rows of the global batch, for 12"):
        Augment("light", 8)(images, generator("cpu", 0), slice(0, 4), 24)


@pytest.mark.parametrize("strength", ["none", "flip", "light", "medium", "strong"])
def test_masks_follow_their_images(strength: str) -> None:
    """A mask that repeats the image's two shades still does after augmentation, apart from edges."""
    side = 48
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    masks = torch.stack([((rows + shift) // 12 + columns // 16) % 2 for shift in range(0, 24, 3)]).to(torch.uint8)
    images = masks.unsqueeze(1).expand(-1, 3, -1, -1) * 255
    augment = Augment(strength, 32, (0.0,) * 3, (1.0,) * 3, erasing=0.0)
    made = augment(torch.cat([images, masks.unsqueeze(1)], 1), torch.Generator().manual_seed(3))
    assert made.shape == (8, 4, 32, 32)
    image, mask = made[:, 0], made[:, 3]
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    plain = Augment(strength, 32, (0.0,) * 3, (1.0,) * 3, erasing=0.0)(images, torch.Generator().manual_seed(3))
    assert torch.equal(made[:, :3], plain)  # the image is what it is without a mask
    if strength in ("none", "flip", "light"):  # others change colors
        assert ((image > 0.5) == (mask > 0.5)).float().mean() > 0.94
    unknown = augment(torch.full((2, 4, side, side), 255, dtype=torch.uint8), torch.Generator().manual_seed(0))
    assert (unknown[:, 3] == 255).all()
