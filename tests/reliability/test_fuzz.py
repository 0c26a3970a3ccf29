"""The fuzzer, bounded: no raw error, no half-changed model, no nonsense accepted, over all functions and commands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.reliability.fuzzing import surface
from tests.training.toys import ROOT


def fuzz(*numbers: int) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.reliability.fuzzing", *map(str, numbers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout


def test_the_fuzzer_knows_every_function_and_command() -> None:
    import vitrail
    from vitrail.cli._app import COMMANDS

    assert surface.commands().keys() == COMMANDS.keys()
    found = surface.functions()
    assert {"vitrail.merge", "vitrail.record", "vitrail.inspect", "vitrail.tune", "vitrail.training.train"} <= set(
        found
    )
    assert all(getattr(vitrail, name.removeprefix("vitrail.")) is found[name] for name in found if name.count(".") == 1)


def test_calls_and_command_lines() -> None:
    assert "'calls': 400" in fuzz(400, 25, 11)


@pytest.mark.slow
def test_many_calls_and_command_lines() -> None:
    count = int(os.environ.get("VITRAIL_CALLS", "100000"))
    assert f"'calls': {count}" in fuzz(count, count // 100, 0)
