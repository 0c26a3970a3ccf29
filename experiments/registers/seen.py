"""What a trained model makes of scenes: the tokens of its last block, beside what is known about the scenes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from vitrail.analysis.features import patch_features
from vitrail.analysis.redundancy import neighbor_similarity
from vitrail.data.collection import Collection
from vitrail.data.spec import Preprocessing
from vitrail.surgery.recording import record
from vitrail.training import Labels


@dataclass(frozen=True)
class Seen:
    """The patches of some scenes after the last block, and what is known about the scenes.

    Attributes:
        tokens, keys, values: (B, P, D).
        masks: (B, H, W): 1 object, 0 background, 255 unknown.
        boxes: of each scene, in pixels; None where there is none.
        similarity: (B, P) how much a patch is like its neighbours, right after the patch embedding.
        classes: (B,).
        names: of each scene.
        grid: height and width in patches.
        patch: sides of a patch in pixels.
    """

    tokens: Tensor
    keys: Tensor
    values: Tensor
    masks: Tensor
    boxes: list[Tensor | None]
    similarity: Tensor
    classes: Tensor
    names: list[str]
    grid: tuple[int, int]
    patch: tuple[int, int]

    @classmethod
    def by(cls, model: nn.Module, labels: Labels, scenes: Collection) -> Self:
        """Run a model over scenes; special tokens, appended ones among them, are left out."""
        parts: list[tuple[Tensor, ...]] = []
        masks, boxes, classes = [], [], []
        names: list[str] = []
        expects = labels.preprocessing
        assert isinstance(expects, Preprocessing)
        for batch in scenes.batches(expects, 64):
            seen = record(model, batch.images, ("embedding", "tokens", "k", "v"), layers=[-1])
            (layer,), layout = seen.layers, seen.layout
            assert seen.embedding is not None
            taken = (patch_features(one[layer], layout).float() for one in (seen.k, seen.v))
            similarity = neighbor_similarity(seen.embedding, layout.grid)
            parts.append((seen.tokens[layer][:, layout.patches].float(), *taken, similarity))
            assert batch.masks is not None
            assert batch.boxes is not None
            assert batch.labels is not None
            masks.append(batch.masks)
            classes.append(batch.labels)
            names += batch.names
            boxes += [torch.tensor(some) if some else None for some in batch.boxes]
        _, height, width = layout.grid
        sides = (expects.size[0] // height, expects.size[1] // width)
        tokens, keys, values, similar = (torch.cat(some) for some in zip(*parts, strict=True))
        known = similar.cpu(), torch.cat(classes), names
        return cls(tokens, keys, values, torch.cat(masks), boxes, *known, (height, width), sides)
