"""Check the kernels on a GPU: each kernel over a grid of shapes, then whole merged models.

    python benchmarks/check_kernels.py            everything
    python benchmarks/check_kernels.py --quick    some of each

Kernels are compared with the reference functions in float64. Output buffers are poisoned and surrounded by guards,
inputs are surrounded by NaN, and the same input must give the same bits twice. Models are compared with the reference
functions in the same dtype and in a longer one: inference, gradients, CUDA graphs and torch.compile.

Most of the time goes into compiling kernels, so several processes share the work. With `--workers 0` everything runs
in one process, for a debugger or `compute-sanitizer`. Failures are printed first, the table last; the exit code is 1
if anything failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402
from tests.kernels.cases import (  # noqa: E402
    Attention,
    AttentionBackward,
    Backward,
    Case,
    Edges,
    Groups,
    Matching,
    Merging,
    Norm,
    Outcome,
    Pairs,
    Received,
    Sum,
)
from tests.kernels.whole import (  # noqa: E402
    IMAGES,
    LARGE,
    METHODS,
    SMALL,
    autocast_outcomes,
    compiled_outcome,
    graph_outcome,
    method_outcomes,
    outcomes,
    small_vit,
    streams_outcome,
)

from vitrail import kernels  # noqa: E402
from vitrail.errors import VitrailWarning  # noqa: E402

DTYPES = ("bfloat16", "float16", "float32")
HALF_TYPES = DTYPES[:2]
LENGTHS = (1, 2, 3, 5, 16, 17, 31, 64, 65, 100, 127, 128, 129, 197, 198, 255, 256, 257, 300, 576, 577, 1024, 1025)
LONG = (1370, 1374, 2048, 3000, 4095, 4096)
WIDTHS = (32, 48, 64, 72, 80, 96, 128)
CHANNELS = (192, 384, 768, 1024, 1280, 1664)


def attention_cases() -> Iterator[Case]:
    """Yield every length; every width and dtype on both sides of each kernel switch; every layout."""
    for length in (*LENGTHS, *LONG):
        yield Attention(length=length, width=64, dtype="bfloat16", heads=3)
    for width, dtype, length in product(WIDTHS, DTYPES, (17, 128, 129, 256, 577)):
        yield Attention(length=length, width=width, dtype=dtype)
    for dtype, length in product(DTYPES[1:], (1, 2, 197, 4096)):
        yield Attention(length=length, width=80, dtype=dtype)
    for dtype, layout in product(DTYPES, ("separate", "heads", "channels")):
        yield Attention(length=131, width=72, dtype=dtype, layout=layout)
    for dtype, stepped in product(DTYPES, (False, True)):
        yield Attention(length=100, width=64, dtype=dtype, stepped=stepped, sharp=8.0, scale=0.3)
        yield Attention(length=192, width=64, dtype=dtype, stepped=stepped, shift=-200.0)
        for length, padding in ((197, 100), (256, 255), (577, 400)):
            yield Attention(length=length, width=64, dtype=dtype, stepped=stepped, padding=padding)


def received_cases() -> Iterator[Case]:
    """Yield every length, width, dtype and layout of the attention that tokens receive."""
    for length in (*LENGTHS, *LONG):
        yield Received(length=length, width=64, dtype=HALF_TYPES[length % 2], heads=3)
    for width, dtype, length in product(WIDTHS, DTYPES, (17, 197)):
        yield Received(length=length, width=width, dtype=dtype, padding=length // 3)
    for layout in ("separate", "heads", "channels"):
        yield Received(length=131, width=72, dtype="float16", layout=layout)


def attention_backward_cases() -> Iterator[Case]:
    """Yield every length; every width and dtype on both sides of each block size, fused and split; every layout."""
    for length in (*LENGTHS, *LONG):
        yield AttentionBackward(length=length, width=64, dtype=HALF_TYPES[length % 2], heads=3)
    for width, dtype, length in product(WIDTHS, DTYPES, (17, 64, 197)):
        yield AttentionBackward(length=length, width=width, dtype=dtype)
    for dtype, layout in product(DTYPES, ("separate", "heads", "channels")):
        yield AttentionBackward(length=131, width=72, dtype=dtype, layout=layout)
    for dtype, split in product(DTYPES, (False, True)):
        yield AttentionBackward(length=100, width=64, dtype=dtype, sharp=4.0, scale=0.3, split=split)
        yield AttentionBackward(length=192, width=64, dtype=dtype, shift=-200.0, split=split)
        for length, padding in ((100, 60), (197, 196), (577, 400)):
            yield AttentionBackward(length=length, width=64, dtype=dtype, split=split, padding=padding)
    for length in (1, 2, 17, 64, 65, 128):
        yield AttentionBackward(length=length, width=64, dtype="bfloat16", heads=3, split=True)
    for width, dtype in product(WIDTHS, DTYPES):
        yield AttentionBackward(length=31, width=width, dtype=dtype, split=True)
    for layout in ("separate", "heads", "channels"):
        yield AttentionBackward(length=31, width=72, dtype="float16", layout=layout)


def matching_cases() -> Iterator[Case]:
    """Yield every length with 0 to 9 protected tokens; ties, crowds and NaN images; every width and layout."""
    turn = count()
    for length, keys in product((*LENGTHS, *LONG), ("random", "lattice")):
        protected = min(next(turn) % 10, length - 2)
        if protected >= 0:
            yield Matching(length=length, protected=protected, width=64, keys=keys, batch=4, dtype=DTYPES[length % 3])
    for protected, length in product(range(10), (50, 577)):
        yield Matching(length=length, protected=protected, r=16, width=64, keys="lattice", batch=16)
    for keys, length, r in product(("equal", "crowd", "broken"), (29, 197, 257, 1025), (1, 13, None)):
        yield Matching(length=length, r=r, width=64, keys=keys, batch=8, dtype="bfloat16")
    for width, dtype, length in product(WIDTHS, DTYPES, (40, 197, 300)):
        yield Matching(length=length, r=8, width=width, dtype=dtype, heads=12, batch=16)
    for layout, length in product(("separate", "heads", "channels"), (131, 577)):
        yield Matching(length=length, r=16, layout=layout, dtype="bfloat16")


def edges_cases() -> Iterator[Case]:
    """Yield the steps of a matching: every length and width, masks, penalties, padding and numbers per image."""
    turn = count()
    for length, width in product((*LENGTHS, *LONG), (64, 768)):
        protected = min(next(turn) % 10, length - 2)
        if protected >= 0:
            yield Edges(length=length, protected=protected, width=width, batch=4, dtype=DTYPES[length % 3])
    for width, dtype, length in product((136, 192, 384, 768, 1024, 1664), DTYPES, (40, 197, 300)):
        yield Edges(length=length, width=width, dtype=dtype, batch=8, penalty=length == 197)
        yield Edges(length=length, width=width, dtype=dtype, batch=8, padding=length // 3, counts=True)
        yield Matching(length=length, r=8, width=width, dtype=dtype, heads=1, batch=16)
    for keys, length in product(("lattice", "equal", "crowd", "broken"), (29, 197, 257, 1025)):
        yield Edges(length=length, width=384, keys=keys, dtype="bfloat16", batch=4)
        yield Edges(length=length, keys=keys, given=True, batch=4, masked=True, counts=True)
    for layout, heads in product(("separate", "heads", "channels"), (1, 3)):
        yield Edges(length=131, width=200, layout=layout, heads=heads, dtype="float16")


def groups_cases() -> Iterator[Case]:
    """Yield places, members and ranks of every length, some with empty groups; pairs of every length and width."""
    for length in (*LENGTHS, *LONG):
        yield Groups(length=length, kept=max(1, length // 3), spare=length % 2 * (length // 3), batch=4)
        yield Groups(length=length, kept=length, batch=3)
        yield Pairs(length=length, width=64)
    for width, dtype, keys in product((64, 136, 384, 768), DTYPES, ("random", "lattice", "broken")):
        yield Pairs(length=197, width=width, dtype=dtype, keys=keys)


def merging_cases() -> Iterator[Case]:
    """Yield every width and dtype with all options and with each one off; norms, sums and gradients."""
    everything = {"y": True, "gamma": True, "add": True, "norm": True, "sizes": True}
    shape: dict[str, Any] = {"length": 197, "kept": 150, "batch": 8}
    for channels, dtype in product(CHANNELS, DTYPES):
        yield Merging(**shape, **everything, channels=channels, dtype=dtype, crowded=True)
        yield Merging(**shape, channels=channels, dtype=dtype, sizes=True)
        yield Norm(length=197, channels=channels, dtype=dtype)
        yield Sum(length=197, channels=channels, dtype=dtype)
        yield Backward(**shape, channels=channels, dtype=dtype, sizes=True)
        yield Backward(**shape, channels=channels, dtype=dtype, sizes=True, norm=True, gamma=True)
        yield Backward(length=197, kept=None, channels=channels, dtype=dtype, norm=True)
    for name, dtype in product(everything, DTYPES):
        yield Merging(**shape, **{**everything, name: False, "gamma": name not in ("y", "gamma")}, dtype=dtype)
    for gamma, add, dtype in product((False, True), (False, True), DTYPES):
        yield Norm(length=197, channels=768, y=True, gamma=gamma, add=add, dtype=dtype)
    for length, kept in ((1, 1), (2, 1), (3, 3), (257, 129), (4096, 2048), (4095, 4094)):
        yield Merging(length=length, kept=kept, channels=768, dtype="bfloat16", norm=True)
        yield Backward(length=length, kept=kept, channels=768, dtype="bfloat16", strided=True)
        yield Backward(length=length, kept=kept, channels=768, dtype="bfloat16", norm=True, tokens=False)
    for dtype in DTYPES:
        yield Merging(**shape, **everything, channels=768, dtype=dtype, padding=50)
        yield Merging(**shape, channels=768, dtype=dtype, sizes=True, padding=50)
        yield Backward(**shape, channels=768, dtype=dtype, sizes=True, norm=True, gamma=True, padding=50)
        yield Backward(**shape, channels=768, dtype=dtype, sizes=True, padding=50)
    for channels, branch, gamma in product((384, 768, 1152), HALF_TYPES, (False, True)):
        yield Merging(**shape, channels=channels, branch=branch, y=True, gamma=gamma, norm=True, sizes=True)
        yield Norm(length=197, channels=channels, branch=branch, y=True, gamma=gamma)
        yield Sum(length=197, channels=channels, branch=branch, gamma=gamma)
        yield Backward(**shape, channels=channels, branch=branch, norm=True, gamma=gamma, sizes=True)
        yield Backward(length=197, kept=None, channels=channels, branch=branch, norm=True, gamma=gamma)


@dataclass(frozen=True)
class Task:
    """A check to run in some process."""

    topic: str
    name: str
    call: Callable[[], Outcome | list[Outcome]]


def kernel_tasks(cases: Sequence[Case], device: str) -> list[Task]:
    """Return one task per case."""
    return [Task(case.topic, str(case), partial(_run_case, case, device)) for case in cases]


def _run_case(case: Case, device: str) -> Outcome:
    from tests.kernels.checks import run

    return run(case, device)


def model_tasks(quick: bool) -> list[Task]:
    """Return whole models in every dtype: inference, training, CUDA graphs and compiled."""
    tasks = [
        Task("model", f"{subject.name} {dtype}", partial(outcomes, subject, dtype, "cuda", train))
        for subject in (LARGE[:1] if quick else LARGE)
        for dtype, train in (("bf16", False), ("fp32", False), ("fp16", False), ("bf16", True), ("fp32", True))
        if not quick or dtype != "fp16"
    ]
    tasks += [
        Task("model", f"{subject.name} autocast", partial(autocast_outcomes, subject, torch.bfloat16, "cuda", True))
        for subject in (LARGE[0], LARGE[1], LARGE[4])
    ]
    vit = replace(LARGE[0], make=small_vit)
    recorded = [(torch.bfloat16, LARGE[0])] if quick else [(torch.bfloat16, LARGE[0]), (torch.float32, vit)]
    if not quick:
        recorded += [(torch.bfloat16, LARGE[3]), (torch.float16, LARGE[3])]
        tasks[:0] = [
            Task("model", f"{vit.name} {dtype} compiled", partial(compiled_outcome, vit, dtype, "cuda"))
            for dtype in (torch.bfloat16, torch.float32)
        ]
    tasks += [
        Task("model", f"{subject.name} {dtype} CUDA graph", partial(graph_outcome, subject, dtype))
        for dtype, subject in recorded
    ]
    tasks.append(Task("model", f"{LARGE[0].name} streams", partial(streams_outcome, LARGE[0], torch.bfloat16)))
    return tasks


def method_tasks(quick: bool) -> list[Task]:
    """Return whole models that merge by every method."""
    dtypes = (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32)
    subject = replace(LARGE[0], make=small_vit, images=IMAGES)
    return [
        Task("method", f"{name} {dtype}", partial(method_outcomes, subject, name, dtype, "cuda"))
        for name in METHODS
        for dtype in dtypes
    ]


def beyond_tasks(device: str, small: bool = False) -> list[Task]:
    """Return inputs beyond 32-bit indices; with ``small``, small inputs that only exercise the check."""
    if small:
        calls = [
            ("attention_outcome", (3, 20, 2, 16)),
            ("matching_outcome", (3, 60, 2, 16)),
            ("merging_outcome", (3, 40, 8)),
        ]
    else:
        calls = [
            ("attention_outcome", (2_800, 256, 16, 64)),
            ("attention_outcome", (1_200, 600, 16, 64)),
            ("attention_outcome", (8_200, 260, 8, 16)),  # more heads than the second grid axis allows
            ("matching_outcome", (2_800, 256, 16, 64)),
            ("matching_outcome", (1_200, 600, 16, 64)),
            ("merging_outcome", (8_200, 257, 1_024)),
        ]
    return [Task("beyond", f"{name} {shape}", partial(_run_beyond, name, *shape, device)) for name, shape in calls]


def _run_beyond(name: str, *arguments: Any) -> Outcome:
    from tests.kernels import beyond

    outcome: Outcome = getattr(beyond, name)(*arguments)
    return outcome


def all_tasks(device: str, quick: bool) -> list[Task]:
    """Return what can run on a device, longest first."""
    cases = [
        *attention_cases(), *attention_backward_cases(), *received_cases(), *matching_cases(), *edges_cases(),
        *groups_cases(), *merging_cases(),
    ]  # fmt: skip
    if device == "cuda":
        if quick:
            return [*model_tasks(quick), *method_tasks(quick), *kernel_tasks(cases[::10], device)]
        return [*model_tasks(quick), *method_tasks(quick), *beyond_tasks(device), *kernel_tasks(cases, device)]
    models = [Task("model", subject.name, partial(outcomes, subject, "fp32", device)) for subject in SMALL]
    if os.environ.get("TRITON_INTERPRET") != "1":
        return models
    # the interpreter computes bfloat16 products wrongly
    small = [case for case in cases if getattr(case, "length", 0) <= 300 and case.dtype != "bfloat16"]
    return [*models, *beyond_tasks(device, small=True), *kernel_tasks(small[:: 16 if quick else 1], device)]


class _Process:
    broken = ""
    """The task that left this process's GPU unusable."""


