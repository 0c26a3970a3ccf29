"""What special tokens are called where people read it: in tables, pictures and logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vitrail.tokens.layout import Role, TokenSpan


def span_names(special: Iterable[TokenSpan]) -> tuple[str, ...]:
    """Name spans of tokens: tasks by their names, others by their role, or by their names if a role has several.

    >>> span_names([TokenSpan(Role.CLASS, 1, "cls"), TokenSpan(Role.REGISTER, 4), TokenSpan(Role.TASK, 1, "colour")])
    ('class', 'register', 'colour')
    """
    special = tuple(special)
    roles = Counter(span.role for span in special)
    return tuple(
        span.name if span.name and (span.role is Role.TASK or roles[span.role] > 1) else span.role.value
        for span in special
    )


def token_names(special: Iterable[TokenSpan]) -> tuple[str, ...]:
    """Name every token by its span, with a number from 1 where several have the same name.

    >>> token_names([TokenSpan(Role.CLASS), TokenSpan(Role.REGISTER, 2)])
    ('class', 'register 1', 'register 2')
    """
    special = tuple(special)
    names = [name for name, span in zip(span_names(special), special, strict=True) for _ in range(span.count)]
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if names.count(name) == 1 else f"{name} {seen[name]}")
    return tuple(numbered)
