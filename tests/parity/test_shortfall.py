"""Fewer merges than requested, where the possible number depends on the images.

In the original order protected patches stay where they are, so the places of the tokens between them, and
with them the number of pairs, depend on what merged before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.parity.checks import SETTINGS, Setting, ask_oracle, check_against_oracle, saturates
from tests.parity.models.cases import Case
from tests.parity.models.timm_vit import CASES, vit
from vitrail.errors import SaturatedWarning


def merge_and_run(model: nn.Module, images: Tensor, **options: Any) -> Tensor:
    """Merge a model and run it: too few pairs are only detected in the forward pass."""
    vitrail.merge(model, **options)
    with torch.no_grad():
        return model(images)


@pytest.mark.parametrize("name", ["gap-no-class", "siglip-tower", "max"])
def test_shortfall_in_the_original_order_is_reported(name: str) -> None:
    setting = Setting((3, 2, 3), order="original", protect="each")
    case = CASES[name]
    model, images = case.model(), case.images()
    expected, options = ask_oracle(model, case, images, setting)
    assert saturates(expected, expected.features.shape[1], options["r"])
    with pytest.warns(SaturatedWarning):
        merge_and_run(model, images, **options)


@pytest.mark.parametrize("name", ["max", "class-even", "distilled", "siglip-tower"])
def test_later_layers_merge_what_earlier_ones_could_not(name: str) -> None:
    check_against_oracle(CASES[name], Setting(1000, order="original", protect="each"))


@pytest.mark.parametrize("setting", ["beyond", "beyond-original", "mask-per-image-beyond"])
@pytest.mark.parametrize("class_token", [True, False])
def test_down_to_the_last_pair(setting: str, class_token: bool) -> None:
    """More layers than there is anything to merge in."""

    def deep() -> nn.Module:
        return vit(depth=7, class_token=class_token, global_pool="avg")

    check_against_oracle(Case("deep", deep, (32, 32)), SETTINGS[setting])


def test_everything_protected_merges_nothing() -> None:
    case = CASES["registers"]
    model, images = case.model(), case.images()
    with torch.no_grad():
        plain = model(images)
    with pytest.warns(SaturatedWarning):
        merged = merge_and_run(model, images, r=2, protect=torch.ones(16, dtype=torch.bool))
    assert torch.allclose(merged, plain, rtol=0, atol=1e-12)
