"""Features with rotary position, against the queries and keys that the unmerged model itself attends with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from tests.models.mixes import SMALL, built, random_images
from tests.surgery.models import ALL, run
from vitrail.merging import FEATURES, Context, Reduction, ToMe
from vitrail.merging.features import compute_features
from vitrail.models import ViTConfig

ROTARY = ["eva-eva02", "eva-dinov3", "eva-mixed-xy", "own"]
Attended = list[tuple[Tensor, Tensor, Tensor]]
"""Queries, keys and values (B, H, N, d) of each layer."""


def model_of(name: str) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    if name == "own":
        config = ViTConfig(**{**SMALL, "depth": 3, "position": "rotary"})
        return built(config), random_images(config), {}
    case = ALL[name]
    return case.model(), case.images(), case.call


def attended(monkeypatch: pytest.MonkeyPatch, model: nn.Module, images: Tensor, call: dict[str, Any]) -> Attended:
    """Run a model and return the queries, keys and values that reach PyTorch's attention."""
    found: Attended = []
    attend = F.scaled_dot_product_attention

    def watch(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        found.append((q, k, v))
        return attend(q, k, v, *args, **options)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(F, "scaled_dot_product_attention", watch)
        model(images, **call)
    return found


class Watching(ToMe):
    """ToMe that keeps the contexts it is given."""

    def __init__(self, features: Any = "keys") -> None:
        super().__init__(features)
        self.seen: list[dict[str, Tensor]] = []

    @property
    def twin(self) -> str | None:
        return None

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        self.seen.append({name: compute_features(context, name) for name in FEATURES})
        return super().reduce(context, r)


@pytest.mark.parametrize("name", ROTARY)
def test_rotated_features_are_what_the_model_attends_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, call = model_of(name)
    plain = attended(monkeypatch, model, images, call)
    method = Watching()
    with vitrail.merge(model, r=2, method=method):
        merged = attended(monkeypatch, model, images, call)
    assert len(method.seen) == len(plain) == len(merged) == 3
    for layer, features in enumerate(method.seen):
        # the first layer sees what the unmerged model sees, later ones what the merged model attends with
        q, k, v = plain[0] if layer == 0 else merged[layer]
        torch.testing.assert_close(features["rotated_queries"], q.mean(1), rtol=0, atol=1e-12)
        torch.testing.assert_close(features["rotated_keys"], k.mean(1), rtol=0, atol=1e-12)
        torch.testing.assert_close(features["values"], v.mean(1), rtol=0, atol=1e-12)
        for plainly in ("keys", "queries"):
            assert (features[plainly] - features[f"rotated_{plainly}"]).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["timm-registers", "hf-deit-head"])
def test_without_rotary_position_they_are_the_plain_ones(name: str) -> None:
    model, images, call = model_of(name)
    method = Watching()
    with torch.no_grad(), vitrail.merge(model, r=2, method=method):
        model(images, **call)
    for features in method.seen:
        assert torch.equal(features["rotated_keys"], features["keys"])
        assert torch.equal(features["rotated_queries"], features["queries"])


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize(
    "weights",
    [{"rotated_keys": 1.0}, {"rotated_queries": 1.0}, {"rotated_keys": 0.6, "rotated_queries": 0.1, "values": 0.3}],
    ids=str,
)
def test_groups_against_a_loop(name: str, weights: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, call = model_of(name)
    q, k, v = attended(monkeypatch, model, images, call)[0]
    shown = {"rotated_keys": k.mean(1), "rotated_queries": q.mean(1), "values": v.mean(1)}
    features: Any = weights if len(weights) > 1 else next(iter(weights))
    with vitrail.merge(model, r=[3, 0, 0], method=ToMe(features)) as merging, merging.track() as trace, torch.no_grad():
        run_any(name, model, images, call)
    special, target = trace.layout.num_special, trace.latest.assignment.target
    for image in range(len(images)):

        def score(i: int, j: int, image: int = image) -> float:
            return sum(
                weight * float(F.cosine_similarity(shown[one][image, i], shown[one][image, j], dim=0))
                for one, weight in weights.items()
            )

        sources = [i for i in range(special, target.shape[1]) if i % 2 == 0]
        destinations = [j for j in range(special, target.shape[1]) if j % 2 == 1]
        into = {i: max(destinations, key=lambda j: score(i, j)) for i in sources}
        merging_ones = sorted(sources, key=lambda i: -score(i, into[i]))[:3]
        wanted = [into[i] if i in merging_ones else i for i in range(target.shape[1])]
        found = target[image].tolist()
        assert [[a == b for b in wanted] for a in wanted] == [[a == b for b in found] for a in found]


def run_any(name: str, model: nn.Module, images: Tensor, call: dict[str, Any]) -> Tensor:
    return model(images) if name == "own" else run(model, images, ALL[name])
