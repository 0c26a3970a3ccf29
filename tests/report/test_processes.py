"""Several processes make the report that one makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.report.models import look, planted, write_pictures

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def run(folder: Path, out: Path, world: int = 2) -> list[int]:
    command = [sys.executable, "-m", "tests.report.worker"]
    places = [str(out.with_suffix(".meeting")), str(folder), str(out)]
    options: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    started = [subprocess.Popen([*command, str(rank), str(world), *places], **options) for rank in range(world)]
    return [process.wait(timeout=300) for process in started]


def same(a: Any, b: Any, where: str = "") -> None:
    """Compare plain values; numbers may differ by rounding."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list) and isinstance(b, list):
        assert len(a) == len(b), where
        for place, (one, two) in enumerate(zip(a, b, strict=True)):
            same(one, two, f"{where}.{place}")
    elif isinstance(a, float) and isinstance(b, float):
        assert a == pytest.approx(b, rel=2e-3, abs=1e-4), where
    else:
        assert a == b, where


def test_two_processes_equal_one(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "pictures", 51)
    assert run(folder, tmp_path / "two.json") == [0, 0]
    two = json.loads((tmp_path / "two.json").read_text(encoding="utf-8"))
    one = look(planted(), folder, batch_size=4, name="planted").to_dict()
    for name in ("versions", "settings"):
        one.pop(name)
        two.pop(name)
    assert one["norms"]["verdict"] == "artifacts"
    same(one, two)


def test_part_without_a_readable_picture(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "pictures", 1)
    assert run(folder, tmp_path / "two.json") == [0, 0]
    two = json.loads((tmp_path / "two.json").read_text(encoding="utf-8"))
    assert (two["data"]["pictures"], two["problems"]["num_skipped"]) == (1, 1)


def test_all_processes_fail_together(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.png").write_bytes(b"no picture")
    assert run(folder, tmp_path / "two.json") == [3, 3]
    assert len(list(tmp_path.glob("two.json.*.error"))) == 2
