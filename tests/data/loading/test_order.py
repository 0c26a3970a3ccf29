"""The order of samples: a function of the seed and the step, the same for any world size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.loading.order import Order, generator, mix
from vitrail.errors import InvalidOption

# ---------------------------------------------------------------- seeds


def test_mix_is_splitmix() -> None:
    """The first stage from a state of zero is published: splitmix64 seeded with 0 gives e220a8397b1dcdaf."""
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF >> 1


def test_mix_tells_numbers_apart() -> None:
    pairs = [(a, b) for a in range(-50, 50) for b in range(50)]
    seeds = {mix(*pair) for pair in pairs}
    assert len(seeds) == len(pairs)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix(1) != mix(1, 0) != mix(0, 1)
    ones = torch.tensor([[mix(7, step) >> bit & 1 for bit in range(63)] for step in range(4000)]).float().mean(0)
    assert (ones - 0.5).abs().max() < 0.05


def test_generators_have_no_past() -> None:
    first = torch.rand(3, generator=generator("cpu", 1, 2))
    torch.rand(100)
    assert torch.equal(first, torch.rand(3, generator=generator("cpu", 1, 2)))
    assert not torch.equal(first, torch.rand(3, generator=generator("cpu", 1, 3)))


# ---------------------------------------------------------------- steps


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5))
def test_a_pass_sees_every_sample_at_most_once(count: int, batch: int, seed: int) -> None:
    if count < batch:
        return
    order = Order(count, batch, seed)
    for epoch in range(2):
        start = epoch * order.steps_per_epoch
        seen = torch.cat([order.indices(start + step) for step in range(order.steps_per_epoch)])
        assert len(seen) == count // batch * batch
        assert len(seen.unique()) == len(seen)
        assert 0 <= seen.min() <= seen.max() < count


def test_order_is_drawn_anew_for_each_epoch_and_seed() -> None:
    order = Order(100, 100, 0)
    assert not torch.equal(order.indices(0), order.indices(1))
    assert not torch.equal(order.indices(0), Order(100, 100, 1).indices(0))
    assert torch.equal(order.indices(7), Order(100, 100, 0).indices(7))
    assert order.indices(0).dtype == torch.int64


@pytest.mark.parametrize("distinct", [2, 3, 4, 5])
@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_repeats(distinct: int, repeats: int) -> None:
    order = Order(24, distinct * repeats, 0, repeats)
    assert order.steps_per_epoch == 24 // (distinct * repeats)
    steps = [order.indices(step) for step in range(24 // distinct)]
    for indices in steps:
        assert indices.unique(return_counts=True)[1].tolist() == [repeats] * distinct
        pairs = indices[: len(indices) // 2 * 2].view(-1, 2)
        assert (pairs[:, 0] != pairs[:, 1]).all()  # none is mixed with itself
    seen = torch.cat(steps).unique()
    assert len(seen) == 24 // distinct * distinct  # a pass of several epochs sees them all


def test_refusals() -> None:
    with pytest.raises(InvalidOption, match="3 samples, fewer than one batch of 4"):
        Order(3, 4, 0)
    with pytest.raises(InvalidOption, match="repeats=3"):
        Order(10, 8, 0, 3)
    for bad in ({"batch": 0}, {"batch": 4, "repeats": 0}):
        with pytest.raises(InvalidOption):
            Order(count=8, seed=0, **bad)
    with pytest.raises(InvalidOption, match="step=-1"):
        Order(8, 4, 0).indices(-1)
