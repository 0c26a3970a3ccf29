"""What single families of transformers do besides what all do."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import vitrail
from tests.oracle import describe, run
from tests.parity.models.cases import Case
from tests.parity.models.transformers_beit import CASES as BEIT
from tests.parity.models.transformers_dinov3 import CASES as DINOV3
from tests.parity.models.transformers_dinov3 import SMALL
from tests.parity.models.transformers_relatives import CASES as RELATIVES
from tests.parity.models.transformers_vjepa2 import CASES as VJEPA2
from vitrail.adapters import find
from vitrail.errors import BrokenPass, UnsupportedInput, UnsupportedModel


def test_feature_maps_of_a_dinov3_backbone_are_at_full_length() -> None:
    def build() -> hf.DINOv3ViTBackbone:
        return hf.DINOv3ViTBackbone(hf.DINOv3ViTConfig(**SMALL, out_features=["stage2", "stage3"]))

    case = Case("backbone", build, (32, 32))
    model, images = case.model(), case.images()
    expected = run(describe(model, images), 3)
    with torch.no_grad(), vitrail.merge(model, r=3):
        maps = model(images).feature_maps
    for grid, hidden in zip(maps, expected.hidden[1:], strict=True):
        assert torch.allclose(grid.flatten(2).mT, model.norm(hidden)[:, 5:], rtol=0, atol=1e-9)


def test_shifted_coordinates_of_dinov3_are_read_from_its_table() -> None:
    case = DINOV3["wide"]
    model, images = case.model().train(), case.images()
    found = find(model)
    layout = found.adapter.layout(model, case.size)
    position = found.adapter.position(model, layout.grid)
    cosine, sine = model.rope_embeddings(images)
    table, tokens = torch.cat([sine, cosine], -1), model.embeddings(images)
    assert position is not None
    positions = position.coordinates(layout, tokens, table)
    again = position.table(0, positions)
    assert again is not None
    assert torch.allclose(again[0, 0, layout.num_special :], table, atol=1e-6)
    plain = found.adapter.position(model.eval(), layout.grid)
    assert plain is not None
    assert (plain.coordinates(layout, tokens, table) - positions).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["own", "shared"])
def test_masks_of_a_changed_beit_are_refused(name: str) -> None:
    model, images = BEIT[name].model(), BEIT[name].images()
    mask = torch.ones(2, 17, dtype=torch.bool)
    with vitrail.merge(model, r=2), pytest.raises(UnsupportedInput, match="position bias"):
        model(images, attention_mask=mask)
    assert torch.allclose(model(images, attention_mask=mask)[0], model(images)[0])


def test_vit_mae_sees_whole_images_in_order() -> None:
    model, images = RELATIVES["mae"].model(), RELATIVES["mae"].images()
    shuffled = torch.rand(2, 16, generator=torch.Generator().manual_seed(1))
    states = model(images, output_hidden_states=True).hidden_states[1:]
    plain = hf.ViTMAEModel(model.config).double().eval()  # shuffles patches anew in every call
    plain.load_state_dict(model.state_dict())
    recording = vitrail.record(plain, images)
    for layer, state in enumerate(states):
        assert torch.allclose(recording.tokens[layer], state)
    with vitrail.merge(plain, r=0):
        assert torch.allclose(plain(images).last_hidden_state, model(images).last_hidden_state)
        with pytest.raises(UnsupportedInput, match="noise"):
            plain(images, shuffled)
        plain.config.mask_ratio = 0.75
        with pytest.raises(UnsupportedInput, match="mask_ratio"):
            plain(images)
    for refused in (plain, hf.ViTMAEForPreTraining(plain.config)):
        with pytest.raises(UnsupportedModel, match="mask_ratio = 0"):
            vitrail.merge(refused, r=2)


def test_packed_images_of_radio_are_refused() -> None:
    model = RELATIVES["radio"].model()
    with vitrail.merge(model, r=2), pytest.raises(UnsupportedInput, match="image_grid_hw"):
        model(torch.zeros(12, 192), image_grid_hw=torch.tensor([[3, 4]]))


def test_each_teacher_of_radio_and_caption_of_tipsv2_has_its_token() -> None:
    for name, special in (("radio", {"class": 3, "register": 7}), ("tipsv2", {"class": 1, "class second": 2})):
        model = RELATIVES[name].model()
        found = find(model)
        spans = found.adapter.layout(model).special
        assert {f"{span.role} {span.name}".strip(): span.count for span in spans} == special
        tokens = found.adapter.token_parameters(model)
        assert {key: value.shape[1] for key, value in tokens.items()} == {
            (one.role, one.name): one.count for one in spans
        }


def test_attention_of_vjepa2_is_recorded_with_its_rotation() -> None:
    case = VJEPA2["vjepa2-eager"]
    model, clips = case.model(torch.float32), case.images(torch.float32)
    with torch.no_grad():
        wanted = model(clips, output_attentions=True).attentions
    found = vitrail.record(model, clips, "attention", queries=[0, 5, 47])
    for layer, weights in enumerate(wanted):
        assert torch.allclose(found.attention[layer], weights[:, :, [0, 5, 47]], atol=1e-6)
    with vitrail.merge(model, r=0):
        again = vitrail.record(model, clips, "attention", queries=[0, 5, 47])
        assert torch.allclose(again.attention[2], found.attention[2])
        with pytest.raises(BrokenPass, match="call the model"):
            find(model).blocks[0](torch.randn(1, 48, 32), None)


def test_vjepa2_in_half_precision_is_the_model_itself() -> None:
    case = VJEPA2["vjepa2-head"]
    model, clips = case.model(torch.float32).bfloat16(), case.images(torch.float32).bfloat16()
    with torch.no_grad():
        plain = model(clips).logits
        with vitrail.merge(model, r=0):
            assert torch.equal(model(clips).logits, plain)
