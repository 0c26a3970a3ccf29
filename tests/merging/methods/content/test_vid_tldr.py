"""vid-TLDR against a plain loop."""

from __future__ import annotations

import pytest
import torch

from tests.merging.methods.loops import context, entropy
from vitrail.errors import InvalidOption
from vitrail.merging import MergeState, match
from vitrail.merging.methods.content import VidTLDR


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("protected", [0, 1])
def test_sources_enter_by_their_saliency(sized: bool, protected: int) -> None:
    torch.manual_seed(0)
    x, rows = torch.randn(3, 11, 4).double(), (3 * torch.randn(3, 2, 11, 11).double()).softmax(-1)
    size = torch.randint(1, 5, (3, 11)).double() if sized else None
    here = context(x, protected=protected, size=size)
    here.attend = lambda queries: rows[:, :, list(queries or [])]
    reduction = VidTLDR().reduce(here, 4)
    target = match(x, 4, protected).target
    assert torch.equal(reduction.assignment.target, target)
    kept, state = MergeState((4,), size=size).apply(x, reduction)
    zeros = 0
    for image in range(3):
        sharp = [-entropy(row) for row in rows[image].mean(0).tolist()][protected:]
        low, high = min(sharp), max(sharp)
        scaled = [(value - low) / (high - low) for value in sharp]
        mean = sum(scaled) / len(scaled)
        saliency = [0.0] * protected + [max(0.0, (value - mean) / (1 - mean)) for value in scaled]
        for group in range(7):
            members = (target[image] == group).nonzero()[:, 0].tolist()
            weights = [
                (1.0 if len(members) == 1 or i % 2 else saliency[i]) * (1.0 if size is None else float(size[image, i]))
                for i in members
            ]
            zeros += weights.count(0.0)
            total = sum(weights)
            assert float(state.size[image, group]) == pytest.approx(total)
            mean_token = sum(w * x[image, i] for w, i in zip(weights, members, strict=True)) / total
            torch.testing.assert_close(kept[image, group], mean_token)
    assert zeros, "no source is background: the test would prove little"


def test_options() -> None:
    assert VidTLDR().layers(6) == [1, 1, 1, 1, 0, 0]
    assert VidTLDR(2, features="keys").options == {"first": 2, "features": "keys"}
    assert VidTLDR().options == {}
    with pytest.raises(InvalidOption, match="first"):
        VidTLDR(0)
