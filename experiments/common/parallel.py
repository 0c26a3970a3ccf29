"""Run one command in several processes that share its runs: while one starts up or evaluates, another trains."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event, Lock

from experiments.common.cli import EXIT_CODES, FAILED, INTERRUPTED, worst_exit_code
from vitrail._distributed import cpu_count
from vitrail.training.interrupt import Stop

THREADS = "OMP_NUM_THREADS"


def run_parallel(command: Sequence[str], count: int, log: Callable[[str], object], stop: Stop) -> int:
    """Run a command in several processes and return the most severe exit code; equal lines are logged once.

    Each process gets its share of the cores unless ``OMP_NUM_THREADS`` is set. The processes are detached from the
    terminal: if this process is interrupted or its output is closed (``| head``), it terminates them.
    """
    environment = {THREADS: str(max(1, cpu_count() // count)), **os.environ, "PYTHONUNBUFFERED": "1"}
    logged: set[str] = set()
    lock, output_closed = Lock(), Event()

    def follow(process: subprocess.Popen[str]) -> int:
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                with lock:
                    if line not in logged:
                        logged.add(line)
                        try:
                            log(line.rstrip("\n"))
                        except (SystemExit, OSError):
                            output_closed.set()
        return process.returncode

    pipe, stdout = subprocess.PIPE, subprocess.STDOUT
    with ThreadPoolExecutor(count) as executor:
        processes = [
            subprocess.Popen(command, env=environment, stdout=pipe, stderr=stdout, text=True, start_new_session=True)
            for _ in range(count)
        ]
        try:
            futures = {executor.submit(follow, process) for process in processes}
            while wait(futures, timeout=0.1).not_done:
                if stop.wanted or output_closed.is_set():
                    for process in processes:
                        process.terminate()
                    break
            wait(futures)
        finally:
            for process in processes:
                process.kill()
    codes = [future.result() for future in futures]
    if stop.wanted or output_closed.is_set():
        return INTERRUPTED if stop.wanted else FAILED
    for code in codes:
        if code not in EXIT_CODES:
            log(f"One of {count} processes died with exit code {code}; its run was left to the others.")
    return worst_exit_code(codes)
