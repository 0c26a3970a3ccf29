"""CLIP and SigLIP with both towers: images merge, text does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import vitrail
from tests.oracle import describe, run
from tests.parity.models.cases import Case, require
from tests.parity.models.transformers_clip import with_text

KINDS: dict[str, type[hf.PreTrainedModel]] = {"clip": hf.CLIPModel, "siglip": hf.SiglipModel}
every_kind = pytest.mark.parametrize("kind", KINDS)


def pair(kind: str, dtype: torch.dtype = torch.float64) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model of both towers, and images with texts for it."""

    def build() -> nn.Module:
        return with_text(KINDS[kind])

    case = Case(kind, build, (32, 32))
    texts = torch.tensor([[1, 5, 9, 3, 7, 2, 2, 2], [1, 4, 4, 8, 2, 2, 2, 2], [1, 30, 31, 32, 33, 34, 35, 2]])
    return case.model(dtype), {"input_ids": texts, "pixel_values": case.images(dtype)}


@every_kind
def test_similarities_are_those_of_merged_images_and_plain_texts(kind: str) -> None:
    require("transformers", "5.6")
    model, inputs = pair(kind)
    with torch.no_grad():
        plain = model(**inputs)
        pooled = run(describe(model.vision_model, inputs["pixel_values"]), 3).outputs["pooler_output"]
        images = model.visual_projection(pooled) if kind == "clip" else pooled
        cosines = nn.functional.normalize(images, dim=-1) @ plain.text_embeds.T
        wanted = cosines * model.logit_scale.exp() + (model.logit_bias if kind == "siglip" else 0)
        with vitrail.merge(model, r=3):
            merged = model(**inputs)
            features = model.get_image_features(inputs["pixel_values"]).pooler_output
    assert torch.equal(merged.text_embeds, plain.text_embeds)
    assert torch.allclose(features, images, rtol=0, atol=1e-9)
    assert torch.allclose(merged.logits_per_image, wanted, rtol=0, atol=1e-8)
    assert (merged.logits_per_image - plain.logits_per_image).abs().max() > 1e-3
    assert torch.equal(model(**inputs).logits_per_image, plain.logits_per_image)


@every_kind
def test_text_alone_runs_in_a_merged_model(kind: str) -> None:
    model, inputs = pair(kind, torch.float32)
    with torch.no_grad():
        plain = model.get_text_features(inputs["input_ids"]).pooler_output
        with vitrail.merge(model, r=3):
            assert torch.equal(model.get_text_features(inputs["input_ids"]).pooler_output, plain)


@every_kind
def test_costs_are_those_of_the_images(kind: str) -> None:
    model, _ = pair(kind, torch.float32)
    tower, both = vitrail.count(model.vision_model), vitrail.count(model)
    projection = 32 * 16 if kind == "clip" else 0
    assert both.flops == tower.flops + projection


def test_a_projection_alone_is_no_classifier() -> None:
    from vitrail.adapters import find, input_spec

    for kind, head in (("clip", hf.CLIPForImageClassification), ("siglip", hf.SiglipForImageClassification)):
        model, classifier = pair(kind, torch.float32)[0], with_text(head)
        found, headed = find(model), find(classifier)
        assert found.adapter.num_classes(model, found.trunk) == 0
        assert headed.adapter.num_classes(classifier, headed.trunk) == 5
        assert input_spec(model).mean == ((0.5,) * 3 if kind == "siglip" else (0.48145466, 0.4578275, 0.40821073))
