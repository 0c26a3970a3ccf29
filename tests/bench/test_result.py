"""Results: ratios of the best modes, plain data, and text."""

import dataclasses
import json

import pytest

from tests.bench.models import FULL, result, row
from vitrail.bench import BenchConfig, Check, Failure
from vitrail.bench.result import summary, title

CHECK = Check(0.004, 0.97, 0.006, 0.955, 0.007, 0.95, "float32", 16, 0.02, 0.03)


def test_row() -> None:
    one = row("merged", "eager", 20.0)
    assert one.ms == pytest.approx(20.0)
    assert one.images_per_s == pytest.approx(8 / 0.020)
    assert one.peak_mb == pytest.approx(5.0)
    assert one.tflops == pytest.approx(2 * 1e9 * 8 / 0.020 / 1e12)
    assert (one.ms_low, one.ms_high, one.ms_least) == pytest.approx((19.8, 20.2, 19.6))
    assert one.spread == pytest.approx(0.01)
    training = row("merged", "eager", 20.0, config=BenchConfig("timm:x", batch=8, train=True), peak=None)
    assert training.tflops == pytest.approx(3 * one.tflops)
    assert training.peak_mb is None


def test_ratios_use_the_best_modes() -> None:
    found = result(*FULL)
    assert found.speedup == pytest.approx(20.0 / 12.5)
    assert found.efficiency == pytest.approx(12.0 / 12.5)
    assert found.ratio("unmerged", "eager") == pytest.approx(24.0 / 12.5)
    assert found.ratio("sliced", "eager") == pytest.approx(15.0 / 12.5)
    assert found.flops_ratio == 2.0
    best = found.best("sliced")
    assert best is not None
    assert best.mode == "compiled"


def test_ratios_without_rows() -> None:
    found = result(*(one for one in FULL if one.variant != "sliced"))
    assert found.efficiency is None
    assert found.ratio("sliced", "eager") is None
    assert found.speedup is not None
    assert result(FULL[0]).speedup is None


def test_to_dict() -> None:
    broken = dataclasses.replace(FULL[4], difference=float("nan"))
    found = result(*FULL[:4], broken, FULL[5], check=CHECK, failed=(Failure("merged", "graph", "why"),))
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert {"variant", "mode", "ms", "images_per_s", "peak_mb", "ready_s"} <= set(data["rows"][0])
    assert [(entry["variant"], entry["mode"]) for entry in data["rows"]] == [(one.variant, one.mode) for one in FULL]
    assert data["rows"][4]["difference"] is None
    assert data["speedup"] == pytest.approx(1.6)
    assert data["efficiency"] == pytest.approx(0.96)
    assert data["check"]["equal_groups"] == 0.97
    assert data["failed"] == [{"variant": "merged", "mode": "graph", "form": "graph", "reason": "why"}]
    assert data["rows"][0]["form"] == "eager"  # names from before 0.3 stay readable
    assert data["check"]["pictures"] == data["check"]["images"] == 16
    assert data["config"]["model"] == "timm:vit_tiny_patch16_224"
    assert data["config"]["forms"] == data["config"]["modes"] == ["eager", "compiled"]
    assert data["config"]["proportional"] is True
    assert data["machine"]["versions"] == {"torch": "2.11"}
    assert data["kernels"]["kernels"] == "reference"
    assert data["tokens_per_layer"][-1] == 149


def test_summary() -> None:
    noisy = dataclasses.replace(FULL[5], ms_high=20.0)
    failed = (Failure("merged", "graph", "no time left"),)
    text = "\n".join(summary(result(*FULL[:5], noisy, check=CHECK, startup_s=7.25, failed=failed, notes=("A note",))))
    assert "Speed-up 1.60: merged (eager, 12.5 ms) against unmerged (compiled, 20 ms)" in text
    assert "multiply-adds: 2.00. Eager only: 1.92." in text
    assert "Efficiency 0.96: the same model with tokens cut off for free (compiled, 12 ms)" in text
    assert "outputs differ by 4.0e-03, and 97.0% of the patches" in text
    assert "7.0e-03 for the reference (95.0% equal groups), 6.0e-03 for the merged model (95.5%)" in text
    assert "Gradients differ by 2.0e-02 (rounding alone: 3.0e-02)." in text
    assert "more than ±5% (merged, compiled)" in text
    assert "merged, graph: not measured (no time left)." in text
    assert "took 7.2 s" in text
    assert "A note." in text
    assert "reference functions in PyTorch (no CUDA device)." in text
    assert "Some GPU, CUDA 13.0; Python 3.11, torch 2.11" in text


def test_summary_without_ratios() -> None:
    text = "\n".join(summary(result(FULL[0], kernels={"kernels": "triton", "why": "a GPU"})))
    assert "Speed-up" not in text
    assert "Efficiency" not in text
    assert "triton (a GPU)." in text


def test_title() -> None:
    config = BenchConfig("timm:vit", r=(4, 2), batch=8, dtype="bf16", autocast=True, train=True)
    assert title(result(*FULL, config=config)) == (
        "timm:vit, 224 × 224, batch 8, r = 4 2, bf16 through autocast, training step (forward, backward, AdamW), "
        "random weights: 197 → 149 tokens, 2 → 1 GMACs"
    )
    assert "r = 4, sizes ignored, fp32" in title(result(config=BenchConfig("timm:vit", r=4, proportional=False)))
