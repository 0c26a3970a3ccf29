"""Settings found by `vitrail.tune` on images that the model was not trained on, measured on the validation set."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch import nn

import vitrail
from experiments.methods.measure import Rows, described, logits_of, measured, reason, row_key
from experiments.methods.subjects import Size, Subject
from experiments.methods.variants import TOLERANCE, quiet
from vitrail.errors import VitrailError
from vitrail.merging import as_method
from vitrail.tuning import tune

CANDIDATES: dict[str, tuple[Any, ...]] = {
    "tuned": (
        "tome",
        {"name": "tome", "features": "tokens"},
        {"name": "tome", "features": "values"},
        {"name": "tome", "features": {"keys": 0.5, "tokens": 0.5}},
        "energy",
        "mlerp",
        "mctf",
        "salient",
        "evit",
    ),
    "tuned, tome": ("tome",),
}
"""Methods that a tuning chooses from, fixed before any result was seen: several, or ToMe, whose every part has a fused
kernel, with another schedule."""

TUNED = tuple(CANDIDATES)
"""Names of the tuned variants."""


def tune_subject(subject: Subject, size: Size, rows: Rows, until: float) -> Iterator[str]:
    """Tune one setting for each budget, and measure it once on the validation set. Yield one line for each."""
    reference = logits_of(subject.model, subject.inputs, size.batch)
    known, full = rows.known(), subject.gflops
    for variant, share in ((name, share) for share in size.tuned for name in TUNED):
        key = row_key(subject.kind, subject.seed, variant, share)
        if key in known:
            continue
        if time.monotonic() > until:
            yield "out of time"
            return
        candidates = [method for method in CANDIDATES[variant] if serves(subject.model, method)]
        try:
            with quiet():
                found = tune(
                    subject.model, subject.tuning, gflops=share * full, quality="kl", method=candidates,
                    search="greedy", limit=len(subject.tuning), batch_size=min(size.batch, len(subject.tuning)),
                    held_out=0.3, seconds=size.tune_seconds,
                )  # fmt: skip
                if found.flops > (1 + TOLERANCE) * share * full * 1e9:  # there was no time to search that far
                    yield f"{key}  misses the budget; give it more time"
                    continue
                with found.apply(subject.model) as merging:
                    row = measured(subject, merging, reference, size.batch)
        except Exception as error:  # a failed search must not stop the others
            yield f"{key}  {reason(error)}"
            continue
        rows.add({
            "key": key, "model": subject.kind, "seed": subject.seed, "variant": variant, "share": share,
            "unmerged_gflops": full, **row,
            "tuning": {
                "family": found.family, "value": found.value, "interval": found.interval, "tuned_on": found.tuned_on,
                "held_out": found.held_out, "seconds": found.seconds, "candidates": len(candidates),
            },
        })  # fmt: skip
        yield f"{key}  {row['config']['method']}  {found.family}  {described(row)}"


def serves(model: nn.Module, method: Any) -> bool:
    """Return whether a method can reduce the tokens of a model."""
    try:
        vitrail.merge(model, r=0, method=as_method(method)).remove()
    except VitrailError:
        return False
    return True
