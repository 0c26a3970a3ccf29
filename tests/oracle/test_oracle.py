"""The oracle itself: it equals the model without merging, and a step computed by hand."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import describe, run
from tests.oracle.core import Token, merge, possible
from tests.parity.models import timm_beit, timm_eva, timm_vit, torchvision_vit, transformers_vit
from tests.parity.models.cases import Case, outputs_of

CASES: list[tuple[str, Case]] = [
    *(("vit", case) for case in timm_vit.CASES.values()),
    *(("eva", case) for case in timm_eva.CASES.values()),
    *(("beit", case) for case in timm_beit.CASES.values()),
    *(("transformers", case) for case in transformers_vit.CASES.values()),
    *(("torchvision", case) for case in torchvision_vit.CASES.values()),
]


@pytest.mark.parametrize(("library", "case"), CASES, ids=[f"{kind}-{case.name}" for kind, case in CASES])
def test_without_merging_it_is_the_model(library: str, case: Case) -> None:
    model, images = case.model(), case.images()
    with torch.no_grad():
        own = outputs_of(model(images, **case.call))
        result = run(describe(model, images, **case.call), 0)
    assert result.outputs.keys() == own.keys()
    # Where a library itself computes in float32, that is as near as anyone can come.
    atol = 1e-10 if case.tolerance <= 1e-9 else case.tolerance
    for name, output in own.items():
        assert torch.allclose(result.outputs[name], output, rtol=0, atol=atol)


def turned(*degrees: float) -> list[list[float]]:
    """Unit vectors in the plane."""
    angles = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angles.cos(), angles.sin()], dim=1).tolist()


def tokens(*sizes: int) -> list[Token]:
    """Tokens of these sizes whose vector is their place, standing for successive positions."""
    made, first = [], 0
    for place, size in enumerate(sizes):
        made.append(Token(torch.tensor([float(place)]), list(range(first, first + size))))
        first += size
    return made


def test_one_step_by_hand() -> None:
    """Even places 2 and 4 are nearest to place 3, at 1 and 5 degrees; place 0 is protected."""
    metric = turned(0, 90, 180, 181, 176, 120)
    left = merge(tokens(1, 1, 2, 1, 3, 1), metric, {0}, 2, "paper")
    assert [t.members for t in left] == [[0], [1], [2, 3, 4, 5, 6, 7], [8]]
    assert left[2].vector.item() == pytest.approx((2 * 2 + 1 * 3 + 3 * 4) / 6)
    left = merge(tokens(1, 1, 2, 1, 3, 1), metric, {0}, 1, "paper")
    assert [t.members for t in left] == [[0], [5, 6, 7], [1], [2, 3, 4], [8]]
    left = merge(tokens(1, 1, 2, 1, 3, 1), metric, {0}, 1, "original")
    assert [t.members for t in left] == [[0], [1], [2, 3, 4], [5, 6, 7], [8]]


def test_how_many_pairs_there_are() -> None:
    assert possible(tokens(*[1] * 6), set(), 9) == 3
    assert possible(tokens(*[1] * 7), set(), 9) == 3
    assert possible(tokens(*[1] * 6), {0}, 9) == 2
    assert possible(tokens(*[1] * 6), {1, 3, 5}, 9) == 0
    assert possible(tokens(*[1] * 6), {0, 2}, 9) == 1
    assert possible(tokens(*[1] * 6), set(), 2) == 2
