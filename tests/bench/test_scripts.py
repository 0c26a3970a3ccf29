"""The scripts in ``benchmarks``: their targets, options and result files."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.bench.models import FULL, result

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("common", "h200", "cpu", "breadth")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def data(**more: Any) -> dict[str, Any]:
    return {**result(*FULL).to_dict(), "command": "h200.py", **more}


def test_targets(scripts: dict[str, ModuleType]) -> None:
    rows = scripts["h200"].ROWS
    found = {
        name: (row.config.model, row.config.batch, row.config.r, row.floor, row.goal, row.efficiency)
        for name, row in rows.items()
    }
    assert found == {
        "vit-b-224": ("timm:vit_base_patch16_224", 256, 16, 1.60, 2.0, 1.05),
        "vit-l-224": ("timm:vit_large_patch16_224", 256, 8, 1.75, 2.0, 1.05),
        "vit-l-384": ("timm:vit_large_patch16_384", 64, 23, 1.80, 2.0, 1.05),
        "dinov2-l-518": ("timm:vit_large_patch14_reg4_dinov2", 16, 50, 1.75, 2.0, 1.05),
        "one-picture": ("timm:vit_base_patch16_224", 1, 16, 1.05, 1.25, 1.0),
        "training": ("timm:vit_large_patch16_224", 128, 8, 1.6, 1.9, 0.95),
    }
    assert [name for name, row in rows.items() if row.eager_efficiency == 1.0] == list(rows)[:4]
    assert [name for name, row in rows.items() if row.config.train] == ["training"]
    assert "compiled-graph" in rows["one-picture"].config.modes
    assert all(row.config.dtype == "bf16" and row.config.device == "cuda" for row in rows.values())
    (cpu,) = scripts["cpu"].ROWS.values()
    config = cpu.config
    assert (config.model, config.batch, config.r, config.dtype, config.threads, cpu.efficiency) == (
        *("timm:vit_small_patch16_224", 8, 13, "fp32", 2, 0.90),
    )


def test_missed_targets(scripts: dict[str, ModuleType]) -> None:
    row = scripts["h200"].ROWS["vit-b-224"]
    assert row.missed({"speedup": 2.1, "efficiency": 1.1, "eager_efficiency": 1.0}) == []
    assert row.missed({"speedup": 1.7, "efficiency": 1.1, "eager_efficiency": 0.9}) == [
        *("eager efficiency 1", "goal 2"),
    ]
    assert row.missed({"speedup": 1.5, "efficiency": None}) == [
        *("speed-up floor 1.6", "efficiency 1.05", "eager efficiency 1", "goal 2"),
    ]


def test_speed_is_compared_with_the_flops_saved(scripts: dict[str, ModuleType]) -> None:
    rows = scripts["breadth"].ROWS
    assert rows["autocast"].missed({"speedup": 1.9, "flops_ratio": 2.0}) == []
    assert rows["autocast"].missed({"speedup": 1.89, "flops_ratio": 2.0}) == ["0.95 of the FLOP ratio 2.00"]
    assert rows["vit-l-8"].missed({"speedup": 1.19, "flops_ratio": 2.0}) == ["speed-up floor 1.2"]
    small = {name for name, row in rows.items() if row.config.batch < 16}
    assert all((row.flops_share is None) == (name in small or row.config.train) for name, row in rows.items())


def test_result_files_accumulate_rows(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    common, rows = scripts["common"], scripts["h200"].ROWS
    first = {"commit": "abc1234", "rows": {"vit-b-224": data(command="one"), "vit-l-224": data(command="old")}}
    path = common.save(first, rows, tmp_path / "new")
    assert path == tmp_path / "new" / "2026-01-02-some-gpu-abc1234.json"
    failed = {"error": "took longer than 9 s", "command": "two"}
    second = {"commit": "abc1234", "rows": {"training": failed, "vit-l-224": data(command="two")}}
    assert common.save(second, rows, tmp_path / "new") == path
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert list(stored["rows"]) == ["vit-b-224", "vit-l-224", "training"]
    assert (stored["commit"], stored["date"]) == ("abc1234", "2026-01-02")
    assert [row["command"] for row in stored["rows"].values()] == ["one", "two", "two"]
    assert stored["machine"]["device"] == "Some GPU"
    lines = path.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# 2026-01-02, Some GPU, abc1234"
    assert lines[4] == (
        "| ViT-B/16 224, 256, r 16 | 20 (compiled) | 12 (compiled) | 12.5 (eager) | 1.60 (1.6, 2) | 0.96 (1.05) "
        "| 1.20 (1) | 0.5 s | 5 → 5 | – | efficiency 1.05, goal 2 |"
    )
    assert "took longer than 9 s" in lines[6]
    assert lines[-2:] == ["- `one`", "- `two`"]
    assert [path.name for path in tmp_path.rglob(".*")] == []


def test_join(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    common, h200 = scripts["common"], scripts["h200"]
    for name in ("vit-b-224", "training"):
        common.save({"commit": "abc", "rows": {name: data()}}, h200.ROWS, tmp_path / name)
    parts = [str(path) for path in sorted(tmp_path.rglob("*.json"))]
    assert common.main(h200.ROWS, "", "h200.py", ["--join", *parts, "--out", str(tmp_path / "all")]) == 0
    (joined,) = (tmp_path / "all").glob("*.json")
    assert set(json.loads(joined.read_text(encoding="utf-8"))["rows"]) == {"vit-b-224", "training"}


def test_each_row_has_its_own_process(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common, rows = scripts["common"], scripts["h200"].ROWS
    commands: list[list[str]] = []

    def start(command: list[str], timeout: float, check: bool) -> Any:
        commands.append(command)
        if "training" in command:
            raise common.subprocess.TimeoutExpired(command, timeout)
        Path(command[command.index("--json") + 1]).write_text(json.dumps(data()), encoding="utf-8")
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(common.subprocess, "run", start)
    options = ["--timeout", "9", "--commit", "abc", "--out", str(tmp_path), "--seconds", "3", "--forms", "eager"]
    assert common.main(rows, "", "/somewhere/h200.py", ["vit-b-224", "training", *options]) == 1
    assert [command[3] for command in commands] == ["vit-b-224", "training"]
    stored = json.loads(next(tmp_path.glob("*.json")).read_text(encoding="utf-8"))
    assert stored["rows"]["training"] == {
        "error": "took longer than 9 s",
        "command": "benchmarks/h200.py training --seconds 3.0 --limit 300.0 --attention auto --modes eager",
    }
    assert "vit-b-224: ViT-B/16 224, 256, r 16" in capsys.readouterr().out
    assert common.main(rows, "", "h200.py", ["vit-c", "--out", str(tmp_path)]) == 2
    assert "no row named vit-c; there are vit-b-224," in capsys.readouterr().out


def test_options_reach_the_benchmark(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common, rows = scripts["common"], scripts["h200"].ROWS
    measured: list[Any] = []
    monkeypatch.setattr(common, "run", lambda config, tell: measured.append(config) or result(*FULL, config=config))
    path = tmp_path / "row.json"
    given = ["--seconds", "3", "--limit", "4", "--modes", "eager,blocks", "--attention", "cudnn", "--autocast"]
    assert common.main(rows, "", "h200.py", ["--child", "training", "--json", str(path), *given]) == 0
    (config,) = measured
    assert (config.seconds, config.limit, config.modes) == (3.0, 4.0, ("eager", "blocks"))
    assert (config.attention, config.autocast, config.cold, config.train) == ("cudnn", True, True, True)
    assert json.loads(path.read_text(encoding="utf-8"))["target"]["floor"] == 1.6


def test_kept_results_are_readable(scripts: dict[str, ModuleType]) -> None:
    rows = {**scripts["h200"].ROWS, **scripts["cpu"].ROWS}
    for path in (FOLDER / "results").glob("*.json"):
        stored = json.loads(path.read_text(encoding="utf-8"))
        table = [line for line in scripts["common"].markdown(stored, rows).splitlines() if line.startswith("| ")]
        kept = [
            line for line in path.with_suffix(".md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")
        ]
        assert [line.split(" | ")[1:] for line in table] == [line.split(" | ")[1:] for line in kept]
