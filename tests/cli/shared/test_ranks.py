"""Which rank prints, and how ranks exit."""

import os

import pytest

from vitrail.cli._shared import console
from vitrail.cli._shared.ranks import command, exit_at_once


class Ended(Exception):
    """Raised instead of exiting."""


@pytest.mark.parametrize(("given", "code"), [(None, 0), (0, 0), (2, 2), ("a mistake", 1)])
def test_exit_code(monkeypatch: pytest.MonkeyPatch, given: object, code: int) -> None:
    def end(number: int) -> None:
        raise Ended(number)

    monkeypatch.setattr(os, "_exit", end)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    with pytest.raises(Ended, match=f"^{code}$"), exit_at_once():
        raise SystemExit(given)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit), exit_at_once():
        raise SystemExit(given)


@pytest.mark.parametrize(("rank", "quiet"), [("0", (False, False)), ("1", (True, False)), (None, (False, False))])
def test_only_the_first_rank_prints(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, quiet: tuple[bool, bool]
) -> None:
    for name, value in (("RANK", rank or "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    if rank is None:
        monkeypatch.delenv("MASTER_ADDR")  # without it every process is alone
    with command():
        assert (console.out.quiet, console.err.quiet) == quiet
        with command(console.out, console.err):
            assert (console.out.quiet, console.err.quiet) == (quiet[0], quiet[0])
        assert (console.out.quiet, console.err.quiet) == quiet
    assert not console.out.quiet
