"""One command in several processes, which share its runs: while one starts, reads or evaluates, another trains."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event, Lock

from vitrail._distributed import cores
from vitrail.training.interrupt import Stop

THREADS = "OMP_NUM_THREADS"
STOPPED, FAILED, WRONG, LEFT = 130, 1, 2, 3
"""What a command ends with if not all is done, the gravest first: asked to stop, runs failed, wrong words, no time."""

ENDS = (STOPPED, FAILED, WRONG, LEFT, 0)


def side_by_side(command: Sequence[str], count: int, say: Callable[[str], object], stop: Stop) -> int:
    """Run a command in some processes at once and give what it ends with; what several of them say is said once.

    Each has its share of the cores, unless the user has said how many threads to have. They hear nothing from the
    terminal: when this process is asked to stop, or nobody listens any more (``| head``), it asks them to stop, too.
    """
    given = {THREADS: str(max(1, cores() // count)), **os.environ, "PYTHONUNBUFFERED": "1"}
    said: set[str] = set()
    one_at_a_time, nobody_listens = Lock(), Event()

    def follow(process: subprocess.Popen[str]) -> int:
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                with one_at_a_time:
                    if line not in said:
                        said.add(line)
                        try:
                            say(line.rstrip("\n"))
                        except (SystemExit, OSError):
                            nobody_listens.set()
        return process.returncode

    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with ThreadPoolExecutor(count) as followers:
        processes = [
            subprocess.Popen(command, env=given, stdout=pipe, stderr=both, text=True, start_new_session=True)
            for _ in range(count)
        ]
        try:
            following = {followers.submit(follow, process) for process in processes}
            while wait(following, timeout=0.1).not_done:
                if stop.wanted or nobody_listens.is_set():
                    for process in processes:
                        process.terminate()
                    break
            wait(following)
        finally:
            for process in processes:
                process.kill()
    codes = [one.result() for one in following]
    if stop.wanted or nobody_listens.is_set():
        return STOPPED if stop.wanted else FAILED
    for code in codes:
        if code not in ENDS:
            say(f"One of {count} processes ended by itself ({code}); what it was at was left to the others.")
    return gravest(codes)


def gravest(codes: Iterable[int]) -> int:
    """Give what to end with, of what several parts ended with; whatever else a process ends with is a failure."""
    found = {code if code in ENDS else FAILED for code in codes}
    return next(code for code in ENDS if code in found)
