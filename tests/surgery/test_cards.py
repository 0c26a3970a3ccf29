"""Cards of what notebooks show: their figures are those of the objects."""

import re

import pytest
import timm
import torch

import vitrail
from tests.drawing.test_notebook import Checker, check_card, values
from vitrail.drawing.notebook import HEIGHT
from vitrail.report import inspect
from vitrail.tuning import Candidate, Tuning


def vit(**options: object) -> torch.nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=3, num_classes=5, **options).eval()


def text(found: Checker) -> str:
    return " | ".join(found.text)


def test_merging_and_trace() -> None:
    model = vit()
    merging = vitrail.merge(model, r=3)
    found = check_card(merging._repr_html_())
    assert "8 of 17" in text(found)
    assert re.search(r"VisionTransformer, merged .*tome", text(found))
    full, *bars = values(found, "rect", "height")
    assert full == HEIGHT
    assert [round(height / HEIGHT * 17) for height in bars] == [14, 11, 8] == merging.tokens_per_layer()

    with merging.track() as trace:
        assert "Nothing was tracked" in text(check_card(trace._repr_html_()))
        model(torch.randn(6, 3, 64, 64))
    found = check_card(trace._repr_html_())
    kept = [len(trace.groups[index].unique()) for index in range(4)]
    assert [one for one in found.text if "groups" in one] == [f"image {i}: {n} groups" for i, n in enumerate(kept)]
    assert "8 of 17, mean" in text(found)
    merging.remove()
    assert "was removed" in text(check_card(merging._repr_html_()))


def test_merging_that_images_decide() -> None:
    model = vit()
    assert "Images decide" in text(check_card(vitrail.merge(model, method="threshold")._repr_html_()))


def test_recording() -> None:
    images = torch.randn(2, 3, 64, 64)
    recording = vitrail.record(vit(), images, ("tokens", "q"), layers=[0, 2])
    found = check_card(recording._repr_html_())
    assert "2 × 17 × 192, float32, of 2 layers" in text(found)
    assert "2 × 3 × 17 × 64, float32, of 2 layers" in text(found)
    norms = recording.tokens[2][0, 1:].norm(dim=-1)
    assert f"image 0: {norms.min():.3g} to {norms.max():.3g}" in found.text
    plain = vitrail.record(vit(), images, "embedding")
    assert "2 × 16 × 192" in text(check_card(plain._repr_html_()))


def test_report() -> None:
    report = inspect(vit(), torch.randn(4, 3, 64, 64))
    found = check_card(report._repr_html_(), limit=40_000)
    assert report.verdict in text(found)
    typical = [layer["typical"] for layer in report.norms["per_layer"]]
    bars = values(found, "rect", "height")
    assert [height / HEIGHT * max(typical) for height in bars] == pytest.approx(typical, rel=0.01)


def test_tuning() -> None:
    curve = tuple(Candidate("greedy", "tome", (n, n), 10**9 * (9 - n), 1 - n / 100) for n in range(4))
    tuning = Tuning(
        config={"r": [2, 2], "method": "tome"}, family="greedy", quality="agreement", bound=0.97, value=0.98,
        interval=(0.97, 0.99), flops=7 * 10**9, flops_unmerged=9 * 10**9, speedup=1.25, latency_ms=1.0, batch=8,
        tuned_on=100, held_out=50, curve=curve, seconds=1.0, interrupted=True, device="cpu",
    )  # fmt: skip
    found = check_card(tuning._repr_html_())
    for part in (
        "2 2",
        "agreement, 50 held-out samples",
        "0.98 (0.97 to 0.99)",
        "7 of 9",
        "1.25, batch 8",
        "Interrupted.",
    ):
        assert part in text(found)
    x, y = values(found, "circle", "cx"), values(found, "circle", "cy")
    assert (len(x), x[-1], y[-1]) == (5, x[2], y[2])
