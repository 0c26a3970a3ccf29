"""Test-time registers on images with artifacts, compared with random neurons.

Neurons are sought where this inspection found artifacts. Few are tried first, and more if these leave artifacts; as
many random neurons of the same layers are the control. The model is unchanged afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.adapters import find
from vitrail.analysis.attention import token_maps
from vitrail.analysis.norms import NormAccumulator
from vitrail.errors import UnsupportedInput, VitrailError
from vitrail.report.collect import KeptImage, run_hooked
from vitrail.report.context import Context, SecondPass, rounded, spread_evenly
from vitrail.report.page.blocks import Beside, Block, Strip, Svg, Table, Text
from vitrail.report.page.formatting import count, number, percent
from vitrail.report.page.images import NormColors, photo_panel, weight_panel
from vitrail.report.report import Report, ShownImage
from vitrail.report.sections.base import Section, Values
from vitrail.report.verdict import cure_sentence
from vitrail.surgery.hooks import watch
from vitrail.surgery.registers import find_register_neurons, test_time_registers

IMAGES = 200
"""Most images that registers are tried on, beside those that are shown."""

COUNTS = (10, 50)
"""Numbers of neurons to try: ten were enough for OpenCLIP ViT-B/16, DINOv2 ViT-L/14 took 45."""

GONE, FEWER = 0.1, 0.5
"""Largest shares of the artifacts left for the effects "gone" and "fewer"."""

DRAWN = 4
"""Images that are drawn before and after: those with the most artifacts."""


class Trial(NamedTuple):
    """A run with registers: values, norms (B, P), and attention maps (B, S, h, w) unless S is 0."""

    values: Values
    norms: Tensor
    maps: Tensor | None


def compute(context: Context) -> Values:
    """Try test-time registers if there are artifacts."""
    if context.norms.verdict != "artifacts" or context.norms.threshold is None:
        return {"note": "nothing to cure: no artifacts were found"}
    images = _images(context)
    batches = context.second_pass(images)
    steps = len(COUNTS) + 2
    context.progress("trying test-time registers", 1, steps)
    before = _before(context, images)
    neurons = find_register_neurons(context.model, batches, max(COUNTS), threshold=context.norms.threshold)
    trials: dict[int, Trial] = {}
    for step, many in enumerate(COUNTS, 2):
        context.progress("trying test-time registers", step, steps)
        with test_time_registers(context.model, neurons=neurons.strongest(many)):
            trials[many] = _trial(context, batches)
        if _left(trials[many].values, before) <= GONE:
            break
    best = min(trials, key=lambda many: (max(GONE, _left(trials[many].values, before)), many))
    try:
        with test_time_registers(context.model, neurons=neurons.strongest(best), control=context.seed):
            control = _trial(context, batches).values
    except VitrailError as error:  # the layers have too few other neurons
        control = {"note": str(error)}
    context.progress("trying test-time registers", steps, steps)
    after, norms, maps = trials[best]
    rows = {image.index: row for row, image in enumerate(images)}
    for one in context.shown:
        one.cured = rounded(norms[rows[one.index]])
        drawn = () if maps is None else maps[rows[one.index]]
        one.maps["cured_attention"] = dict(zip(context.special_names, drawn, strict=False))
    return {
        "images": len(images),
        "threshold": context.norms.threshold,
        "neurons": {layer: list(some) for layer, some in neurons.strongest(best).by_layer.items()},
        "num_neurons": best,
        "onset": neurons.onset,
        "tried": {many: trial.values["outlier_share"] for many, trial in trials.items()},
        "effect": effect(before, after, control),
        "before": before,
        "after": after,
        "control": control,
    }


def effect(before: Values, after: Values, control: Values) -> str:
    """Return the effect on the artifacts: "gone", "fewer", "none", or "unspecific" if random neurons do as well.

    Random neurons do as well if they remove at least half as many artifacts as the others.
    """
    left = _left(after, before)
    if left > FEWER:
        return "none"
    if "outlier_share" in control and _left(control, before) <= (1 + left) / 2:
        return "unspecific"
    return "gone" if left <= GONE else "fewer"


def _left(after: Values, before: Values) -> float:
    return float(after["outlier_share"]) / float(before["outlier_share"])


def _images(context: Context) -> list[KeptImage]:
    """Return evenly spread images, and those that are shown."""
    images = {image.index: image for image in (*spread_evenly(context.featured, IMAGES), *context.chosen)}
    if not context.outliers(tuple(images.values())).any():
        raise UnsupportedInput("none of the images whose features were kept has an artifact")
    return [images[index] for index in sorted(images)]


def _before(context: Context, images: Sequence[KeptImage]) -> Values:
    """Return the values of the unchanged model, from the features that were kept."""
    outliers = context.outliers(images)
    rows = torch.stack([image.features.attention[:, : context.layout.num_special] for image in images])
    return {
        **_summary(torch.stack([image.norms for image in images]), outliers),
        "verdict": context.norms.verdict,
        "on_places": _on_places(context, rows[..., context.layout.patches].float(), outliers),
    }


@torch.no_grad()
def _trial(context: Context, batches: SecondPass) -> Trial:
    """Run the model, which carries registers, and compare it with the features of the unchanged model."""
    model, depth, special = context.model, len(find(context.model).blocks), context.layout.num_special
    every = watch(model, ("entry", "norms"))
    last = watch(model, ("tokens", "attention"), [-1], range(special) if special else [0])
    counts = NormAccumulator(depth)
    parts: list[tuple[Tensor, Tensor]] = []
    cosines: list[Tensor] = []
    for batch in batches.batches():
        all_layers, last_layer = run_hooked(model, batch.images, every, last)
        patches = last_layer.layout.patches
        counts.add_recording(all_layers, batch.indices)
        attention, tokens = (last_layer.by_layer[name][depth - 1].cpu() for name in ("attention", "tokens"))
        parts.append((all_layers.norms[depth - 1][:, patches].float().cpu(), attention[..., patches].float()))
        kept = batches.images[len(cosines) : len(cosines) + len(tokens)]
        own_tokens = torch.cat([tokens[:, :special], tokens[:, patches]], 1)
        cosines += [_cosines(context, *pair) for pair in zip(kept, own_tokens, strict=True)]
    after, rows = (torch.cat(part) for part in zip(*parts, strict=True))
    assert context.norms.threshold is not None
    names = (*context.special_names, "normal")
    values = {
        **_summary(after, after > context.norms.threshold),
        "verdict": counts.result().verdict,
        "on_places": _on_places(context, rows, context.outliers(batches.images)) if special else {},
        "similarity": dict(zip(names, torch.stack(cosines).nanmean(0).tolist(), strict=True)),
    }
    if not special:
        return Trial(values, after, None)
    # Columns of zeros take the place of the model's own special tokens.
    return Trial(values, after, token_maps(F.pad(rows, (special, 0)), context.layout).mean(1).flatten(-3, -2))


def _summary(norms: Tensor, outliers: Tensor) -> Values:
    return {
        "outlier_share": float(outliers.double().mean()),
        "images_with_outliers": int(outliers.any(1).sum()),
        "typical": float(norms.median()),
        "largest": float(norms.max()),
    }


def _on_places(context: Context, rows: Tensor, outliers: Tensor) -> Values:
    """Return the share of attention of each special token on the patches that are artifacts without registers."""
    has_some = outliers.any(1)
    mass = (rows[has_some] * outliers[has_some][:, None, None]).sum(-1).mean(1).double().mean(0)
    return dict(zip(context.special_names, mass.tolist(), strict=True))


def _cosines(context: Context, image: KeptImage, tokens: Tensor) -> Tensor:
    """Return cosines (S + 1,) with the unchanged model: of each special token, and the mean of normal patches."""
    special = context.layout.num_special
    cosine = F.cosine_similarity(image.features.tokens.values.double(), tokens.double(), dim=-1)
    normal = cosine[special:][~context.outliers((image,))[0]]
    return torch.cat([cosine[:special], normal.mean().unsqueeze(0)])


def render(report: Report) -> list[Block]:
    """Show artifacts before and after, and the control."""
    values = report.cure
    if "effect" not in values:
        return []
    layers = ", ".join(f"layer {layer}: {count(len(some), 'neuron')}" for layer, some in values["neurons"].items())
    moved = Text(f"{count(values['num_neurons'], 'neuron')} moved ({layers}).", "soft")
    return [
        Beside([_table(values, report.noun)], [Text(EXPLANATION, "soft"), moved]),
        *_strips(report.images, values["threshold"]),
    ]


def conclude(report: Report) -> str:
    """Return what the registers did to the artifacts."""
    return cure_sentence(report.cure)


def _table(values: Values, noun: str) -> Table:
    states = [values["before"], values["after"], values["control"]]

    def row(name: str, write: Callable[[Any], str], key: str, part: str | None = None) -> list[str]:
        found = [state.get(key) if part is None else (state.get(key) or {}).get(part) for state in states]
        return [name, *map(write, found)]

    rows = [
        row(f"tokens above {number(values['threshold'])}", percent, "outlier_share"),
        row(f"{noun}s with such tokens", number, "images_with_outliers"),
        row("verdict", lambda value: value or "–", "verdict"),
        row("largest norm", number, "largest"),
        row("median norm", number, "typical"),
    ]
    for name in values["before"]["on_places"]:
        rows.append(row(f"attention of {name} on those places", percent, "on_places", name))
    for name in values["after"]["similarity"]:
        token = "other patch tokens" if name == "normal" else f"{name} token"
        rows.append(row(f"{token}: cosine with before", number, "similarity", name))
    caption = f"The same {count(values['images'], noun)} without and with test-time registers"
    return Table(["", "before", "with registers", "with random neurons"], rows, caption)


def _strips(images: Sequence[ShownImage], threshold: float) -> list[Block]:
    chosen = sorted((one for one in images if one.cured is not None), key=lambda one: -len(one.outliers))[:DRAWN]
    if not chosen:
        return []
    scale = NormColors(chosen)
    return [scale.ramp(), *(_strip(one, one.cured or [], scale, threshold) for one in chosen)]


def _strip(one: ShownImage, cured: Sequence[float], scale: NormColors, threshold: float) -> Strip:
    panels: list[tuple[Svg, str]] = [(photo_panel(one, one.title), one.title)] if one.pixels is not None else []
    left = [place for place, norm in enumerate(cured) if norm > threshold]
    for when, norms, outliers in (("before", one.norms, one.outliers), ("after", cured, left)):
        many = count(len(outliers), "high-norm token")
        label = f"Norms of the patch tokens of {one.name}, {when}: {many}"
        panels.append((scale.panel(one, label, norms, outliers), f"norms {when}: {many}"))
    before, after = one.maps.get("attention", {}), one.maps.get("cured_attention", {})
    name = next((name for name in before if name.startswith("class")), next(iter(before), ""))
    for when, maps in (("before", before), ("after", after)):
        if name in maps:
            panel = weight_panel(one, maps[name], f"Attention of {name}, {one.name}, {when}")
            panels.append((panel, f"attention of {name} {when}"))
    return Strip(panels)


EXPLANATION = (
    "Test-time registers need no training: neurons that are active where artifacts are write to an extra "
    "token instead, which is removed at the end. As many random neurons of the same layers are the control; "
    "they should change nothing."
)
SECTION = Section("cure", "Test-time registers", "Cure", "", render, compute, "cure", "cure", conclude=conclude)
