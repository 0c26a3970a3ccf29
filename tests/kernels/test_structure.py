"""The checks themselves detect wrong kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.guards import GUARD, guarded, surrounded
from tests.kernels.structure import check_lists, check_places, partners, shortfall
from vitrail.merging import match

R, PROTECTED = 5, 2


@pytest.fixture
def metric() -> Tensor:
    return torch.randn(2, 21, 8, dtype=torch.float64)


def lists_of(target: Tensor) -> tuple[Tensor, Tensor]:
    """Members group by group, the one at an odd position first, and where each group begins."""
    position = torch.arange(target.shape[1])
    follows = (position % 2 == 0).long()
    member = (target * 100 + follows * 50 + position).argsort(1)
    counts = torch.stack([row.bincount() for row in target])
    return member, torch.nn.functional.pad(counts.cumsum(1), (1, 0))


def test_the_reference_passes(metric: Tensor) -> None:
    target = match(metric, R, PROTECTED).target
    check_places(target, R, PROTECTED)
    check_lists(target, *lists_of(target))
    short, unclear = shortfall(metric, target, R, PROTECTED, 1e-9)
    assert short == 0
    assert not unclear.any()


def test_other_partners_and_other_edges_fall_short(metric: Tensor) -> None:
    target = match(metric, R, PROTECTED).target
    other = match(metric.flip(2).roll(1, 1), R, PROTECTED).target
    check_places(other, R, PROTECTED)
    assert shortfall(metric, other, R, PROTECTED, 1e-9)[0] > 0.01
    merged, partner = partners(target, R, PROTECTED)
    assert merged.sum(1).tolist() == [R, R]
    assert bool((partner[merged] >= PROTECTED // 2).all())


def test_near_ties_are_unclear_and_equal_ones_are_not() -> None:
    metric = torch.zeros(3, 4, 4, dtype=torch.float64)
    metric[:, 0, 0] = metric[:, 1, 0] = metric[:, 3, 0] = metric[:, 2, 1] = 1
    metric[1, 3, 2] = 1e-3  # now less like the first token, by half a millionth
    metric[2, 3, 2] = 1
    target = match(metric, 1).target
    assert shortfall(metric, target, 1, 0, 1e-5)[1].tolist() == [False, True, False]


def test_tokens_in_another_order_are_found(metric: Tensor) -> None:
    target = match(metric, R, PROTECTED).target
    swapped = target.clone()
    swapped[target == 3], swapped[target == 4] = 4, 3
    with pytest.raises(AssertionError, match="another order"):
        check_places(swapped, R, PROTECTED)
    with pytest.raises(AssertionError, match="merged instead of 4"):
        check_places(target, 4, PROTECTED)


def test_wrong_lists_are_found(metric: Tensor) -> None:
    target = match(metric, R, PROTECTED).target
    member, start = lists_of(target)
    twice = member.clone()
    twice[0, 3] = twice[0, 4]
    with pytest.raises(AssertionError, match="no permutation"):
        check_lists(target, twice, start)
    with pytest.raises(AssertionError, match="another group"):
        check_lists(target, member.roll(1, 1), start)
    with pytest.raises(AssertionError, match="begin at 0"):
        check_lists(target, member, start + 1)
    with pytest.raises(AssertionError, match="no members"):
        check_lists(target, member, torch.cat([start[:, :1], start[:, :-2], start[:, -1:]], 1))
    several = int(start[0].diff().argmax())
    first, last = int(start[0, several]), int(start[0, several + 1]) - 1
    turned = member.clone()
    turned[0, first], turned[0, last] = member[0, last], member[0, first]
    with pytest.raises(AssertionError, match="not the one that stays"):
        check_lists(target, turned, start)


@pytest.mark.parametrize(("place", "words"), [(-1, "before the beginning"), (6, "behind the end")])
def test_writing_outside_a_result_is_detected(place: int, words: str) -> None:
    def launch() -> None:
        result = torch.empty(2, 3, dtype=torch.float16, device="cpu")
        whole = result.as_strided((6 + 2 * GUARD,), (1,), 0)
        whole[GUARD + place] = 1.0

    with pytest.raises(AssertionError, match=words), guarded():
        launch()


def test_unwritten_memory_is_poisoned() -> None:
    with guarded():
        floats = torch.empty(2, 3, dtype=torch.float32, device="cpu")
        like = torch.empty_like(torch.zeros(4, dtype=torch.int32))
    assert floats.isnan().all()
    assert (like < 0).all()
    assert torch.empty(1, dtype=torch.int32).shape == (1,)


def test_inputs_are_surrounded_by_nan() -> None:
    values = torch.randn(2, 3, 4)
    inside = surrounded(values, 1)
    assert torch.equal(inside, values)
    around = inside.as_strided((2, 5, 4), (20, 4, 1), 0)
    assert around[:, 0].isnan().all()
    assert around[:, 4].isnan().all()
