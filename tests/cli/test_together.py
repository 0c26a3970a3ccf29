"""Which of several processes speaks, and how one ends."""

import os

import pytest

from vitrail.cli import console
from vitrail.cli.together import ending_at_once, one_speaks


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


@pytest.mark.parametrize(("rank", "quiet"), [("0", (False, False)), ("1", (True, False)), (None, (False, False))])
def test_others_than_the_first_are_silent(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, quiet: tuple[bool, bool]
) -> None:
    for name, value in (("RANK", rank or "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    if rank is None:
        monkeypatch.delenv("MASTER_ADDR")  # then nobody can be met, and all work alone
    with one_speaks():
        assert (console.out.quiet, console.err.quiet) == quiet
        with one_speaks(console.out, console.err):
            assert (console.out.quiet, console.err.quiet) == (quiet[0], quiet[0])
        assert (console.out.quiet, console.err.quiet) == quiet
    assert not console.out.quiet
