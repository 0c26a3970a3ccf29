"""Convolutional stems, and patch drop in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.models.mixes import SMALL, built, random_images
from tests.surgery.models import flops_that_run
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.models import ViT, ViTConfig

CONVOLVED: dict[str, Any] = {**SMALL, "stem": "convolutions"}


def test_a_stem_halves_until_a_pixel_is_a_patch() -> None:
    """Compare with explicit layers; the receptive field of a patch ends at its neighbors."""
    config = ViTConfig(**CONVOLVED)
    model = built(config)
    first, norm, _, second, other, _ = model.patch_embed.stem
    assert [tuple(conv.weight.shape[:2]) for conv in (first, second)] == [(12, 3), (24, 12)]
    x = random_images(config)
    with torch.no_grad():
        y = torch.relu(norm(nn.functional.conv2d(x, first.weight, stride=2, padding=1)))
        y = torch.relu(other(nn.functional.conv2d(y, second.weight, stride=2, padding=1)))
        expected = (
            torch.einsum("bchw,dc->bhwd", y, model.patch_embed.proj.weight[..., 0, 0]) + model.patch_embed.proj.bias
        )
        torch.testing.assert_close(model.patch_embed(x), expected.flatten(1, 2))
    x.requires_grad_()
    model.patch_embed(x)[0, 5].sum().backward()  # row 1, column 1 of patches of 4 pixels
    rows = x.grad[0].abs().sum((0, 2)).nonzero()[:, 0]
    assert (int(rows.min()), int(rows.max())) == (1, 7)


def test_a_model_with_a_stem_saves_merges_and_counts(tmp_path: Any) -> None:
    config = ViTConfig(**CONVOLVED)
    model, x = built(config), random_images(config)
    with torch.no_grad():
        plain = model(x)
        model.save_pretrained(tmp_path / "model")
        assert torch.equal(ViT.from_pretrained(tmp_path / "model").double().eval()(x), plain)
        with vitrail.merge(model, r=0):
            assert torch.equal(model(x), plain)
        with vitrail.merge(model, r=3) as merging, merging.track() as trace:
            model(x)
        assert trace.groups.shape == (2, 16)
        assert torch.equal(model(x), plain)
        assert vitrail.count(model).flops * 2 == flops_that_run(lambda: model(x[:1]))
    assert vitrail.count(model, (16, 32)).tokens == 1 + 32
    with pytest.raises(UnsupportedModel, match="stem='convolutions'"):
        vitrail.to_timm(model)


@pytest.mark.parametrize("patch", [6, (4, 8), 1, (2, 4, 4)])
def test_patch_sizes_that_a_stem_cannot_have(patch: Any) -> None:
    sides = (4, 24, 24) if isinstance(patch, tuple) and len(patch) == 3 else 24
    with pytest.raises(InvalidOption, match=r"square patch_size of 2, 4, 8, 16"):
        ViTConfig(**{**CONVOLVED, "image_size": sides, "patch_size": patch})


@pytest.mark.parametrize("position", ["learned", "sincos", "rotary"])
def test_dropped_patches_are_absent(position: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their order restored, blocks must see a subset of the patches, each at its own position."""
    config = ViTConfig(**SMALL, position=position, patch_drop=0.5)
    model, x = built(config).train(), random_images(config)
    places = torch.tensor([[3, 15, 0, 8, 7, 2, 11, 4], [9, 1, 14, 5, 6, 13, 10, 12]])
    drawn = torch.full((2, 16), 9.0, dtype=torch.float64)
    drawn.scatter_(1, places, torch.arange(8.0, dtype=torch.float64).expand(2, -1))
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: drawn)
    with torch.no_grad():
        found = model.forward_features(x)
        expected = torch.stack([alone(model, x[i : i + 1], places[i]) for i in range(2)])
    assert found.shape == (2, 1 + 8, 24)
    torch.testing.assert_close(found, expected)
    assert model.eval().forward_features(x).shape == (2, 17, 24)


def alone(model: ViT, x: Tensor, places: Tensor) -> Tensor:
    """Return the features of one image with these patches only, by masking instead of dropping the others."""
    from vitrail.models.position import rotary_table

    patches, special = model._embed(x, model.config.grid)
    sequence = torch.cat([special["cls"], patches], 1)
    kept = torch.cat([torch.zeros(1, dtype=torch.long), 1 + places])
    mask = torch.zeros(17, dtype=torch.bool).index_fill(0, kept, True).expand(17, 17)
    rope = rotary_table(model.config.grid, model.config.head_width, 2, x) if model.config.position == "rotary" else None
    for block in model.blocks:
        sequence = block(sequence, rope=rope, mask=mask)
    return model.norm(sequence)[0, kept]


def test_each_patch_is_dropped_at_the_configured_rate() -> None:
    from vitrail.models.vit import _drop_patches

    torch.manual_seed(0)
    x = torch.arange(12.0).expand(2000, 12).unsqueeze(-1)
    kept, rope = _drop_patches(x, None, 0.25)
    assert rope is None
    assert kept.shape == (2000, 9, 1)
    assert all(len(set(row)) == 9 for row in kept[:, :, 0].tolist())
    shares = torch.bincount(kept.flatten().long(), minlength=12) / 2000
    assert (shares - 0.75).abs().max() < 5 * (0.75 * 0.25 / 2000) ** 0.5


def test_merging_with_dropped_patches() -> None:
    config = ViTConfig(**SMALL, patch_drop=0.25)
    model, x = built(config).train(), random_images(config)
    with vitrail.merge(model, r=2) as merging, merging.track() as trace:
        model(x).sum().backward()
    assert trace.layout.num_patches == 12
    rotary = built(ViTConfig(**SMALL, patch_drop=0.25, position="rotary")).train()
    with vitrail.merge(rotary, r=2), pytest.raises(UnsupportedInput, match="train it with patch_drop=0"):
        rotary(x)
