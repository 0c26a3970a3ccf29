"""The cure, tried: test-time registers on pictures with artifacts, beside random neurons, before and after.

The neurons are looked for where this inspection found artifacts. Few are tried first and more where these leave
artifacts; as many random ones of the same layers are the control. The model is what it was afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.adapters import find
from vitrail.analysis.attention import token_maps
from vitrail.analysis.norms import NormAccumulator
from vitrail.errors import UnsupportedInput, VitrailError
from vitrail.report.again import Again
from vitrail.report.looking import Picture
from vitrail.report.sections import Section
from vitrail.report.study import Study, features_of, spread
from vitrail.surgery.hooks import watch
from vitrail.surgery.recording import evaluating, to_model
from vitrail.surgery.registers import find_register_neurons, test_time_registers

PICTURES = 200
"""Most pictures that the cure is tried on, beside those that are shown."""

COUNTS = (10, 50)
"""Numbers of neurons to try: ten were enough for OpenCLIP ViT-B/16, DINOv2 ViT-L/14 took 45."""

GONE, FEWER = 0.1, 0.5
"""Shares of the artifacts that may be left where they are said to be gone, or fewer."""


@dataclass(frozen=True)
class Trial:
    """What a model did with registers: values, and norms (P,) and attention maps (S, h, w) of each picture."""

    values: Section
    norms: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)


def try_cure(
    model: nn.Module, study: Study, again: Again, tell: Callable[[str, int, int | None], object]
) -> tuple[Section, Trial | None]:
    """Try test-time registers where there are artifacts; give the section, and what the best trial showed."""
    if study.norms.verdict != "artifacts" or study.norms.threshold is None:
        return {"note": "there is nothing to cure: no artifacts were found"}, None
    pictures = _pictures(study)
    again = again.of(pictures)
    steps = iter(range(1, len(COUNTS) + 3))

    def step() -> None:
        tell("trying test-time registers", next(steps), len(COUNTS) + 2)

    step()
    before = _before(study, pictures)
    neurons = find_register_neurons(model, again, max(COUNTS), threshold=study.norms.threshold)
    trials: dict[int, Trial] = {}
    for count in COUNTS:
        step()
        with test_time_registers(model, neurons=neurons.strongest(count)):
            trials[count] = _trial(model, study, again)
        if _left(trials[count].values, before) <= GONE:
            break
    best = min(trials, key=lambda count: (max(GONE, _left(trials[count].values, before)), count))
    tell("trying random neurons", len(COUNTS) + 2, len(COUNTS) + 2)
    control = _control(model, study, again, neurons.strongest(best))
    after = trials[best].values
    section = {
        "pictures": len(pictures),
        "threshold": study.norms.threshold,
        "neurons": {layer: list(some) for layer, some in neurons.strongest(best).by_layer.items()},
        "num_neurons": best,
        "onset": neurons.onset,
        "tried": {count: trial.values["outlier_share"] for count, trial in trials.items()},
        "effect": effect(before, after, control),
        "before": before,
        "after": after,
        "control": control,
    }
    return section, trials[best]


def effect(before: Section, after: Section, control: Section) -> str:
    """Say what became of the artifacts: ``gone``, ``fewer``, ``none``; ``unspecific`` where random neurons do as well.

    Random neurons do as well where they take away half of what the others do, or more.
    """
    left = _left(after, before)
    if left > FEWER:
        return "none"
    if "outlier_share" in control and _left(control, before) <= (1 + left) / 2:
        return "unspecific"
    return "gone" if left <= GONE else "fewer"


def _left(after: Section, before: Section) -> float:
    return float(after["outlier_share"]) / float(before["outlier_share"])


def _pictures(study: Study) -> list[Picture]:
    """Choose pictures: some spread evenly, and those that are shown."""
    chosen = {picture.index: picture for picture in (*spread(study.featured, PICTURES), *study.shown)}
    if not study.outliers(tuple(chosen.values())).any():
        raise UnsupportedInput("none of the pictures that were looked at closely has an artifact")
    return [chosen[index] for index in sorted(chosen)]


def _control(model: nn.Module, study: Study, again: Again, neurons: Any) -> Section:
    """Try random neurons; a model that has too few of them says so."""
    try:
        with test_time_registers(model, neurons=neurons, control=study.seed):
            return _trial(model, study, again).values
    except VitrailError as error:
        return {"note": str(error)}


def _before(study: Study, pictures: list[Picture]) -> Section:
    """Give the values of the model as it is, from what was kept."""
    norms = torch.stack([picture.norms for picture in pictures])
    marked = study.outliers(tuple(pictures))
    rows = torch.stack([features_of(picture).attention[:, : study.layout.num_special] for picture in pictures])
    return {
        **_share(norms, marked),
        "verdict": study.norms.verdict,
        "on_places": _on_places(study, rows[..., study.layout.patches].float(), marked),
    }


@torch.no_grad()
def _trial(model: nn.Module, study: Study, again: Again) -> Trial:
    """Run a model that carries registers, and compare it with what was kept of the model as it is."""
    depth, special = len(find(model).blocks), study.layout.num_special
    every = watch(model, ("norms",))
    last = watch(model, ("tokens", "attention"), [-1], range(special) if special else [0])
    counts = NormAccumulator(depth)
    norms: dict[int, Tensor] = {}
    rows: dict[int, Tensor] = {}
    alike: list[Tensor] = []
    known = {picture.index: picture for picture in again.pictures}
    for piece in again.pieces():
        with every.hooked(), last.hooked(), evaluating(model):
            model(to_model(model, piece.images))
        (seen,), (closely,) = every.take(), last.take()
        patches = closely.layout.patches
        by_layer = torch.stack([seen.by_layer["norms"][layer][:, patches] for layer in range(depth)])
        counts.add(by_layer, piece.indices)
        attention, tokens = (closely.by_layer[name][depth - 1] for name in ("attention", "tokens"))
        for row, index in enumerate(piece.indices):
            norms[index] = by_layer[-1, row].float().cpu()
            rows[index] = attention[row][..., patches].float().cpu()
            alike.append(_alike(study, known[index], torch.cat([tokens[row, :special], tokens[row, patches]]).cpu()))
    order = [picture.index for picture in again.pictures]
    after = torch.stack([norms[index] for index in order])
    were = study.outliers(tuple(again.pictures))
    found = torch.stack([rows[index] for index in order])
    assert study.norms.threshold is not None
    values = {
        **_share(after, after > study.norms.threshold),
        "verdict": counts.result().verdict,
        "on_places": _on_places(study, found, were) if special else {},
        "similarity": dict(
            zip((*study.special_names, "normal"), torch.stack(alike).nanmean(0).tolist(), strict=True),
        ),
    }
    maps = token_maps(_padded(found, study), study.layout).mean(1).flatten(-3, -2) if special else None
    return Trial(values, norms, {} if maps is None else dict(zip(order, maps, strict=True)))


def _padded(rows: Tensor, study: Study) -> Tensor:
    """Put columns of nothing in front of rows over patches, where the model's own special tokens are."""
    return F.pad(rows, (study.layout.num_special, 0))


def _share(norms: Tensor, marked: Tensor) -> Section:
    return {
        "outlier_share": float(marked.double().mean()),
        "pictures_with_outliers": int(marked.any(1).sum()),
        "typical": float(norms.median()),
        "largest": float(norms.max()),
    }


def _on_places(study: Study, rows: Tensor, marked: Tensor) -> Section:
    """Give the share of attention that each special token gives to the patches that were artifacts before."""
    there = marked.any(1)
    mass = (rows[there] * marked[there][:, None, None]).sum(-1).mean(1).double().mean(0)
    return dict(zip(study.special_names, mass.tolist(), strict=True))


def _alike(study: Study, picture: Picture, tokens: Tensor) -> Tensor:
    """Give the cosine (S + 1,) of each special token, and of patches that were no artifacts, with what they were."""
    kept, special = features_of(picture).tokens, study.layout.num_special
    cosine = F.cosine_similarity(kept.values.double(), tokens.double(), dim=-1)
    normal = cosine[special:][~study.outliers((picture,))[0]]
    return torch.cat([cosine[:special], normal.mean().unsqueeze(0)])
