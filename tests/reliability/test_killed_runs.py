"""Runs that are killed at any moment, also inside of a checkpoint's write, end with the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.toys import ROOT


def killed(folder: Path, kills: int, seed: int, how: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.reliability.killing", str(folder), str(kills), str(seed), how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(f"{how}: {found}\n")
    return found


def test_runs_killed_inside_of_writes_end_with_the_same_bits(tmp_path: Path) -> None:
    found = killed(tmp_path, 8, 0, "counted")
    assert found["kills"] == 8
    assert found["equal"] == found["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["counted", "timed"])
def test_runs_killed_at_many_random_moments_end_with_the_same_bits(how: str, tmp_path: Path) -> None:
    found = killed(tmp_path, int(os.environ.get("VITRAIL_KILLS", "50")), 1, how)
    assert found["equal"] == found["runs"]
