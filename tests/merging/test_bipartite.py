"""The reference matching against a loop, with its rules for ties and protection."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.merging.bipartite import front_edges, mask_edges, match, protected_mask, rank


def matched_by_loops(metric, r, mask, order):
    """Token Merging's matching for one image in plain Python: the target of every position."""
    n = len(metric)
    unit = [v / v.norm() for v in metric]
    edges = []
    for i in range(0, n, 2):
        options = [(float(unit[i] @ unit[j]), -j) for j in range(1, n, 2) if not mask[i] and not mask[j]]
        if options:
            score, j = max(options)
            edges.append((score, i, -j))
    chosen = {i: j for _, i, j in sorted(edges, key=lambda edge: (-edge[0], edge[1]))[:r]}
    groups = [[j, *[i for i in chosen if chosen[i] == j]] for j in range(n) if j not in chosen]
    if order == "original":
        groups.sort(key=min)
    else:
        groups.sort(key=lambda g: (0 if mask[g[0]] else 1 if g[0] % 2 == 0 else 2, g[0]))
    target = [0] * n
    for place, members in enumerate(groups):
        for member in members:
            target[member] = place
    return target, len(edges)


@given(
    n=st.integers(1, 13),
    special=st.integers(0, 4),
    order=st.sampled_from(["paper", "original"]),
    mask=st.booleans(),
    ties=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_matches_the_loop_for_every_possible_r(n, special, order, mask, ties, seed):
    torch.manual_seed(seed)
    special = min(special, n)
    metric = torch.randn(2, n, 4, dtype=torch.float64)
    if ties:  # few directions that are exact in floating point: many equal similarities
        metric = torch.eye(4, dtype=torch.float64)[torch.randint(0, 4, (2, n))]
    front = protected_mask(special, n, metric.device)
    protected = front | (torch.rand(2, n) < 0.3) if mask else front
    most = int(mask_edges(protected).min())
    if not mask:
        assert most == front_edges(n, special)
    assert match(metric, 0, special, order).target.tolist() == [list(range(n))] * 2
    for r in range(1, most + 1):
        found = match(metric, r, protected if mask else special, order)
        assert found.length == n - r
        for b in range(2):
            wanted, edges = matched_by_loops(metric[b], r, protected.expand(2, n)[b], order)
            assert found.target[b].tolist() == wanted
            assert r <= edges


def test_protected_tokens_stay_in_front_and_alone():
    metric = torch.ones(1, 9, 3)
    found = match(metric, 3, 2)
    assert found.target[0, :2].tolist() == [0, 1]
    assert all(place > 1 for place in found.target[0, 2:].tolist())


def test_rank_is_a_stable_descending_sort():
    values = torch.tensor([[1.0, 3.0, 2.0, 3.0, -torch.inf, 1.0]])
    assert rank(values).tolist() == [[3, 0, 2, 1, 5, 4]]


def test_whole_rows_of_ties_go_to_the_lower_index():
    found = match(torch.ones(1, 8, 2), 2)
    # sources 0 and 2 both go to position 1; what is left are sources 4, 6, then destinations 1, 3, 5, 7
    assert found.target.tolist() == [[2, 2, 2, 3, 0, 4, 1, 5]]


def test_a_broken_image_keeps_its_length():
    metric = torch.randn(2, 9, 4)
    metric[0] = torch.nan
    found = match(metric, 3, 1)
    assert sorted(set(found.target[0].tolist())) == list(range(6))
    assert found.target[0, 0] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_are_compared_in_float32(dtype):
    metric = torch.randn(3, 20, 16).to(dtype)
    assert torch.equal(match(metric, 5, 1).target, match(metric.float(), 5, 1).target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(match(metric, 5, 1).target, match(metric.float(), 5, 1).target)
