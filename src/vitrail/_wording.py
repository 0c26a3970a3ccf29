"""Grammar of messages: counts and articles."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the right number.

    >>> counted(1, "image"), counted(3, "image")
    ('1 image', '3 images')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def kind_of(value: object) -> str:
    """Return the type of a value with its article.

    >>> kind_of(3), kind_of("three")
    ('an int', 'a str')
    """
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
