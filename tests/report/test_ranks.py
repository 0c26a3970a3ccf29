"""The report of several ranks equals that of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.report.models import inspect, planted, write_images

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories that two ranks inspect one after the other, each with its report next to it.

    The first one fails on both ranks, and they go on together.
    """
    root = tmp_path_factory.mktemp("inspected")
    (root / "unreadable").mkdir()
    for number in range(3):
        (root / "unreadable" / f"{number}.png").write_bytes(b"not an image")
    write_images(root / "single", 1)
    write_images(root / "many", 27)
    places = [
        str(root / name) for directory in ("unreadable", "single", "many") for name in (directory, f"{directory}.json")
    ]
    command = [sys.executable, "-m", "tests.report.worker"]
    options: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    started = [
        subprocess.Popen([*command, rank, "2", str(root / "meeting"), *places], **options) for rank in ("0", "1")
    ]
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    return root


def same(a: Any, b: Any, where: str = "") -> None:
    """Assert that plain values are equal up to rounding."""
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


def test_two_processes_equal_one(inspected: Path) -> None:
    two = json.loads((inspected / "many.json").read_text(encoding="utf-8"))
    one = inspect(planted(), inspected / "many", batch_size=4, name="planted").to_dict()
    for name in ("versions", "settings"):
        one.pop(name)
        two.pop(name)
    assert one["norms"]["verdict"] == "artifacts"
    same(one, two)


def test_part_without_a_readable_image(inspected: Path) -> None:
    two = json.loads((inspected / "single.json").read_text(encoding="utf-8"))
    assert (two["data"]["images"], two["problems"]["num_skipped"]) == (1, 1)


def test_all_processes_fail_together(inspected: Path) -> None:
    assert not (inspected / "unreadable.json").exists()
    assert len(list(inspected.glob("unreadable.json.*.error"))) == 2
    assert len(list(inspected.glob("*.error"))) == 2