def work(task: Task) -> list[Outcome]:
    """Run a task; errors become its outcome."""
    if _Process.broken:
        return [Outcome(task.topic, task.name, why=f"not run: {_Process.broken} broke the process")]
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    warnings.simplefilter("ignore", VitrailWarning)  # cases merge more than possible on purpose
    try:
        found = task.call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return [found] if isinstance(found, Outcome) else found
    except Exception as error:
        if "CUDA error" in str(error):
            _Process.broken = task.name
        return [Outcome(task.topic, task.name, why=f"{type(error).__name__}: {error}"[:500])]


def run_all(tasks: Sequence[Task], workers: int) -> Iterator[Outcome]:
    """Yield outcomes as they finish."""
    if workers == 0:
        for task in tasks:
            yield from work(task)
        return
    pool: Executor
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(work, task) for task in tasks]):
            yield from future.result()


def table(found: Sequence[Outcome]) -> str:
    """Return one line per topic and model, with the outcome closest to its limit."""
    rows = [("what", "checks", "failed", "worst error", "allowed", "in")]
    parts: dict[str, list[Outcome]] = {}
    for outcome in found:
        name = f"model {outcome.case.split()[0]}" if outcome.topic == "model" else outcome.topic
        parts.setdefault(name, []).append(outcome)
    for name, part in parts.items():
        worst = max(part, key=lambda o: (o.error != o.error, o.error / o.limit if o.limit else 0.0))
        failed = sum(not outcome.passed for outcome in part)
        case = worst.case.removeprefix(name.split()[-1]).strip()
        rows.append((name, str(len(part)), str(failed), f"{worst.error:.1e}", f"{worst.limit:.1e}", case))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:5], widths, strict=True)), row[5]]) for row in rows
    )


