"""docs/tokens.md is right: its examples run, and its table of layouts equals the libraries."""

import re
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers as hf

from vitrail.adapters import find
from vitrail.models import ViT, ViTConfig
from vitrail.tokens import Role, TokenLayout, TokenSpec

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tokens.md").read_text(encoding="utf-8")


def test_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, run = {}, {}
    for section in PAGE.split("\n## "):
        for block in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
            exec(compile(block, "docs/tokens.md", "exec"), names)
            run.setdefault(section.partition("\n")[0], []).append(dict(names))
    (specs,) = run["Token specs"]
    assert specs["output"].by_role["color"].shape == (1, 8)
    assert specs["model"].layout().indices("register") == range(2, 6)
    shaped, read = run["Images, videos, spectrograms"]
    assert shaped["video"].layout((16, 64, 64)).grid == (8, 4, 4)
    assert not shaped["late"].layout(layer=11).indices("class")
    assert read["features"].shape == (2, 41, 192)
    assert read["dense"](read["features"], read["wide"].layout(), size=(64, 160)).shape == (2, 21, 64, 160)
    (loaded,) = run["timm weights"]
    assert loaded["fit"] == (["tokens.breed", "heads.breed.weight", "heads.breed.bias"], [])
    extended = run["Adding tokens to an existing model"][0]
    assert extended["output"].by_role["breed"].shape == (2, 37)
    assert extended["added"].layout.indices("task", "species") == range(6, 7)


@pytest.mark.parametrize(
    ("name", "special", "position"),
    [
        ("vit_tiny_patch16_224", [Role.CLASS], True),
        ("deit3_small_patch16_224", [Role.CLASS], False),
        ("deit_tiny_distilled_patch16_224", [Role.CLASS, Role.DISTILLATION], True),
        ("vit_small_patch14_reg4_dinov2", [Role.CLASS, (Role.REGISTER, 4)], False),
        ("vit_medium_patch16_reg4_gap_256", [(Role.REGISTER, 4)], False),
        ("vit_small_patch16_dinov3", [Role.CLASS, (Role.REGISTER, 4)], False),
        ("vit_base_patch16_siglip_224", [], False),
    ],
)
def test_layouts_of_timm(name, special, position):
    model = timm.create_model(name, num_classes=0, depth=1)
    layout = find(model).adapter.layout(model)
    assert layout == TokenLayout.of(*special, grid=layout.grid)
    positions = 0 if model.pos_embed is None else model.pos_embed.shape[1]
    if special:
        assert (positions == layout.num_tokens) == position


@pytest.mark.parametrize(
    ("kind", "config", "special"),
    [
        (hf.ViTModel, hf.ViTConfig, [Role.CLASS]),
        (hf.DeiTModel, hf.DeiTConfig, [Role.CLASS, Role.DISTILLATION]),
        (hf.Dinov2Model, hf.Dinov2Config, [Role.CLASS]),
        (hf.Dinov2WithRegistersModel, hf.Dinov2WithRegistersConfig, [Role.CLASS, (Role.REGISTER, 4)]),
    ],
)
def test_layouts_of_transformers(kind, config, special):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    model = kind(config(**sizes))
    layout = find(model).adapter.layout(model)
    assert layout == TokenLayout.of(*special, grid=layout.grid)


def test_timm_ignores_registers_of_a_distilled_model():
    model = timm.create_model("deit_tiny_distilled_patch16_224", depth=1, reg_tokens=4)
    assert model.num_prefix_tokens == 2


@pytest.mark.parametrize(("std", "equal"), [(0.0, True), (0.02, False)])
def test_equal_tokens_with_one_loss_stay_equal(std, equal):
    spec = TokenSpec("cls", Role.CLASS, count=2, std=std, position=False)
    model = ViT(ViTConfig(image_size=16, patch_size=4, width=16, depth=2, heads=2, num_classes=4, tokens=(spec,)))
    start = model.tokens["cls"].detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 3, 16, 16)), torch.randint(0, 4, (8,))).backward()
        optimizer.step()
    one, other = model.tokens["cls"][0]
    assert torch.equal(one, other) == equal
    assert not torch.equal(model.tokens["cls"], start)
