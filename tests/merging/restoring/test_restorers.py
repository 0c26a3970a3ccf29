"""Restorers on plain tensors, against loops in float64."""

import pytest
import torch
from torch import Tensor

from vitrail.errors import InvalidOption, UntrainedMethod
from vitrail.merging import Assignment, MergeState, ModelShape, Reduction
from vitrail.merging.restoring import (
    RESTORERS,
    Attention,
    Copy,
    Residual,
    Restorer,
    Transport,
    as_restorer,
    register_restorer,
)

SHAPE = ModelShape(depth=3, width=6, heads=2, head_width=3, special=1, grid=(1, 3, 3))


def built(restorer: Restorer) -> Restorer:
    restorer.check(SHAPE)
    restorer.build(SHAPE)
    return restorer.double()


def start(restorer: Restorer | None) -> MergeState:
    return MergeState((2, 2, 2), protected=1, special=1, restorer=restorer, grid=(1, 3, 3))


def steps(batch: int = 2) -> list[Assignment]:
    """Return two reductions of ten tokens, the first of which is special: to eight, then to six."""
    first = torch.tensor([[0, 1, 2, 3, 1, 4, 5, 2, 6, 7], [0, 1, 2, 3, 4, 5, 5, 5, 6, 7]])[:batch]
    second = torch.tensor([[0, 1, 2, 1, 3, 4, 5, 5], [0, 1, 1, 2, 3, 4, 4, 5]])[:batch]
    return [Assignment(first, 8), Assignment(second, 6)]


def run(restorer: Restorer | None, x: Tensor, changes: list[Tensor]) -> tuple[Tensor, MergeState]:
    """Reduce tokens twice; between and behind the reductions add changes, as blocks do."""
    state = start(restorer)
    for step, change in zip(steps(len(x)), changes, strict=True):
        x, state = state.apply(x, Reduction(step))
        x, state = x + change[:, : x.shape[1]], state.next_layer()
    return x, state


def tokens(seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 10, 6, dtype=torch.float64, generator=generator)
    return x, [torch.randn(2, length, 6, dtype=torch.float64, generator=generator) for length in (8, 6)]


def still() -> list[Tensor]:
    return [torch.zeros(2, 8, 6, dtype=torch.float64), torch.zeros(2, 6, 6, dtype=torch.float64)]


def test_whole_residuals_restore_what_later_blocks_leave_alone() -> None:
    x, changes = tokens()
    merged, state = run(built(Residual(None)), x, still())
    assert torch.allclose(state.restore(merged), x, atol=1e-14, rtol=0)
    assert not torch.allclose(state.unmerge(merged), x, atol=0.1)
    merged, state = run(built(Residual(None)), x, changes)
    whole = x.clone()
    for image in range(2):
        for place in range(10):
            group = 0 + place
            for step, change in zip(steps(), changes, strict=True):
                group = int(step.target[image, group])
                whole[image, place] += change[image, group]
    assert torch.allclose(state.restore(merged), whole, atol=1e-13, rtol=0)


def test_codes_are_sums_over_layers_along_the_directions_of_each() -> None:
    x, changes = tokens(1)
    restorer = built(Residual(2))
    restorer.encode.data = torch.randn(3, 6, 2, dtype=torch.float64)
    restorer.decode.data = torch.randn(3, 2, 6, dtype=torch.float64)
    merged, state = run(restorer, x, changes)
    wanted = torch.zeros(2, 10, 6, dtype=torch.float64)
    for image in range(2):
        now, group = x[image], list(range(10))
        code = torch.zeros(10, 2, dtype=torch.float64)
        for layer, step in enumerate(steps()):
            sizes = [sum(group[p] == g for p in range(10)) for g in range(len(now))]
            members = [[g for g in range(len(now)) if int(step.target[image, g]) == new] for new in range(step.length)]
            means = [sum(now[g] * sizes[g] for g in some) / sum(sizes[g] for g in some) for some in members]
            for place in range(10):
                new = int(step.target[image, group[place]])
                code[place] += (now[group[place]] - means[new]) @ restorer.encode[layer].detach()
                group[place] = new
            now = torch.stack(means) + changes[layer][image]
        for place in range(10):
            wanted[image, place] = now[group[place]] + code[place] @ restorer.decode[1].detach()
    assert torch.allclose(state.restore(merged), wanted, atol=1e-13, rtol=0)
    assert state.kept["residual"].shape == (2, 10, 2)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_transport_adds_the_mean_change_of_the_nearest_groups(count: int) -> None:
    x, changes = tokens(2)
    merged, state = run(Transport(count), x, changes)
    wanted = torch.zeros(2, 10, 6, dtype=torch.float64)
    for image in range(2):
        now, group, saved = x[image], list(range(10)), {}
        sizes, followed = [1.0] * 10, []
        for layer, step in enumerate(steps()):
            target = step.target[image].tolist()
            members = [[g for g, new in enumerate(target) if new == wanted_new] for wanted_new in range(step.length)]
            means = [sum(now[g] * sizes[g] for g in some) / sum(sizes[g] for g in some) for some in members]
            for place in range(10):
                new = target[group[place]]
                if len(members[new]) > 1 and place not in saved:
                    distance = [float((now[group[place]] - mean).norm()) for mean in means]
                    nearest = sorted(range(1, step.length), key=lambda g: distance[g])[:count]
                    saved[place] = now[group[place]], [(layer, g, means[g]) for g in nearest]
                group[place] = new
            sizes = [sum(sizes[g] for g in some) for some in members]
            followed.append(target)
            now = torch.stack(means) + changes[layer][image]
        for place in range(10):
            wanted[image, place] = now[group[place]]
            if place in saved:
                value, nearest = saved[place]
                moves = []
                for layer, g, mean in nearest:
                    end = g if layer == 1 else followed[1][g]
                    moves.append(now[end] - mean)
                wanted[image, place] = value + sum(moves) / len(moves)
    assert torch.allclose(state.restore(merged), wanted, atol=1e-12, rtol=0)


