"""What blocks and backbones of transformers cannot do is refused, before anything runs."""

from __future__ import annotations

import pytest
import torch

import vitrail
from vitrail.errors import InvalidOption, UnsupportedModel

transformers = pytest.importorskip("transformers", minversion="5.6")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
IMAGES = torch.randn(2, 3, 32, 32)


def test_a_block_that_runs_as_it_is_has_no_keys_to_record() -> None:
    config = transformers.VitDetConfig(**SIZES, pretrain_image_size=32, mlp_ratio=2, residual_block_indices=[1])
    model = transformers.VitDetModel(config).eval()
    with pytest.raises(UnsupportedModel, match=r"block 1 .*record other layers"):
        vitrail.record(model, IMAGES, "k", layers=[-1])
    with pytest.raises(UnsupportedModel, match="block 1"):
        vitrail.inspect(model, IMAGES, probes=False)
    assert [*vitrail.record(model, IMAGES, "k").k] == [0]


@pytest.mark.parametrize("kind", ["Dinov2", "DINOv3ViT"])
def test_test_time_registers_on_a_backbone(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**SIZES, intermediate_size=64, out_features=["stage1", "stage2"])
    model = getattr(transformers, f"{kind}Backbone")(config).eval()
    before = model(IMAGES).feature_maps
    with pytest.raises(UnsupportedModel, match="feature maps"):
        vitrail.test_time_registers(model, neurons={0: [0]})
    assert all(map(torch.equal, model(IMAGES).feature_maps, before))


@pytest.mark.parametrize("side", [32, 64])
def test_attention_without_special_tokens_needs_queries(side: int) -> None:
    config = transformers.SiglipVisionConfig(**SIZES, intermediate_size=64)
    model = transformers.SiglipVisionModel(config).eval()
    with pytest.raises(InvalidOption, match="queries="):
        vitrail.record(model, torch.randn(1, 3, side, side), "attention")
