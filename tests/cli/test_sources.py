"""Every command opens every source: class folders, parquet files and shards."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.data.files import BROKEN, class_folders, encoded, shard, table
from vitrail.cli import app
from vitrail.cli.demo import run_demo

MODEL = "timm:vit_tiny_patch16_224"
TINY = ("--size", "32", "--random-weights", "--device", "cpu")
KINDS = ("folders", "parquet", "shards")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def source(kind: str, folder: Path, broken: bool = False) -> Path:
    if kind == "folders":
        return class_folders(folder / "set", 4, broken=(1,) * broken)
    if kind == "parquet":
        return table(folder / "set.parquet", 4, broken=(1,) * broken, label=[0, 1, 0, 1])
    data = [BROKEN if broken and number == 1 else encoded(number) for number in range(4)]
    return shard(folder / "set.tar", {f"{number:03}": {"png": one, "cls": 1} for number, one in enumerate(data)})


@pytest.mark.parametrize("kind", KINDS)
def test_merge(tmp_path: Path, kind: str) -> None:
    result = run("merge", MODEL, source(kind, tmp_path), "-r", 1, "-o", tmp_path / "out", *TINY)
    assert result.exit_code == 0, result.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    names = [entry["picture"] for entry in summary["pictures"]]
    assert sorted(int(Path(name).stem) for name in names) == [0, 1, 2, 3]
    assert all((tmp_path / "out" / entry["files"]["glass"]).is_file() for entry in summary["pictures"])


@pytest.mark.parametrize("kind", KINDS)
def test_merge_skips_what_cannot_be_read_and_takes_a_limit(tmp_path: Path, kind: str) -> None:
    data = source(kind, tmp_path, broken=True)
    result = run("merge", MODEL, data, "-r", 1, "-o", tmp_path / "out", *TINY)
    assert result.exit_code == 1, result.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert (len(summary["pictures"]), len(summary["skipped"])) == (3, 1)
    result = run("merge", MODEL, data, "-r", 1, "-o", tmp_path / "one", *TINY, "--limit", 1)
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "one").glob("*-glass.png"))) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_inspect(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "report.html"
    result = run("inspect", MODEL, source(kind, tmp_path), *TINY, "--no-probes", "--no-cure", "-o", out)
    assert result.exit_code == 0, result.output
    assert json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))["data"]["images"] == 4


def test_demo(tmp_path: Path) -> None:
    runs = run_demo(tmp_path / "out", "vitrail:tiny", [source("shards", tmp_path)])
    assert [result.picture for result in runs[0].pictures] == [f"{number:03}, keep 50 %" for number in range(4)]
    assert (tmp_path / "out" / "002-sheet.png").is_file()
