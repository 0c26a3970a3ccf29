"""Pruning and clustering in half precision, under autocast, and with protected patches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import vitrail
from tests.merging.methods.small import small_images, small_model
from vitrail.merging.methods.clustering import DPCKNN, Agglomerative, KMeans
from vitrail.merging.methods.learned._learned import LearnedMethod
from vitrail.merging.methods.pruning import ATS, AViT, DynamicViT, EViT

CHOICES: dict[str, Any] = {
    "agglomerative": Agglomerative,
    "ats": ATS,
    "avit": lambda: AViT(epsilon=0.5, scale=0.1, shift=-0.2),
    "dpc_knn": DPCKNN,
    "dynamicvit": DynamicViT,
    "evit": EViT,
    "evit-drop": lambda: EViT("drop"),
    "kmeans": KMeans,
}
every_choice = pytest.mark.parametrize("name", CHOICES)


def made(name: str) -> Any:
    """Return a method that counts as trained."""
    torch.manual_seed(0)
    method = CHOICES[name]()
    if isinstance(method, LearnedMethod):
        method.passes.fill_(1)
    return method


@every_choice
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    exact, model = small_model(torch.float32), small_model(dtype)
    kept = []
    with torch.no_grad():
        for one, method in ((exact, made(name)), (model, made(name))):
            with vitrail.merge(one, keep=0.5, method=method) as merging, merging.track() as trace:
                out = one(small_images(next(one.parameters()).dtype))
            assert out.isfinite().all()
            assert out.dtype == next(one.parameters()).dtype
            kept.append(trace.tokens_per_layer[:, -1].float())
    if merging.method.static:
        assert torch.equal(kept[0], kept[1])
        assert kept[0].tolist() == [33] * 3
    else:
        assert (kept[0] - kept[1]).abs().max() <= 4
        assert (kept[0] < 65).all()


@every_choice
def test_autocast(name: str) -> None:
    model = small_model(torch.float32)
    with torch.no_grad(), vitrail.merge(model, keep=0.5, method=made(name)), torch.autocast("cpu", torch.bfloat16):
        assert model(small_images(torch.float32)).isfinite().all()


@every_choice
def test_protected_patches_stay_alone_and_keep_their_tokens(name: str) -> None:
    model = small_model()
    protect = torch.rand(3, 64, generator=torch.Generator().manual_seed(0)) < 0.3
    merging = vitrail.merge(model, r=8, protect=protect, method=made(name))
    with torch.no_grad(), merging.track() as trace:
        model(small_images())
    for groups, mask in zip(trace.groups, protect, strict=True):
        members = torch.bincount(groups)
        assert (members[groups[mask]] == 1).all()
        assert (members > 1).any()
