"""Assignment: index maps merge, unmerge and compose."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail import Assignment


@st.composite
def maps(draw, before=None):
    """Any map onto ``length`` positions, for a batch of two."""
    n = before if before is not None else draw(st.integers(1, 12))
    m = draw(st.integers(1, n))
    rows = []
    for _ in range(2):
        onto = draw(st.permutations(range(m)))
        rest = draw(st.lists(st.integers(0, m - 1), min_size=n - m, max_size=n - m))
        rows.append(draw(st.permutations([*onto, *rest])))
    return Assignment(torch.tensor(rows), m)


@st.composite
def chains(draw):
    first = draw(maps())
    second = draw(maps(before=first.length))
    third = draw(maps(before=second.length))
    return first, second, third


def tokens(n: int, d: int = 3) -> torch.Tensor:
    return torch.randn(2, n, d, dtype=torch.float64)


@given(maps())
def test_merge_is_the_weighted_mean_of_the_members(a):
    n = a.target.shape[1]
    x, size = tokens(n), torch.randint(1, 9, (2, n)).double()
    merged, sizes = a.merge(x, size), a.merge_sizes(size)
    for b in range(2):
        for j in range(a.length):
            members = [i for i in range(n) if a.target[b, i] == j]
            weight = sum(size[b, i] for i in members)
            mean = sum(size[b, i] * x[b, i] for i in members) / weight
            torch.testing.assert_close(merged[b, j], mean)
            assert sizes[b, j] == weight


@given(maps())
def test_unmerge_gives_each_position_its_group(a):
    y = tokens(a.length)
    full = a.unmerge(y)
    for b in range(2):
        for i in range(a.target.shape[1]):
            assert torch.equal(full[b, i], y[b, a.target[b, i]])


@given(maps())
def test_merging_what_was_unmerged_changes_nothing(a):
    y = tokens(a.length)
    torch.testing.assert_close(a.merge(a.unmerge(y)), y)


@given(chains())
def test_composition_is_one_map(chain):
    a, b, c = chain
    x = tokens(a.target.shape[1])
    size = torch.ones(2, x.shape[1], dtype=torch.float64)
    step_sizes = [size, a.merge_sizes(size), b.merge_sizes(a.merge_sizes(size))]
    stepwise = c.merge(b.merge(a.merge(x, step_sizes[0]), step_sizes[1]), step_sizes[2])
    composed = a.then(b).then(c)
    torch.testing.assert_close(composed.merge(x), stepwise)
    y = tokens(c.length)
    assert torch.equal(composed.unmerge(y), a.unmerge(b.unmerge(c.unmerge(y))))
    assert torch.equal(composed.target, a.then(b.then(c)).target)


@given(maps())
def test_identity_is_neutral(a):
    before = Assignment.identity(2, a.target.shape[1])
    after = Assignment.identity(2, a.length)
    assert torch.equal(before.then(a).target, a.target)
    assert torch.equal(a.then(after).target, a.target)


def test_a_token_alone_is_copied_exactly_in_half_precision():
    a = Assignment(torch.tensor([[0, 1, 1, 2]]), 3)
    x = torch.randn(1, 4, 8, dtype=torch.bfloat16)
    merged = a.merge(x, torch.tensor([[3.0, 1.0, 2.0, 7.0]]))
    assert torch.equal(merged[:, 0], x[:, 0])
    assert torch.equal(merged[:, 2], x[:, 3])
    assert merged.dtype == torch.bfloat16


def test_gradients_are_exact():
    a = Assignment(torch.tensor([[0, 1, 1, 2, 1]]), 3)
    x = torch.randn(1, 5, 2, dtype=torch.float64, requires_grad=True)
    size = torch.tensor([[1.0, 2.0, 3.0, 1.0, 4.0]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: a.merge(x, size), (x,))
    assert torch.autograd.gradcheck(lambda x: a.unmerge(a.merge(x, size)), (x,))
