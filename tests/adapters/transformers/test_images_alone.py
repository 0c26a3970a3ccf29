"""Models that take text, prompts or patches beside images, run on images alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import vitrail
from vitrail.adapters import image_model
from vitrail.adapters.outputs import output_tensor
from vitrail.embedding.predictor import Predictor
from vitrail.export import export

transformers = pytest.importorskip("transformers", minversion="5.6")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT = {**SIZES, "vocab_size": 100}
TOWER = {**SIZES, "image_size": 32, "patch_size": 8}
PATCHES = {**SIZES, "patch_size": 8, "num_patches": 16}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "Sam":
        vision = {
            **SIZES,
            "mlp_dim": 64,
            "output_channels": 16,
            "image_size": 32,
            "patch_size": 4,
            "window_size": 3,
            "global_attn_indexes": [1],
            "num_pos_feats": 8,
            "initializer_range": 0.1,
        }
        prompts = {"hidden_size": 16, "image_size": 32, "patch_size": 4, "image_embedding_size": 8}
        decoder = {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
        config = transformers.SamConfig(
            vision_config=vision,
            prompt_encoder_config={**prompts, "mask_input_channels": 4},
            mask_decoder_config=decoder,
        )
        return transformers.SamModel(config).eval()
    tower = PATCHES if name == "Siglip2" else TOWER
    config = getattr(transformers, f"{name}Config")(text_config=TEXT, vision_config=tower, projection_dim=16)
    return getattr(transformers, f"{name}Model")(config).eval()


def reference(name: str, model: torch.nn.Module, images: Tensor) -> Tensor:
    """Return what the image part of a model returns by itself."""
    if name == "Siglip2":
        cells = images.unfold(2, 8, 8).unfold(3, 8, 8)  # (B, C, rows, columns, 8, 8)
        patches = cells.permute(0, 2, 3, 4, 5, 1).reshape(len(images), 16, -1)
        shapes = torch.tensor([[4, 4]] * len(images))
        mask = torch.ones(len(images), 16, dtype=torch.long)
        return model.vision_model(patches, pixel_attention_mask=mask, spatial_shapes=shapes).pooler_output
    tower = model.vision_encoder if name == "Sam" else model.vision_model
    return output_tensor(tower(pixel_values=images))


@pytest.mark.parametrize("name", ["CLIP", "Siglip", "Siglip2", "Aimv2", "Sam"])
@torch.no_grad()
def test_the_image_part_of_a_whole_model_runs(name: str) -> None:
    model, images = build(name), torch.randn(4, 3, 32, 32)
    wanted = reference(name, model, images)
    runs = image_model(model)
    assert image_model(runs) is runs
    torch.testing.assert_close(output_tensor(runs(images)), wanted)
    recorded = vitrail.record(model, images, ["tokens", "q"])
    assert torch.equal(recorded.tokens[1], vitrail.record(runs, images).tokens[1])
    with vitrail.merge(model, r=0) as merging:
        torch.testing.assert_close(output_tensor(runs(images)), wanted)
        assert merging.pays(1, seconds=0.01).batch == 1
    with vitrail.merge(model, r=4):
        assert not torch.allclose(output_tensor(runs(images)), wanted)


def test_a_whole_clip_is_inspected_tuned_and_exported(tmp_path: Path) -> None:
    model, images = build("CLIP"), torch.randn(4, 3, 32, 32)
    assert len(vitrail.inspect(model, images, probes=False, discovery=False).images) == 4
    with vitrail.test_time_registers(model, neurons={0: [0]}):
        assert vitrail.record(model, images).layout.num_special == 2
    assert sum(vitrail.tune(model, images, within="cosine 0.1", seconds=1).config["r"]) > 0
    written = export(model, tmp_path / "clip.pt2", batch=1)
    assert written.outputs["pooler_output"] == (1, 32)


def test_a_naflex_classifier_predicts_from_images() -> None:
    torch.manual_seed(0)
    config = transformers.Siglip2Config(text_config=TEXT, vision_config=PATCHES, num_labels=3)
    model = transformers.Siglip2ForImageClassification(config).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        plain = image_model(model)(images).logits
        with vitrail.merge(model, r=0):
            torch.testing.assert_close(model(images).logits, plain)
    assert len(Predictor(model, top=3).targets[0].classes) == 3