def test_transport_ignores_padding() -> None:
    x, _ = tokens(3)
    x, change = x[:, :5], torch.randn(1, 7, 6, dtype=torch.float64)
    alone = MergeState((1,), protected=1, special=1, restorer=Transport(10), padded=True)
    step = Assignment(torch.tensor([[0, 1, 2, 1, 3]]), 4)
    merged, state = alone.apply(x[:1], Reduction(step))
    expected = state.restore(merged + change[:, :4])
    merged, state = alone.apply(x[:1], Reduction(Assignment(step.target, 7)))
    assert torch.allclose(state.restore(merged + change), expected, atol=1e-14, rtol=0)


def test_special_tokens_that_enter_later_shift_the_neighbors() -> None:
    x, _ = tokens(4)
    step = Assignment(torch.tensor([[0, 1, 2, 1, 3, 4, 5, 2, 6, 7]] * 2), 8)
    change = torch.randn(2, 8, 6, dtype=torch.float64)
    for restorer in (Transport(3), built(Residual(None))):
        merged, state = start(restorer).apply(x, Reduction(step))
        expected = state.restore(merged + change)
        later = state.insert([1])
        new = torch.randn(2, 1, 6, dtype=torch.float64)
        moved = torch.cat([merged[:, :1] + change[:, :1], new, merged[:, 1:] + change[:, 1:]], 1)
        restored = later.restore(moved)
        assert torch.equal(restored[:, 1:2], new)
        assert torch.allclose(torch.cat([restored[:, :1], restored[:, 2:]], 1), expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("restorer", [Copy(), Transport(2), Residual(None), Attention(None)])
def test_tokens_that_never_merged_stay_as_they_are(restorer: Restorer) -> None:
    x, changes = tokens(5)
    merged, state = run(built(restorer), x, changes)
    full = state.assignment.unmerge(merged)
    alone = state.assignment.merge_sizes(torch.ones(2, 10)).gather(1, state.assignment.target) == 1
    assert alone.any()
    assert torch.equal(state.restore(merged)[alone], full[alone])
    assert torch.equal(state.restore(merged), full) == isinstance(restorer, Copy)


def test_registry_and_options() -> None:
    for restorer in (
        Copy(),
        Residual(),
        Residual(3),
        Residual(None),
        Transport(),
        Transport(4),
        Attention(2, hidden=8),
    ):
        again = as_restorer(restorer.config)
        assert type(again) is type(restorer)
        assert again.config == restorer.config
    assert as_restorer(None) is None
    assert as_restorer("residual").channels == 8
    with pytest.raises(InvalidOption, match="restore is one of attention, copy, residual, transport"):
        as_restorer("nothing")
    with pytest.raises(InvalidOption, match="does not take these options"):
        as_restorer({"name": "copy", "channels": 3})
    with pytest.raises(InvalidOption, match="channels is 1 or more"):
        Residual(0)
    with pytest.raises(InvalidOption, match="neighbors is 1 or more"):
        Transport(0)
    with pytest.raises(InvalidOption, match="multiple of heads"):
        Attention(hidden=10, heads=4)
    with pytest.raises(InvalidOption, match="tokens of this model have 6"):
        built(Residual(7))
    with pytest.raises(InvalidOption, match="registered already"):
        register_restorer("copy")(type("Other", (Restorer,), {}))
    with pytest.raises(InvalidOption, match="subclasses of Restorer"):
        register_restorer("copy")(int)  # type: ignore[type-var]
    assert set(RESTORERS) == {"copy", "residual", "transport", "attention"}


def test_few_channels_need_a_fit() -> None:
    for restorer in (Residual(2), Attention(2), Attention(None)):
        with pytest.raises(UntrainedMethod, match=r"calibrate_restorer.*load_state_dict"):
            built(restorer).check_ready()
        restorer.count_pass()
        restorer.check_ready()
    built(Residual(None)).check_ready()
