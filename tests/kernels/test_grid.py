"""The GPU check as far as it runs without a GPU: its coverage and its output."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.kernels.cases import Attention, Case, Matching, Outcome

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "check_kernels.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "check_kernels", module)
    spec.loader.exec_module(module)
    return module


def values(cases: list[Case], name: str) -> set[Any]:
    return {getattr(case, name) for case in cases}


def test_grid_covers_lengths_widths_dtypes_and_ties(script: ModuleType) -> None:
    attention: list[Case] = [case for case in script.attention_cases() if isinstance(case, Attention)]
    matching: list[Case] = [case for case in script.matching_cases() if isinstance(case, Matching)]
    for cases, shortest in ((attention, 1), (matching, 2)):
        assert {shortest, 197, 256, 257, 577, 1025, 4095, 4096} <= values(cases, "length")
        assert {32, 64, 72, 80, 128} <= values(cases, "width")
        assert {"float32", "float16", "bfloat16"} == values(cases, "dtype")
        assert {"packed", "separate", "heads", "channels"} == values(cases, "layout")
    assert set(range(10)) == values(matching, "protected")
    assert {"random", "lattice", "equal", "crowd", "broken"} == values(matching, "keys")
    everything = [*attention, *matching, *script.merging_cases()]
    assert len({str(case) for case in everything}) == len(everything)


def test_tasks_travel_to_other_processes(script: ModuleType) -> None:
    tasks = script.all_tasks("cuda", quick=False)
    assert len(pickle.loads(pickle.dumps(tasks))) == len(tasks) > len(script.all_tasks("cuda", quick=True))
    assert {task.topic for task in tasks} == {
        *("model", "beyond", "attention", "attention received", "attention backward"),
        *("matching", "merging", "norm", "sum", "backward"),
        *("edges", "groups", "method", "pairs"),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, and would run the real check")
def test_without_a_gpu_a_note_is_printed(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert script.main(["--only", "ViT"]) == 0
    output = capsys.readouterr().out
    assert "Without a GPU" in output
    assert output.splitlines()[-2].split()[:4] == ["model", "ViT", "2", "0"]
    assert output.splitlines()[-1].endswith("0 failed")
    assert script.main(["--only", "nothing has this name"]) == 1


def test_failures_are_reported_and_counted(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks() -> Outcome:
        raise RuntimeError("CUDA error: an illegal memory access")

    tasks = [
        script.Task("attention", "attention a", lambda: Outcome("attention", "attention a", 0.5, 1.0)),
        script.Task("attention", "attention b", lambda: Outcome("attention", "attention b", 2.0, 1.0)),
        script.Task("attention", "attention c", lambda: Outcome("attention", "attention c", float("nan"), 1.0)),
        script.Task("matching", "matching d", breaks),
        script.Task("matching", "matching e", breaks),
    ]
    monkeypatch.setattr(script, "all_tasks", lambda device, quick: tasks)
    assert script.main(["--workers", "0"]) == 1
    *_, b, c, d, e, head, attention, matching, last = capsys.readouterr().out.splitlines()
    assert b == "FAILED attention b: error 2.00e+00, allowed 1.0e+00"
    assert c == "FAILED attention c: error nan, allowed 1.0e+00"
    assert d == "FAILED matching d: RuntimeError: CUDA error: an illegal memory access"
    assert e == "FAILED matching e: not run: matching d broke the process"
    assert head.split()[:3] == ["what", "checks", "failed"]
    assert attention.split()[:4] == ["attention", "3", "2", "nan"]
    assert matching.split()[:3] == ["matching", "2", "2"]
    assert last.startswith("5 checks in ")
