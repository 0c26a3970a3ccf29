"""Several processes for one command: what they say, what they end with, and how they are stopped."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import experiments.__main__ as program
from experiments.__main__ import app
from experiments.common.cli import FAILED, INTERRUPTED, INVALID, UNFINISHED, worst_exit_code
from experiments.common.parallel import run_parallel
from vitrail.training.interrupt import Interrupted, Stop


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_each_has_its_share_and_what_all_say_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    said: list[str] = []
    text = "import os; print('threads', os.environ['OMP_NUM_THREADS']); print('  process', os.getpid())"
    assert run_parallel(python(text), 3, said.append, Stop()) == 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert said.count(f"threads {max(1, cores // 3)}") == 1
    assert len({line for line in said if line.startswith("  process ")}) == len(said) - 1 == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run_parallel(python(text), 2, said.append, Stop())
    assert "threads 7" in said


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, UNFINISHED], UNFINISHED),
        ([UNFINISHED, INVALID], INVALID),
        ([INVALID, FAILED], FAILED),
        ([FAILED, INTERRUPTED], INTERRUPTED),
    ],
)
def test_the_gravest_end_is_given(codes: list[int], code: int) -> None:
    assert worst_exit_code(codes) == worst_exit_code(reversed(codes)) == code
    assert worst_exit_code([UNFINISHED, -9]) == worst_exit_code([0, 77]) == FAILED  # killed, or anything else


def test_what_one_of_them_ends_with_is_told(tmp_path: Path) -> None:
    first = "import os; os.mkdir('first')"  # which only one of them can do
    text = f"import os, sys; os.chdir({str(tmp_path)!r})\ntry: {first}\nexcept FileExistsError: sys.exit(3)"
    assert run_parallel(python(text), 3, print, Stop()) == UNFINISHED


def test_asked_to_stop_it_asks_them() -> None:
    said: list[str] = []
    text = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(130)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )

    def say(line: str) -> None:
        said.append(line)
        if line == "ready":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    begun = time.monotonic()
    with Stop.listening() as stop:
        assert run_parallel(python(text), 2, say, stop) == INTERRUPTED
    assert said == ["ready", "saved"]
    assert time.monotonic() - begun < 30


def test_they_stop_when_nobody_listens() -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        raise SystemExit(1)  # as rich does for `| head`

    begun = time.monotonic()
    assert run_parallel(python("import time; print('ready', flush=True); time.sleep(60)"), 2, say, Stop()) == FAILED
    assert said == ["ready"]
    assert time.monotonic() - begun < 30


def test_a_process_that_is_killed_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    first = "import os; os.mkdir('first'); os.kill(os.getpid(), 9)"  # which only one of them can do
    text = f"import os; os.chdir({str(tmp_path)!r})\ntry: {first}\nexcept FileExistsError: pass"
    assert run_parallel(python(text), 2, said.append, Stop()) == FAILED
    (line,) = said
    assert "exit code -9" in line


@pytest.mark.parametrize("options", [[], ["--processes", "2"]])
def test_a_command_that_is_stopped_ends_with_130(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Runner(program.Runner):
        def search_and_run(self, *_: Any, **__: Any) -> None:
            asked.append(self.study.name)
            raise Interrupted("Interrupted.")

    monkeypatch.setattr(program, "Runner", Runner)
    monkeypatch.setattr(program, "run_parallel", lambda *_: INTERRUPTED)
    said = CliRunner().invoke(app, ["class_tokens", "depth", *options])
    assert (said.exit_code, said.output.count("Interrupted.")) == (INTERRUPTED, 1)
    assert asked == ([] if options else ["class_tokens"])


def test_they_end_with_it(tmp_path: Path) -> None:
    text = f"import os, time; os.mkdir({str(tmp_path)!r} + f'/{{os.getpid()}}'); time.sleep(60)"

    class Impatient(Stop):
        """Whose process is interrupted when all others have begun."""

        @property
        def wanted(self) -> bool:
            if len(list(tmp_path.iterdir())) == 2:
                raise KeyboardInterrupt
            return False

        @wanted.setter
        def wanted(self, value: bool) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        run_parallel(python(text), 2, print, Impatient())
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


def test_studies_that_measure_time_are_done_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []
    alone: list[str] = []

    def beside(command: list[str], count: int, *_: Any) -> int:
        asked.append((command, count))
        return UNFINISHED

    class Runner(program.Runner):
        def search_and_run(self, *_: Any, **__: Any) -> None:
            alone.append(self.study.name)

    monkeypatch.setattr(program, "run_parallel", beside)
    monkeypatch.setattr(program, "Runner", Runner)
    words = ["depth", "merging", "sound_and_video/sounds", "class_tokens"]
    options = ["--seeds=0,1", "--arms=-x", "--seconds=0.0", f"--out={tmp_path}", "--device=cpu", "--tune"]
    said = CliRunner().invoke(app, [*words, *options, "--processes", "3"])
    assert said.exit_code == UNFINISHED, said.output
    assert alone == ["merging", "sound_and_video/sounds"]
    ((command, count),) = asked
    assert (command[:3], count) == ([sys.executable, "-m", "experiments"], 3)
    assert command[3:5] == ["depth", "class_tokens"]
    assert set(command[5:]) == set(options)
    CliRunner().invoke(app, ["merging", "--reduced", "--processes", "2", "--out", str(tmp_path)])
    assert (asked[-1][0][3], "--reduced" in asked[-1][0]) == ("merging", True)
    said = CliRunner().invoke(app, ["depth", "--plot", "--processes", "2"])
    assert (said.exit_code, "trains nothing" in said.output) == (2, True)
