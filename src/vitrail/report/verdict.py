"""A report in sentences: the verdict, how sure it is, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitrail.report.page.formatting import confidence, count, number, percent

Values = Mapping[str, Any]

BADGES = {
    "artifacts": "▲ artifact tokens found",
    "content": "✓ no artifact tokens: high norms are content",
    "none": "✓ no artifact tokens",
    "uncertain": "? uncertain",
}

LIKELY = 0.9
"""Artifacts that would have been found with this probability are said to be visible in a sample."""

CLEAR_ANSWER = 50
"""Images that give a clear answer in most cases."""

FEW = 20
"""Fewer images than these give a first impression only, and no confidence."""


def verdict_sentence(norms: Values) -> str:
    """Return the answer in one sentence."""
    if norms["verdict"] == "artifacts":
        onset, depth = norms["onset"], len(norms["per_layer"])
        since = "" if onset is None else f", from layer {onset} on (of {depth}, counted from 0)"
        return (
            f"This model has artifact tokens: {percent(norms['outlier_share'])} of its patch tokens have a norm above "
            f"{number(norms['threshold'])}, typically {number(norms['ratio'])} times that of the others{since}."
        )
    if norms["verdict"] == "none":
        return "No artifact tokens were found: no small group of patch tokens has norms far above those of the rest."
    if norms["verdict"] == "content":
        return (
            f"No artifact tokens were found: {percent(norms['outlier_share'])} of the patch tokens have a norm above "
            f"{number(norms['threshold'])}, but the content of the images explains them."
        )
    return f"There is no clear answer: {norms['reason']}."


def confidence_sentence(norms: Values, noun: str = "image") -> str:
    """Return how sure the verdict is, and what that means; of few images, that it is a first impression."""
    if norms["num_images"] < FEW:
        return (
            f"Only {count(norms['num_images'], noun)}: take this as a first impression of the model, and every "
            f"number below as one of these {noun}s. {CLEAR_ANSWER} or more give a clear answer in most cases."
        )
    value = confidence(norms["confidence"])
    if norms["verdict"] == "artifacts":
        return f"Confidence: {value}, the probability that a model without artifacts shows no such gap by chance."
    if norms["verdict"] in ("none", "content"):
        if not norms.get("power"):  # a report from before power was part of it
            return f"Confidence: {value}, the probability that typical artifacts would have been found in these images."
        return (
            f"Confidence: {value}, the probability that artifacts of an unknown kind (0.1 to 5 % of the tokens at 3 to "
            f"10 times the norm) would have been found in these images. {visible_sentence(norms['power'])}"
        )
    return "Confidence: none. These images do not support either answer."


def confidence_words(value: float | None, num_images: int) -> str:
    """Return the confidence for a table: a number, or that there are few images."""
    return "few images" if num_images < FEW else confidence(value) if value else "none"


def visible_sentence(power: Values) -> str:
    """Return which artifacts a sample would have shown, and which it could not."""
    least: dict[str, str | None] = {}
    for share, row in power.items():
        likely = [multiple for multiple, probability in row.items() if probability >= LIKELY]
        least[share.replace("%", " %")] = min(likely, key=float) if likely else None
    seen = [f"{share} of the tokens from {multiple} times the norm on" for share, multiple in least.items() if multiple]
    hidden = [share for share, multiple in least.items() if multiple is None]
    sentences = [f"It would have shown {', '.join(seen)}."] if seen else []
    if hidden:
        sentences.append(f"Artifacts of {', '.join(hidden)} of the tokens could not have been seen.")
    return " ".join(sentences)


def cure_sentence(cure: Values) -> str:
    """Return in one sentence what test-time registers did."""
    before, after, control = (cure[state].get("outlier_share") for state in ("before", "after", "control"))
    effects = {
        "gone": "Test-time registers work here",
        "fewer": "Test-time registers help here, but not fully",
        "none": "Test-time registers do not work here",
        "unspecific": "Random neurons do about as well, so these neurons do not cause the artifacts",
    }
    control_text = "" if control is None else f", and {percent(control)} with as many random neurons"
    return (
        f"{effects[cure['effect']]}: {percent(before)} of the patch tokens are above the threshold without them, "
        f"{percent(after)} with {count(cure['num_neurons'], 'neuron')} moved{control_text}."
    )


def comparison_sentence(a: Values, b: Values) -> str:
    """Return in one sentence how the norms of two reports differ."""
    if a["verdict"] == b["verdict"] == "artifacts":
        left, right = a["outlier_share"], b["outlier_share"]
        more = "as many" if left == right else "A has more" if left > right else "B has more"
        return f"Both models have artifact tokens: {left:.2%} of A's patch tokens, {right:.2%} of B's; {more}."
    if a["verdict"] == b["verdict"]:
        return (
            "Neither model gives a clear answer."
            if a["verdict"] == "uncertain"
            else "Neither model has artifact tokens."
        )
    answers = {
        "artifacts": "has artifact tokens",
        "content": "has no artifact tokens (its high norms are content)",
        "none": "has no artifact tokens",
        "uncertain": "gives no clear answer",
    }
    return f"Model A {answers[a['verdict']]}; model B {answers[b['verdict']]}."


def recommendations(norms: Values, registers: Values, cure: Values, noun: str = "image") -> list[str]:
    """Return what to do next; code is between backticks."""
    advice: list[str] = []
    if norms["num_not_finite"]:
        advice.append(
            f"{count(norms['num_not_finite'], 'token')} had a norm that is not finite. Check these {noun}s first, and "
            "run the model in float32."
        )
    num_registers = len(registers.get("tokens") or [])
    if norms["verdict"] == "artifacts":
        return advice + _against_artifacts(norms["onset"], num_registers, cure)
    if norms["verdict"] in ("none", "content"):
        advice.append("Nothing needs to be done about artifacts: use patch tokens as they are.")
        if norms["verdict"] == "content":
            advice.append(
                "The tokens with high norms are patches that were bright or contrasted from the embedding on, or "
                "objects whose patches have high norms together. The norm maps show which."
            )
        if num_registers:
            advice.append("The model has registers. Use `vitrail.ablate` to see whether they keep its patches clean.")
        return advice
    if norms["num_images"] < CLEAR_ANSWER:
        advice.append(
            f"Inspect more {noun}s: there were {count(norms['num_images'], noun)}, and {CLEAR_ANSWER} or more give "
            "a clear answer in most cases."
        )
    else:
        advice.append("Check the histogram and the norm maps: is there a group of tokens far above the rest?")
    return [*advice, f"Use {noun}s like those the model was trained on, preprocessed as it expects them."]


def _against_artifacts(onset: int | None, num_registers: int, cure: Values) -> list[str]:
    advice = ["Use a model trained with registers if there is one (DINOv2 with registers, DINOv3)."]
    if num_registers:
        advice = [
            f"The model has {count(num_registers, 'register')} and still has artifacts. Check the norm and the "
            "attention of the registers to see whether it uses them. A model trained with more registers may help."
        ]
    if "effect" not in cure:
        advice.append(
            "Without training: `vitrail.test_time_registers(model, images)` moves the artifacts to an extra token and "
            "can be undone. It was not tried here. Inspect the model again with it and compare both reports."
        )
    elif cure["effect"] in ("gone", "fewer"):
        advice.append(
            f"Without training: `vitrail.test_time_registers(model, images, neurons={cure['num_neurons']})` moves the "
            "artifacts to an extra token and can be undone; it was tried on these images above. Measure your own task "
            "with and without it."
        )
    else:
        advice.append("No cure without training was found: test-time registers did not help on these images.")
    if onset == 0:
        advice.append(
            "The outliers arise in the first layer already, where published models have none. Check on the norm maps "
            "whether they lie on flat or very bright patches."
        )
    if onset:
        advice.append(f"For dense tasks, try features from layer {onset - 1}, the last one before the artifacts.")
    return [
        *advice,
        "For class predictions alone, nothing needs to be done. Do not read single bright spots of an attention map as "
        "objects.",
    ]
