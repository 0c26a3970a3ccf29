"""The sections of a report: each analysis on what was kept, as plain values, with a note where it has no answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from vitrail.analysis.attention import overlap, role_mass, spread, token_maps
from vitrail.analysis.discovery import Discovery, corloc, lost_batch, suggest_biases, sweep_lost, tokencut_batch
from vitrail.analysis.features import Pca, fit_pca
from vitrail.analysis.probes.classes import ClassProbe, one_token_each, probe_classes
from vitrail.analysis.probes.local import cut_patches, probe_pixels, probe_positions
from vitrail.analysis.redundancy import redundancy
from vitrail.analysis.result import plain
from vitrail.errors import VitrailError
from vitrail.report.looking import OBJECT_FEATURES
from vitrail.report.study import Study, features_of

Section = dict[str, Any]
Found = TypeVar("Found")

METHODS: dict[str, Callable[..., list[Discovery]]] = {"lost": lost_batch, "tokencut": tokencut_batch}
"""Ways to find an object."""

PROBE_WORK = 1.5e9
"""Tokens × channels × positions that one fit of the position probe may take on a CPU."""


def attempt(function: Callable[[], Section]) -> Section:
    """Run one analysis; what goes wrong in it is its note, and the others go on."""
    try:
        return plain(function())
    except VitrailError as error:
        return {"note": str(error)}
    except (ArithmeticError, ImportError, LookupError, MemoryError, RuntimeError, ValueError) as error:
        return {"note": f"this failed: {type(error).__name__}: {str(error).strip() or 'without a message'}"}


def attempt_with(function: Callable[[], tuple[Section, Found]], otherwise: Found) -> tuple[Section, Found]:
    """Do the same for an analysis that gives something beside its section."""
    beside = [otherwise]

    def run() -> Section:
        section, beside[0] = function()
        return section

    return attempt(run), beside[0]


def redundancy_section(study: Study) -> Section:
    """Say where outliers sit."""
    pictures = tuple(picture for picture in study.pictures if bool(picture.similarity.isfinite().all()))
    if not pictures:
        return {"note": "a grid of one patch has no neighbours"}
    outliers = study.outliers(pictures)
    shares = [picture.foreground for picture in pictures]
    empty = torch.full((study.layout.num_patches,), torch.nan)
    masks = torch.stack([empty if one is None else one for one in shares])
    found = redundancy(
        torch.stack([picture.similarity for picture in pictures]),
        outliers,
        study.layout.grid,
        masks=None if all(one is None for one in shares) else masks,
        seed=study.seed,
    ).to_dict()
    if not outliers.any():
        found["note"] = "there are no outliers to compare with the other patches"
    elif study.norms.verdict != "artifacts":
        found["note"] = "whether the patches above the line are artifacts is uncertain; they are compared all the same"
    return found


def attention_section(study: Study) -> Section:
    """Say what each role attends to in the last layer, how widely, and how much goes to outliers."""
    rows, layout = study.attention, study.layout
    special = len([token for token in study.queries if token < layout.num_special])
    found: Section = {
        "pictures": len(rows),
        "tokens": list(study.special_names),
        "patch_rows": len(study.queries) - special,
        "mass": role_mass(rows, layout, queries=study.queries).to_dict(),
    }
    found["on_outliers"] = _on_outliers(study, special)
    if not special:
        return {**found, "note": "the model has no class or register token; attention is that of some patches"}
    maps = token_maps(rows[:, :, :special], layout)
    found["spread"] = spread(maps).to_dict()
    if special > 1:
        found["overlap"] = overlap(maps).to_dict()
    return found


def _on_outliers(study: Study, special: int) -> Section | None:
    """Give the share of attention that outliers get from each special token and from patches, and a fair share."""
    outliers = study.outliers(study.featured)
    there = outliers.any(1)
    if not there.any():
        return None
    rows = study.attention[there][..., study.layout.patches].float()
    marked = outliers[there][:, None, None].float()
    mass = (rows * marked).sum(-1).mean(1).double()  # (B, Q)
    shares = {name: float(mass[:, place].mean()) for place, name in enumerate(study.special_names)}
    if mass.shape[1] > special:
        shares["patch"] = float(mass[:, special:].mean())
    fair = float(outliers[there].double().sum(1).mean()) / study.layout.num_tokens
    return {"pictures": int(there.sum()), "mass": shares, "fair": fair}


def registers_section(study: Study, classes: ClassProbe | None) -> Section:
    """Look at each register by itself."""
    if not study.registers:
        return {"tokens": [], "note": "the model has no register tokens"}
    place = {token: row for row, token in enumerate(study.queries)}
    widths = spread(token_maps(study.attention[:, :, [place[token] for token in study.registers]], study.layout))
    rows = []
    for number, token in enumerate(study.registers):
        norms = study.special_norms[:, token].double()
        name = study.special_names[token]
        mean = float(norms.mean())
        rows.append(
            {
                "name": name,
                "position": token,
                "norm": mean,
                "norm_sd": float(norms.std()) if len(norms) > 1 else None,
                "norm_ratio": mean / study.norms.typical,
                "entropy": float(widths.entropy[number]),
                "effective_patches": float(widths.effective[number]),
                "class_probe": classes.kinds[name].to_dict() if classes is not None and name in classes.kinds else None,
            }
        )
    return {"tokens": rows, "pictures": len(study.featured)}


def pca_section(study: Study) -> tuple[Section, Pca | None]:
    """Fit principal components of patch features, outliers left out."""
    fitted: list[Pca] = []

    def fit() -> Section:
        features = study.tokens[:, study.layout.patches]
        components = min(3, features.shape[2])
        fitted.append(fit_pca(features, components=components, leave_out=study.outliers(study.featured)))
        return {"pictures": len(features), **fitted[0].to_dict()}

    section = attempt(fit)
    return section, fitted[0] if fitted else None


def probe_sections(study: Study) -> tuple[Section, ClassProbe | None]:
    """Ask tokens for their position, their pixels and the picture's label."""
    outliers = study.outliers(study.featured)

    def position() -> Section:
        tokens = study.tokens[:, study.layout.patches]
        most = 20_000 if tokens.is_cuda else int(max(4000, min(20_000, PROBE_WORK / tokens[0].numel())))
        return probe_positions(tokens, outliers, study.layout.grid, seed=study.seed, max_tokens=most).to_dict()

    def pixels() -> Section:
        patches = cut_patches(study.images(study.featured).float() / 255, study.patch)
        return probe_pixels(study.tokens[:, study.layout.patches], outliers, patches, seed=study.seed).to_dict()

    classes: list[ClassProbe] = []

    def single_token() -> Section:
        known = [place for place, picture in enumerate(study.featured) if picture.label is not None]
        if not known:
            return {"note": "the pictures have no labels, so there is no class to ask a token for"}
        labels = torch.tensor([label for picture in study.featured if (label := picture.label) is not None])
        tokens, marked = study.tokens[known], outliers[known]
        classes.append(
            probe_classes(lambda seed: one_token_each(tokens, study.layout, marked, seed=seed), labels, seed=study.seed)
        )
        return classes[0].to_dict()

    found = {"position": attempt(position), "pixels": attempt(pixels), "classes": attempt(single_token)}
    found["pictures"] = len(study.featured)  # type: ignore[assignment]
    return found, classes[0] if classes else None


