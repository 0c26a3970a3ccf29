"""Fixtures of the command line's tests."""

from pathlib import Path

import pytest
import torch

from tests.cli.reports import FakeReports
from vitrail.cli._shared import console


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print without color, even if the environment forces it, as CI often does."""
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("typer.rich_utils.FORCE_TERMINAL", None)
    monkeypatch.setattr(console, "out", console.PlainConsole())
    monkeypatch.setattr(console, "err", console.PlainConsole(stderr=True))


@pytest.fixture(scope="session")
def saved_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a small transformers model."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5, initializer_range=0.5)
    folder = tmp_path_factory.mktemp("vit")
    ViTForImageClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> FakeReports:
    """Replace inspections by fakes that take no time."""
    fake = FakeReports()
    for name in ("Report", "compare", "inspect"):
        monkeypatch.setattr(f"vitrail.report.{name}", getattr(fake, name))
    return fake
