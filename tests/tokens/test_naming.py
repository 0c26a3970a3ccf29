"""What tokens are called."""

from vitrail.tokens import Role, TokenSpan, span_names, token_names

CLASS, TEACHER = TokenSpan(Role.CLASS, 1, "cls"), TokenSpan(Role.DISTILLATION, 1, "teacher")


def test_a_role_that_is_there_once_says_it_all() -> None:
    spans = [CLASS, TEACHER, TokenSpan(Role.REGISTER, 3, "memory")]
    assert span_names(spans) == ("class", "distillation", "register")
    assert token_names(spans) == ("class", "distillation", "register 1", "register 2", "register 3")


def test_spans_of_one_role_are_told_apart_by_their_names() -> None:
    spans = [TokenSpan(Role.REGISTER, 2), TokenSpan(Role.REGISTER, 1, "test-time")]
    assert token_names(spans) == ("register 1", "register 2", "test-time")
    assert token_names([TokenSpan(Role.CLASS), TokenSpan(Role.CLASS)]) == ("class 1", "class 2")


def test_tasks_have_their_names() -> None:
    assert token_names([TokenSpan(Role.TASK, 1, "colour")]) == ("colour",)
    assert token_names([CLASS, TokenSpan(Role.TASK, 1, "class")]) == ("class 1", "class 2")
