"""How one of several processes ends."""

import os

import pytest

from vitrail.cli.together import ending_at_once


class Ended(Exception):
    """In the place of a real end."""


@pytest.mark.parametrize(("given", "code"), [(None, 0), (0, 0), (2, 2), ("a mistake", 1)])
def test_one_of_several_ends_at_once_with_its_code(monkeypatch: pytest.MonkeyPatch, given: object, code: int) -> None:
    def end(number: int) -> None:
        raise Ended(number)

    monkeypatch.setattr(os, "_exit", end)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    with pytest.raises(Ended, match=f"^{code}$"), ending_at_once():
        raise SystemExit(given)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit), ending_at_once():
        raise SystemExit(given)
