"""Vision-language models: the tower merges, and nothing behind it notices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.parity.checks import assert_restored, fingerprint
from tests.parity.models.cases import require
from tests.parity.models.vision_language import MODELS, PAD, RELATED, Inputs, Vlm, named, prompt
from vitrail.adapters import find
from vitrail.errors import AlreadyApplied, NotApplied, UnsupportedInput


@pytest.fixture(autouse=True)
def towers_of_their_own() -> None:
    """Before transformers 5.6 a tower was wrapped once more, and generation differed."""
    require("transformers", "5.6")


every_model = pytest.mark.parametrize("vlm", MODELS, ids=lambda one: one.name)
related_models_too = pytest.mark.parametrize("vlm", [*MODELS, *RELATED], ids=lambda one: one.name)


def outputs_of(model: Any, inputs: Inputs) -> Any:
    """Return what the model computes from the images."""
    return model.get_image_features(**{name: inputs[name] for name in inputs if name not in TEXT})


TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


def features_of(model: Any, inputs: Inputs) -> list[Tensor]:
    """Return what the language model receives for each image, features for several of its layers side by side."""
    output = outputs_of(model, inputs)
    return [
        torch.cat(each, -1)
        for each in zip(output.pooler_output, *(output.get("deepstack_features") or ()), strict=True)
    ]


def logits_for(model: Any, inputs: Inputs, features: list[Tensor]) -> Tensor:
    """Return the logits of the unmerged model for given features of the images."""
    output = outputs_of(model, inputs)
    deep = output.get("deepstack_features") or []
    features, *more = zip(*(one.chunk(1 + len(deep), -1) for one in features), strict=True)
    output.pooler_output = features if isinstance(output.pooler_output, list | tuple) else torch.stack(features)
    for layer, each in enumerate(more):
        deep[layer] = each
    text = {name: value for name, value in inputs.items() if not name.startswith("pixel")}
    return model(**text, mm_encoder_outputs={"image": output}).logits


@related_models_too
@torch.no_grad()
def test_nothing_changes_with_r_0(vlm: Vlm) -> None:
    model, inputs = vlm.model(torch.float32), vlm.inputs(torch.float32)
    plain = model(**inputs).logits
    with vitrail.merge(model, r=0):
        logits = model(**inputs).logits
    if vlm.packed:  # images of one size are multiplied by the weights together, and others apart
        assert torch.allclose(logits, plain, rtol=0, atol=2e-5)
    else:
        assert torch.equal(logits, plain)


@related_models_too
@torch.no_grad()
@pytest.mark.parametrize("r", [2, (3, 0, 2, 1)])
def test_the_language_model_receives_what_the_oracle_restores(vlm: Vlm, r: Any) -> None:
    model, inputs = vlm.model(), vlm.inputs()
    expected = vlm.features(model, inputs, r)
    unmerged, logits = features_of(model, inputs), logits_for(model, inputs, expected)
    with vitrail.merge(model, r=r):
        found = features_of(model, inputs)
        assert torch.allclose(model(**inputs).logits, logits, rtol=0, atol=vlm.tolerance)
    assert len(found) == len(expected)
    for actual, wanted, before in zip(found, expected, unmerged, strict=True):
        assert actual.shape == before.shape
        assert torch.allclose(actual, wanted, rtol=0, atol=vlm.tolerance)
        assert (actual - before).abs().max() > 1e-3


@every_model
@torch.no_grad()
def test_removal_restores_the_model_to_the_bit(vlm: Vlm) -> None:
    model, inputs = vlm.model(torch.float32), vlm.inputs(torch.float32)
    plain = model(**inputs).logits
    make_up, state = fingerprint(model), {name: value.clone() for name, value in model.state_dict().items()}
    merging = vitrail.merge(model, r=2)
    assert list(model.state_dict()) == list(state)
    assert (model(**inputs).logits - plain).abs().max() > 1e-4
    merging.remove()
    assert_restored(model, make_up, state)
    assert torch.equal(model(**inputs).logits, plain)


@related_models_too
@torch.no_grad()
def test_generation_with_a_cache_is_generation_without(vlm: Vlm) -> None:
    model, inputs = vlm.model(), vlm.inputs()
    with vitrail.merge(model, r=2):
        cached = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        plain = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False, use_cache=False)
    assert cached.shape == (2, inputs["input_ids"].shape[1] + 5)
    assert torch.equal(cached, plain)
    assert torch.equal(cached[:, :-5], inputs["input_ids"])


@every_model
@torch.no_grad()
def test_text_alone_runs_in_a_merged_model(vlm: Vlm) -> None:
    model = vlm.model(torch.float32)
    ids = torch.tensor([[1, 5, 9, 3]])
    plain = model(input_ids=ids).logits
    with vitrail.merge(model, r=2):
        assert torch.equal(model(input_ids=ids).logits, plain)


@every_model
def test_gradients_are_those_of_the_oracle(vlm: Vlm) -> None:
    model, inputs = vlm.model(), vlm.inputs()
    images = inputs["pixel_values"].requires_grad_()

    def gradient(features: list[Tensor]) -> Tensor:
        return torch.autograd.grad(sum(one.square().sum() for one in features), images)[0]

    wanted = gradient(vlm.features(model, inputs, 2))
    with vitrail.merge(model, r=2):
        assert torch.allclose(
            gradient(features_of(model, inputs)), wanted, rtol=max(1e-6, 100 * vlm.tolerance), atol=vlm.tolerance
        )
    assert bool((wanted.abs().amax(1) > 0).any())


@pytest.mark.parametrize("vlm", [one for one in MODELS if not one.packed], ids=lambda one: one.name)
def test_costs_are_those_of_the_images(vlm: Vlm) -> None:
    model = vlm.model(torch.float32)
    tower, whole = vitrail.count(find(model).trunk), vitrail.count(model)
    projector = getattr(model.model, "multi_modal_projector", None) or model.model.connector
    weights = sum(weight.numel() for weight in projector.parameters() if weight.dim() > 1)
    assert whole.flops == tower.flops + weights * (16 // vlm.patches_per_token)
    assert whole.flops_by_part["rest"] == tower.flops_by_part["rest"]


@torch.no_grad()
def test_padded_images_are_refused_where_tokens_merge() -> None:
    model = named("idefics3").model(torch.float32)
    tower, images = model.model.vision_model, torch.randn(2, 3, 32, 32)
    padded = torch.ones(2, 4, 4, dtype=torch.bool)
    padded[1, :, 3] = False
    plain = tower(images, patch_attention_mask=padded).last_hidden_state
    with vitrail.merge(model, r=0):
        assert torch.equal(tower(images, patch_attention_mask=padded).last_hidden_state, plain)
    with vitrail.merge(model, r=2):
        with pytest.raises(UnsupportedInput, match="mask"):
            tower(images, patch_attention_mask=padded)
        whole = tower(images, patch_attention_mask=torch.ones_like(padded)).last_hidden_state
        assert torch.equal(whole, tower(images).last_hidden_state)


@torch.no_grad()
def test_a_tower_reads_images_of_other_sizes() -> None:
    model = named("idefics3").model()
    tower, images = model.model.vision_model, torch.randn(2, 3, 24, 40, dtype=torch.float64)
    plain = tower(images).last_hidden_state
    with vitrail.merge(model, r=2) as merging:
        merged = tower(images).last_hidden_state
        assert merging.tokens_per_layer((24, 40)) == [13, 11, 9, 7]
    assert merged.shape == plain.shape
    assert (merged - plain).abs().max() > 1e-3


def tower_of(model: Any) -> Any:
    return find(model).trunk


@pytest.mark.parametrize("name", ["llava", "idefics3", "qwen2.5-vl"])
@torch.no_grad()
def test_a_tower_merged_by_itself_is_the_model_merged_whole(name: str) -> None:
    model, inputs = named(name).model(torch.float32), named(name).inputs(torch.float32)
    plain = model(**inputs).logits
    with vitrail.merge(tower_of(model), r=2):
        alone = model(**inputs).logits
        for other in (model, tower_of(model)):
            with pytest.raises(AlreadyApplied, match="already merged"):
                vitrail.merge(other, r=1)
    with vitrail.merge(model, r=2):
        assert torch.equal(model(**inputs).logits, alone)
    assert (alone - plain).abs().max() > 1e-4
    assert torch.equal(model(**inputs).logits, plain)


@pytest.mark.parametrize("name", ["llava", "internvl-plain", "qwen2.5-vl"])
@torch.no_grad()
def test_a_copy_is_merged_by_itself(name: str) -> None:
    model, inputs = named(name).model(torch.float32), named(name).inputs(torch.float32)
    plain = model(**inputs).logits
    merging = vitrail.merge(model, r=2)
    merged, other = model(**inputs).logits, copy.deepcopy(model)
    vitrail.Merging.of(other).remove()
    assert torch.equal(other(**inputs).logits, plain)
    assert torch.equal(model(**inputs).logits, merged)
    merging.remove()
    with pytest.raises(NotApplied):
        merging.remove()


@pytest.mark.parametrize("name", ["llava", "paligemma", "internvl-plain", "qwen2.5-vl"])
@torch.no_grad()
def test_half_precision(name: str) -> None:
    model = named(name).model(torch.float32).bfloat16()
    inputs = {
        key: value.bfloat16() if value.is_floating_point() else value for key, value in named(name).inputs().items()
    }
    with vitrail.merge(model, r=2):
        logits = model(**inputs).logits
    assert logits.dtype == torch.bfloat16
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize(("name", "tokens"), [("llava", 16), ("paligemma", 16), ("internvl-plain", 4)])
@torch.no_grad()
def test_prompts_with_different_numbers_of_images(name: str, tokens: int) -> None:
    model, images = named(name).model(), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    prompts = [prompt((tokens, tokens), [5, 9]), prompt((tokens,), [7])]
    length = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (length - len(one)) + one for one in prompts])
    inputs = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "pixel_values": images}
    plain = model(**inputs).logits
    with vitrail.merge(model, r=0):
        assert torch.equal(model(**inputs).logits, plain)
    with vitrail.merge(model, r=2):
        together = model.get_image_features(pixel_values=images).pooler_output
        alone = [model.get_image_features(pixel_values=one.unsqueeze(0)).pooler_output[0] for one in images]
        assert torch.allclose(torch.stack(list(together)), torch.stack(alone), rtol=0, atol=1e-9)
        assert model.generate(**inputs, max_new_tokens=2, do_sample=False).shape == (2, length + 2)
