"""Weight decay groups, learning rate schedule, and averaged weights."""

from math import cos, pi

import pytest
import torch
from torch import nn

from vitrail.models import create_model
from vitrail.models.vit import undecayed
from vitrail.tokens import Role, TokenSpec
from vitrail.training.optim.ema import Ema
from vitrail.training.optim.optimizer import lr_at, make_optimizer, optimizer_tensors, parameter_groups


def small(*tokens: TokenSpec) -> nn.Module:
    return create_model("vit_tiny_patch16", width=32, heads=2, depth=1, num_classes=3, tokens=tokens)


def test_norms_biases_positions_and_tokens_do_not_decay() -> None:
    model = small(TokenSpec("cls", Role.CLASS), TokenSpec("memory", Role.REGISTER, 2, decay=True))
    spared = undecayed(model)
    assert {"tokens.cls", "pos_embed", "norm.weight", "blocks.0.attn.qkv.bias", "heads.cls.bias"} <= spared
    decayed = {name for name, _ in model.named_parameters()} - spared
    assert decayed == {
        "tokens.memory",
        "patch_embed.proj.weight",
        "heads.cls.weight",
        *(f"blocks.0.{part}.weight" for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")),
    }


def test_nested_models_keep_their_settings() -> None:
    wrapped = nn.ModuleDict({"model": small(TokenSpec("cls", Role.CLASS))})
    assert "model.tokens.cls" in undecayed(wrapped)


def test_tokens_of_other_libraries_are_known_by_their_names() -> None:
    timm = pytest.importorskip("timm", reason="needs a timm model")
    model = timm.create_model("vit_tiny_patch16_224", depth=1, reg_tokens=2)
    assert {"cls_token", "reg_token", "pos_embed"} <= undecayed(model)
    assert "head.weight" not in undecayed(model)


def test_groups_hold_each_trained_parameter_once() -> None:
    model = small(TokenSpec("cls", Role.CLASS))
    model.norm.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    groups = parameter_groups(model, 0.05)
    names = [name for group in groups for name in group["names"]]
    assert sorted([*names, "norm.weight"]) == sorted(name for name, _ in model.named_parameters())
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]


def test_the_optimizer_has_its_state_from_the_start_and_steps_as_torch_does() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours, 0.1, 0.05)
    other = torch.optim.AdamW(
        [{"params": [theirs.weight], "weight_decay": 0.05}, {"params": [theirs.bias], "weight_decay": 0.0}], lr=0.1
    )
    state = optimizer_tensors(optimizer)
    assert state.keys() == {f"{kind}.{n}" for kind in ("step", "exp_avg", "exp_avg_sq") for n in ("weight", "bias")}
    for _ in range(3):
        x = torch.randn(4, 3)
        for model, steps in ((ours, optimizer), (theirs, other)):
            steps.zero_grad()
            model(x).square().sum().backward()
            steps.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert state["step.weight"].item() == 3  # the tensors themselves, not copies


def test_the_learning_rate_rises_in_a_line_and_falls_along_a_cosine() -> None:
    rates = [lr_at(step, peak=2.0, warmup=4, total=10, floor=0.1) for step in range(10)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    expected = [2 * (0.1 + 0.9 * (1 + cos(pi * step / 6)) / 2) for step in range(6)]
    assert rates[4:] == pytest.approx(expected)
    assert lr_at(10, peak=2.0, warmup=4, total=10, floor=0.1) == pytest.approx(0.2)
    assert lr_at(0, peak=1.0, warmup=0, total=1, floor=0.0) == 1


def test_averages_of_weights_and_statistics() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ema = Ema(model, 0.5)
    expected = {name: value.clone().double() for name, value in model.state_dict().items()}
    for step in range(8):
        model(torch.randn(4, 2))
        with torch.no_grad():
            model[0].weight.add_(1)
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, value in model.state_dict().items():
            expected[name] = decay * expected[name] + (1 - decay) * value.double()
    for name, value in ema.tensors.items():
        if name.endswith("num_batches_tracked"):
            assert value.item() == 8
        else:
            assert torch.allclose(value.double(), expected[name], atol=1e-6)
    live = model[0].weight.clone()
    with ema.applied():
        assert torch.equal(model[0].weight, ema.tensors["0.weight"])
    assert torch.equal(model[0].weight, live)
