"""Token specifications: which special tokens a model has."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from torch import nn

from vitrail._checks import is_int, is_number
from vitrail.errors import InvalidOption
from vitrail.tokens.layout import Role

Kind = Literal["classification", "regression"]

# A name becomes a key of torch's containers, which store tokens and heads as attributes.
_TAKEN = frozenset(dir(nn.ModuleDict())) | frozenset(dir(nn.ParameterDict())) | {Role.PATCH.value, "patches"}


@dataclass(frozen=True)
class TokenSpec:
    """``count`` learned tokens of one role.

    - ``std``: standard deviation of the initial values. Tokens that start equal, have equal positions and share a
      loss stay equal; 0.02 lets them diverge.
    - ``position``: whether a learned position is added. ``None``: yes, except for registers and tokens that enter at
      the class-attention stage.
    - ``enters``: the layer before which the tokens join the sequence; −1 is after the last block, where class
      attention begins.
    - ``visible``: ``False`` if no other token attends to them.
    - ``classes``: outputs of their head. ``None`` is the model's ``num_classes`` for class and distillation tokens,
      0 leaves them without a head; required for task tokens; registers have no head.
    - ``kind``: what the head predicts.
    - ``decay``: whether weight decay applies to the tokens.

    >>> TokenSpec("color", "task", classes=8).to_dict()["role"]
    'task'
    """

    name: str
    role: Role
    count: int = 1
    std: float = 0.02
    position: bool | None = None
    enters: int = 0
    visible: bool = True
    classes: int | None = None
    kind: Kind = "classification"
    decay: bool = False

    def __post_init__(self) -> None:
        special = [role.value for role in Role if role is not Role.PATCH]
        if self.role not in special:
            raise InvalidOption(f"the role of a special token is one of {', '.join(special)}; got {self.role!r}")
        object.__setattr__(self, "role", Role(self.role))
        _check_name(self.name)
        self.expect("count", is_int(self.count, 1, 2**20), f"an integer from 1 to {2**20}")
        self.expect("enters", is_int(self.enters, -1), "an integer, -1 or more")
        self.expect("std", is_number(self.std) and self.std >= 0, "a number, 0 or more")
        self.expect("position", self.position is None or isinstance(self.position, bool), "True, False or None")
        self.expect("visible", isinstance(self.visible, bool), "True or False")
        self.expect("decay", isinstance(self.decay, bool), "True or False")
        self.expect("kind", self.kind in ("classification", "regression"), "'classification' or 'regression'")
        if self.role is Role.REGISTER:
            self.expect("classes", self.classes is None, "None: registers have no head. Use a task token instead")
            self.expect("kind", self.kind == "classification", "the default: registers have no head")
        elif self.role is Role.TASK:
            self.expect("classes", is_int(self.classes, 1, 10**8), "the number of outputs of the task, 1 to 10⁸")
        else:
            one = self.role is Role.CLASS or self.count == 1
            self.expect("count", one, "1; add task tokens for further teachers")
            given = self.classes is None or is_int(self.classes, 0, 10**8)
            self.expect("classes", given, "None (the model's num_classes), or 0 or more")

    def expect(self, option: str, right: bool, expected: str) -> None:
        """Raise ``InvalidOption`` if an option is not right."""
        if not right:
            raise InvalidOption(
                f"the {self.role} token {self.name!r} has {option}={getattr(self, option)!r}; expected {expected}"
            )

    def outputs(self, num_classes: int) -> int:
        """Return the number of outputs of the tokens' head in a model of ``num_classes``; 0 if they have no head."""
        if self.role is Role.REGISTER:
            return 0
        return num_classes if self.classes is None else self.classes

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain data for JSON."""
        return {**asdict(self), "role": self.role.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TokenSpec:
        """Build a spec from plain data as `to_dict` returns it; missing options have their defaults."""
        if not isinstance(values, Mapping):
            raise InvalidOption(f"a token spec is a dict with a name and a role; got {values!r}")
        known = {field.name for field in fields(cls)}
        wrong = sorted(set(values) - known)
        missing = sorted({"name", "role"} - set(values))
        if wrong or missing:
            raise InvalidOption(
                f"a token spec has name, role and optionally {', '.join(sorted(known - {'name', 'role'}))}; "
                f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(map(str, wrong)) or 'none'}"
            )
        return cls(**values)


def check_specs(specs: Iterable[TokenSpec | Mapping[str, Any]]) -> tuple[TokenSpec, ...]:
    """Return specs as a tuple after checking that they can be used together; a spec may be given as a dict."""
    if isinstance(specs, str) or not isinstance(specs, Iterable) or getattr(specs, "ndim", 1) == 0:
        raise InvalidOption(f"special tokens must be a list of TokenSpec objects; got {type(specs).__name__}")
    checked = tuple(TokenSpec.from_dict(spec) if isinstance(spec, Mapping) else spec for spec in specs)
    for spec in checked:
        if not isinstance(spec, TokenSpec):
            raise InvalidOption(f"special tokens must be TokenSpec objects; got {spec!r}")
    names = [spec.name for spec in checked]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidOption(
            f"token names must differ; given more than once: {', '.join(twice)}. Use one TokenSpec with count=... for "
            "tokens that share role and head"
        )
    distilled = [spec.name for spec in checked if spec.role is Role.DISTILLATION]
    if len(distilled) > 1:
        raise InvalidOption(
            f"a model has at most one distillation token; got {len(distilled)} ({', '.join(distilled)}). "
            "Add task tokens for further teachers"
        )
    return checked


def _check_name(name: Any) -> None:
    legal = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
    if not legal:
        raise InvalidOption(
            f"a token's name must be a Python identifier such as cls, as parameters are named after it; got {name!r}"
        )
    if name in _TAKEN:
        raise InvalidOption(f"{name!r} cannot name a token: torch's containers use it; try {name + '_token'!r}")
