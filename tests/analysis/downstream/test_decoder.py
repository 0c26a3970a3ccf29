"""A decoder on frozen features: it learns what a linear head cannot, and the same way each time."""

import pytest
import torch

from vitrail.analysis.downstream.decoder import fit_decoder
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.tokens import TokenLayout

GRID = (4, 4)


def shifted(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random patches (count, 16, 4), and masks of 8 x 8 pixels that follow the patch to the left."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2, (count, 4, 4), generator=generator)
    features = torch.nn.functional.one_hot(values, 2).float().flatten(1, 2)
    masks = values.roll(1, 2).repeat_interleave(2, 1).repeat_interleave(2, 2)
    masks[:, :, :2] = 255
    return torch.cat([features, torch.randn(count, 16, 2, generator=generator)], 2), masks


def test_a_decoder_reads_neighbors() -> None:
    """The mask of a patch follows from its neighbor alone: a linear head on single patches has 50 %."""
    features, masks = shifted(96, 0)
    features, masks = (torch.cat([one, other]) for one, other in ((features, features), (masks, masks)))
    decoder = fit_without_flips(features, masks, epochs=30)
    held_out, truth = shifted(24, 1)
    found = decoder(held_out, TokenLayout((), (1, *GRID)), (8, 8)).argmax(1)
    valid = truth != 255
    assert (found == truth)[valid].float().mean() > 0.85


def fit_without_flips(features: torch.Tensor, masks: torch.Tensor, epochs: int) -> torch.nn.Module:
    """Fit without flips: here a mask follows the patch to the left, and in a mirror image the one to the right."""
    with pytest.MonkeyPatch.context() as patch:
        rand = torch.rand
        patch.setattr(torch, "rand", lambda *size, **options: rand(*size, **options) + 1)
        return fit_decoder(features, masks, GRID, classes=2, hidden=16, epochs=epochs, batch_size=16)


def test_the_same_seed_gives_the_same_decoder() -> None:
    features, masks = shifted(8, 0)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    pair = [fit_decoder(features, masks, GRID, classes=2, hidden=8, epochs=2, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    first, second, other = (torch.cat([value.flatten() for value in one.state_dict().values()]) for one in pair)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert not pair[0].training
    assert not any(value.requires_grad for value in pair[0].parameters())


def test_bad_input() -> None:
    features, masks = shifted(4, 0)
    with pytest.raises(UnsupportedInput, match="do not match a grid"):
        fit_decoder(features, masks, (4, 5), classes=2)
    with pytest.raises(UnsupportedInput, match="values from 0 to 0"):
        fit_decoder(features, masks, GRID, classes=1)
    with pytest.raises(InvalidOption, match="epochs"):
        fit_decoder(features, masks, GRID, classes=2, epochs=0)
