"""The few pictures that a report shows, with everything that is drawn beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from vitrail.analysis.attention import token_maps
from vitrail.analysis.discovery import Discovery
from vitrail.analysis.features import Pca, pca_maps
from vitrail.analysis.result import Result
from vitrail.errors import VitrailError
from vitrail.report.closer import Closer
from vitrail.report.cure import Trial
from vitrail.report.study import Study, features_of

MOST_TOKENS = 9
"""Special tokens whose attention is drawn."""


@dataclass(frozen=True, eq=False)
class Shown(Result):
    """One picture that a report shows.

    Attributes:
        index, name, label: which picture it is; the label in words or as a number.
        grid: height and width in patches.
        size: height and width in pixels, as the model sees it.
        norms: after the last layer, row by row.
        outliers: which of them are above the threshold.
        boxes: what each method of discovery found, in pixels.
        truth: true boxes, in pixels.
        cured: norms with test-time registers, row by row; None where these were not tried.
        image: (C, H, W) from 0 to 255; None for a report that was loaded, as are those that follow.
        attention: (h, w) for each special token, the mean over heads of the last layer; sums to one.
        cured_attention: the same with test-time registers.
        closer: attention by layer, by head, and rollout; of a few pictures.
        pca: (h, w, 3) between 0 and 1.
    """

    index: int
    name: str
    label: str | None
    grid: tuple[int, int]
    size: tuple[int, ...]
    norms: list[float]
    outliers: list[int]
    boxes: dict[str, tuple[float, float, float, float]]
    truth: list[list[float]]
    cured: list[float] | None = None
    image: Tensor | None = field(default=None, repr=False, metadata={"json": False})
    attention: dict[str, Tensor] = field(default_factory=dict, repr=False, metadata={"json": False})
    cured_attention: dict[str, Tensor] = field(default_factory=dict, repr=False, metadata={"json": False})
    closer: Closer | None = field(default=None, repr=False, metadata={"json": False})
    pca: Tensor | None = field(default=None, repr=False, metadata={"json": False})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Shown:
        """Read what :meth:`to_dict` wrote; pixels and maps are gone."""
        known = {one.name: values[one.name] for one in fields(cls) if one.metadata.get("json", True)}
        boxes = {name: tuple(box) for name, box in known["boxes"].items()}
        return cls(**{**known, "boxes": boxes, "grid": tuple(known["grid"]), "size": tuple(known["size"])})


def show(
    study: Study,
    boxes: Mapping[str, Mapping[int, Discovery]],
    basis: Pca | None,
    label_names: Sequence[str] | None,
    closer: Mapping[int, Closer],
    cured: Trial | None,
) -> list[Shown]:
    """Put together what is shown of each picture."""
    pictures = study.shown
    time, height, width = study.layout.grid
    outliers = study.outliers(pictures)
    colours = _colours(study, basis)
    place = {picture.index: number for number, picture in enumerate(study.featured)}
    shown = []
    cured = cured or Trial({})
    for number, picture in enumerate(pictures):
        index = picture.index
        features = features_of(picture)
        size = int(features.image.shape[1]), int(features.image.shape[2])
        rows = study.attention[place[index], :, : min(study.layout.num_special, MOST_TOKENS)]
        maps = token_maps(rows.unsqueeze(0), study.layout)[0].mean(0).reshape(-1, time * height, width)
        shown.append(
            Shown(
                index,
                picture.name,
                _label(picture.label, label_names),
                (time * height, width),
                size,
                _rounded(picture.norms),
                outliers[number].nonzero().flatten().tolist(),
                {name: found[index].pixels(study.patch, size) for name, found in boxes.items() if index in found},
                [] if features.boxes is None else features.boxes.tolist(),
                _rounded(cured.norms[index]) if index in cured.norms else None,
                features.image,
                dict(zip(study.special_names, maps, strict=False)),
                dict(zip(study.special_names, cured.attention.get(index, ()), strict=False)),
                closer.get(index),
                None if colours is None else colours[number],
            )
        )
    return shown


def _rounded(norms: Tensor) -> list[float]:
    return [float(f"{norm:.5g}") for norm in norms.tolist()]


def _colours(study: Study, basis: Pca | None) -> Tensor | None:
    """Give colours (B, h, w, 3) of the shown pictures, all on one scale."""
    if basis is None:
        return None
    chosen = [number for number, picture in enumerate(study.featured) if picture in study.shown]
    features = study.tokens[chosen][:, study.layout.patches]
    try:
        maps = pca_maps(features, study.layout.grid, basis=basis, leave_out=study.outliers(study.shown)).cpu()
    except VitrailError:  # every patch is an outlier, so that there is no scale
        return None
    grey = torch.full((*maps.shape[:-1], 3), 0.5)
    grey[..., : maps.shape[-1]] = maps
    return grey.flatten(1, 2)


def _label(label: int | None, names: Sequence[str] | None) -> str | None:
    if label is None:
        return None
    return names[label] if names is not None and label < len(names) else f"class {label}"
