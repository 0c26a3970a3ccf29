"""What single families of transformers do besides what all do."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import vitrail
from tests.oracle import describe, run
from tests.parity.models import Case
from tests.parity.models_transformers_beit import CASES as BEIT
from tests.parity.models_transformers_dinov3 import CASES as DINOV3
from tests.parity.models_transformers_dinov3 import SMALL
from vitrail.adapters import find
from vitrail.errors import UnsupportedInput


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
