"""MergeState: many layers become one map, and everybody gets the right token back."""

import pytest
import torch

from vitrail.merging import MergeState, match


@pytest.mark.parametrize("special", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("order", ["paper", "original"])
@pytest.mark.parametrize("patches", [196, 197])
def test_unmerge_after_24_layers_gives_every_patch_its_group(special, order, patches):
    torch.manual_seed(patches + special)
    length = special + patches
    state = MergeState((7,) * 24, protected=special, order=order)
    # every token is marked by its own position, so that a merged one is the mean of its members' marks
    x = torch.eye(length, dtype=torch.float64).repeat(2, 1, 1)
    while state.layer < 24:
        step = match(torch.randn(2, x.shape[1], 8), state.possible(state.r), state.protected, state.order)
        x, state = state.merge(x, step)
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
    x, state = state.merge(alike, match(alike, 1))
    assert state.positions.flatten().tolist() == [2.0, 0.5, 3.0]
    assert state.size.tolist() == [[1.0, 2.0, 1.0]]
    _, state = state.merge(x, match(torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]), 1))
    assert state.positions.flatten().tolist() == [3.0, 1.0]


def test_skipping_changes_nothing_but_the_layer():
    state = MergeState((0, 3), protected=1)
    after = state.skip()
    assert (state.r, after.r, after.layer) == (0, 3, 1)
    assert after.unmerge(x := torch.randn(1, 4, 2)) is x
    assert after.remerge(x) is x
