"""SigLIP 2 NaFlex: images of different grids in one batch, padded behind; padding is tokens of size 0."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import vitrail
from tests.oracle import run
from tests.oracle.models.transformers_siglip2 import describe_naflex
from tests.parity.checks import assert_restored, fingerprint
from tests.parity.models.cases import require
from tests.parity.models.transformers_siglip2 import GRIDS, PATCH, alone, padded, tower, with_text
from vitrail.adapters import find
from vitrail.errors import SaturatedWarning, UnsupportedInput
from vitrail.merging import METHODS
from vitrail.surgery.hooks import watch

OUTPUTS = ("last_hidden_state", "pooler_output")
IMAGES = range(len(GRIDS))


@pytest.fixture(autouse=True)
def towers_of_their_own() -> None:
    """Before transformers 5.6 a tower was wrapped once more."""
    require("transformers", "5.6")


def call(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Call a model; small images merge less than requested, and say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturatedWarning)
        output = model(**inputs)
    return {name: output[name] for name in OUTPUTS}


def difference(together: dict[str, Tensor], image: int, single: dict[str, Tensor]) -> float:
    """Return the largest difference of an image in a batch to the image by itself, at its own patches."""
    count = single["last_hidden_state"].shape[1]
    tokens = together["last_hidden_state"][image : image + 1, :count] - single["last_hidden_state"]
    pooled = together["pooler_output"][image : image + 1] - single["pooler_output"]
    return max(tokens.abs().max().item(), pooled.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("whole", [False, True])
def test_nothing_changes_with_r_0(whole: bool) -> None:
    model, inputs = tower(torch.float32), padded(torch.float32)
    inputs = alone(inputs, 1) if whole else inputs
    plain = call(model, inputs)
    with vitrail.merge(model, r=0):
        merged = call(model, inputs)
    assert all(torch.equal(merged[name], plain[name]) for name in OUTPUTS)


@torch.no_grad()
@pytest.mark.parametrize("r", [2, [3, 0, 1]])
def test_every_image_of_a_batch_is_the_oracles(r: Any) -> None:
    model, inputs = tower(), padded()
    with vitrail.merge(model, r=r):
        together = call(model, inputs)
    for image in IMAGES:
        one = alone(inputs, image)
        expected = run(describe_naflex(model, one["pixel_values"], one["spatial_shapes"]), r)
        assert difference(together, image, expected.outputs) < 1e-9


TOGETHER: list[dict[str, Any]] = [
    {"keep": 0.5},
    {"gflops": 0.0004},
    {"r": 2, "order": "original"},
    {"r": 3, "proportional": False},
    {"r": 1000},
    {"method": "threshold"},
    {"method": "mutual"},
    *({"r": 2, "method": name} for name, kind in METHODS.items() if kind.takes_padding and name != "random"),
]


@torch.no_grad()
@pytest.mark.parametrize("options", TOGETHER, ids=str)
def test_images_together_are_images_alone(options: dict[str, Any]) -> None:
    model, inputs = tower(), padded()
    if "gflops" in options:
        inputs = {name: value[:2] for name, value in inputs.items()}  # small images cost less without merging
    with vitrail.merge(model, **options) as merging:
        with merging.track() as trace:
            together = call(model, inputs)
        for image in range(len(inputs["pixel_values"])):
            with merging.track() as single:
                assert difference(together, image, call(model, alone(inputs, image))) < 1e-9
            count, kept = len(single.groups[0]), int(single.tokens_per_layer[0, -1])
            assert torch.equal(trace.tokens_per_layer[image], single.tokens_per_layer[0])
            assert torch.equal(trace.groups[image, :count], single.groups[0])
            assert torch.allclose(trace.sizes[image, :kept], single.sizes[0, :kept], rtol=0, atol=1e-9)
            assert not trace.sizes[image, kept:].any()
            assert trace.flops[image] == single.flops[0]


@torch.no_grad()
def test_every_image_has_the_schedule_of_its_own_grid() -> None:
    model, inputs = tower(torch.float32), padded(torch.float32)
    with vitrail.merge(model, keep=0.5) as merging, merging.track() as trace:
        call(model, inputs)
        planned = [merging.tokens_per_layer((height * PATCH, width * PATCH)) for height, width in GRIDS]
    assert trace.tokens_per_layer.tolist() == planned


def test_gradients_are_those_of_images_alone_and_padding_has_none() -> None:
    model, inputs = tower(), padded()
    pixels = inputs["pixel_values"].requires_grad_()
    with vitrail.merge(model, r=2):
        call(model, inputs)["pooler_output"].square().sum().backward()
        for image in IMAGES:
            one = alone({name: value.detach() for name, value in inputs.items()}, image)
            single = one["pixel_values"].requires_grad_()
            call(model, one)["pooler_output"].square().sum().backward()
            assert pixels.grad is not None
            assert single.grad is not None
            count = single.shape[1]
            assert torch.allclose(pixels.grad[image, :count], single.grad[0], rtol=1e-7, atol=1e-9)
            assert not pixels.grad[image, count:].any()
            assert single.grad.any()


@torch.no_grad()
def test_removal_restores_the_model_to_the_bit() -> None:
    model, inputs = tower(torch.float32), padded(torch.float32)
    plain = call(model, inputs)
    make_up, state = fingerprint(model), {name: value.clone() for name, value in model.state_dict().items()}
    merging = vitrail.merge(model, r=2)
    assert (call(model, inputs)["pooler_output"] - plain["pooler_output"]).abs().max() > 1e-3
    merging.remove()
    assert_restored(model, make_up, state)
    again = call(model, inputs)
    assert all(torch.equal(again[name], plain[name]) for name in OUTPUTS)


@torch.no_grad()
def test_tokens_between_blocks_have_full_length() -> None:
    model, inputs = tower(), padded()
    plain = model(**inputs, output_hidden_states=True).hidden_states
    with vitrail.merge(model, r=[0, 0, 2]):
        merged = model(**inputs, output_hidden_states=True).hidden_states
    assert [one.shape for one in merged] == [one.shape for one in plain]
    assert all(
        torch.allclose(after, before, rtol=0, atol=1e-12) for before, after in zip(plain[:3], merged, strict=False)
    )
    assert not torch.allclose(merged[-1], plain[-1])


@torch.no_grad()
def test_similarities_are_those_of_merged_images_and_plain_texts() -> None:
    model, inputs = with_text(hf.Siglip2Model), padded()
    texts = {"input_ids": torch.tensor([[1, 5, 9, 3, 7, 2, 2, 2], [1, 4, 4, 8, 2, 2, 2, 2]])}
    plain = model(**inputs, **texts)
    with vitrail.merge(model, r=1):
        merged = model(**inputs, **texts)
        images = torch.cat([model.get_image_features(**alone(inputs, image)).pooler_output for image in IMAGES])
    assert torch.equal(merged.text_embeds, plain.text_embeds)
    assert torch.allclose(merged.image_embeds, torch.nn.functional.normalize(images, dim=-1), rtol=0, atol=1e-9)
    assert (merged.logits_per_image - plain.logits_per_image).abs().max() > 1e-3


@torch.no_grad()
def test_a_head_averages_the_patches_that_are_there() -> None:
    model, inputs = with_text(hf.Siglip2ForImageClassification), padded()
    with vitrail.merge(model, r=1):
        together = model(**inputs).logits
        single = torch.cat([model(**alone(inputs, image)).logits for image in IMAGES])
    assert torch.allclose(together, single, rtol=0, atol=1e-9)
    assert find(model).adapter.num_classes(model, find(model).trunk) == 5


def packed(images: Tensor) -> dict[str, Tensor]:
    """Return images as patches, row by row, by loops."""
    rows, columns = images.shape[2] // PATCH, images.shape[3] // PATCH
    patches = [
        images[:, :, top : top + PATCH, left : left + PATCH].permute(0, 2, 3, 1).flatten(1)
        for top in range(0, rows * PATCH, PATCH)
        for left in range(0, columns * PATCH, PATCH)
    ]
    shapes = torch.tensor([[rows, columns]] * len(images))
    present = torch.ones(len(images), len(patches), dtype=torch.int)
    return {"pixel_values": torch.stack(patches, 1), "pixel_attention_mask": present, "spatial_shapes": shapes}


@torch.no_grad()
def test_a_merged_model_takes_images() -> None:
    model, images = tower(), torch.randn(2, 3, 24, 40, dtype=torch.float64)
    with vitrail.merge(model, r=2) as merging:
        found, expected = model(images), call(model, packed(images))
        assert all(torch.equal(found[name], expected[name]) for name in OUTPUTS)
        assert len(merging.draw(torch.rand(3, 32, 32))) == 1


@torch.no_grad()
def test_recordings_are_those_of_patches() -> None:
    model, images = tower(), torch.randn(2, 3, 24, 40, dtype=torch.float64)
    hidden = model(**packed(images), output_hidden_states=True).hidden_states
    recording = vitrail.record(model, images, ("embedding", "tokens", "attention"), queries=[0, 3])
    assert recording.layout.grid == (1, 3, 5)
    assert recording.embedding is not None
    assert torch.equal(recording.embedding, model.embeddings.patch_embedding(packed(images)["pixel_values"]))
    assert all(torch.equal(recording.tokens[layer], hidden[layer + 1]) for layer in range(3))
    assert torch.allclose(recording.attention[1].sum(-1), torch.ones(2, 2, 2, dtype=torch.float64))
    recorder = watch(model, "tokens")
    with recorder.hooked():
        model(**alone(padded(), 1))
        assert recorder.take()[0].layout.grid == (1, 3, 5)
        with pytest.raises(UnsupportedInput, match="one patch grid"):
            model(**padded())


@torch.no_grad()
def test_an_inspection_reads_images() -> None:
    report = vitrail.inspect(tower(torch.float32), torch.randn(4, 3, 32, 32), probes=False, discovery=False, cure=False)
    assert report.layout["grid"] == [1, 4, 4]
    assert report.norms["num_tokens"] == 64


@torch.no_grad()
def test_added_tokens_leave_padded_images_as_they_are_until_they_open() -> None:
    model, inputs = tower(), padded()
    plain = call(model, inputs)
    with vitrail.add_tokens(model, registers=2) as added:
        closed = call(model, inputs)
        added.open()
        opened = [call(model, inputs), *(call(model, alone(inputs, image)) for image in IMAGES)]
    assert all(torch.equal(closed[name], plain[name]) for name in OUTPUTS)
    assert all(difference(opened[0], image, opened[image + 1]) < 1e-9 for image in IMAGES)


@pytest.mark.slow
@torch.no_grad()
def test_images_compile_as_one_graph_and_export() -> None:
    model, images = tower(torch.float32), torch.randn(2, 3, 24, 40)
    with vitrail.merge(model, r=2):
        wanted = model(images).pooler_output
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        exported = torch.export.export(model, (images,)).module()
        assert torch.allclose(compiled(images).pooler_output, wanted, atol=1e-5)
        assert torch.allclose(exported(images).pooler_output, wanted, atol=1e-5)


@torch.no_grad()
def test_bad_input_is_refused() -> None:
    model, inputs = tower(torch.float32), padded(torch.float32)
    mask = inputs["pixel_attention_mask"].clone()
    mask[1, 0] = 0
    with vitrail.merge(model, r=2):
        with pytest.raises(UnsupportedInput, match="does not agree with spatial_shapes"):
            model(**{**inputs, "pixel_attention_mask": mask})
        with pytest.raises(UnsupportedInput, match="does not agree with spatial_shapes"):
            model(**{**inputs, "pixel_attention_mask": None})
        with pytest.raises(UnsupportedInput, match="at most as many patches"):
            model(**{**inputs, "spatial_shapes": inputs["spatial_shapes"] * 2})
        with pytest.raises(UnsupportedInput, match="without spatial_shapes"):
            model(inputs["pixel_values"])
        with pytest.raises(UnsupportedInput, match="output_attentions"):
            model(**inputs, output_attentions=True)
    for options, words in (
        ({"method": "kmeans"}, "method='kmeans'"),
        ({"protect": torch.zeros(16, dtype=torch.bool)}, "protect="),
        ({"restore": "transport"}, "restore="),
    ):
        with vitrail.merge(model, r=1, **options), pytest.raises(UnsupportedInput, match=words):
            model(**inputs)
        with vitrail.merge(model, r=1, **options):
            assert call(model, alone(inputs, 0))["pooler_output"].isfinite().all()


@torch.no_grad()
def test_test_time_registers_take_images_without_padding() -> None:
    model, inputs = tower(torch.float32), padded(torch.float32)
    with vitrail.test_time_registers(model, neurons={0: [1]}):
        assert call(model, alone(inputs, 1))["last_hidden_state"].shape == (1, 15, 32)
        with pytest.raises(UnsupportedInput, match="mask"):
            model(**inputs)
