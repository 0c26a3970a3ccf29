"""Outputs of classifiers of any library, and their features as a map."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vitrail
from tests.training.models import CLASS, DISTILLATION, Net, task, tiny
from vitrail.errors import UnsupportedInput, UnsupportedModel
from vitrail.tokens import TokenSpec
from vitrail.training.evaluation.outputs import feature_width, forward_output, forward_output_and_map

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_our_models_declare_their_input() -> None:
    model = tiny(CLASS, DISTILLATION).eval()
    output = forward_output(model, IMAGES)
    torch.testing.assert_close(output.logits, model(IMAGES))
    torch.testing.assert_close(output.logits, (output.by_role["cls"] + output.by_role["distillation"]) / 2)


def test_map_of_ours_is_in_the_order_of_the_grid() -> None:
    model = tiny(CLASS, TokenSpec("register", "register", 3)).eval()
    images = torch.randn(2, 3, 16, 24)
    output, features = forward_output_and_map(model, images)
    assert features.shape == (2, 32, 4, 6)
    torch.testing.assert_close(features[:, :, 1, 2], output.features[:, 4 + 6 + 2])


def test_a_plain_net() -> None:
    net = Net().eval()
    output = forward_output(net, IMAGES)
    assert set(output.by_role) == {"class"}
    assert output.features.shape == (2, 0, 0)
    torch.testing.assert_close(output.logits, net(IMAGES))
    both, features = forward_output_and_map(net, IMAGES)
    torch.testing.assert_close(both.logits, output.logits)
    torch.testing.assert_close(features, net.forward_features(IMAGES))
    assert feature_width(net) == 12


@pytest.fixture
def distilled() -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.create_model(
        "deit_tiny_distilled_patch16_224", num_classes=3, depth=2, img_size=16, patch_size=4, embed_dim=24
    )


def test_timms_distilled_model_in_training_and_evaluation(distilled: nn.Module) -> None:
    distilled.set_distilled_training(True)  # type: ignore[operator]
    first, second = distilled.train()(IMAGES)
    output = forward_output(distilled, IMAGES)
    torch.testing.assert_close(output.by_role["class"], first)
    torch.testing.assert_close(output.by_role["distillation"], second)
    quiet = forward_output(distilled.eval(), IMAGES)
    for name in ("class", "distillation"):
        torch.testing.assert_close(quiet.by_role[name], output.by_role[name])
    torch.testing.assert_close(quiet.logits, (first + second) / 2)
    _, features = forward_output_and_map(distilled, IMAGES)
    torch.testing.assert_close(
        features.flatten(2).transpose(1, 2),
        distilled.forward_features(IMAGES)[:, 2:],  # type: ignore[operator]
    )


def test_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeiTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4,
        num_labels=3,
    )  # fmt: skip
    model = transformers.DeiTForImageClassificationWithTeacher(config).eval()
    expected = model(IMAGES)
    output, features = forward_output_and_map(model, IMAGES)
    torch.testing.assert_close(output.logits, expected.logits)
    torch.testing.assert_close(output.by_role["distillation"], expected.distillation_logits)
    assert features.shape == (2, 16, 4, 4)
    torch.testing.assert_close(features[:, :, 0, 1], model.deit(IMAGES).last_hidden_state[:, 3])
    assert not model.deit._forward_hooks
    single = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16,
            patch_size=4, num_labels=3,
        )
    ).eval()  # fmt: skip
    torch.testing.assert_close(forward_output(single, IMAGES).by_role["class"], single(IMAGES).logits)


def test_merged_models_have_outputs_too() -> None:
    model = tiny(CLASS, task("colour", 2)).eval()
    with vitrail.merge(model, r=2):
        output, features = forward_output_and_map(model, IMAGES)
        torch.testing.assert_close(output.by_role["colour"], model(IMAGES).by_role["colour"])
    assert features.shape == (2, 32, 4, 4)


def test_other_models_than_classifiers_are_refused() -> None:
    with pytest.raises(UnsupportedInput, match="classifier"):
        forward_output(nn.Conv2d(3, 4, 1), IMAGES)
    with pytest.raises(UnsupportedInput, match="dict"):
        forward_output(_Says({"logits": 1}), IMAGES)
    with pytest.raises(UnsupportedModel, match="features"):
        forward_output_and_map(_Says(torch.zeros(2, 3)), IMAGES)
    with pytest.raises(UnsupportedModel, match="width"):
        feature_width(nn.Linear(2, 2))


class _Says(nn.Module):
    def __init__(self, expected: object) -> None:
        super().__init__()
        self.expected = expected

    def forward(self, _: torch.Tensor) -> object:
        return self.expected
