"""What tokens may be added to a model: options read as specs, and refused where they cannot work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from vitrail.adapters import Found
from vitrail.errors import InvalidOption
from vitrail.runtime.layout import layout_of
from vitrail.surgery.selection import is_whole
from vitrail.tokens import Role, TokenSpec, check_specs


def specs_of(
    registers: int, tasks: Mapping[str, int] | None, classes: int, distillation: bool, tokens: Iterable[TokenSpec]
) -> tuple[TokenSpec, ...]:
    """Write what was asked for as specs that go together."""
    for name, value in (("registers", registers), ("classes", classes)):
        if not is_whole(value) or value < 0:
            raise InvalidOption(f"{name} is how many tokens to add, 0 or more; got {value!r}")
    if not isinstance(distillation, bool):
        raise InvalidOption(f"distillation is True or False: a model has at most one such token; got {distillation!r}")
    if tasks is not None and not isinstance(tasks, Mapping):
        raise InvalidOption(f"tasks are names with numbers of outputs, such as {{'breed': 37}}; got {tasks!r}")
    specs = [TokenSpec("classes", Role.CLASS, classes)] if classes else []
    specs += [TokenSpec("distillation", Role.DISTILLATION)] if distillation else []
    specs += [TokenSpec("registers", Role.REGISTER, registers)] if registers else []
    specs += [TokenSpec(name, Role.TASK, classes=outputs) for name, outputs in (tasks or {}).items()]
    if isinstance(tokens, TokenSpec) or not isinstance(tokens, Iterable):
        raise InvalidOption(f"tokens is a list of TokenSpec objects; got {tokens!r}")
    checked = check_specs([*specs, *tokens])
    if not checked:
        raise InvalidOption("no tokens were asked for; give registers=, tasks=, classes=, distillation= or tokens=")
    return checked


def outputs_of(model: nn.Module, found: Found, specs: tuple[TokenSpec, ...], num_classes: int | None) -> dict[str, int]:
    """Say how many outputs each head has, by name."""
    if num_classes is not None and (not is_whole(num_classes) or num_classes < 1):
        raise InvalidOption(f"num_classes is 1 or more; got {num_classes!r}")
    own = num_classes or found.adapter.num_classes(model, found.trunk)
    asking = [spec.name for spec in specs if spec.role in (Role.CLASS, Role.DISTILLATION) and spec.classes is None]
    if asking and not own:
        raise InvalidOption(
            f"this {type(model).__name__} has no classes of its own for the head of {asking[0]!r}; give num_classes="
        )
    return {spec.name: spec.outputs(own) for spec in specs if spec.outputs(own)}


def check_mix(found: Found, specs: tuple[TokenSpec, ...]) -> None:
    """Refuse tokens that the model cannot have beside its own."""
    own = layout_of(found)
    if own.indices(Role.DISTILLATION) and any(spec.role is Role.DISTILLATION for spec in specs):
        raise InvalidOption(
            "this model has a distillation token already, and a model has at most one; a further teacher is a task"
        )
    taken = {span.name for span in own.special if span.name}
    for spec in specs:
        if spec.name in taken:
            raise InvalidOption(f"this model has tokens named {spec.name!r} already; choose another name")
        if not spec.visible:
            raise InvalidOption(
                f"the token {spec.name!r} has visible=False; added tokens are hidden until they are opened"
            )
        if spec.position:
            raise InvalidOption(f"the token {spec.name!r} asks for a position; added tokens have none")
        if not 0 <= spec.enters < len(found.blocks):
            raise InvalidOption(
                f"the token {spec.name!r} has enters={spec.enters}; expected 0 to {len(found.blocks) - 1}, a block"
            )
