"""Whether merging pays: copies are timed, and the result says it in words and numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.fakes import ToyViT
from tests.moments import only_moments
from vitrail.errors import InvalidOption, NotApplied, UnsupportedInput
from vitrail.surgery.merging.payoff import BestTime, Payoff


class Spy(nn.Module):
    """Record how many tokens reach the last MLP; shared by copies of the model."""

    lengths: set[int]

    def __init__(self) -> None:
        super().__init__()
        self.lengths = set()

    def __deepcopy__(self, memo: object) -> Spy:
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.lengths.add(x.shape[1])
        return x


def test_both_models_are_timed_and_stay_unchanged(toy: ToyViT, monkeypatch: pytest.MonkeyPatch) -> None:
    only_moments(monkeypatch)
    spy = Spy()
    toy.blocks[-1].mlp.insert(0, spy)  # type: ignore[operator, union-attr]
    merging = vitrail.merge(toy, r=2)
    before = {name: value.clone() for name, value in toy.state_dict().items()}
    found = merging.pays(batch=3, seconds=0.01)
    assert spy.lengths == {17, 17 - 6}
    assert (found.batch, found.unmerged.mode, found.merged.mode) == (3, "eager", "eager")
    assert found.flops_ratio == merging.flops(merged=False) / merging.flops() > 1
    assert found.speedup == found.unmerged.seconds / found.merged.seconds
    assert merging.is_active
    assert all(torch.equal(value, before[name]) for name, value in toy.state_dict().items())


def test_a_batch_may_have_another_size_and_methods_may_decide_per_image(
    toy: ToyViT, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_moments(monkeypatch)
    merging = vitrail.merge(toy, r=2)
    found = merging.pays(torch.randn(2, 3, 24, 16, dtype=torch.float64), seconds=0.01)
    assert found.batch == 2
    assert found.flops_ratio == merging.flops((24, 16), merged=False) / merging.flops((24, 16))
    merging.remove()
    merging = vitrail.merge(toy, method="threshold")
    assert merging.pays(2, seconds=0.01).flops_ratio is None


@pytest.mark.parametrize(
    ("unmerged", "merged", "word", "pays"),
    [(2.0, 1.0, " pays", True), (1.0, 2.0, "does not pay", False), (1.0, 1.01, "no clear difference", False)],
)
def test_the_sentence_says_what_was_measured(unmerged: float, merged: float, word: str, pays: bool) -> None:
    found = Payoff(8, "a device in float32", BestTime("eager", unmerged, 0.02), BestTime("captured", merged, 0.02), 1.9)
    assert bool(found) is pays
    assert all(part in str(found) for part in (word, "batch 8", "a device", "1.90", "captured"))


def test_bad_input_is_refused(toy: ToyViT) -> None:
    merging = vitrail.merge(toy, r=2)
    for batch in (0, -1, 1.5, "8", None, True):
        with pytest.raises(InvalidOption, match="batch"):
            merging.pays(batch)  # type: ignore[arg-type]
    for seconds in (0, float("nan"), "1"):
        with pytest.raises(InvalidOption, match="seconds"):
            merging.pays(1, seconds=seconds)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedInput, match="batch"):
        merging.pays(torch.zeros(0, 3, 16, 16))
    merging.remove()
    with pytest.raises(NotApplied):
        merging.pays(1)
