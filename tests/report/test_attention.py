"""Maps by layer, by head and by rollout equal those of the recorded attention."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.report.models import inspect_quickly, random_images, small
from vitrail.report.sections.attention import CloserMaps, drawn_layers
from vitrail.tokens import Role, TokenSpec


def maps(rows: Tensor, special: int) -> Tensor:
    """Normalize rows (..., N) over patches, on a grid of 8 × 8."""
    patches = rows[..., special:]
    return (patches / patches.sum(-1, keepdim=True)).unflatten(-1, (8, 8))


def test_maps_are_those_of_the_recorded_attention() -> None:
    model = small("vit_medium_patch16_reg4_gap_256", class_token=True, depth=9)
    images = random_images(5)
    report = inspect_quickly(model, images)
    assert report.attention["closer"] == {"images": [0, 2, 4], "layers": [0, 2, 3, 5, 6, 8], "rollout": True}
    recording = vitrail.record(model, images, "attention", queries=range(69))
    for shown in report.images:
        assert ("closer" in shown.maps) == (shown.index in (0, 2, 4))
        if "closer" not in shown.maps:
            continue
        closer: CloserMaps = shown.maps["closer"]
        rows = {layer: recording.attention[layer][shown.index].double() for layer in range(9)}
        assert list(closer.layers) == [0, 2, 3, 5, 6, 8]
        for layer, found in closer.layers.items():
            expected = maps(rows[layer][:, :5], 5).mean(0)
            assert torch.allclose(found.double(), expected, atol=1e-5)
        assert torch.allclose(closer.heads.double(), maps(rows[8][:, :5], 5), atol=1e-5)
        followed = torch.eye(69, dtype=torch.float64)
        for layer in range(9):
            followed = (rows[layer].mean(0) / 2 + torch.eye(69, dtype=torch.float64) / 2) @ followed
        assert closer.rollout is not None
        assert torch.allclose(closer.rollout.double(), maps(followed[:5], 5), atol=1e-5)


def test_every_role_has_its_maps() -> None:
    tokens = [
        TokenSpec("cls", Role.CLASS),
        TokenSpec("teacher", Role.DISTILLATION),
        TokenSpec("memory", Role.REGISTER, 2),
        TokenSpec("breed", Role.TASK, classes=5),
    ]
    model = vitrail.create_model("vit_tiny_patch16", num_classes=3, tokens=tokens, image_size=128, depth=3).eval()
    report = inspect_quickly(model, random_images(3))
    page = report.to_html()
    assert len(report.attention["tokens"]) == 5
    image = next(one.name for one in report.images if "closer" in one.maps)
    for name in report.attention["tokens"]:  # tokens with maps alike share one
        assert re.search(rf"\b{name}\b[^<]*{image}</h4>", page)
    for what in ("layer 0", "rollout", "head 0"):
        assert f"Attention of class, {what}, {image}" in page


def test_without_full_attention_there_is_no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.report.sections.attention.ROLLOUT_BYTES", 4 * 2 * 65**2 - 1)
    report = inspect_quickly(small(), random_images(3))
    assert report.attention["closer"]["rollout"] is False
    assert "would take" in report.attention["closer"]["note"]
    page = report.to_html()
    assert ", layer 0" in page
    assert ", rollout, " not in page


def test_merged_models_have_layers_but_no_rollout() -> None:
    model = small()
    with vitrail.merge(model, r=8):
        report = inspect_quickly(model, random_images(3))
    assert "merged" in report.attention["closer"]["note"]
    assert any("closer" in one.maps for one in report.images)


def test_model_without_special_tokens_has_none() -> None:
    report = inspect_quickly(small(class_token=False, global_pool="avg"), random_images(3))
    assert "closer" not in report.attention
    assert "Layer by layer" not in report.to_html()


@pytest.mark.parametrize("depth", [1, 2, 5, 6, 7, 12, 24, 40])
def test_layers_run_from_the_first_to_the_last(depth: int) -> None:
    layers = drawn_layers(depth)
    assert layers[0] == 0
    assert layers[-1] == depth - 1
    assert len(layers) == min(depth, 6)
    assert list(layers) == sorted(set(layers))


class Shuffled:
    """Batches in another order each time."""

    def __init__(self) -> None:
        self.walks = 0

    def __iter__(self) -> Any:
        self.walks += 1
        yield from random_images(6).roll(self.walks, 0).split(2)


def test_images_that_change_between_passes_are_noticed() -> None:
    report = inspect_quickly(small(), Shuffled())
    assert "changed between" in report.attention["closer"]["note"]
    assert not any("closer" in one.maps for one in report.images)
    assert report.to_html()
