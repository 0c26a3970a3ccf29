"""``vitrail web``: what it writes, where it listens, and errors."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.cli.words import one_line
from tests.web.models import save, small_vit
from vitrail.cli import app
from vitrail.drawing.colors import VIRIDIS
from vitrail.web.files import page_files


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["web", *map(str, arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"vitrail:{save(small_vit(), tmp_path_factory.mktemp('model'))}"


def test_static_needs_an_empty_directory_and_one_model(model: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    result = run(model, "--static", tmp_path / "full")
    assert result.exit_code == 2
    assert "not an empty directory" in one_line(result.output)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    result = run(model, "vitrail:tiny", "--static", tmp_path / "new")
    assert "one model" in one_line(result.output)
    assert not (tmp_path / "new").exists()


def test_a_port_in_use_is_explained(model: str) -> None:
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run(model, "--no-open", "--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "choose another with --port" in one_line(result.output)


def test_a_model_may_be_named_once(model: str) -> None:
    assert "named once" in one_line(run(model, model, "--no-open").output)


def test_the_page_has_its_scripts_and_nothing_of_python() -> None:
    files = page_files(["image"])
    assert {"index.html", "style.css", "app.js", "backend.js", "worker.js", "samples/church.png"} <= files.keys()
    assert not [name for name in files if name.endswith((".py", ".gz"))]


def test_the_page_paints_with_the_map_of_the_drawings() -> None:
    text = page_files(["image"])["draw.js"].decode().partition("const STOPS = [")[2].partition("];")[0]
    stops = [[int(part) for part in one.split(",")] for one in re.findall(r"\[([\d, ]+)\]", text)]
    assert stops == VIRIDIS.tolist()
