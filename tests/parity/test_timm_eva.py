"""timm's Eva, compared with the oracle, in particular rotary positions of merged tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import vitrail
from tests.oracle import describe, run
from tests.parity.checks import (
    SETTINGS,
    Setting,
    ask_oracle,
    check_against_oracle,
    check_nothing_merged,
)
from tests.parity.models.cases import Case
from tests.parity.models.timm_eva import ATTENTION, CASES, DINOV3, ROTARY, eva, named

every_case = pytest.mark.parametrize("name", CASES)

DEFAULTS = {
    # timm's own frequencies and grids, which float32 only approximates.
    "cat": Case("cat", partial(eva, use_rot_pos_emb=True, img_size=56), (56, 56)),
    "dinov3": Case("dinov3", partial(named, "vit_small_patch16_dinov3", img_size=56), (56, 56)),
    "mixed": Case("mixed", partial(named, "vit_small_patch16_rope_mixed_224", img_size=56), (56, 56)),
    "eva02": Case("eva02", partial(named, "eva02_tiny_patch14_224", img_size=40), (40, 40)),
    "perception": Case("perception", partial(named, "vit_pe_core_base_patch16_224", img_size=40), (40, 40)),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_nothing_merged_is_the_model_itself_with_default_frequencies(name: str) -> None:
    check_nothing_merged(DEFAULTS[name])


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


def test_coordinates_jittered_in_training_are_the_ones_that_merge() -> None:
    """In training DINOv3 stretches coordinates at random; merged tokens sit between the stretched ones."""
    options = {"rope_shift_coords": 0.5, "rope_jitter_coords": 2.0, "rope_rescale_coords": 2.0}
    case = Case("jitter", partial(eva, **DINOV3, **options, num_reg_tokens=2), (32, 32), needs=ATTENTION)
    model, images = case.model().train(), case.images()
    with torch.no_grad():
        torch.manual_seed(3)
        plain = model(images)
        torch.manual_seed(3)
        with vitrail.merge(model, r=0):
            assert torch.allclose(model(images), plain, rtol=0, atol=1e-9)
        recipe = describe(model, images)
        torch.manual_seed(3)
        coordinates = model.rope._apply_coord_augs(torch.tensor(recipe.positions, dtype=torch.float32))
        expected = run(replace(recipe, positions=coordinates.tolist()), 3)
        merging = vitrail.merge(model, r=3)
        torch.manual_seed(3)
        with merging.track() as trace:
            output = model(images)
    assert trace.groups.tolist() == expected.groups
    assert torch.allclose(output, expected.outputs["output"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [ROTARY, DINOV3], ids=["cat", "dinov3"])
def test_patches_dropped_in_training_keep_their_positions(kind: dict[str, Any]) -> None:
    """In training each image may lose different patches; the remaining ones keep their positions."""
    case = Case("drop", partial(eva, **kind, patch_drop_rate=0.25), (32, 32))
    model, images = case.model(), case.images()
    with torch.no_grad():
        recipe = describe(model, images)
        model.train()
        torch.manual_seed(5)
        tokens, kept = model.patch_drop(recipe.tokens)
        alone = [
            run(replace(recipe, tokens=row[None], positions=[recipe.positions[i] for i in patches]), 2)
            for row, patches in zip(tokens, kept.tolist(), strict=True)
        ]
        merging = vitrail.merge(model, r=2)
        torch.manual_seed(5)
        with merging.track() as trace:
            output = model(images)
    assert trace.groups.tolist() == [expected.groups[0] for expected in alone]
    wanted = torch.cat([expected.outputs["output"] for expected in alone])
    assert torch.allclose(output, wanted, rtol=0, atol=1e-9)


def test_resolution_may_change_between_calls() -> None:
    case = CASES["dinov3-dynamic"]
    model = case.model()
    batches = [torch.randn(2, 3, *shape, dtype=torch.float64) for shape in [(32, 64), (64, 16), (32, 32)]]
    expected = [ask_oracle(model, case, images, SETTINGS["steady"])[0] for images in batches]
    with torch.no_grad(), vitrail.merge(model, r=3):
        for images, wanted in zip(batches, expected, strict=True):
            assert torch.allclose(model(images), wanted.outputs["output"], rtol=0, atol=case.tolerance)
