"""timm's Eva, held against the oracle: rotary positions of merged tokens above all."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import vitrail
from tests.parity.checks import (
    SETTINGS,
    Setting,
    ask_oracle,
    check_against_oracle,
    check_nothing_merged,
    check_removal,
)
from tests.parity.models import Case
from tests.parity.models_timm_eva import CASES, eva, named

every_case = pytest.mark.parametrize("name", CASES)

DEFAULTS = {
    # timm's own frequencies and grids, which float32 only approximates.
    "cat": Case("cat", partial(eva, use_rot_pos_emb=True, img_size=56), (56, 56)),
    "dinov3": Case("dinov3", partial(named, "vit_small_patch16_dinov3", img_size=56), (56, 56)),
    "mixed": Case("mixed", partial(named, "vit_small_patch16_rope_mixed_224", img_size=56), (56, 56)),
    "eva02": Case("eva02", partial(named, "eva02_tiny_patch14_224", img_size=40), (40, 40)),
    "perception": Case("perception", partial(named, "vit_pe_core_base_patch16_224", img_size=40), (40, 40)),
}


@every_case
def test_nothing_merged_is_the_model_itself(name: str) -> None:
    check_nothing_merged(CASES[name])


@pytest.mark.parametrize("name", DEFAULTS)
def test_nothing_merged_is_the_model_itself_with_default_frequencies(name: str) -> None:
    check_nothing_merged(DEFAULTS[name])


@every_case
@pytest.mark.parametrize("setting", SETTINGS)
def test_outputs_and_groups_are_the_oracles(name: str, setting: str) -> None:
    check_against_oracle(CASES[name], SETTINGS[setting])


@pytest.mark.parametrize("r", range(0, 12, 3))
@pytest.mark.parametrize("name", ["dinov3", "no-prefix"])
def test_every_r_up_to_the_cap_and_beyond(name: str, r: int) -> None:
    check_against_oracle(CASES[name], Setting(r))


@pytest.mark.parametrize("name", DEFAULTS)
def test_default_frequencies_in_single_precision(name: str) -> None:
    case = DEFAULTS[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    expected, options = ask_oracle(model, case, images, SETTINGS["steady"])
    with torch.no_grad():
        merging = vitrail.merge(model, **options)
        with merging.track() as trace:
            output = model(images)
    assert trace.groups.tolist() == expected.groups
    assert torch.allclose(output, expected.outputs["output"], rtol=1e-4, atol=1e-4)


@every_case
def test_removal_gives_the_model_back(name: str) -> None:
    check_removal(CASES[name])


@every_case
def test_intermediates_come_out_at_full_length(name: str) -> None:
    case = CASES[name]
    model, images = case.model(), case.images()
    expected, options = ask_oracle(model, case, images, SETTINGS["steady"])
    prefix = model.num_prefix_tokens
    height, width = model.patch_embed.dynamic_feat_size(case.size)
    with torch.no_grad(), vitrail.merge(model, **options):
        features = model.forward_features(images)
        last, maps = model.forward_intermediates(images)
        rows = model.forward_intermediates(images, output_fmt="NLC", intermediates_only=True)
    for full in (features, last):
        assert torch.allclose(full, expected.features, rtol=0, atol=case.tolerance)
    for i, hidden in enumerate(expected.hidden):
        patches = hidden[:, prefix:]
        assert torch.allclose(rows[i], patches, rtol=0, atol=case.tolerance)
        grid = patches.transpose(1, 2).unflatten(2, (height, width))
        assert torch.allclose(maps[i], grid, rtol=0, atol=case.tolerance)


@every_case
def test_features_stay_merged_on_request(name: str) -> None:
    case = CASES[name]
    model, images = case.model(), case.images()
    expected, options = ask_oracle(model, case, images, SETTINGS["steady"])
    with torch.no_grad(), vitrail.merge(model, **options, unmerge=False):
        features = model.forward_features(images)
    with torch.no_grad():
        assert torch.allclose(features, model.norm(expected.merged), rtol=0, atol=case.tolerance)


def test_resolution_may_change_between_calls() -> None:
    case = CASES["dinov3-dynamic"]
    model = case.model()
    pictures = [torch.randn(2, 3, *shape, dtype=torch.float64) for shape in [(32, 64), (64, 16), (32, 32)]]
    expected = [ask_oracle(model, case, images, SETTINGS["steady"])[0] for images in pictures]
    with torch.no_grad(), vitrail.merge(model, r=3):
        for images, wanted in zip(pictures, expected, strict=True):
            assert torch.allclose(model(images), wanted.outputs["output"], rtol=0, atol=case.tolerance)
