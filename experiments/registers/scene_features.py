"""Patch features of the last block for a set of scenes, with masks, boxes and classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from vitrail.analysis.features import patch_features
from vitrail.analysis.redundancy import neighbor_similarity
from vitrail.data import Dataset
from vitrail.surgery.recording import record
from vitrail.training import Labels


@dataclass(frozen=True)
class SceneFeatures:
    """Patch tokens of scenes after the last block, with the annotations of the scenes.

    Attributes:
        tokens, keys, values: (B, P, D).
        masks: (B, H, W): 1 object, 0 background, 255 unknown.
        boxes: of each scene, in pixels; None if it has none.
        similarity: (B, P) cosine of each patch with its neighbors, right after the patch embedding.
        classes: (B,).
        names: of each scene.
        grid: patch grid (height, width).
        patch: patch size in pixels (height, width).
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
    def of(cls, model: nn.Module, labels: Labels, scenes: Dataset) -> Self:
        """Run a model over scenes; special tokens, including appended ones, are left out."""
        parts: list[tuple[Tensor, ...]] = []
        masks, boxes, classes = [], [], []
        names: list[str] = []
        spec = labels.preprocessing
        assert spec is not None
        for batch in scenes.batches(spec, 64):
            recording = record(model, batch.images, ("embedding", "tokens", "k", "v"), layers=[-1])
            (layer,), layout = recording.layers, recording.layout
            assert recording.embedding is not None
            keys_values = (patch_features(one[layer], layout).float() for one in (recording.k, recording.v))
            similarity = neighbor_similarity(recording.embedding, layout.grid)
            parts.append((recording.tokens[layer][:, layout.patches].float(), *keys_values, similarity))
            assert batch.masks is not None
            assert batch.boxes is not None
            assert batch.labels is not None
            masks.append(batch.masks)
            classes.append(batch.labels)
            names += batch.names
            boxes += [torch.tensor(some) if some else None for some in batch.boxes]
        _, height, width = layout.grid
        patch = (spec.size[0] // height, spec.size[1] // width)
        tokens, keys, values, similarity = (torch.cat(some) for some in zip(*parts, strict=True))
        annotations = similarity.cpu(), torch.cat(classes), names
        return cls(tokens, keys, values, torch.cat(masks), boxes, *annotations, (height, width), patch)
