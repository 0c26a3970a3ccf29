"""Merging inside windows equals the loops of the oracle, and nothing merged equals the model to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.oracle.windows import run
from tests.parity.models.cases import Case, outputs_of
from tests.parity.models.windowed import CASES, DESCRIBE

everywhere = pytest.mark.parametrize("name", CASES)


def main_output(model: nn.Module, images: Tensor) -> Tensor:
    return next(iter(outputs_of(model(images)).values()))


def ask_oracle(case: Case, model: nn.Module, images: Tensor, counts: Sequence[int], **options: bool) -> Tensor:
    describe = DESCRIBE[case.name.partition("-")[0]]
    found = []
    for image in images:
        recipe = describe(model, image[None])
        found.append(recipe.finish(run(recipe.steps, recipe.tokens, counts, **options)))
    return torch.cat(found)


@everywhere
@torch.no_grad()
def test_nothing_merged_is_the_model_to_the_bit(name: str) -> None:
    case = CASES[name]
    model, images = case.model(), case.images()
    plain = main_output(model, images)
    with vitrail.merge(model, r=0):
        assert torch.equal(main_output(model, images), plain)


@everywhere
@pytest.mark.parametrize("proportional", [True, False])
@torch.no_grad()
def test_merged_is_what_the_loops_compute(name: str, proportional: bool) -> None:
    case = CASES[name]
    model, images = case.model(), case.images()
    plain, keys = main_output(model, images), list(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merging = vitrail.merge(model, r=3, proportional=proportional)
        merged = main_output(model, images)
    counts = [r for r, fits in zip(merging.r, merges(model), strict=True) if fits]
    merging.remove()
    assert torch.equal(main_output(model, images), plain)
    assert list(model.state_dict()) == keys
    expected = ask_oracle(case, model, images, counts, proportional=proportional)
    assert (merged - expected).abs().max() < 1e-9 * expected.abs().max()
    assert (merged - plain).abs().max() > 1e-4 * plain.abs().max()
    unmerged = ask_oracle(case, model, images, [0] * len(counts))
    assert (unmerged - plain).abs().max() < case.tolerance * plain.abs().max()  # eager SAM is float32 inside


def merges(model: nn.Module) -> list[bool]:
    """Whether each block fits: the oracle counts these alone."""
    found = vitrail.adapters.find(model)
    return [layer.windows is not None for layer in found.adapter.layer_windows(found.trunk)]
