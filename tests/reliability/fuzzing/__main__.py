"""The long fuzzer: ``python -m tests.reliability.fuzzing CALLS [COMMAND_LINES] [SEED] [NAME]``; prints the counts."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from pathlib import Path

import torch

from tests.reliability.fuzzing import calls, commands, surface
from tests.reliability.fuzzing.values import World

MEMORY = 4 * 2**30
"""Bytes that a call may take; what takes all memory fails instead."""


def main(count: int, lines: int = 0, seed: int = 0, only: str = "") -> int:
    """Fuzz functions and commands; return the number of faults."""
    trace = Path(os.environ["FUZZ_TRACE"]) if "FUZZ_TRACE" in os.environ else None  # the last call, if all else fails
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        (Path(folder) / "here").mkdir()
        os.chdir(Path(folder) / "here")
        names = {name: function for name, function in surface.functions().items() if only in name}
        known = {name: command for name, command in surface.commands().items() if only in name}
        for what, found in (
            (f"{len(names)} functions", calls.fuzz(names, count, seed, world, trace) if names else calls.Found()),
            (f"{len(known)} commands", commands.fuzz(known, lines, seed, world) if known else calls.Found()),
        ):
            texts = [f"{what}: {dict(found.counts)}"]
            texts += [f"{number} × {fault}\n    {found.details[fault]}" for fault, number in found.faults.most_common()]
            sys.stdout.write("\n".join(texts) + "\n")
            faults += sum(found.faults.values())
        os.chdir("/")
    return faults


if __name__ == "__main__":
    numbers = [int(one) for one in sys.argv[1:4]]
    sys.exit(bool(main(*numbers, *sys.argv[4:5])))
