"""TokenLayout maps positions to roles and back, and names tokens."""

import pytest

from vitrail.errors import InvalidOption
from vitrail.tokens import Role, TokenLayout, TokenSpan, TokenSpec, span_names, token_names


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


def test_tasks_are_found_by_name():
    layout = TokenLayout((TokenSpan(Role.TASK, 1, "color"), TokenSpan(Role.TASK, 2, "shape")), (1, 2, 2))
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


def test_roles_as_strings():
    layout = TokenLayout.of("class", ("register", 2), grid=[1, 2, 2])
    assert layout == TokenLayout.of(Role.CLASS, (Role.REGISTER, 2), grid=(1, 2, 2))
    assert layout.indices("class") == range(1)
    assert layout.role_of(1) is Role.REGISTER
    assert TokenSpan("task", 1, "color").role is Role.TASK


@pytest.mark.parametrize(
    ("special", "grid", "words"),
    [
        ([Role.CLASS], (1, 0, 4), "grid"),
        ([Role.CLASS], (2, 2), "grid"),
        ([Role.CLASS], 4, "grid"),
        ([Role.CLASS], (1, 2.0, 2), "grid"),
        ([(Role.PATCH, 3)], (1, 2, 2), "cannot have the role patch"),
        (["king"], (1, 2, 2), "a role is one of .* got 'king'"),
        ([("class", -1)], (1, 2, 2), "1 or more; got -1"),
        ([("class", "2")], (1, 2, 2), "count of class tokens.*'2'"),
        ([("class", 1, "cls")], (1, 2, 2), "role, count"),
        ([TokenSpec("cls", "class")], (1, 2, 2), "from_specs"),
        ([3], (1, 2, 2), "TokenLayout.of takes roles"),
    ],
)
def test_invalid_options(special, grid, words):
    with pytest.raises(InvalidOption, match=words):
        TokenLayout.of(*special, grid=grid)


def test_other_invalid_options(layout):
    with pytest.raises(InvalidOption, match="a tuple of TokenSpan"):
        TokenLayout(("class",), (1, 2, 2))
    with pytest.raises(InvalidOption, match="got 'king'"):
        layout.indices("king")
    for specs in (["class"], 3):
        with pytest.raises(InvalidOption, match="a list of TokenSpec"):
            TokenLayout.from_specs(specs, (1, 2, 2))


def test_tokens_are_found_by_role_and_position(layout):
    assert layout.find() == (0, 1, 2, 3, 4, 5)
    assert layout.find("register") == (2, 3, 4, 5)
    assert layout.find([Role.CLASS, -1, 0]) == (0, 20)
    assert layout.find(iter([3])) == (3,)
    for wrong in ("king", 21, 2.5, True):
        with pytest.raises(InvalidOption, match=r"roles .* or positions below 21"):
            layout.find(wrong)
    with pytest.raises(InvalidOption, match="no such token: the model has 1 class, 1 distillation, 4 register"):
        layout.find("task")


def test_a_span_is_named_after_its_role_unless_several_share_it():
    spans = [TokenSpan(Role.CLASS, 1, "cls"), TokenSpan(Role.DISTILLATION, 1, "teacher"), TokenSpan(Role.REGISTER, 2)]
    assert span_names(spans) == ("class", "distillation", "register")
    assert token_names(spans) == ("class", "distillation", "register 1", "register 2")
    spans = [TokenSpan(Role.REGISTER, 2), TokenSpan(Role.REGISTER, 1, "test-time")]
    assert token_names(spans) == ("register 1", "register 2", "test-time")
    assert token_names([TokenSpan(Role.CLASS), TokenSpan(Role.CLASS)]) == ("class 1", "class 2")


def test_a_task_is_named_after_itself():
    assert token_names([TokenSpan(Role.TASK, 1, "color")]) == ("color",)
    assert token_names([TokenSpan(Role.CLASS, 1, "cls"), TokenSpan(Role.TASK, 1, "class")]) == ("class 1", "class 2")
