"""The patch tokens with the highest norms, artifacts or not: where they are and what they encode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from experiments.registers.scene_features import SceneFeatures
from vitrail.analysis.probes.classes import probe_classes
from vitrail.analysis.redundancy import object_share, redundancy

SHARE = 0.001
"""Share of the tokens with the highest norms that is kept."""

HEADINGS = (
    "tokens", "above twice the median", "images with any", "in the four images with most", "patches from the edge",
    "others", "on the object, %", "others", "cosine with neighbors", "others",
    "species from each image's highest-norm patch, %", "from a random patch",
)  # fmt: skip


def high_norm_tokens(features: SceneFeatures, share: float = SHARE) -> dict[str, Any]:
    """Describe the tokens of the last layer with the highest norms one by one, and their positions against the others.

    A probe predicts the class from the highest-norm patch of each image, and from a random one. Artifacts would occur
    in many images, at redundant positions, and encode the whole image.
    """
    norms = features.tokens.norm(dim=-1).cpu()
    highest, order = norms.flatten().topk(max(1, round(share * norms.numel())))
    chosen = torch.zeros(norms.numel(), dtype=torch.bool)
    chosen[order] = True
    covered = object_share(features.masks, features.grid)
    tokens = [
        {
            "picture": features.names[image],
            "row": patch // features.grid[1],
            "column": patch % features.grid[1],
            "over_median": ratio,
            "similarity": float(features.similarity[image, patch]),
            "covered": None if covered[image, patch].isnan() else float(covered[image, patch]),
        }
        for (image, patch), ratio in zip(
            (divmod(at, norms.shape[1]) for at in order.tolist()), (highest / norms.median()).tolist(), strict=True
        )
    ]
    places = redundancy(features.similarity, chosen.reshape(norms.shape), features.grid, masks=covered)
    return {"share": share, "tokens": tokens, "places": places.to_dict(), "classes": _class_probe(features, norms)}


def _class_probe(features: SceneFeatures, norms: Tensor) -> dict[str, Any]:
    """Probe the class from the highest-norm patch of each image, and from a random one."""
    tokens, images = features.tokens.cpu(), torch.arange(len(norms))

    def one_per_image(seed: int) -> dict[str, Tensor]:
        drawn = torch.randint(norms.shape[1], (len(norms),), generator=torch.Generator().manual_seed(seed))
        return {"longest": tokens[images, norms.argmax(1)], "random": tokens[images, drawn]}

    return probe_classes(one_per_image, features.classes).to_dict()


def table_cells(found: Mapping[str, Any]) -> list[str]:
    """Format a result of `high_norm_tokens` as one table line under `HEADINGS`."""
    tokens, places, kinds = found["tokens"], found["places"], found["classes"]["kinds"]
    per_image = Counter(token["picture"] for token in tokens)
    above = sum(token["over_median"] > 2 for token in tokens)

    def means(*values: Mapping[str, Any] | None, scale: float = 1.0, digits: int = 2) -> list[str]:
        return ["–" if one is None else f"{scale * one['mean']:.{digits}f}" for one in values]

    def both(name: str) -> tuple[Mapping[str, Any] | None, ...]:
        return places[name]["outlier"], places[name]["normal"]

    accuracies = (kinds[kind]["balanced_accuracy"] for kind in ("longest", "random"))
    return [
        f"{len(tokens)}",
        f"{above}{' or more' * (above == len(tokens))}",
        f"{len(per_image)}",
        f"{sum(count for _, count in per_image.most_common(4))}",
        *means(*both("border_distance")),
        *means(*both("foreground"), scale=100, digits=1),
        *means(*both("similarity")),
        *means(*accuracies, scale=100, digits=1),
    ]
