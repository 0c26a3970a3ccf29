"""Counts by entropy against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.merging.methods.loops import best_pairs, bipartite, context, cosine, entropy, groups_after, merge_pairs
from tests.models.mixes import SMALL, built, random_images
from vitrail.errors import InvalidOption
from vitrail.merging.methods.dynamic import Entropy
from vitrail.merging.methods.dynamic.entropy import PIXEL_ENTROPY, pixel_entropy
from vitrail.models import ViTConfig


def test_entropy_of_attention_counts_members() -> None:
    torch.manual_seed(0)
    x, size = torch.randn(3, 8, 4).double(), torch.randint(1, 4, (3, 8)).double()
    size[1, 6:] = 0
    received = torch.rand(3, 2, 8).double()
    here = context(x, protected=1, size=size, padded=True)
    here.attend = lambda queries: received
    found = Entropy().entropy(here)
    for image in range(3):
        mean = received[image].mean(0)
        members = []
        for token in range(1, 8):
            count = int(size[image, token])
            members += [float(mean[token]) / max(count, 1)] * count
        total = sum(members)
        assert float(found[image]) == pytest.approx(entropy([p / total for p in members]) / math.log(len(members)))
    alone = context(x, protected=7)
    alone.attend = lambda queries: received
    assert Entropy().entropy(alone).tolist() == [0, 0, 0]


def test_entropy_of_pixels() -> None:
    torch.manual_seed(1)
    image = torch.randn(2, 3, 8, 12).double()
    image[:, :, :4, :4] = 0.3
    found = pixel_entropy(image, (1, 2, 3))
    for index in range(2):
        gray = image[index].mean(0)
        low, high = float(gray.min()), float(gray.max())
        for patch in range(6):
            i, j = patch // 3 * 4, patch % 3 * 4
            pixels = gray[i : i + 4, j : j + 4].flatten().tolist()
            bins = [min(int((value - low) / (high - low) * 16), 15) for value in pixels]
            wanted = entropy([bins.count(b) / 16 for b in set(bins)]) / math.log(16)
            assert float(found[index, patch]) == pytest.approx(wanted)
    assert found[:, 0].tolist() == [0, 0]
    assert not pixel_entropy(torch.ones(1, 3, 8, 8), (1, 2, 2)).any()


@pytest.mark.parametrize("center", [0.5, [0.1, 0.5]])
def test_the_number_of_merges(center: Any) -> None:
    torch.manual_seed(2)
    x = torch.randn(4, 21, 4).double()
    values = torch.rand(4, 21).double()
    size = torch.ones(4, 21).double()
    size[2, 15:] = 0
    method = Entropy("input", strength=0.7, center=center, spread=0.1)
    here = context(x, layer=1, protected=1, size=size, padded=True, guide={PIXEL_ENTROPY: values})
    amount = method.amount(here, 4)
    found = method.reduce(here, amount)
    counts = set()
    for image in range(4):
        tokens = size[image].nonzero()[:, 0].tolist()
        mean = sum(values[image, i].item() for i in tokens[1:]) / len(tokens[1:])
        wanted = round(4 * min(max(1 + 0.7 * (0.5 - mean) / 0.1, 0), 2))
        scores = {(a, b): cosine(x[image, a], x[image, b]) for a, b in bipartite(tokens[1:])}
        assert groups_after(found, image, size > 0) == merge_pairs(tokens, best_pairs(scores)[:wanted])
        counts.add(wanted)
    assert len(counts) > 1


def model_of(depth: int = 4) -> tuple[Any, Tensor]:
    config = ViTConfig(**{**SMALL, "image_size": 32, "depth": depth})
    model, x = built(config).float(), random_images(config, batch=48).float()
    smooth = torch.nn.functional.interpolate(torch.nn.functional.avg_pool2d(x, 8), scale_factor=8)
    share = torch.linspace(0, 1, 48)[:, None, None, None]  # from noise to flat areas
    return model, share * x + 0.01 * x + (1 - share) * 2 * smooth


@pytest.mark.parametrize("source", ["attention", "input"])
def test_calibration_keeps_the_plan_on_average(source: str) -> None:
    model, x = model_of()
    with vitrail.merge(model, keep=0.5, method={"name": "entropy", "source": source}) as merging:
        result = merging.calibrate(x, batch_size=20)
        with torch.no_grad(), merging.track() as trace:
            model(x)
        config = merging.config
        kept = (trace.tokens_per_layer[:, -1] - 1).double()
        with pytest.raises(InvalidOption, match="depends on the image"):
            merging.flops()
    assert config["keep"] == 0.5
    assert len(config["method"]["center"]) == len(config["method"]["spread"]) == 4
    assert abs(kept.mean() / 32 - 1) < 0.03
    assert result.keep == pytest.approx(float(kept.mean()) / 64)
    assert len(kept.unique()) > 3
    with vitrail.merge(model, **config) as merging, torch.no_grad(), merging.track() as trace:
        model(x)
        assert torch.equal(trace.tokens_per_layer[:, -1] - 1, kept.long())
    if source == "input":
        means = pixel_entropy(x, (1, 8, 8)).mean(1)
        order = means.argsort()
        assert kept[order[:10]].mean() < kept[order[-10:]].mean() - 5, "flat images merge more"


def test_an_amount_is_required() -> None:
    model, x = model_of(2)
    with pytest.raises(InvalidOption, match="keep="):
        vitrail.merge(model, method="entropy")
    with pytest.raises(InvalidOption, match="2 layers"):
        vitrail.merge(model, r=2, method=Entropy(center=[0.5] * 3))
    assert model(x[:1]).shape == (1, 5)


@pytest.mark.parametrize(
    "options", [{"source": "colour"}, {"strength": -1}, {"center": "a"}, {"spread": 0}, {"spread": [0.1, -1]}]
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        Entropy(**options)


def test_options_make_the_same_method_again() -> None:
    for options in ({}, {"source": "input", "strength": 0.3, "center": [0.5], "spread": 0.1, "bucket": 4}):
        assert Entropy(**options).options == options
