"""Settings found by `vitrail.tune` on images that the model was not trained on, measured on the validation set."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

import vitrail
from experiments.methods.measure import Rows, described, logits_of, measured, reason, row_key
from experiments.methods.subjects import KINDS, Size, Subject
from experiments.methods.variants import TOLERANCE, Unreachable, quiet
from vitrail._timing import Clock, measure
from vitrail.errors import VitrailError
from vitrail.merging import as_method
from vitrail.tuning import Tuning, tune

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
    "tuned, tome": (
        "tome",
        {"name": "tome", "features": "queries"},
        {"name": "tome", "features": "values"},
    ),
}
"""Methods that a tuning for a budget of FLOPs chooses from, fixed before any result was seen: several, or ToMe by
features whose every step has a fused kernel, with another schedule."""

LATENCY = "tuned for latency"
"""Name of the settings of ToMe that are tuned for measured latency, on one model of each kind."""

TUNED = (*CANDIDATES, LATENCY)
"""Names of the tuned variants."""


def tune_subject(subject: Subject, names: Sequence[str], size: Size, rows: Rows, until: float) -> Iterator[str]:
    """Tune one setting for each budget, and measure it once on the validation set. Yield one line for each."""
    reference = logits_of(subject.model, subject.inputs, size.batch)
    known = rows.known()
    plan = [(name, share) for share in size.tuned for name in CANDIDATES if name in names]
    if LATENCY in names and subject.seed == KINDS[subject.kind].seeds[0]:
        plan += [(LATENCY, share) for share in size.latencies]
    for variant, share in plan:
        key = row_key(subject.kind, subject.seed, variant, share)
        if key in known:
            continue
        if time.monotonic() > until:
            yield "out of time"
            return
        try:
            with quiet():
                found = _tune(subject, variant, share, size)
                with found.apply(subject.model) as merging:
                    row = measured(subject, merging, reference, size.batch)
        except Exception as error:  # a failed search must not stop the others
            yield f"{key}  {reason(error)}"
            continue
        rows.add({
            "key": key, "model": subject.kind, "seed": subject.seed, "variant": variant, "share": share,
            "unmerged_gflops": subject.gflops, **row,
            "tuning": {
                "family": found.family, "value": found.value, "interval": found.interval, "tuned_on": found.tuned_on,
                "held_out": found.held_out, "seconds": found.seconds, "speedup": found.speedup,
            },
        })  # fmt: skip
        yield f"{key}  {row['config']['method']}  {found.family}  {described(row)}"


def _tune(subject: Subject, variant: str, share: float, size: Size) -> Tuning:
    """Return the best setting within a share of the FLOPs, or of the measured time of one batch of all tuning images.

    Raises:
        Unreachable: there was no time to search as far as the budget.
    """
    count, full = len(subject.tuning), subject.gflops
    timed = variant == LATENCY
    candidates = [one for one in CANDIDATES["tuned, tome" if timed else variant] if serves(subject.model, one)]
    found = tune(
        subject.model, subject.tuning, gflops=None if timed else share * full,
        latency_ms=share * unmerged_ms(subject) if timed else None, quality="kl", method=candidates, limit=count,
        batch_size=count if timed else min(size.batch, count), held_out=0.3, seconds=size.tune_seconds,
    )  # fmt: skip
    if not timed and found.flops > (1 + TOLERANCE) * share * full * 1e9:
        raise Unreachable("the search misses the budget; give it more time")
    return found


@torch.inference_mode()
def unmerged_ms(subject: Subject) -> float:
    """Return the median time of the unmerged model, run eagerly on all tuning images at once."""
    found = measure({0: lambda _: subject.model(subject.tuning)}, Clock(subject.tuning.device), 1.0)
    return 1e3 * found[0].median


def serves(model: nn.Module, method: Any) -> bool:
    """Return whether a method can reduce the tokens of a model."""
    try:
        vitrail.merge(model, r=0, method=as_method(method)).remove()
    except VitrailError:
        return False
    return True
