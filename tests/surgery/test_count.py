"""Counts against PyTorch's own counter of operations, and against the papers."""

from __future__ import annotations

import pytest
import timm
import torch

import vitrail
from tests.surgery.models import ALL, flops_that_run
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel
from vitrail.models import ViT, ViTConfig, create_model


def counted(model: torch.nn.Module, images: torch.Tensor) -> int:
    """Multiply-adds that run, for one image."""
    return flops_that_run(lambda: model(images)) // 2 // len(images)


@pytest.mark.parametrize(
    "name",
    [
        "timm-registers",
        "hf-deit-head",
        "hf-registers-head",
        "eva-dinov3",
        "torchvision-vit",
        "open_clip-tower",
        "clip-projection",
        "clip-siglip",
    ],
)
def test_flops_are_those_that_run(name: str) -> None:
    model, images = ALL[name].model(torch.float32), ALL[name].images(torch.float32)
    assert vitrail.count(model, images).flops == pytest.approx(counted(model, images), rel=0.03)


def test_packed_parameters_count() -> None:
    """``nn.MultiheadAttention`` has a parameter ``in_proj_weight`` and no projection modules."""
    model = ALL["torchvision-vit"].model(torch.float32)
    width, hidden, patches, tokens, depth = 32, 48, 16, 17, 3
    by_part = vitrail.count(model).flops_by_part
    assert by_part["projections"] == depth * tokens * (3 * width * width + width * width)
    assert by_part["attention"] == depth * 2 * tokens * tokens * width
    assert by_part["feed"] == depth * tokens * 2 * width * hidden
    assert by_part["patches"] == patches * 3 * 8 * 8 * width
    assert by_part["rest"] == 5 * width


def test_flops_of_talking_heads_and_class_attention() -> None:
    model = create_model("cait_xxs24", image_size=96, depth=4, num_classes=10).eval()
    images = torch.randn(1, 3, 96, 96)
    assert vitrail.count(model, images).flops == pytest.approx(counted(model, images), rel=0.02)


@pytest.mark.parametrize(
    ("name", "parameters", "gflops"), [("vit_base_patch16_224", 86.6e6, 17.6), ("vit_small_patch16_224", 22.1e6, 4.6)]
)
def test_known_models(name: str, parameters: float, gflops: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    found = vitrail.count(model)
    assert found.parameters == pytest.approx(parameters, rel=0.01)
    assert found.flops / 1e9 == pytest.approx(gflops, rel=0.01)
    assert sum(found.parameters_by_part.values()) == found.parameters
    assert sum(found.flops_by_part.values()) == found.flops == found.flops_unmerged


def test_published_cait() -> None:
    with torch.device("meta"):
        model = create_model("cait_xxs24")
    found = vitrail.count(model)
    assert found.parameters == pytest.approx(12.0e6, rel=0.01)
    assert found.flops / 1e9 == pytest.approx(2.5, rel=0.02)


def test_a_merge_and_a_token_change_what_they_should() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3).eval()
    plain = vitrail.count(model)
    with vitrail.merge(model, r=2) as merging:
        merged = vitrail.count(model)
        assert merged.flops == merging.flops()
        assert merged.flops_unmerged == plain.flops
        assert merged.flops_by_part["matching"] > 0
    more = vitrail.count(timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, reg_tokens=1).eval())
    assert more.flops - plain.flops == plain.flops_per_token
    assert more.tokens == plain.tokens + 1


def test_bad_sizes() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, dynamic_img_size=True)
    assert vitrail.count(model, 128).tokens == vitrail.count(model, (128, 128)).tokens == 65
    with pytest.raises(InvalidOption):
        vitrail.count(model, torch.zeros(3, 64))
    with pytest.raises(InvalidOption):
        vitrail.count(model, "large")
    with pytest.raises((InvalidOption, UnsupportedInput)):
        vitrail.count(model, 0)
    for wrong in ((64,), 33, (64, 65), 8, (1, 64, 64), True, torch.zeros(1, 3, 1, 64, 64)):
        with pytest.raises(InvalidOption, match=r"\(height, width\)"):
            vitrail.count(model, wrong)
    with pytest.raises(UnsupportedModel, match="got NoneType"):
        vitrail.count(None)  # type: ignore[arg-type]


def test_videos() -> None:
    sizes = {"image_size": (4, 16, 16), "patch_size": (2, 4, 4), "width": 24, "depth": 2, "heads": 2}
    model = ViT(ViTConfig(**sizes))
    assert vitrail.count(model).tokens == model.layout().num_tokens == 33
    assert vitrail.count(model, (8, 32, 16)).tokens == model.layout((8, 32, 16)).num_tokens
    assert vitrail.count(model, torch.zeros(1, 3, 6, 16, 16)).tokens == model.layout((6, 16, 16)).num_tokens
    with pytest.raises(InvalidOption, match=r"size=32; .*\(time, height, width\)"):  # as model.layout(32)
        vitrail.count(model, 32)
