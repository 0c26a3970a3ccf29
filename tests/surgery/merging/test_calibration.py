"""Calibration of dynamic methods on images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.models.mixes import SMALL, built, random_images
from vitrail.errors import InvalidOption, NotApplied, UnsupportedInput, VitrailWarning
from vitrail.merging.methods.dynamic import Threshold
from vitrail.models import ViTConfig


def model_of() -> tuple[Any, Tensor]:
    config = ViTConfig(**{**SMALL, "image_size": 32, "depth": 4})
    model, x = built(config).float(), random_images(config, batch=48).float()
    smooth = torch.nn.functional.avg_pool2d(x, 3, 1, 1)
    share = torch.linspace(0, 1, 48)[:, None, None, None]  # from noise to smooth images
    return model, share * x + (1 - share) * 2 * smooth


def counted(model: Any, merging: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the patches left in each image, and the cost of each image."""
    kept, flops = [], []
    for batch in x.split(20):
        with torch.no_grad(), merging.track() as trace:
            model(batch)
        kept.append(trace.tokens_per_layer[:, -1] - 1)
        flops.append(trace.flops)
    return torch.cat(kept).double(), torch.cat(flops).double()


@pytest.mark.parametrize("batch_size", [48, 7])
@pytest.mark.parametrize("schedule", [None, "decreasing"])
def test_the_mean_number_of_patches_is_the_budget(batch_size: int, schedule: str | None) -> None:
    model, x = model_of()
    with vitrail.merge(model, method="threshold") as merging:
        result = merging.calibrate(x, keep=0.5, schedule=schedule, batch_size=batch_size)
        kept, flops = counted(model, merging, x)
        config = merging.config
    assert abs(kept.mean() / 32 - 1) < 0.03
    assert len(kept.unique()) > 3
    assert result.images == 48
    assert result.keep == pytest.approx(float(kept.mean()) / 64)
    assert result.gflops == pytest.approx(float(flops.mean()) / 1e9)
    assert (result.fewest, result.most) == (int(kept.min()), int(kept.max()))
    assert result.deviation == pytest.approx(float(kept.mean()) / 32 - 1)
    assert config["method"]["threshold"] == result.settings["threshold"] == result.to_dict()["settings"]["threshold"]
    assert len(config["method"]["threshold"]) == 4
    with vitrail.merge(model, **config) as merging:
        assert torch.equal(counted(model, merging, x)[0], kept)


def test_the_mean_cost_is_the_budget() -> None:
    model, x = model_of()
    with vitrail.merge(model, method="threshold") as merging:
        budget = 0.75 * merging.flops(merged=False) / 1e9
        result = merging.calibrate(x, gflops=budget)
        _, flops = counted(model, merging, x)
    assert abs(float(flops.mean()) / 1e9 / budget - 1) < 0.03
    assert result.deviation == pytest.approx(float(flops.mean()) / 1e9 / budget - 1)


def test_the_first_thresholds_are_scores_at_the_rank_of_the_plan() -> None:
    """DyMU's rule, by a loop over layers: the scores of the whole batch, sorted, at rank r·B."""
    model, x = model_of()
    seen: list[tuple[Tensor, int]] = []

    class Watched(Threshold):
        def reduce(self, context: Any, r: Any) -> Any:
            if self.measured is not None:
                scores = self.scores(context).amax(2)
                seen.append((scores, int(r)))
            return super().reduce(context, r)

        def settle(self, measured: Any) -> None:
            super().settle(measured)
            self.first = list(self.threshold)  # type: ignore[arg-type]

    method = Watched()
    with vitrail.merge(model, method=method) as merging:
        merging.calibrate(x, keep=0.5)
    assert [r for _, r in seen] == [8] * 4
    wanted = [sorted(scores[scores.isfinite()].tolist(), reverse=True)[8 * 48 - 1] for scores, _ in seen]
    torch.testing.assert_close(torch.tensor(method.first), torch.tensor(wanted))


def test_layers_that_the_plan_leaves_out_merge_nothing() -> None:
    model, x = model_of()
    with vitrail.merge(model, r=[10, 0, 6, 0], method="threshold") as merging:
        result = merging.calibrate(x)
        with torch.no_grad(), merging.track() as trace:
            model(x)
    assert [value is None for value in result.settings["threshold"]] == [False, True, False, True]
    lengths = trace.tokens_per_layer.double().mean(0)
    assert lengths[0] == lengths[1]
    assert lengths[2] == lengths[3]
    assert abs((lengths[3] - 1) / 48 - 1) < 0.03


def test_batches_and_limits() -> None:
    model, x = model_of()
    with vitrail.merge(model, method="threshold") as merging:
        whole = merging.calibrate(x, keep=0.6, batch_size=16)
        assert merging.calibrate(iter(x.split(16)), keep=0.6) == whole
        assert merging.calibrate(x, keep=0.6, limit=20).images == 20
        with pytest.raises(UnsupportedInput, match="no images"):
            merging.calibrate([], keep=0.6)
        assert merging.config["method"]["threshold"] != whole.settings["threshold"]


def test_a_failure_changes_nothing() -> None:
    model, x = model_of()
    model.train()
    with vitrail.merge(model, keep=0.7, method=Threshold(0.8)) as merging:
        config = merging.config
        for wrong, words in ({"keep": 0.01}, "keep"), ({"gflops": 1e-9}, "gflops"), ({"tolerance": 2}, "tolerance"):
            with pytest.raises(InvalidOption, match=words):
                merging.calibrate(x, **wrong)
            assert merging.config == config
        with pytest.raises(UnsupportedInput, match="channels"):
            merging.calibrate([x, torch.zeros(1, 7, 32, 32)], keep=0.5)
        assert merging.config == config
        assert model.training
    with pytest.raises(NotApplied):
        merging.calibrate(x, keep=0.5)


def test_what_cannot_be_calibrated() -> None:
    model, x = model_of()
    with vitrail.merge(model, r=3) as merging, pytest.raises(InvalidOption, match="threshold"):
        merging.calibrate(x, keep=0.5)
    with vitrail.merge(model, method="threshold") as merging, pytest.raises(InvalidOption, match="budget"):
        merging.calibrate(x)


def test_a_missed_budget_is_reported() -> None:
    model, x = model_of()
    with vitrail.merge(model, method="threshold") as merging:
        budget = 0.7001 * merging.flops(merged=False) / 1e9
        with pytest.warns(VitrailWarning, match="missed the budget by [+-]"):
            result = merging.calibrate(x[:1].expand(4, -1, -1, -1), gflops=budget, tolerance=1e-9)
    assert 1e-9 < abs(result.deviation) < 0.05, "one image is near the budget and cannot meet it exactly"
