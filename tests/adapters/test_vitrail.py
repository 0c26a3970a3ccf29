"""Vitrail's own models merge, record and take registers as the equivalent timm models do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import timm
import torch
from torch import Tensor, nn

import vitrail
from tests.surgery.models import distance
from vitrail.adapters import Rotary, find
from vitrail.errors import ModelLoadError
from vitrail.models import ViT, ViTConfig, create_model, from_timm
from vitrail.tokens import Role, TokenSpec

SMALL = {"img_size": 64, "depth": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
TIMM = {
    "class": ("vit_tiny_patch16_224", {}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "registers": ("vit_tiny_patch16_224", {"reg_tokens": 3, "init_values": 0.1}),
    "class-free": ("vit_medium_patch16_reg4_gap_256", {}),
}
TINY = ViTConfig(image_size=32, patch_size=8, width=32, depth=4, heads=4, num_classes=5)


@torch.no_grad()
def lively(model: nn.Module) -> nn.Module:
    """Redraw every parameter, so that each branch contributes."""
    source = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.copy_(0.3 * torch.randn(weight.shape, generator=source) + (1 if weight.dim() == 1 else 0))
    return model.double().eval()


def random_images(size: int = 32, batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("name", TIMM)
def test_merged_equals_timm(name: str) -> None:
    """The same weights and merging through another adapter give the same values."""
    made, options = TIMM[name]
    theirs = lively(timm.create_model(made, **{**SMALL, **options}))
    ours = from_timm(theirs).double().eval()
    images = random_images(64)
    assert distance(ours(images), theirs(images)) < 1e-10
    outputs = []
    for model in (ours, theirs):
        with vitrail.merge(model, r=3) as merging, merging.track() as trace:
            outputs.append((model(images), trace.groups, merging.flops()))
    assert distance(outputs[0][0], outputs[1][0]) < 1e-10
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert outputs[0][2] == outputs[1][2]


@pytest.mark.parametrize("name", ["vit_tiny_patch16", "deit_tiny_patch16_distilled", "cait_xxs24"])
def test_nothing_merged_is_nothing_changed(name: str) -> None:
    model = lively(create_model(name, image_size=32, patch_size=8, width=32, heads=2, depth=3, num_classes=4))
    images = random_images()
    before = model(images)
    with vitrail.merge(model, r=0):
        assert distance(model(images), before) < 1e-12
    with vitrail.merge(model, r=2):
        assert not torch.equal(model(images), before)
    assert torch.equal(model(images), before)


MIXES = {
    "registers": (TokenSpec("cls", Role.CLASS), TokenSpec("reg", Role.REGISTER, 2)),
    "tasks": (TokenSpec("cls", Role.CLASS), TokenSpec("breed", Role.TASK, classes=3)),
    "several": (TokenSpec("cls", Role.CLASS, 2), TokenSpec("dist", Role.DISTILLATION)),
    "gathering": (TokenSpec("cls", Role.CLASS, enters=-1, position=False), TokenSpec("reg", Role.REGISTER, 2)),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("position", ["learned", "rotary", "sincos"])
def test_every_mix_merges_and_records(mix: str, position: str) -> None:
    stage = 2 if mix == "gathering" else 0
    model = lively(ViT(replace(TINY, tokens=MIXES[mix], position=position, class_attention=stage)))
    images = random_images()
    features = model.forward_features(images)
    with vitrail.merge(model, r=2) as merging:
        assert merging.layout.num_special == find(model).adapter.layout(model).num_special
        merged = model.forward_features(images)
        assert merged.shape == features.shape
        recording = vitrail.record(model, images, ("tokens", "attention", "norms"))
        rows = recording.attention[3].sum(-1)
        assert torch.allclose(rows, torch.ones_like(rows))
    assert torch.equal(model.forward_features(images), features)


def test_rotary_position_of_merged_tokens_is_their_mean() -> None:
    """Merging two equal patches at the same position changes nothing else."""
    model = lively(ViT(replace(TINY, position="rotary")))
    rotary = find(model).adapter.position(model, (1, 4, 4))
    assert isinstance(rotary, Rotary)
    assert rotary.positions is not None
    table = rotary.table(0, rotary.positions.unsqueeze(0))[0, 0]
    from vitrail.models.position import rotary_table

    assert distance(table, rotary_table((1, 4, 4), 8, 2, random_images())) < 1e-12


def test_talking_heads_count_a_merged_key_as_its_copies() -> None:
    model = lively(create_model("cait_xxs24", image_size=32, patch_size=8, width=32, heads=4, depth=2, num_classes=4))
    block, parts = model.blocks[0], find(model).block_adapters[0]
    scores = torch.randn(1, 4, 6, 5, dtype=torch.float64)
    size = torch.tensor([[1, 3, 1, 2, 1]])
    copies = size[0].repeat_interleave(size[0]).numel()
    index = torch.arange(5).repeat_interleave(size[0])
    apart = parts.weigh(block, scores[..., index])
    together = parts.weigh(block, scores, size.double().log()[:, None, None])
    summed = torch.zeros_like(together).index_add_(-1, index, apart)
    assert copies == 8
    assert distance(together, summed) < 1e-12


def test_talking_heads_are_recorded_as_they_attend() -> None:
    model = lively(create_model("cait_xxs24", image_size=32, patch_size=8, width=32, heads=4, depth=2, num_classes=4))
    images = random_images()
    seen: list[Tensor] = []
    for block in model.blocks:
        block.attn.attn_drop.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(images)
    found = vitrail.record(model, images, "attention", queries="patch")
    for layer, weights in found.attention.items():
        assert distance(weights, seen[layer]) < 1e-12


def test_registers_at_test_time() -> None:
    model = lively(ViT(replace(TINY, position="rotary")))
    images = random_images()
    before = model(images)
    with vitrail.test_time_registers(model, neurons={1: (3, 5)}):
        assert model(images).shape == before.shape
    assert torch.equal(model(images), before)


def test_gradients_of_merged_talking_heads() -> None:
    model = lively(create_model("cait_xxs24", image_size=32, patch_size=8, width=32, heads=4, depth=2, num_classes=4))
    with vitrail.merge(model, r=2):
        model(random_images()).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())


def test_loading_by_name() -> None:
    assert isinstance(vitrail.load_model("vitrail:vit_tiny_patch16", pretrained=False, num_classes=3), ViT)
    with pytest.raises(ModelLoadError, match="no trained weights"):
        vitrail.load_model("vitrail:vit_tiny_patch16")
    with pytest.raises(ModelLoadError):
        vitrail.load_model("vitrail:resnet50", pretrained=False)


def test_exported_with_its_tokens() -> None:
    """Token names become part of the code when a model is traced."""
    model = lively(ViT(replace(TINY, tokens=MIXES["registers"]))).float()
    images = random_images().float()
    with vitrail.merge(model, r=2):
        expected = model(images)
        program = torch.export.export(model, (images,))
        assert torch.allclose(program.module()(images), expected, atol=1e-5)
        program.run_decompositions({})


def test_a_name_is_a_string() -> None:
    for name in (None, 3, "vit"):
        with pytest.raises(ModelLoadError, match="a model is named timm:NAME"):
            vitrail.load_model(name)  # type: ignore[arg-type]
