"""``time_models``: any models, each in forms of its own, by turns on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail.bench.config import COMPILE_MODES, FORMS, check_choices, check_graphs, check_time, compiles
from vitrail.bench.forms import compiling, inference
from vitrail.bench.models import copy_model
from vitrail.bench.result import reason
from vitrail.bench.timing import Clock, Key, Spread, Step, clock_for, measure
from vitrail.errors import InvalidOption, UnsupportedInput

Forms = str | Sequence[str]


@dataclass(frozen=True)
class Timed:
    """One model in one form.

    Attributes:
        seconds: median of one step over the whole batch.
        images_per_s: pictures, or sounds or clips, in a second, at that.
        spread: half of the width of the middle half of the samples, over the median.
        samples: how many samples there are.
    """

    seconds: float
    images_per_s: float
    spread: float
    samples: int

    @classmethod
    def of(cls, taken: Spread, batch: int) -> Timed:
        """Say what samples of steps over so many pictures mean."""
        spread = (taken.high - taken.low) / 2 / taken.median
        return cls(taken.median, batch / taken.median, spread, taken.samples)


@dataclass(frozen=True)
class ModelTimes:
    """What was measured of one model.

    Attributes:
        forms: its times by form.
        failed: why the other forms could not be had.
    """

    forms: dict[str, Timed]
    failed: dict[str, str]

    @property
    def best(self) -> Timed | None:
        """The time of the fastest form; None where all failed."""
        return min(self.forms.values(), key=lambda one: one.seconds, default=None)


def time_models(
    models: Mapping[Key, nn.Module],
    pictures: Tensor | Sequence[Tensor],
    *,
    forms: Forms | Mapping[Key, Forms] = ("eager",),
    seconds: float = 10.0,
    compile_mode: str = "default",
    clock: Clock | None = None,
) -> dict[Key, ModelTimes]:
    """Time inference of models, merged in any way or not, in the dtype and on the device that they have.

    Copies that share the weights are put into forms and take turns; the models stay as they are. A form that fails
    says why, and the others go on.

    >>> found = time_models({"unmerged": model, "merged": merged}, pictures)    # doctest: +SKIP
    >>> found["unmerged"].best.seconds / found["merged"].best.seconds           # doctest: +SKIP

    Args:
        models: models by name.
        pictures: a batch of what the models take, or several of one shape that take turns.
        forms: which of :data:`FORMS` to time, for all models or by name; ``blocks`` needs a model that merging takes.
        seconds: time to spend on measuring, shared by all, after warm-up and compilation.
        compile_mode: mode of ``torch.compile``.
        clock: another clock than the device's.
    """
    batches = list(pictures) if isinstance(pictures, Sequence) else [pictures]
    _check_batches(batches)
    _check_models(models, batches[0].device)
    wanted = _by_model(models, forms)
    every = {form for own in wanted.values() for form in own}
    check_graphs(every, batches[0].device)
    check_choices("compile_mode", (compile_mode,), COMPILE_MODES)
    check_time("seconds", seconds)
    steps: dict[tuple[Key, str], Step] = {}
    failed: dict[tuple[Key, str], str] = {}
    with torch.cuda.device_of(batches[0]), compiling() if compiles(every) else nullcontext():
        for name, form in ((name, form) for name, own in wanted.items() for form in own):
            try:
                steps[name, form] = _first_step(form, models[name], batches, compile_mode)
            except Exception as error:
                failed[name, form] = reason(error)
        taken = measure(steps, clock or clock_for(batches[0].device), seconds, inputs=len(batches))
    return {
        name: ModelTimes(
            {form: Timed.of(taken[name, form], len(batches[0])) for form in own if (name, form) in taken},
            {form: failed[name, form] for form in own if (name, form) in failed},
        )
        for name, own in wanted.items()
    }


def _first_step(form: str, model: nn.Module, batches: Sequence[Tensor], compile_mode: str) -> Step:
    """Put a copy of a model into a form and run it once, which compiles and records."""
    step = inference(form, copy_model(model, share=True).eval(), batches, compile_mode).step
    step(0)
    return step


def _by_model(models: Mapping[Key, nn.Module], forms: Forms | Mapping[Key, Forms]) -> dict[Key, tuple[str, ...]]:
    """Give each model its forms."""
    given = forms if isinstance(forms, Mapping) else dict.fromkeys(models, forms)
    if given.keys() != models.keys():
        raise InvalidOption(
            f"forms by name are for {', '.join(map(repr, given)) or 'nothing'}, and the models are "
            f"{', '.join(map(repr, models))}; name each model once, or give forms for all of them"
        )
    wanted = {name: _names(given[name]) for name in models}
    for own in wanted.values():
        check_choices("forms", own, FORMS)
    return wanted


def _names(forms: Forms) -> tuple[str, ...]:
    return (forms,) if isinstance(forms, str) else tuple(forms)


def _check_models(models: Mapping[Key, nn.Module], place: torch.device) -> None:
    if not isinstance(models, Mapping) or not models:
        got = "none" if isinstance(models, Mapping) else type(models).__name__
        raise InvalidOption(f'models are at least one, by name, such as {{"merged": model}}; got {got}')
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise InvalidOption(f"model {name!r} is a {type(model).__name__}; expected a torch.nn.Module")
        away = {str(value.device) for value in (*model.parameters(), *model.buffers()) if value.device != place}
        if away:
            raise UnsupportedInput(
                f"model {name!r} is on {', '.join(sorted(away))}, and the pictures on {place}; move one to the other"
            )


def _check_batches(batches: Sequence[Tensor]) -> None:
    if not batches or not all(isinstance(batch, Tensor) for batch in batches):
        got = ", ".join(type(batch).__name__ for batch in batches) or "nothing"
        raise UnsupportedInput(f"pictures are a tensor, or several in a sequence; got {got}")
    first = batches[0]
    if first.dim() < 4 or not len(first):
        raise UnsupportedInput(
            f"pictures are a batch, such as (8, 3, 224, 224); got {tuple(first.shape)}. Give one picture as "
            "picture[None]"
        )
    if len({(batch.shape, batch.dtype, batch.device) for batch in batches}) > 1:
        got = ", ".join(f"{tuple(batch.shape)} in {batch.dtype} on {batch.device}" for batch in batches)
        raise UnsupportedInput(f"batches that take turns have one shape, dtype and device; got {got}")
