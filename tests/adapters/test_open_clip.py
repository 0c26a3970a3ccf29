"""open_clip: models of both towers, names, and towers that are refused."""

from __future__ import annotations

from typing import Any

import open_clip
import pytest
import torch
from torch import nn

import vitrail
from tests.oracle import describe, run
from tests.parity.models.cases import redraw
from tests.parity.models.open_clip_towers import tower
from vitrail.adapters import find, input_spec
from vitrail.errors import ModelLoadError, UnsupportedModel

VISION = {"layers": 3, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32, "mlp_ratio": 2.0}
TEXT = {"context_length": 8, "vocab_size": 40, "width": 24, "heads": 2, "layers": 2}
TEXTS = torch.tensor([[1, 5, 9, 3, 39, 0, 0, 0], [1, 4, 4, 8, 39, 0, 0, 0]])


def both(kind: str) -> Any:
    """Return a small model of both towers, in float64 with redrawn parameters."""
    if kind == "clip":
        model = open_clip.CLIP(16, dict(VISION), dict(TEXT))
    elif kind == "custom":
        model = open_clip.CustomTextCLIP(16, dict(VISION), dict(TEXT))
    elif kind == "coca":
        pool = {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
        text = {**TEXT, "embed_cls": True, "output_tokens": True}
        decoder = {"context_length": 8, "vocab_size": 40, "width": 16, "heads": 2, "layers": 2}
        model = open_clip.CoCa(16, decoder, text, {**VISION, **pool})
    else:
        timm = {"timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear", "image_size": 160}
        model = open_clip.CustomTextCLIP(16, timm, dict(TEXT))
    model = model.double()
    redraw(model, seed=3)
    return model.eval()


def images_of(model: Any) -> torch.Tensor:
    """Return two random images of a model's size."""
    size = input_spec(model).size
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["clip", "custom", "coca"])
def test_images_merge_and_texts_do_not(kind: str) -> None:
    model = both(kind)
    images = images_of(model)
    with torch.no_grad():
        plain = model.encode_text(TEXTS), model.encode_image(images)
        wanted = run(describe(model.visual, images), 3).outputs["output"]
        with vitrail.merge(model, r=3):
            text, image = model.encode_text(TEXTS), model.encode_image(images)
        assert torch.equal(model.encode_image(images), plain[1])
    assert torch.equal(text, plain[0])
    if kind == "coca":
        wanted = nn.functional.normalize(wanted, dim=-1)
    assert torch.allclose(image, wanted, rtol=0, atol=1e-9)
    assert (image - plain[1]).abs().max() > 1e-3


def test_towers_of_timm_merge_inside_open_clip() -> None:
    model = both("timm")
    images = images_of(model)
    with torch.no_grad():
        plain = model.encode_image(images)
        with vitrail.merge(model, r=8):
            merged = model.encode_image(images)
        with vitrail.merge(model.visual.trunk, r=8):
            assert torch.equal(model.encode_image(images), merged)
    assert (merged - plain).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["clip", "custom", "timm"])
def test_costs_are_those_of_the_images(kind: str) -> None:
    model = both(kind)
    assert vitrail.count(model).flops == vitrail.count(model.visual).flops


def test_features_between_blocks_have_full_length() -> None:
    model = both("clip")
    images = images_of(model)
    expected = run(describe(model.visual, images), 3)
    with torch.no_grad(), vitrail.merge(model, r=3):
        maps = model.forward_intermediates(image=images)["image_intermediates"]
        lists = model.visual.forward_intermediates(images, output_fmt="NLC")["image_intermediates"]
    for grid, tokens, wanted in zip(maps, lists, expected.hidden, strict=True):
        assert torch.allclose(tokens, wanted[:, 1:], rtol=0, atol=1e-9)
        assert torch.allclose(grid.flatten(2).mT, wanted[:, 1:], rtol=0, atol=1e-9)


def test_gradient_checkpointing() -> None:
    gradients = []
    for enabled in (False, True):
        model = both("clip")
        model.set_grad_checkpointing(enabled)
        vitrail.merge(model, r=3)
        model.train().encode_image(images_of(model)).square().sum().backward()
        gradients.append(model.visual.conv1.weight.grad)
    assert torch.allclose(*gradients, rtol=0, atol=1e-9)
    assert gradients[0].abs().max() > 0


def test_names() -> None:
    with torch.device("meta"):
        model = vitrail.load_model("open_clip:ViT-B-32", pretrained=False)
    assert type(find(model).trunk).__module__ == "open_clip.transformer"
    assert not model.training
    spec = input_spec(model)
    assert (spec.size, spec.mean[0]) == ((224, 224), 0.48145466)
    assert vitrail.count(model).flops / 1e9 == pytest.approx(4.4, rel=0.02)
    with pytest.raises(ModelLoadError, match="list_pretrained"):
        vitrail.load_model("open_clip:ViT-B-33:openai")
    with pytest.raises(ModelLoadError, match=r"ViT-B-32:TAG.*openai"):
        vitrail.load_model("open_clip:ViT-B-32")


def test_refused_towers_are_untouched() -> None:
    with pytest.raises(UnsupportedModel, match="cosine"):
        vitrail.merge(tower(scaled_cosine_attn=True), r=2)
    late = tower()
    late.transformer.batch_first = False
    with pytest.raises(UnsupportedModel, match="batch_first"):
        vitrail.merge(late, r=2)
    split = tower()
    split.transformer.resblocks[1].attn = nn.MultiheadAttention(32, 2, kdim=16, batch_first=True)
    with pytest.raises(UnsupportedModel, match="packed"):
        vitrail.merge(split, r=2)
    assert type(split).__name__ == "VisionTransformer"
    assert not hasattr(split, "_vitrail_plan")
