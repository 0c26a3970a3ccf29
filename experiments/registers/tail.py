"""The longest patch tokens of a model, whether or not they are artifacts: which they are, where, and what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from experiments.registers.seen import Seen
from vitrail.analysis.probes.classes import probe_classes
from vitrail.analysis.redundancy import object_share, redundancy

SHARE = 0.001
"""The longest thousandth."""

HEAD = (
    "longest tokens", "above twice the median", "pictures with any", "in the four with most", "patches from the edge",
    "others", "on the object, %", "others", "cosine with neighbours", "others",
    "species from each picture's longest patch, %", "from a random one",
)  # fmt: skip


def of(seen: Seen, share: float = SHARE) -> dict[str, Any]:
    """Note the longest tokens of the last layer: each by itself, and their places beside those of all others.

    Beside them stands what tells the class: the longest patch of each picture, which need not be one of these tokens,
    and a random one. Artifacts would be in many pictures, in redundant places, and tell of the whole picture.
    """
    norms = seen.tokens.norm(dim=-1).cpu()
    longest, order = norms.flatten().topk(max(1, round(share * norms.numel())))
    chosen = torch.zeros(norms.numel(), dtype=torch.bool)
    chosen[order] = True
    covered = object_share(seen.masks, seen.grid)
    tokens = [
        {
            "picture": seen.names[picture],
            "row": place // seen.grid[1],
            "column": place % seen.grid[1],
            "over_median": ratio,
            "similarity": float(seen.similarity[picture, place]),
            "covered": None if covered[picture, place].isnan() else float(covered[picture, place]),
        }
        for (picture, place), ratio in zip(
            (divmod(at, norms.shape[1]) for at in order.tolist()), (longest / norms.median()).tolist(), strict=True
        )
    ]
    places = redundancy(seen.similarity, chosen.reshape(norms.shape), seen.grid, masks=covered)
    return {"share": share, "tokens": tokens, "places": places.to_dict(), "classes": _classes(seen, norms)}


def _classes(seen: Seen, norms: Tensor) -> dict[str, Any]:
    """Tell the class from the longest patch token of each picture, and from one at random."""
    tokens, everyone = seen.tokens.cpu(), torch.arange(len(norms))

    def one_each(seed: int) -> dict[str, Tensor]:
        drawn = torch.randint(norms.shape[1], (len(norms),), generator=torch.Generator().manual_seed(seed))
        return {"longest": tokens[everyone, norms.argmax(1)], "random": tokens[everyone, drawn]}

    return probe_classes(one_each, seen.classes).to_dict()


def cells(noted: Mapping[str, Any]) -> list[str]:
    """Write what was noted as one line of a table below HEAD."""
    tokens, places, kinds = noted["tokens"], noted["places"], noted["classes"]["kinds"]
    held = Counter(token["picture"] for token in tokens)
    above = sum(token["over_median"] > 2 for token in tokens)

    def means(*found: Mapping[str, Any] | None, scale: float = 1.0, digits: int = 2) -> list[str]:
        return ["–" if one is None else f"{scale * one['mean']:.{digits}f}" for one in found]

    def beside(name: str) -> tuple[Mapping[str, Any] | None, ...]:
        return places[name]["outlier"], places[name]["normal"]

    told = (kinds[kind]["balanced_accuracy"] for kind in ("longest", "random"))
    return [
        f"{len(tokens)}",
        f"{above}{' or more' * (above == len(tokens))}",
        f"{len(held)}",
        f"{sum(count for _, count in held.most_common(4))}",
        *means(*beside("border_distance")),
        *means(*beside("foreground"), scale=100, digits=1),
        *means(*beside("similarity")),
        *means(*told, scale=100, digits=1),
    ]
