"""Commands in several processes: output, exit codes, interrupts."""

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


def test_threads_are_shared_and_equal_lines_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    lines: list[str] = []
    text = "import os; print('threads', os.environ['OMP_NUM_THREADS']); print('  process', os.getpid())"
    assert run_parallel(python(text), 3, lines.append, Stop()) == 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert lines.count(f"threads {max(1, cores // 3)}") == 1
    assert len({line for line in lines if line.startswith("  process ")}) == len(lines) - 1 == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run_parallel(python(text), 2, lines.append, Stop())
    assert "threads 7" in lines


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
def test_worst_exit_code(codes: list[int], code: int) -> None:
    assert worst_exit_code(codes) == worst_exit_code(reversed(codes)) == code
    assert worst_exit_code([UNFINISHED, -9]) == worst_exit_code([0, 77]) == FAILED  # killed, or anything else


def test_exit_code_of_one_process_is_returned(tmp_path: Path) -> None:
    first = "import os; os.mkdir('first')"  # only one of them succeeds
    text = f"import os, sys; os.chdir({str(tmp_path)!r})\ntry: {first}\nexcept FileExistsError: sys.exit(3)"
    assert run_parallel(python(text), 3, print, Stop()) == UNFINISHED


def test_interrupt_is_forwarded() -> None:
    lines: list[str] = []
    text = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(130)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )

    def log(line: str) -> None:
        lines.append(line)
        if line == "ready":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    begun = time.monotonic()
    with Stop.listening() as stop:
        assert run_parallel(python(text), 2, log, stop) == INTERRUPTED
    assert lines == ["ready", "saved"]
    assert time.monotonic() - begun < 30


def test_processes_stop_when_the_output_is_closed() -> None:
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        raise SystemExit(1)  # as rich does for `| head`

    begun = time.monotonic()
    assert run_parallel(python("import time; print('ready', flush=True); time.sleep(60)"), 2, log, Stop()) == FAILED
    assert lines == ["ready"]
    assert time.monotonic() - begun < 30


def test_killed_process_is_reported(tmp_path: Path) -> None:
    lines: list[str] = []
    first = "import os; os.mkdir('first'); os.kill(os.getpid(), 9)"  # only one of them succeeds
    text = f"import os; os.chdir({str(tmp_path)!r})\ntry: {first}\nexcept FileExistsError: pass"
    assert run_parallel(python(text), 2, lines.append, Stop()) == FAILED
    (line,) = lines
    assert "exit code -9" in line


@pytest.mark.parametrize("options", [[], ["--processes", "2"]])
def test_interrupted_command_exits_with_130(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Runner(program.Runner):
        def search_and_run(self, *_: Any, **__: Any) -> None:
            calls.append(self.study.name)
            raise Interrupted("Interrupted.")

    monkeypatch.setattr(program, "Runner", Runner)
    monkeypatch.setattr(program, "run_parallel", lambda *_: INTERRUPTED)
    result = CliRunner().invoke(app, ["class_tokens", "depth", *options])
    assert (result.exit_code, result.output.count("Interrupted.")) == (INTERRUPTED, 1)
    assert calls == ([] if options else ["class_tokens"])


def test_processes_are_killed_with_the_parent(tmp_path: Path) -> None:
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


def test_timed_studies_use_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], int]] = []
    alone: list[str] = []

    def run_fake(command: list[str], count: int, *_: Any) -> int:
        calls.append((command, count))
        return UNFINISHED

    class Runner(program.Runner):
        def search_and_run(self, *_: Any, **__: Any) -> None:
            alone.append(self.study.name)

    monkeypatch.setattr(program, "run_parallel", run_fake)
    monkeypatch.setattr(program, "Runner", Runner)
    words = ["depth", "merging", "sound_and_video/sounds", "class_tokens"]
    options = ["--seeds=0,1", "--arms=-x", "--seconds=0.0", f"--out={tmp_path}", "--device=cpu", "--tune"]
    result = CliRunner().invoke(app, [*words, *options, "--processes", "3"])
    assert result.exit_code == UNFINISHED, result.output
    assert alone == ["merging", "sound_and_video/sounds"]
    ((command, count),) = calls
    assert (command[:3], count) == ([sys.executable, "-m", "experiments"], 3)
    assert command[3:5] == ["depth", "class_tokens"]
    assert set(command[5:]) == set(options)
    CliRunner().invoke(app, ["merging", "--reduced", "--processes", "2", "--out", str(tmp_path)])
    assert (calls[-1][0][3], "--reduced" in calls[-1][0]) == ("merging", True)
    result = CliRunner().invoke(app, ["depth", "--plot", "--processes", "2"])
    assert (result.exit_code, "trains nothing" in result.output) == (2, True)
