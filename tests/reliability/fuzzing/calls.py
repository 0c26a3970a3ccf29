"""Calls of public functions with right and wrong arguments, and what may come of them."""

from __future__ import annotations

import inspect
import random
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.reliability.fuzzing.values import Odd, World, right, wrong
from vitrail.errors import VitrailError
from vitrail.surgery._handle import Handle

SLOW = {"training.train": 0.02, "inspect": 0.1, "compare": 0.1, "tune": 0.1, "bench.run": 0.1, "export.export": 0.1}
"""Functions that work for long where they succeed, and how often they are called compared with others."""

PATIENCE = 60
"""Seconds after which a call hangs."""


class Hanging(BaseException):
    """A call that did not end."""


@dataclass
class Found:
    """What the calls came to: counts, and a line for each fault."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)

    def fault(self, kind: str, where: str, detail: str) -> None:
        self.counts[kind] += 1
        self.faults[f"{kind}: {where}"] += 1
        self.details.setdefault(f"{kind}: {where}", detail)


def snapshot(model: nn.Module) -> Any:
    """Return what must not change in a model: its classes, modes, hooks, names, and the bits of its weights."""
    parts = [
        (name, type(part), part.training, len(part._forward_hooks), len(part._forward_pre_hooks), sorted(vars(part)))
        for name, part in model.named_modules()
    ]
    return parts, [(name, value.detach().clone()) for name, value in model.state_dict().items()]


def same(before: Any, after: Any) -> bool:
    if before[0] != after[0] or [name for name, _ in before[1]] != [name for name, _ in after[1]]:
        return False
    return all(torch.equal(one, two) for (_, one), (_, two) in zip(before[1], after[1], strict=True))


def arguments(function: Callable[..., Any], draw: random.Random, world: World) -> tuple[dict[str, Any], list[str]]:
    """Return keyword arguments, and the names of those that are wrong."""
    given: dict[str, Any] = {}
    bad: list[str] = []
    parameters = inspect.signature(function).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    spoiled = {one.name for one in draw.sample(named, min(len(named), draw.choice((0, 1, 1, 1, 2))))}
    for one in named:
        if one.name in spoiled:
            given[one.name] = wrong(draw, world)
            bad.append(one.name)
            continue
        if one.default is not one.empty and draw.random() < 0.7:
            continue
        try:
            given[one.name] = right(one.name, draw, world)
        except KeyError:
            if one.default is one.empty:
                given[one.name] = wrong(draw, world)
                bad.append(one.name)
    return given, bad


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `Hanging` in a call that takes too long."""

    def late(number: int, frame: Any) -> None:
        raise Hanging

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def call(
    name: str, function: Callable[..., Any], draw: random.Random, world: World, found: Found, trace: Path | None = None
) -> None:
    """Call a function once, and count what came of it."""
    given, bad = arguments(function, draw, world)
    models = [value for value in given.values() if isinstance(value, nn.Module)]
    before = [snapshot(model) for model in models]
    found.counts["calls"] += 1
    where, shown = f"{name}({', '.join(bad)})", ", ".join(f"{key}={_shown(value)}" for key, value in given.items())
    result: Any = None
    if trace is not None:
        trace.write_text(f"{where} {shown}")
    try:
        with limited(PATIENCE), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(**given)
            if inspect.isgenerator(result):
                result = next(result, None)
    except VitrailError as error:
        found.counts["refused"] += 1
        if len(str(error)) > 2100:
            found.fault("long message", where, shown)
    except Hanging:
        found.fault("hangs", where, shown)
    except Exception as error:
        if any("progress" in one and callable(given[one]) for one in bad):
            return  # a function of the caller's own that fails
        place = traceback.extract_tb(error.__traceback__)[-1]
        found.fault(
            f"raw {type(error).__name__}", where, f"{shown}\n    {error!s:.200} ({place.filename}:{place.lineno})"
        )
    else:
        found.counts["accepted"] += 1
        if _is_nonsense(function, given, bad):
            found.fault("nonsense accepted", where, shown)
    finally:
        if isinstance(result, Handle) and result.is_active:
            result.remove()
        for model, one in zip(models, before, strict=True):
            if not same(one, snapshot(model)):
                found.fault("changed model", where, shown)


def _is_nonsense(function: Callable[..., Any], given: dict[str, Any], bad: list[str]) -> bool:
    """Return whether an object of no use was passed where a type is declared."""
    parameters = inspect.signature(function).parameters
    useless = [one for one in bad if isinstance(given[one], Odd) or given[one] is object]
    declared = [str(parameters[one].annotation) for one in useless]
    return any("Any" not in one and "object" not in one and "_empty" not in one for one in declared)


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except Exception:
        return f"<{type(value).__name__}>"


def fuzz(names: dict[str, Callable[..., Any]], count: int, seed: int, world: World, trace: Path | None = None) -> Found:
    """Make ``count`` calls."""
    draw, found = random.Random(seed), Found()
    torch.manual_seed(seed)
    weights = [SLOW.get(name.removeprefix("vitrail."), 1.0 if ".analysis." in name else 3.0) for name in names]
    for name in draw.choices(list(names), weights, k=count):
        call(name, names[name], draw, world, found, trace)
    return found
