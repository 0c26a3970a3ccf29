"""Run a model on one sample, with and without merging, and compare its predictions and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

import vitrail
from vitrail._timing import Clock
from vitrail.adapters.outputs import output_tensor
from vitrail.cli._shared.model import Loaded
from vitrail.cli._shared.summary import Cost, Guess, Guesses, Result
from vitrail.drawing import draw_groups
from vitrail.drawing.film import Film
from vitrail.drawing.groups import enlarged
from vitrail.errors import UnsupportedInput
from vitrail.runtime.trace import Trace
from vitrail.training.evaluation.outputs import forward_output

GUESSES = 3
"""Number of most likely classes to name."""


@dataclass(frozen=True)
class Prediction:
    """A model's output as one vector, whether it scores classes, its latency, and the most likely classes."""

    values: Tensor
    is_classes: bool
    seconds: float
    guesses: Guesses


def cost_of(loaded: Loaded, merging: vitrail.Merging) -> Cost:
    """Count tokens and FLOPs for one input, where they do not depend on the image."""
    after = merging.tokens_per_layer(loaded.size)
    before = [loaded.layout.num_tokens] * len(after)
    return Cost(before, after, merging.flops(loaded.size, merged=False), merging.flops(loaded.size))


def mean_cost(costs: Sequence[Cost]) -> Cost:
    """Return the mean of the costs of several samples, as whole numbers."""
    layers = zip(*(cost.tokens_after for cost in costs), strict=True)
    return replace(
        costs[0],
        tokens_after=[round(fmean(counts)) for counts in layers],
        flops_after=round(fmean(cost.flops_after for cost in costs)),
    )


def _traced_cost(loaded: Loaded, trace: Trace, flops_before: int) -> Cost:
    """Count tokens and FLOPs of a batch of one that ran."""
    after = trace.tokens_per_layer[0].tolist()
    return Cost([loaded.layout.num_tokens] * len(after), after, flops_before, int(trace.flops[0]))


@torch.inference_mode()
def predict(loaded: Loaded, batch: Tensor) -> Prediction:
    """Run the model, merged or not, on a batch of one."""
    batch, clock = batch.to(loaded.device), Clock(loaded.device)
    start = clock.now()
    try:
        output: Any = forward_output(loaded.model, batch) if loaded.questions else loaded.model(batch)
    except (AssertionError, ValueError, RuntimeError) as error:  # how libraries refuse a size
        if isinstance(error, RuntimeError) and (loaded.size is None or isinstance(error, torch.OutOfMemoryError)):
            raise
        size = " × ".join(map(str, loaded.spec.size))
        raise UnsupportedInput(
            f"{loaded.name} does not take {loaded.medium.noun} of {size} ({error}); leave --image-size out"
        ) from error
    seconds = clock.now() - start
    values, is_classes = _values(loaded.model, output)
    if loaded.questions:
        is_classes = is_classes and any(question.kind == "classification" for question in loaded.questions)
    return Prediction(values.flatten().double().cpu(), is_classes, seconds, _guesses(loaded, output))


def compare_merged(
    loaded: Loaded, merging: vitrail.Merging, sample: Any, name: str, before: Prediction
) -> tuple[dict[str, Image.Image | Film], Result, Cost]:
    """Run the merged model on one sample; return drawings of its groups, the comparison with the unmerged model, and
    what it cost.
    """
    with merging.track() as trace:
        after = predict(loaded, loaded.medium.batch(sample, loaded.spec))
    groups = trace.groups[0].reshape(trace.layout.grid).cpu().numpy()
    norms = float(before.values.norm() * after.values.norm())
    cosine = float(before.values @ after.values) / norms if norms > 0 else math.nan
    finite = bool(before.values.isfinite().all() and after.values.isfinite().all())
    same = None
    if not finite:
        pass
    elif before.guesses:
        same = all(best[0].name == after.guesses[name][0].name for name, best in before.guesses.items())
    elif before.is_classes:
        same = bool(before.values.argmax() == after.values.argmax())
    result = Result(
        picture=name,
        panes=int(trace.groups[0].unique().numel()),
        cosine=None if math.isnan(cosine) else min(max(cosine, -1.0), 1.0),
        same_top1=same,
        seconds_before=before.seconds,
        seconds_after=after.seconds,
        guesses_before=before.guesses,
        guesses_after=after.guesses,
        finite=finite,
    )
    cost = _traced_cost(loaded, trace, merging.flops(loaded.size, merged=False))
    return draw_groups(enlarged(sample), groups, loaded.spec), result, cost


def _guesses(loaded: Loaded, output: Any) -> Guesses:
    """Return the most likely classes of each label column."""
    found: Guesses = {}
    for question in loaded.questions:
        if question.kind not in ("classification", "multilabel"):
            continue
        scores = question.prediction(output)[0].double()
        shares = scores.softmax(0) if question.kind == "classification" else scores.sigmoid()
        likely, places = shares.topk(min(GUESSES, len(scores)))
        pairs = zip(places.tolist(), likely.tolist(), strict=True)
        found[question.name] = [Guess(question.classes[place], probability) for place, probability in pairs]
    return found


def _values(model: nn.Module, output: Any) -> tuple[Tensor, bool]:
    """Return a model's output for the whole input: class scores, else pooled features, else all tokens."""
    values = output_tensor(output)
    if values is output:
        return values, values.dim() == 2 and int(getattr(model, "num_classes", 0) or 0) > 0
    return values, values is getattr(output, "logits", None)
