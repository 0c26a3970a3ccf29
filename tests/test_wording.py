"""Messages have the right number and article."""

import pytest

from vitrail._wording import counted, kind_of


@pytest.mark.parametrize(("count", "text"), [(0, "0 images"), (1, "1 image"), (2, "2 images")])
def test_counts(count: int, text: str) -> None:
    assert counted(count, "image") == text


@pytest.mark.parametrize(
    ("value", "text"), [(1, "an int"), ("one", "a str"), ([], "a list"), (OSError(), "an OSError")]
)
def test_articles(value: object, text: str) -> None:
    assert kind_of(value) == text
