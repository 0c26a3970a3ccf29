"""Outcomes of Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kernels.cases import Outcome

ROOT = Path(__file__).resolve().parents[2]

Interpreted = Callable[[str], list[Outcome]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest tests first: at the end, the other workers would be idle."""
    items.sort(key=lambda item: "interpreted" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def interpreted() -> Interpreted:
    """Return the outcomes of a part. Each part is used by one test: a second one would run it again, or wait."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton, whose interpreter runs the kernels on a CPU")

    def outcomes(part: str) -> list[Outcome]:
        *before, last = ["", *_interpret(part).splitlines()]
        assert last.startswith("["), "the interpreter's process failed:\n" + "\n".join([*before[-30:], last])
        return [Outcome(**outcome) for outcome in json.loads(last)]

    return outcomes


def _interpret(part: str) -> str:
    """Run a part in its own process; return its output, errors last."""
    given = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.interpreter", part]
    ended = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False, timeout=600)
    return ended.stdout if ended.returncode == 0 else ended.stdout + ended.stderr
