"""Fewer visual tokens for the language model: counts, prompts kept in step, and equality with the model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from tests.oracle.models.vision_language import shortened
from tests.parity.checks import assert_restored, fingerprint
from tests.parity.models.cases import require
from tests.parity.models.vision_language import IMAGE, PAD, Inputs, Vlm, named, pixels, prompt
from tests.parity.test_vlm import features_of, logits_for
from vitrail.errors import AlreadyApplied, InvalidOption, NotApplied, UnsupportedInput, UnsupportedModel


@pytest.fixture(autouse=True)
def towers_of_their_own() -> None:
    require("transformers", "5.6")


NAMES = ["llava", "llava-full", "paligemma", "idefics3", "smolvlm", "internvl", "gemma3", "vipllava"]
every_model = pytest.mark.parametrize("vlm", [named(name) for name in NAMES], ids=lambda one: one.name)


def generate(model: Any, inputs: Inputs, **options: Any) -> Tensor:
    ids: Tensor = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, **options)
    return ids


@every_model
@torch.no_grad()
def test_all_tokens_are_the_model(vlm: Vlm) -> None:
    model, inputs = vlm.model(torch.float32), vlm.inputs(torch.float32)
    plain = model(**inputs).logits
    with vitrail.merge(model, r=0, shorten=1.0) as merging:
        assert torch.equal(model(**merging.shorten(inputs)).logits, plain)
        assert merging.visual_tokens == vlm.tokens[0][0]
    with vitrail.merge(model, r=2):
        merged = model(**inputs).logits
    with vitrail.merge(model, r=2, shorten=vlm.tokens[0][0]):
        assert torch.equal(model(**inputs).logits, merged)


@every_model
@torch.no_grad()
def test_the_language_model_receives_what_the_oracle_merges(vlm: Vlm) -> None:
    model, inputs = vlm.model(), vlm.inputs()
    expected = [
        torch.cat([shortened(image, 3) for image in images.split(counts)])
        for images, counts in zip(vlm.features(model, inputs, 0), vlm.tokens, strict=True)
    ]
    with vitrail.merge(model, shorten=3) as merging:  # with r=2 restored copies would be ties
        short = merging.shorten(inputs)
        found = features_of(model, short)
        logits = model(**short).logits
    assert [one.shape for one in found] == [one.shape for one in expected]
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.allclose(actual, wanted, rtol=0, atol=vlm.tolerance)
    assert torch.allclose(logits, logits_for(model, short, expected), rtol=0, atol=max(1e-7, vlm.tolerance))


@every_model
@torch.no_grad()
def test_generation_with_a_cache_is_generation_without(vlm: Vlm) -> None:
    model, inputs = vlm.model(), vlm.inputs()
    with vitrail.merge(model, r=1, shorten=2) as merging:
        short = merging.shorten(inputs)
        cached, plain = generate(model, short), generate(model, short, use_cache=False)
        step = model(**short, use_cache=True)
    length = inputs["input_ids"].shape[1] - sum(count - 2 for count in vlm.tokens[0])
    assert cached.shape == (2, length + 4)
    assert torch.equal(cached, plain)
    assert torch.equal(cached[:, :-4], short["input_ids"])
    assert step.past_key_values.get_seq_length() == length


@every_model
@torch.no_grad()
def test_removal_restores_the_model_to_the_bit(vlm: Vlm) -> None:
    model, inputs = vlm.model(torch.float32), vlm.inputs(torch.float32)
    plain = model(**inputs).logits
    make_up, state = fingerprint(model), {name: value.clone() for name, value in model.state_dict().items()}
    merging = vitrail.merge(model, shorten=0.5)
    assert list(model.state_dict()) == list(state)
    assert model(**merging.shorten(inputs)).logits.shape[1] < plain.shape[1]
    merging.remove()
    assert_restored(model, make_up, state)
    assert torch.equal(model(**inputs).logits, plain)


def of_many_images() -> tuple[Any, Inputs]:
    """Return LLaVA with prompts of two images, one and none, padded in front."""
    model = named("llava").model()
    prompts = [prompt((16, 16), [5, 9]), prompt((16,), [8]), prompt((), [7, 6, 4])]
    length = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (length - len(one)) + one for one in prompts])
    return model, {"input_ids": ids, "attention_mask": (ids != PAD).long(), **pixels(torch.float64, 3, 3, 32, 32)}


@torch.no_grad()
def test_a_batch_of_prompts_is_its_prompts_one_by_one() -> None:
    model, inputs = of_many_images()
    with vitrail.merge(model, r=1, shorten=5) as merging:
        short = merging.shorten(inputs)
        together = model(**short).logits[:, -1]
        generated = generate(model, short)
        for row, images in enumerate([slice(0, 2), slice(2, 3), None]):
            ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].unsqueeze(0)
            alone = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if images is not None:
                alone |= {"pixel_values": inputs["pixel_values"][images]}
            alone = merging.shorten(alone)
            assert torch.allclose(model(**alone).logits[0, -1], together[row], rtol=0, atol=1e-5)
            assert torch.equal(generate(model, alone)[0, -4:], generated[row, -4:])
    assert short["input_ids"].shape[1] == inputs["input_ids"].shape[1] - 2 * 11


@torch.no_grad()
def test_prompts_stay_in_step() -> None:
    model, inputs = of_many_images()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    labels = torch.where(mask.bool() & (ids != IMAGE), ids, -100)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {**inputs, "labels": labels, "position_ids": positions, "token_type_ids": (ids == IMAGE).long()}
    before = copy.deepcopy(given)
    with vitrail.merge(model, shorten=3) as merging:
        short = merging.shorten(given)
        loss, logits = (getattr(model(**short), name) for name in ("loss", "logits"))
        assert loss.item() == pytest.approx(cross_entropy(logits, short["labels"]).item(), rel=1e-6)
    wanted = [prompt((3, 3), [5, 9]), prompt((3,), [8]), prompt((), [7, 6, 4])]
    for row, one in enumerate(wanted):
        real = short["attention_mask"][row].bool()
        assert short["input_ids"][row][real].tolist() == one
        assert short["position_ids"][row][real].tolist() == list(range(len(one)))
        assert short["labels"][row][real].tolist() == [-100 if token == IMAGE else token for token in one]
        assert short["token_type_ids"][row].tolist() == (short["input_ids"][row] == IMAGE).long().tolist()
        assert real.long().sort().values.tolist() == real.long().tolist()
        assert set(short["input_ids"][row][~real].tolist()) <= {PAD}
        assert set(short["labels"][row][~real].tolist()) <= {-100}
    assert short["pixel_values"] is given["pixel_values"]
    assert all(torch.equal(given[name], value) for name, value in before.items())


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of predicting each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)


def test_padding_stays_on_its_side() -> None:
    model, _ = of_many_images()
    prompts = [prompt((16, 16), [5]), prompt((16,), [8])]
    behind = torch.tensor([one + [PAD] * (len(prompts[0]) - len(one)) for one in prompts])
    with vitrail.merge(model, shorten=2) as merging:
        short = merging.shorten({"input_ids": behind, "attention_mask": (behind != PAD).long()})
        assert short["input_ids"].tolist() == [
            prompt((2, 2), [5]),
            [*prompt((2,), [8]), PAD, PAD, PAD],
        ]
        assert torch.equal(short["attention_mask"], (short["input_ids"] != PAD).long())
        # without a mask every token counts; the second prompt has as many words as the first has images more
        full = torch.tensor([prompt((16, 16), [5]), prompt((16,), [8] * 18)])
        made = merging.shorten({"input_ids": full})
        assert made["input_ids"].tolist() == [[PAD] * 14 + prompt((2, 2), [5]), prompt((2,), [8] * 18)]
        assert torch.equal(made["attention_mask"], (made["input_ids"] != PAD).long())
        text = {"input_ids": torch.tensor([[1, 5, 9]])}
        assert merging.shorten(text) == text


def test_a_processors_own_class_is_kept() -> None:
    from transformers import BatchFeature

    model, inputs = of_many_images()
    with vitrail.merge(model, shorten=2) as merging:
        short = merging.shorten(BatchFeature(inputs))
    assert type(short) is BatchFeature
    assert int((short["input_ids"] == IMAGE).sum()) == 6


@torch.no_grad()
def test_copies_and_handles_carry_it() -> None:
    vlm = named("internvl-plain")
    model, inputs = vlm.model(torch.float32), vlm.inputs(torch.float32)
    plain = model(**inputs).logits
    merging = vitrail.merge(model, r=1, shorten=0.5)
    assert (merging.visual_tokens, merging.config["shorten"]) == (2, 0.5)
    short = merging.shorten(inputs)
    logits = model(**short).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**short).logits, logits)
        vitrail.Merging.of(other).remove()
        assert torch.equal(other(**inputs).logits, plain)
    with merging.suspended():
        assert torch.equal(model(**inputs).logits, plain)
    assert torch.equal(model(**short).logits, logits)
    config = merging.config
    vitrail.Merging.of(model.model.vision_tower).remove()
    assert torch.equal(model(**inputs).logits, plain)
    with pytest.raises(NotApplied):
        merging.remove()
    with vitrail.merge(model, **config):
        assert torch.equal(model(**short).logits, logits)


def test_gradients_reach_all_tokens() -> None:
    vlm = named("paligemma")
    model, inputs = vlm.model(), vlm.inputs()
    images = inputs["pixel_values"].requires_grad_()
    with vitrail.merge(model, shorten=3):
        (found,) = torch.autograd.grad(sum(one.square().sum() for one in features_of(model, inputs)), images)
    wanted = [shortened(one, 3) for one in vlm.features(model, inputs, 0)]
    (expected,) = torch.autograd.grad(sum(one.square().sum() for one in wanted), images)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_added_tokens_stay_when_it_is_removed() -> None:
    model, inputs = of_many_images()
    added = vitrail.add_tokens(model, registers=2)
    plain = model(**inputs).logits
    with vitrail.merge(model, shorten=4) as merging:
        assert model(**merging.shorten(inputs)).logits.shape[1] < plain.shape[1]
    assert torch.equal(model(**inputs).logits, plain)
    added.remove()


@torch.no_grad()
def test_a_prompt_that_was_not_shortened_is_refused() -> None:
    vlm = named("idefics3")
    model, inputs = vlm.model(), vlm.inputs()
    with (
        vitrail.merge(model, r=1, shorten=3),
        pytest.raises(UnsupportedInput, match=r"16 placeholders.*shorten\(inputs"),
    ):
        model(**inputs)


@pytest.mark.parametrize("wanted", [0, 17, -1, 0.0, 1.5, True, "half"])
def test_impossible_numbers_are_refused(wanted: Any) -> None:
    model = named("llava").model()
    make_up = fingerprint(model)
    with pytest.raises(InvalidOption, match="shorten"):
        vitrail.merge(model, r=1, shorten=wanted)
    assert fingerprint(model) == make_up


@pytest.mark.parametrize(
    ("name", "reason"),
    [("qwen2-vl", "rows and columns"), ("qwen3-vl", "rows and columns"), ("llava-next", "places in a grid")],
)
def test_models_that_need_the_grid_are_refused(name: str, reason: str) -> None:
    model = named(name).model()
    make_up = fingerprint(model)
    with pytest.raises(UnsupportedModel, match=reason):
        vitrail.merge(model, r=1, shorten=2)
    assert fingerprint(model) == make_up


def test_a_tower_alone_is_refused() -> None:
    model = named("llava").model()
    with pytest.raises(UnsupportedModel, match="given whole"):
        vitrail.merge(model.model.vision_tower, r=1, shorten=2)
    with pytest.raises(UnsupportedModel, match="no language model"):
        vitrail.merge(vitrail.models.create_model("vit_tiny_patch16", image_size=32, depth=2), r=1, shorten=2)


def test_bad_prompts_are_refused() -> None:
    model, inputs = of_many_images()
    with vitrail.merge(model, r=1) as merging:
        assert merging.visual_tokens == 16
        with pytest.raises(InvalidOption, match="merged without shorten="):
            merging.shorten(inputs)
    with vitrail.merge(model, shorten=3) as merging:
        with pytest.raises(AlreadyApplied):
            vitrail.merge(model, shorten=3)
        with pytest.raises(InvalidOption, match="prompt 0 has 6, which is no multiple"):
            merging.shorten(merging.shorten(inputs))
        with pytest.raises(InvalidOption, match="return_tensors"):
            merging.shorten({"input_ids": [[1, 2, 3]]})
        with pytest.raises(InvalidOption, match="attention_mask"):
            merging.shorten({**inputs, "attention_mask": torch.ones(3, 1, 4, 4)})
