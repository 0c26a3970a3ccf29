"""A merging as plain options and tensors, and back: what ``vitrail.json`` holds of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrail.adapters import find
from vitrail.errors import InvalidOption, UntrainedMethod
from vitrail.merging import METHODS, Method, as_method
from vitrail.merging.foresight import Foresight, as_foresight
from vitrail.merging.methods.learned import LearnedMethod
from vitrail.merging.restoring import Restorer, as_restorer
from vitrail.runtime.layout import model_shape
from vitrail.runtime.plan import Plan

PARTS = ("method", "restorer", "foresight")
"""Parts of a merging that may have tensors, as they are named in front of these."""


def saved_merge(config: Mapping[str, Any], plan: Plan) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the options of a merging as plain data, and the tensors of its parts by ``PART.NAME``."""
    method = plan.method
    if METHODS.get(method.name) is not type(method):
        raise InvalidOption(
            f"method {method.label} is not registered, so a file cannot name it; register its class by "
            "vitrail.register_method"
        )
    if plan.restorer is not None and not isinstance(plan.restorer.config, str | Mapping):
        raise InvalidOption(f"restorer {plan.restorer.label} is not registered, so a file cannot name it; register it")
    if isinstance(method, LearnedMethod) and not method.is_trained:
        raise UntrainedMethod(
            f"method {method.label} was never trained, so there is nothing to save; train it in training mode, with "
            "gradients, and save it then"
        )
    options = {**config, "method": {"name": method.name, **method.options} if method.options else method.name}
    parts: dict[str, nn.Module | None] = dict(zip(PARTS, (method, plan.restorer, plan.foresight), strict=True))
    states = {name: {} if part is None else part.state_dict() for name, part in parts.items()}
    return options, {f"{name}.{key}": value for name, one in states.items() for key, value in one.items()}


def merge_options(model: nn.Module, options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return arguments of `vitrail.merge` for this model, with parts that have their tensors; raise if they do not fit.

    A text in ``method`` is the name of a registered method, never a path.
    """
    from vitrail.surgery.merging.merging import merge

    known = [name for name in inspect.signature(merge).parameters if name != "model"]
    if unknown := [name for name in options if name not in known]:
        raise InvalidOption(f"merge: unknown option {unknown[0]!r:.80}; expected {', '.join(known)}")
    made = dict(options)
    shape = model_shape(find(model))
    by_part = {part: _of(tensors, part) for part in PARTS}
    if by_part["method"]:
        made["method"] = _trained(options.get("method"), by_part["method"])
    elif "method" in made and not isinstance(made["method"], Path):  # which text names, and files never do
        made["method"] = as_method(made["method"])
    for name, part in (
        ("restore", as_restorer(made.get("restore"))),
        ("foresight", as_foresight(made.get("foresight"))),
    ):
        states = by_part["restorer" if name == "restore" else name]
        if part is not None and states:
            _check_part(part, shape)
            part.load_state_dict(states)
            made[name] = part
    return made


def _of(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}."): one for name, one in tensors.items() if name.startswith(f"{part}.")}


def _check_part(part: Restorer | Foresight, shape: Any) -> None:
    """Create the parameters of a part for a model."""
    if isinstance(part, Restorer):
        part.check(shape)
    part.build(shape)


def _trained(method: Any, states: dict[str, Tensor]) -> Method:
    """Return a method with its weights."""
    plain = dict(method) if isinstance(method, Mapping) else {"name": method}
    name = plain.pop("name", None)
    kind = METHODS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InvalidOption(f"method={name!r:.80} is not registered; expected one of {', '.join(METHODS)}")
    if issubclass(kind, LearnedMethod):
        return kind.from_state(states, **plain)
    made = kind(**plain)
    made.load_state_dict(states)
    return made
