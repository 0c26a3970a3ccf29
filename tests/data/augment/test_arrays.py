"""Augmentation of arrays: against plain loops, along every axis, equal for any world size."""

import pytest
import torch
from torch import Tensor

from vitrail.data.augment.arrays import DRAWS, REACH, ArrayAugment, mask_band, shift, whole_number
from vitrail.data.loading.order import generator
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption

SHAPES = {"spectrograms": (6, 2, 16, 24), "clips": (6, 3, 8, 9, 17)}
NORMALIZING = {2: InputSpec.of_arrays((1.0, -2.0), (2.0, 0.5)), 3: InputSpec.of_arrays((0.5,) * 3, (0.25,) * 3, 255)}


def values(kind: str) -> Tensor:
    shape = SHAPES[kind]
    if kind == "clips":
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator("cpu", 1))
    return torch.randn(shape, generator=generator("cpu", 1), dtype=torch.float64)


def brute(sample: Tensor, strength: str, numbers: list[float], normalizing: InputSpec) -> Tensor:
    """Augment one sample, value by value."""
    made = torch.zeros(sample.shape, dtype=torch.float64)
    sides = sample.shape[1:]
    most = [int(side * REACH[strength]) for side in sides]
    offsets, bands = [0] * len(sides), [(0, 0)] * len(sides)
    for axis, side in enumerate(sides):
        shift, width, place = numbers[3 * axis : 3 * axis + 3]
        offsets[axis] = min(int(shift * (2 * most[axis] + 1)), 2 * most[axis]) - most[axis]
        if strength in ("medium", "strong"):
            wide = min(int(width * (most[axis] + 1)), most[axis])
            begin = min(int(place * (side - wide + 1)), side - wide)
            bands[axis] = (begin, begin + wide)
    for index in torch.cartesian_prod(*(torch.arange(side) for side in sides)).tolist():
        source = [at - by for at, by in zip(index, offsets, strict=True)]
        outside = any(not 0 <= at < side for at, side in zip(source, sides, strict=True))
        if outside or any(low <= at < high for at, (low, high) in zip(index, bands, strict=True)):
            continue
        for channel, (mean, std) in enumerate(zip(normalizing.mean, normalizing.std, strict=True)):
            value = sample[(channel, *source)].item() / normalizing.scale
            made[(channel, *index)] = (value - mean) / std
    return made


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("strength", REACH)
def test_against_loops(kind: str, strength: str) -> None:
    given = values(kind)
    normalizing = NORMALIZING[given.shape[1]]
    table = torch.rand(len(given), DRAWS * (given.dim() - 2), generator=generator("cpu", 2))
    table[0], table[1] = 0.0, 1.0  # the ends of what may be drawn
    made = ArrayAugment(strength, normalizing).apply(given, table)
    assert made.dtype == torch.float32
    for number in (0, 1, 2):
        expected = brute(given[number], strength, table[number].tolist(), normalizing)
        torch.testing.assert_close(made[number].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("strength", REACH)
def test_the_same_for_any_world_size(kind: str, strength: str) -> None:
    given = values(kind)
    augment = ArrayAugment(strength, NORMALIZING[given.shape[1]])
    whole = augment(given, generator("cpu", 5, 1))
    parts = [augment(given[at : at + 3], generator("cpu", 5, 1), slice(at, at + 3), 6) for at in (0, 3)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(augment(given, generator("cpu", 5, 2)), whole) == (strength == "none")


def test_shifts_and_bands_one_by_one() -> None:
    line = torch.arange(1.0, 7.0).expand(3, 1, 2, 6)
    moved = shift(line, 3, torch.tensor([0, 2, -1]))
    assert moved[:, 0, 1].tolist() == [[1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4], [2, 3, 4, 5, 6, 0]]
    dark = mask_band(line, 3, torch.tensor([0, 2, 4]), torch.tensor([0, 1, 2]))
    assert dark[:, 0, 0].tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 0, 4, 5, 6], [1, 2, 3, 4, 0, 0]]


def test_evaluation_only_normalizes() -> None:
    values, draw = torch.randn(3, 2, 8, 12), torch.Generator().manual_seed(0)
    augment = ArrayAugment("strong", InputSpec.of_arrays((0.5, 1.0), (2.0, 3.0)))
    assert torch.equal(augment.settled()(values, draw), augment.plain(values))
    assert not torch.equal(augment(values, draw), augment.plain(values))


def test_numbers_are_spread_evenly() -> None:
    counts = (whole_number((torch.arange(7000) + 0.5) / 7000, -3, 3) + 3).bincount()
    assert counts.tolist() == [1000] * 7
    highest = torch.tensor([0, 1, 4])
    assert torch.equal(whole_number(torch.ones(3), 0, highest), highest)


def test_no_number_is_read_back_from_the_device() -> None:
    """On a device without numbers, reading one or making a shape of one is an error."""
    given = values("spectrograms").to("meta")
    assert ArrayAugment("strong", NORMALIZING[2]).apply(given, torch.rand(6, 6).to("meta")).shape == given.shape


def test_autocast_leaves_it_exact() -> None:
    augment, given = ArrayAugment("medium", NORMALIZING[2]), values("spectrograms").float()
    with torch.autocast("cpu", torch.bfloat16):
        made = augment(given, generator("cpu", 0))
    assert torch.equal(made, augment(given, generator("cpu", 0)))


def test_refusals() -> None:
    with pytest.raises(InvalidOption, match="augment='flip'"):
        ArrayAugment("flip", NORMALIZING[2])
    for wrong in ({"mean": (), "std": ()}, {"mean": (0,), "std": (0,)}, {"mean": (float("nan"),), "std": (1,)}):
        with pytest.raises(InvalidOption, match="channels"):
            InputSpec.of_arrays(**wrong)
