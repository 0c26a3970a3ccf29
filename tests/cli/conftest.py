"""Commands speak plainly in tests, also where the environment asks for colours (as many build machines do)."""

import pytest
from rich.console import Console

from vitrail.cli import console


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("typer.rich_utils.FORCE_TERMINAL", None)
    monkeypatch.setattr(console, "out", Console(highlight=False))
    monkeypatch.setattr(console, "err", Console(stderr=True, highlight=False))
