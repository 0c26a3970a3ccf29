"""A report in words: the verdict in one sentence, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Values = Mapping[str, Any]


def percent(share: float | None) -> str:
    """Write a share: "2.4 %", "0.31 %"; a dash where there is none."""
    if share is None or not math.isfinite(share):
        return "–"
    value = 100 * share
    return f"{value:.0f} %" if value == 0 or value >= 99.95 else f"{value:.3g} %" if value < 10 else f"{value:.1f} %"


def number(value: float | None) -> str:
    """Write a number with three digits; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0 or 1e-4 <= abs(value) < 1e5:
        return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}").replace("-", "−")
    return f"{value:.2e}".replace("-", "−")


def sure(confidence: float | None) -> str:
    """Write a confidence, never as certainty."""
    if confidence is None:
        return "unknown"
    return "more than 99.9 %" if confidence > 0.999 else percent(confidence)


def count(many: int, one: str, several: str | None = None) -> str:
    """Write a number with its noun: "1 picture", "3 pictures"."""
    return f"{many:,} {one if many == 1 else several or one + 's'}"


def verdict(norms: Values) -> str:
    """Give the answer in one plain sentence."""
    if norms["verdict"] == "artifacts":
        since = norms["onset"]
        depth = len(norms["per_layer"])
        when = "" if since is None else f", from layer {since} on (of {depth}, counted from 0)"
        return (
            f"This model has artifact tokens: {percent(norms['outlier_share'])} of its patch tokens have a norm above "
            f"{number(norms['threshold'])}, typically {number(norms['ratio'])} times that of the others{when}."
        )
    if norms["verdict"] == "none":
        return "No artifact tokens were found: no small group of patch tokens has norms far above those of the rest."
    return f"There is no clear answer: {norms['reason']}."


def confidence(norms: Values) -> str:
    """Say how sure the verdict is, and what that means."""
    sureness = sure(norms["confidence"])
    if norms["verdict"] == "artifacts":
        return f"Confidence: {sureness}. That is how rarely a model without artifacts would show such a gap by chance."
    if norms["verdict"] == "none":
        return (
            f"Confidence: {sureness}. That is how likely artifacts of the usual kind (2 % of the tokens at five times "
            "the norm) would have been found in these pictures."
        )
    return "Confidence: none; these pictures allow neither answer."


def meaning(norms: Values) -> str:
    """Explain what artifacts are to somebody who has not read about them."""
    common = (
        "A vision transformer cuts a picture into patches and keeps one vector, a token, for each. Large models tend "
        "to empty the tokens of a few dull patches and to use them as scratch paper for the whole picture. Such "
        "artifact tokens have a much larger norm (length of the vector) than the others, and what they hold no longer "
        "belongs to their place."
    )
    if norms["verdict"] == "artifacts":
        return common + (
            " Attention maps then show bright specks, and whatever reads patch tokens (segmentation, depth, object "
            "discovery) reads noise there. Classification is usually not hurt."
        )
    return common


def cure_words(cure: Values) -> str:
    """Say in a sentence what test-time registers did."""
    before, after, control = (cure[when].get("outlier_share") for when in ("before", "after", "control"))
    many = count(cure["num_neurons"], "neuron")
    change = f"{percent(before)} of the patch tokens were above the line before, {percent(after)} are with {many} moved"
    beside = "" if control is None else f", {percent(control)} with as many random ones"
    said = {
        "gone": "The cure works here",
        "fewer": "The cure helps here, but not fully",
        "none": "The cure does not work here",
        "unspecific": "Random neurons do about as well, so it is not these neurons that make the artifacts",
    }
    return f"{said[cure['effect']]}: {change}{beside}."


def _cure_advice(cure: Values) -> str:
    """Say whether to use test-time registers."""
    if "effect" not in cure:
        return (
            "Without training: vitrail.test_time_registers(model, pictures) moves the artifacts onto an extra token "
            "and can be undone. It was not tried here. Inspect the model again afterwards and compare both reports."
        )
    if cure["effect"] in ("gone", "fewer"):
        return (
            f"Without training: vitrail.test_time_registers(model, pictures, neurons={cure['num_neurons']}) moves the "
            "artifacts onto an extra token and can be undone; above it was tried on these pictures. Measure your own "
            "task with and without it."
        )
    return (
        "Without training, nothing that was tried takes the artifacts away: test-time registers did not help on these "
        "pictures."
    )


def advice(report: Values) -> list[str]:
    """Say what to do next."""
    norms, registers = report["norms"], report["registers"].get("tokens") or []
    found: list[str] = []
    if norms["num_not_finite"]:
        found.append(
            f"{count(norms['num_not_finite'], 'token')} had a norm that is not finite. Look at these pictures first, "
            "and run the model in float32."
        )
    if norms["verdict"] == "artifacts":
        if registers:
            found.append(
                f"The model has {count(len(registers), 'register')} and artifacts all the same: see below whether the "
                "registers are used at all (their norm and attention). A model trained with more registers may help."
            )
        else:
            found.append("Use a model trained with registers, where there is one (DINOv2 with registers, DINOv3).")
        found.append(_cure_advice(report["cure"]))
        onset = norms["onset"]
        if onset == 0:
            found.append(
                "The outliers are there from the first layer on, where published models have none yet. They may be due "
                "to the pictures and not to the model: see below whether they lie on patches that are flat or very "
                "bright."
            )
        if onset:
            found.append(
                f"For dense tasks, features from layer {onset - 1}, the last one before the artifacts, are worth a try."
            )
        found.append(
            "For class predictions alone nothing needs to be done. Do not read single bright spots of an attention map "
            "as objects."
        )
    elif norms["verdict"] == "none":
        found.append("Nothing needs to be done about artifacts: patch tokens can be used as they are.")
        if registers:
            found.append(
                "The model has registers. Whether its patches are clean because of them, vitrail.ablate can tell."
            )
    else:
        if norms["num_pictures"] < 50:
            found.append(
                f"Inspect more pictures: there were {count(norms['num_pictures'], 'picture')}, and fifty or more give "
                "a clear answer in most cases."
            )
        else:
            found.append("Look at the histogram and the norm maps: is there a group of tokens far above the rest?")
        found.append("Take pictures like those that the model was trained on, prepared as it expects them.")
    return found
