"""timm's VisionTransformer, compared with the oracle."""

from __future__ import annotations

import pytest
import torch

import vitrail
from tests.parity.checks import (
    SETTINGS,
    Setting,
    ask_oracle,
    check_against_oracle,
)
from tests.parity.models.timm_vit import CASES

every_case = pytest.mark.parametrize("name", CASES)


@pytest.mark.parametrize("order", ["paper", "original"])
@pytest.mark.parametrize("r", range(11))
@pytest.mark.parametrize("name", ["class-odd", "gap-no-class", "distilled", "registers-no-class"])
def test_every_r_up_to_the_cap_and_beyond(name: str, r: int, order: str) -> None:
    check_against_oracle(CASES[name], Setting(r, order=order))


@every_case
def test_features_come_out_at_full_length(name: str) -> None:
    case = CASES[name]
    model, images = case.model(), case.images()
    expected, options = ask_oracle(model, case, images, SETTINGS["steady"])
    with torch.no_grad(), vitrail.merge(model, **options):
        features = model.forward_features(images)
    assert torch.allclose(features, expected.features, rtol=0, atol=case.tolerance)


@every_case
@pytest.mark.parametrize("norm", [False, True])
def test_intermediates_come_out_at_full_length(name: str, norm: bool) -> None:
    case = CASES[name]
    model, images = case.model(), case.images()
    expected, options = ask_oracle(model, case, images, SETTINGS["steady"])
    prefix = model.num_prefix_tokens
    with torch.no_grad(), vitrail.merge(model, **options):
        last, maps = model.forward_intermediates(images, norm=norm)
        rows = model.forward_intermediates(images, norm=norm, output_fmt="NLC", intermediates_only=True)
        some = model.forward_intermediates(
            images, indices=[0, 1], norm=norm, output_fmt="NLC", intermediates_only=True, stop_early=True
        )
        with_prefix = model.forward_intermediates(
            images, norm=norm, output_fmt="NLC", intermediates_only=True, return_prefix_tokens=True
        )
    assert torch.allclose(last, expected.features, rtol=0, atol=case.tolerance)
    height, width = model.patch_embed.dynamic_feat_size(case.size)
    for i, hidden in enumerate(expected.hidden):
        with torch.no_grad():
            wanted = model.norm(hidden) if norm else hidden
        patches = wanted[:, prefix:]
        grid = patches.transpose(1, 2).unflatten(2, (height, width))
        assert torch.allclose(maps[i], grid, rtol=0, atol=case.tolerance)
        assert torch.allclose(rows[i], patches, rtol=0, atol=case.tolerance)
        if i < 2:
            assert torch.allclose(some[i], patches, rtol=0, atol=case.tolerance)
        if prefix:
            assert torch.allclose(with_prefix[i][0], patches, rtol=0, atol=case.tolerance)
            assert torch.allclose(with_prefix[i][1], wanted[:, :prefix], rtol=0, atol=case.tolerance)


def test_a_stopped_pass_leaves_no_state() -> None:
    """After `stop_early` the last block was never reached; the next pass still starts afresh."""
    case = CASES["registers"]
    model, images = case.model(), case.images()
    expected, options = ask_oracle(model, case, images, SETTINGS["steady"])
    with torch.no_grad(), vitrail.merge(model, **options):
        model.forward_intermediates(images, indices=[0], stop_early=True, intermediates_only=True)
        output = model(images)
    assert torch.allclose(output, expected.outputs["output"], rtol=0, atol=case.tolerance)


def test_r_may_change_between_calls() -> None:
    case = CASES["class-even"]
    model, images = case.model(), case.images()
    settings = [Setting(2), Setting((5, 1)), Setting(0), Setting(3)]
    answers = [ask_oracle(model, case, images, setting) for setting in settings]
    merging = vitrail.merge(model, r=1)
    for expected, options in answers:
        merging.r = options["r"]
        with torch.no_grad():
            output = model(images)
        assert torch.allclose(output, expected.outputs["output"], rtol=0, atol=case.tolerance)


def test_resolution_may_change_between_calls() -> None:
    """One patched dynamic model, images of several shapes."""
    case = CASES["dynamic"]
    model = case.model()
    shapes = [(24, 56), (32, 32), (40, 24)]
    batches = [torch.randn(2, 3, *shape, dtype=torch.float64) for shape in shapes]
    expected = [ask_oracle(model, case, images, SETTINGS["steady"])[0] for images in batches]
    with torch.no_grad(), vitrail.merge(model, r=3):
        for images, wanted in zip(batches, expected, strict=True):
            assert torch.allclose(model(images), wanted.outputs["output"], rtol=0, atol=case.tolerance)
