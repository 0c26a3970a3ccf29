"""What came out of Triton's interpreter, each part computed once however many workers run the tests."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

from tests.kernels.cases import Outcome

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Outcome]]:
    """Give the outcomes of a part, by case."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton, whose interpreter runs the kernels on a CPU")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    @functools.cache
    def outcomes(part: str) -> dict[str, Outcome]:
        path = folder / f"interpreted-{part}.json"
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                path.write_text(_interpret(part), encoding="utf-8")
        *before, last = ["", *path.read_text(encoding="utf-8").splitlines()]
        assert last.startswith("["), "the interpreter's process failed:\n" + "\n".join([*before[-30:], last])
        return {outcome["case"]: Outcome(**outcome) for outcome in json.loads(last)}

    return outcomes


def _interpret(part: str) -> str:
    """Run a part in a process of its own; gives what it printed, problems last."""
    given = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.interpreter", part]
    ended = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False, timeout=600)
    return ended.stdout if ended.returncode == 0 else ended.stdout + ended.stderr
