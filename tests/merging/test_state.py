"""MergeState: many layers compose to one map, and unmerging restores every position."""

import pytest
import torch

from vitrail.merging import Assignment, MergeState, Reduction, match


@pytest.mark.parametrize("special", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("order", ["paper", "original"])
@pytest.mark.parametrize("patches", [196, 197])
def test_unmerge_after_24_layers_gives_every_patch_its_group(special, order, patches):
    torch.manual_seed(patches + special)
    length = special + patches
    state = MergeState((7,) * 24, protected=special)
    # every token is marked by its own position, so that a merged one is the mean of its members' marks
    x = torch.eye(length, dtype=torch.float64).repeat(2, 1, 1)
    while state.layer < 24:
        step = match(torch.randn(2, x.shape[1], 8), state.r, state.protected, order)
        x, state = state.apply(x, Reduction(step))
        state = state.next_layer(x)
    assert x.shape[1] == length - 7 * 24
    full = state.unmerge(x)
    for b in range(2):
        for i in range(length):
            members = full[b, i].nonzero().flatten().tolist()
            assert i in members
            torch.testing.assert_close(full[b, i, members], torch.full((len(members),), 1 / len(members)).double())
            assert state.size[b, state.assignment.target[b, i]] == len(members)
            if i < special:
                assert members == [i]
    torch.testing.assert_close(state.remerge(full), x)
    if order == "original":
        first = [int(x[0, j].nonzero()[0]) for j in range(x.shape[1])]
        assert first == sorted(first)


def test_positions_are_means_weighted_by_size():
    state = MergeState((1, 1), positions=torch.tensor([[[0.0], [1.0], [2.0], [3.0]]]))
    alike = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.2, 1.0]]])
    x, state = state.apply(alike, Reduction(match(alike, 1)))
    assert state.positions.flatten().tolist() == [2.0, 0.5, 3.0]
    assert state.size.tolist() == [[1.0, 2.0, 1.0]]
    _, state = state.apply(x, Reduction(match(torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]), 1)))
    assert state.positions.flatten().tolist() == [3.0, 1.0]


def test_next_layer_changes_nothing_but_the_layer():
    state = MergeState((0, 3), protected=1)
    after = state.next_layer(torch.randn(1, 4, 2))
    assert (state.r, after.r, after.layer) == (0, 3, 1)
    assert after.unmerge(x := torch.randn(1, 4, 2)) is x
    assert after.remerge(x) is x


def test_memory_and_guide_merge_along_and_the_archive_stays():
    values = torch.tensor([[1.0, 3.0, 5.0]])
    state = MergeState((1,), size=torch.tensor([[1.0, 3.0, 1.0]]), guide={"map": values}, archive={"kept": values})
    reduction = Reduction(
        Assignment(torch.tensor([[0, 0, 1]]), 2), memory={"pairs": torch.stack([values, 2 * values], 2)}
    )
    _, after = state.apply(torch.randn(1, 3, 4), reduction)
    assert after.guide["map"].tolist() == [[2.5, 5.0]]
    assert after.memory["pairs"].tolist() == [[[2.5, 5.0], [5.0, 10.0]]]
    assert after.archive["kept"] is values


def test_weights_replace_sizes_in_means_and_sizes():
    x = torch.tensor([[[1.0], [3.0], [8.0]]])
    state = MergeState((1,), size=torch.tensor([[1.0, 3.0, 1.0]]))
    step = Assignment(torch.tensor([[0, 0, 1]]), 2)
    pruned, after = state.apply(x, Reduction(step, weight=torch.tensor([[1.0, 0.0, 1.0]])))
    assert pruned.flatten().tolist() == [1.0, 8.0]
    assert after.size.tolist() == [[1.0, 1.0]]
    mean, after = state.apply(x, Reduction(step, weight=torch.tensor([[1.0, 1.0, 1.0]]), size=state.size))
    assert mean.flatten().tolist() == [2.0, 8.0]
    assert after.size.tolist() == [[4.0, 1.0]]


def test_a_hard_relaxation_equals_its_index_map_and_has_gradients():
    torch.manual_seed(0)
    x, size = torch.randn(2, 5, 3, dtype=torch.float64), torch.randint(1, 4, (2, 5)).double()
    step = Assignment(torch.tensor([[0, 1, 1, 2, 0], [0, 0, 0, 1, 2]]), 3)
    guide, positions = {"map": torch.randn(2, 5).double()}, torch.randn(2, 5, 2).double()
    state = MergeState((2,), size=size, guide=guide, positions=positions)
    soft = torch.nn.functional.one_hot(step.target, 3).double().requires_grad_()
    hard_x, hard = state.apply(x, Reduction(step))
    soft_x, relaxed = state.apply(x, Reduction(step, soft=soft))
    torch.testing.assert_close(soft_x, hard_x)
    torch.testing.assert_close(relaxed.size, hard.size)
    torch.testing.assert_close(relaxed.guide["map"], hard.guide["map"])
    torch.testing.assert_close(relaxed.positions, hard.positions)
    (soft_x.sum() + relaxed.size.square().sum()).backward()
    assert soft.grad.abs().sum() > 0


def test_padding_adds_nothing():
    x = torch.tensor([[[1.0], [3.0], [100.0]]])
    state = MergeState((1,), size=torch.tensor([[1.0, 1.0, 0.0]]), padded=True)
    merged, after = state.apply(x, Reduction(Assignment(torch.tensor([[0, 0, 0]]), 2)))
    assert merged.flatten().tolist() == [2.0, 0.0]
    assert after.size.tolist() == [[2.0, 0.0]]
    assert after.presence.tolist() == [[1.0, 0.0]]
    assert after.next_layer(merged).lengths[0].tolist() == [1]