def main(arguments: Sequence[str]) -> int:
    """Run the checks and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="some cases of each kind")
    parser.add_argument("--only", metavar="TEXT", nargs="+", help="only tasks with one of these in topic or name")
    parser.add_argument("--workers", type=int, help="processes that share the work; 0 to run in this one")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begun = time.monotonic()
    say(f"Kernels: {kernels.describe()}")
    if device == "cpu":
        say("Without a GPU, models run on the reference functions, so this checks little.")
    tasks = all_tasks(device, options.quick)
    wanted = options.only or [""]
    tasks = [task for task in tasks if any(text in f"{task.topic} {task.name}" for text in wanted)]
    default = min(14, os.cpu_count() or 1) if device == "cuda" else 0
    found = list(run_all(tasks, default if options.workers is None else options.workers))
    found.sort(key=lambda outcome: (outcome.topic, outcome.case))
    failures = [outcome for outcome in found if not outcome.passed]
    for outcome in found:
        if outcome.topic in ("model", "method") and outcome.passed:
            say(f"{outcome.case}: error {outcome.error:.2e}, allowed {outcome.limit:.1e}")
    for outcome in failures:
        say(f"FAILED {outcome.case}: {outcome.why or f'error {outcome.error:.2e}, allowed {outcome.limit:.1e}'}")
    say(table(found))
    say(f"{len(found)} checks in {time.monotonic() - begun:.0f} s, {len(failures)} failed")
    return int(bool(failures) or not found)


def say(text: str) -> None:
    """Print and flush."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
