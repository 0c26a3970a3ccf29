"""TokenLayout answers which index is which token."""

import pytest

from vitrail import Role, TokenLayout, TokenSpan


@pytest.fixture
def layout() -> TokenLayout:
    return TokenLayout.of(Role.CLASS, Role.DISTILLATION, (Role.REGISTER, 4), grid=(1, 3, 5))


def test_counts(layout):
    assert (layout.num_special, layout.num_patches, layout.num_tokens) == (6, 15, 21)
    assert layout.patches == slice(6, 21)


def test_every_index_has_the_role_of_its_span(layout):
    roles = [layout.role_of(index) for index in range(layout.num_tokens)]
    assert roles == [Role.CLASS, Role.DISTILLATION, *[Role.REGISTER] * 4, *[Role.PATCH] * 15]
    assert layout.role_of(-1) is Role.PATCH
    assert layout.role_of(-21) is Role.CLASS


def test_indices_invert_roles(layout):
    for role in Role:
        assert list(layout.indices(role)) == [i for i in range(21) if layout.role_of(i) is role]
    assert list(layout.indices("register")) == [2, 3, 4, 5]
    assert list(layout.indices(Role.TASK)) == []


def test_tasks_are_told_apart_by_name():
    layout = TokenLayout((TokenSpan(Role.TASK, 1, "colour"), TokenSpan(Role.TASK, 2, "shape")), (1, 2, 2))
    assert list(layout.indices(Role.TASK, "shape")) == [1, 2]
    assert list(layout.indices(Role.TASK)) == [0, 1, 2]


def test_zero_counts_are_left_out():
    assert TokenLayout.of(Role.CLASS, (Role.REGISTER, 0), grid=(1, 2, 2)).special == (TokenSpan(Role.CLASS),)


def test_another_grid_keeps_the_special_tokens(layout):
    assert layout.with_grid((2, 4, 4)).num_tokens == 6 + 32


@pytest.mark.parametrize("index", [21, -22])
def test_positions_outside_are_errors(layout, index):
    with pytest.raises(IndexError, match="sequence of 21"):
        layout.role_of(index)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="grid"):
        TokenLayout.of(Role.CLASS, grid=(1, 0, 4))
    with pytest.raises(ValueError, match="other roles than patch"):
        TokenLayout.of((Role.PATCH, 3), grid=(1, 2, 2))