def discovery_section(study: Study) -> tuple[Section, dict[str, dict[int, Discovery]]]:
    """Look for one object in each picture, by LOST and TokenCut on the last layer's keys and on its values.

    Which of both suits a model depends on how it was trained, and nothing in the model says so: both are tried. The
    boxes that are given are those of the keys, as in both papers.
    """
    boxes: dict[str, dict[int, Discovery]] = {}
    truth = [features_of(picture).boxes for picture in study.objects]
    size = tuple(features_of(study.objects[0]).image.shape[1:]) if study.objects else (0, 0)
    known = any(one is not None and len(one) for one in truth)

    def method(feature: str, name: str) -> Section:
        found = METHODS[name](study.object_features(feature), study.layout.grid)
        boxes[f"{feature} {name}"] = {picture.index: one for picture, one in zip(study.objects, found, strict=True)}
        if not known:
            return {"note": "no true boxes, so that nothing says how often these are right"}
        return {"corloc": corloc([one.pixels(study.patch, (size[0], size[1])) for one in found], truth).to_dict()}

    def sweep(feature: str) -> Section:
        features, grids = study.object_features(feature), [study.layout.grid] * len(study.objects)
        return sweep_lost(features, grids, truth, biases=suggest_biases(features), patch=study.patch).to_dict()

    section: Section = {"pictures": len(study.objects)}
    for feature in OBJECT_FEATURES:
        section[feature] = {name: attempt(partial(method, feature, name)) for name in METHODS}
        if known:
            section[feature]["lost_sweep"] = attempt(partial(sweep, feature))
    if known:
        # Objects that fill their pictures are "found" by a box around everything: the number to beat.
        everything = (0.0, 0.0, float(size[1]), float(size[0]))
        section["whole_picture"] = corloc([everything] * len(truth), truth).to_dict()
    return section, {name: boxes[f"keys {name}"] for name in METHODS if f"keys {name}" in boxes}
