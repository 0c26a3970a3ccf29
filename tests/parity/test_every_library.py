"""Models of every library, compared with the oracle."""

from __future__ import annotations

import pytest
import torch

import vitrail
from tests.parity.checks import (
    SETTINGS,
    ask_oracle,
    check_against_oracle,
    check_layers_before_the_first_merge,
    check_nothing_merged,
    check_removal,
)
from tests.surgery.models import ALL

every_case = pytest.mark.parametrize("name", ALL)
every_timm_case = pytest.mark.parametrize("name", [name for name in ALL if name.startswith(("timm-", "eva-", "beit-"))])


@every_case
def test_nothing_merged_is_the_model_itself(name: str) -> None:
    check_nothing_merged(ALL[name])


THOROUGH = (
    "timm-class-odd",
    "timm-registers",
    "eva-eva02",
    "eva-dinov3",
    "eva-mixed-xy",
    "beit-own",
    "beit-both",
    "hf-deit",
    "hf-registers",
    "torchvision-vit",
)
"""Models that always meet every setting."""

DIFFERENT = ("steady", "per-layer", "unweighted-original", "beyond", "mask-per-image-original")
"""Settings that every model always meets; the others vary them."""


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param(name, setting, marks=[] if name in THOROUGH or setting in DIFFERENT else [pytest.mark.slow])
        for name in ALL
        for setting in SETTINGS
    ],
)
def test_outputs_and_groups_are_the_oracles(name: str, setting: str) -> None:
    check_against_oracle(ALL[name], SETTINGS[setting])


@every_case
def test_removal_restores_the_model(name: str) -> None:
    check_removal(ALL[name])


@every_timm_case
def test_layers_before_the_first_merge_are_the_models_own(name: str) -> None:
    check_layers_before_the_first_merge(ALL[name])


@every_timm_case
def test_features_stay_merged_on_request(name: str) -> None:
    case = ALL[name]
    model, images = case.model(), case.images()
    expected, options = ask_oracle(model, case, images, SETTINGS["steady"])
    with torch.no_grad(), vitrail.merge(model, **options, unmerge=False):
        features = model.forward_features(images)
    with torch.no_grad():
        assert torch.allclose(features, model.norm(expected.merged), rtol=0, atol=case.tolerance)
