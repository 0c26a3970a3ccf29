"""torchvision's models by name, trained and saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer
from torchvision.models._api import BUILTIN_MODELS, register_model

import vitrail
from tests.parity.models.torchvision_vit import vit
from vitrail.adapters import ModelRequest, find, input_spec
from vitrail.adapters.registry import library
from vitrail.data.spec import MEAN, STD
from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedModel


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """One of torchvision's registered models that is small."""

    @register_model(name="vit_small_for_tests")
    def build(*, weights: Any = None, progress: bool = True, **options: Any) -> nn.Module:
        assert weights is None, "no trained weights"
        return vit(**options)

    yield
    del BUILTIN_MODELS["vit_small_for_tests"]


def test_by_name() -> None:
    with torch.device("meta"):
        model = vitrail.load_model("torchvision:vit_b_16", pretrained=False)
    assert isinstance(model, VisionTransformer)
    assert not model.training
    spec = input_spec(model)
    assert (spec.size, spec.mean, spec.std) == ((224, 224), MEAN, STD)
    assert vitrail.count(model).flops / 1e9 == pytest.approx(17.6, rel=0.01)
    with pytest.raises(ModelLoadError, match="vit_b_16"):
        vitrail.load_model("torchvision:no_such_model")
    with pytest.raises(ModelLoadError, match="pretrained=False"):
        vitrail.load_model("torchvision:vit_small_for_tests")


def test_other_models_and_sizes_are_refused() -> None:
    with torch.device("meta"), pytest.raises(UnsupportedModel, match="ResNet"):
        find(vitrail.load_model("torchvision:resnet18", pretrained=False))
    model = vitrail.load_model("torchvision:vit_small_for_tests", pretrained=False)
    with vitrail.merge(model, r=2) as merging, pytest.raises(InvalidOption):
        merging.flops((64, 64))
    model.encoder.layers[0].self_attention = nn.MultiheadAttention(32, 2, kdim=16, batch_first=True)
    with pytest.raises(UnsupportedModel, match="packed"):
        vitrail.merge(model, r=2)


def test_built_for_training_saved_and_loaded(tmp_path: Path) -> None:
    one = library("torchvision")
    request = ModelRequest({"label": ("a", "b", "c")}, pretrained=False, image_size=40)
    model, config = one.build("vit_small_for_tests", request)
    one.save(tmp_path, model, model.state_dict(), config, {"classes": {"label": ["a", "b", "c"]}})
    loaded = vitrail.load_model(str(tmp_path))
    images = torch.randn(2, 3, 40, 40)
    assert torch.equal(loaded(images), model.eval()(images))
    assert loaded(images).shape == (2, 3)
    for keep in (True, False):
        again, _ = one.rebuild(loaded, tmp_path, config, request, keep_heads=keep)
        assert torch.equal(again.heads.head.weight, loaded.heads.head.weight) == keep
        assert torch.equal(again.class_token, loaded.class_token)


def test_logits_of_its_head_are_recorded() -> None:
    model = vit().eval()
    with torch.no_grad(), vitrail.adapters.head_outputs(model) as found:
        output = model(torch.randn(2, 3, 32, 32))
    assert torch.equal(found["class"][0], output)
