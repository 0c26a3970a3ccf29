"""Odd inputs of merged models and of what is fitted to images: errors of ours, or results, never errors of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

import vitrail
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.merging import METHODS
from vitrail.merging.methods.learned import LearnedMethod

GUIDES = {
    "salient": {"name": "salient", "importance": "mask"},
    "edges": {"name": "edges", "boundary": "mask"},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(32, 8, embed_dim=16, depth=3, num_heads=2, num_classes=5).eval()


def applied(name: str, **options: Any) -> tuple[nn.Module, vitrail.Merging]:
    own, method = model(), METHODS[name]()
    if isinstance(method, LearnedMethod):
        method.passes.fill_(1)
    amount = {} if method.decides else {"r": [0, 2, 2] if name == "dynamicvit" else 2}
    return own, vitrail.merge(own, method=method, **amount, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_an_empty_batch_has_empty_outputs(name: str) -> None:
    own, merging = applied(name)
    images = torch.randn(0, 3, 32, 32)
    assert own(images).shape == (0, 5)
    merging.remove()
    own, merging = applied(name, unmerge=False)
    tokens = merging.tokens_per_layer()[-1] if merging.method.static else 17
    assert own.forward_features(images).shape == (0, tokens, 16)
    own.train()
    assert own.forward_features(images).shape[0] == 0


@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.full((2, 16), torch.nan), "finite.*got NaN or infinite.*nan_to_num"),
        (torch.rand(2, 4, 4).index_fill(2, torch.tensor(1), torch.inf), "finite.*got NaN or infinite"),
        (torch.complex(torch.rand(2, 16), torch.rand(2, 16)), "finite.*got complex"),
    ],
)
def test_guides_are_real_and_finite(name: str, values: Tensor, words: str) -> None:
    own = model()
    with vitrail.merge(own, 2, method=GUIDES[name]) as merging:
        with pytest.raises(InvalidOption, match=f"mask is a map of real, {words}"):
            merging.guide(mask=values)
        with merging.guide(mask=values.isfinite()):
            assert own(torch.randn(2, 3, 32, 32)).isfinite().all()


FITS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "tune": lambda own, images: vitrail.tune(own, images, "cosine 0.9", seconds=2),
    "calibrate": lambda own, images: vitrail.merge(own, method="threshold").calibrate(images, keep=0.6),
    "entropy": lambda own, images: vitrail.merge(own, keep=0.6, method="entropy").calibrate(images),
    "residual": lambda own, images: vitrail.merge(own, 2, restore="residual").calibrate_restorer(images),
    "attention": lambda own, images: vitrail.merge(own, 2, restore="attention").calibrate_restorer(images, steps=1),
    "foresight": lambda own, images: vitrail.merge(own, 2, foresight={"layer": 0}).train_foresight(images, steps=1),
}


@pytest.mark.parametrize("name", FITS)
def test_images_that_are_not_finite_are_refused(name: str) -> None:
    own, images = model(), torch.randn(6, 3, 32, 32)
    images[4, 0, 3, 3] = torch.nan if name != "calibrate" else torch.inf
    with pytest.raises(UnsupportedInput, match=r"1 image of 6.*NaN or infinite.*image 4"):
        FITS[name](own, images)
    if name in ("residual", "foresight"):
        part = vitrail.Merging.of(own).restorer if name == "residual" else vitrail.Merging.of(own).foresight
        assert not part.is_trained  # type: ignore[union-attr]
        assert all(value.isfinite().all() for value in part.state_dict().values())  # type: ignore[union-attr]


def test_a_model_whose_activations_are_not_finite_is_not_calibrated() -> None:
    own, images = model(), torch.randn(6, 3, 32, 32)
    with torch.no_grad():
        own.blocks[1].attn.qkv.weight[20] = torch.nan  # type: ignore[union-attr,index]
    merging = vitrail.merge(own, keep=0.6, method="entropy")
    settings = merging.method.settings  # type: ignore[union-attr]
    with pytest.raises(UnsupportedInput, match="NaN or infinite"):
        merging.calibrate(images)
    assert merging.method.settings == settings  # type: ignore[union-attr]


CALLS = FITS | {
    "look_ahead": lambda own, images: vitrail.look_ahead(own, images),
    "guided": lambda own, images: vitrail.merge(own, 2).guided(images, first="full"),
    "restoration_error": lambda own, images: vitrail.merge(own, 2).restoration_error(images),
    "record": lambda own, images: vitrail.record(own, images),
}


@pytest.mark.parametrize("shape", [(3, 24, 24), (1, 32, 32)])
@pytest.mark.parametrize("name", CALLS)
def test_images_of_another_shape_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedInput, match=rf"shape \({shape[0]}, {shape[1]}, .*it takes \(3, 32, 32\)"):
        CALLS[name](model(), torch.randn(6, *shape))


def test_a_calibration_needs_a_budget_below_the_cost_of_the_model() -> None:
    own, images = model(), torch.randn(6, 3, 32, 32)
    full = vitrail.count(own).flops / 1e9
    for name in ("threshold", "entropy"):
        with vitrail.merge(own, 2, method=name) as merging:
            with pytest.raises(InvalidOption, match=r"costs .* without merging; pass less"):
                merging.calibrate(images, gflops=2 * full)
            assert merging.config["r"] == 2


@pytest.mark.parametrize("method", ["tome", "kmeans"])
def test_a_share_of_less_than_one_patch_is_refused(method: str) -> None:
    own = model()
    with pytest.raises(InvalidOption, match=r"keep=1e-06 of 16 patches is less than one.*keep=0\.0625"):
        vitrail.merge(own, keep=1e-6, method=method)
    with vitrail.merge(own, keep=0.0625, method="kmeans") as merging:
        assert merging.tokens_per_layer()[-1] == 2


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_no_method(name: str) -> None:
    with pytest.raises(InvalidOption, match="method is one of agglomerative"):
        vitrail.merge(model(), 2, method=name)
