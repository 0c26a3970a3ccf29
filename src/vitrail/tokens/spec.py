"""What a model is told about a kind of token, before there is any tensor."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any, Literal

from torch import nn

from vitrail.errors import InvalidOption
from vitrail.tokens.layout import Role

Kind = Literal["classification", "regression"]

# A name becomes a key of torch's containers, which keep tokens and heads as attributes of themselves.
_TAKEN = frozenset(dir(nn.ModuleDict())) | frozenset(dir(nn.ParameterDict())) | {Role.PATCH.value, "patches"}


@dataclass(frozen=True)
class TokenSpec:
    """``count`` learned tokens of one role: how they start, where they enter, who reads them, what they answer.

    - ``std``: spread of the initial values. Tokens that start equal, with equal positions and one loss, stay equal
      for ever; 0.02 lets them part.
    - ``position``: whether a learned position is added; ``None`` leaves it to the role (registers have none) and
      to the place (tokens of a class-attention stage have none).
    - ``enters``: the layer before which the tokens join the sequence; −1 is after the last block, where class
      attention begins.
    - ``visible``: ``False`` for tokens that only read. No other token attends to them.
    - ``classes``: outputs of their head. ``None`` is the model's ``num_classes`` for class and distillation
      tokens; a task token must say it; registers have no head. 0 leaves a class or distillation token without one.
    - ``decay``: whether weight decay applies to the tokens.

    >>> TokenSpec("colour", "task", classes=8).to_dict()["role"]
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
        object.__setattr__(self, "role", _role(self.role))
        _check_name(self.name)
        for option, low in (("count", 1), ("enters", -1)):
            self._expect(option, _whole(getattr(self, option), low), f"a whole number, {low} or more")
        number = isinstance(self.std, int | float) and not isinstance(self.std, bool)
        self._expect("std", number and isfinite(self.std) and self.std >= 0, "a number, 0 or more")
        self._expect("position", self.position is None or isinstance(self.position, bool), "True, False or None")
        self._expect("visible", isinstance(self.visible, bool), "True or False")
        self._expect("decay", isinstance(self.decay, bool), "True or False")
        self._expect("kind", self.kind in ("classification", "regression"), "'classification' or 'regression'")
        match self.role:
            case Role.REGISTER:
                self._expect("classes", self.classes is None, "None, for registers have no head; a task token has one")
                self._expect("kind", self.kind == "classification", "none of its own, for registers have no head")
            case Role.TASK:
                self._expect("classes", _whole(self.classes, 1), "the number of outputs of the task, 1 or more")
            case Role.CLASS | Role.DISTILLATION:
                one = self.role is Role.CLASS or self.count == 1
                self._expect("count", one, "1; further teachers are task tokens with a head each")
                given = self.classes is None or _whole(self.classes, 0)
                self._expect("classes", given, "None (the model's num_classes), or 0 or more")

    def _expect(self, option: str, right: bool, expected: str) -> None:
        if not right:
            raise InvalidOption(
                f"the {self.role} token {self.name!r} has {option}={getattr(self, option)!r}; expected {expected}"
            )

    def outputs(self, num_classes: int) -> int:
        """Say how many outputs the tokens' head has in a model of ``num_classes``; 0 where they have none."""
        if self.role is Role.REGISTER:
            return 0
        return num_classes if self.classes is None else self.classes

    def to_dict(self) -> dict[str, Any]:
        """Give the spec as plain values, ready for JSON."""
        return {**asdict(self), "role": self.role.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TokenSpec:
        """Build a spec from plain values, as `to_dict` gives them; what is left out has its default."""
        if not isinstance(values, Mapping):
            raise InvalidOption(f"a token spec is written as a dict with a name and a role; got {values!r}")
        known = {field.name for field in fields(cls)}
        wrong = sorted(set(values) - known)
        missing = sorted({"name", "role"} - set(values))
        if wrong or missing:
            raise InvalidOption(
                f"a token spec has name and role, and maybe {', '.join(sorted(known - {'name', 'role'}))}; "
                f"missing here: {', '.join(missing) or 'nothing'}; not known: {', '.join(map(str, wrong)) or 'nothing'}"
            )
        return cls(**values)


def check_specs(specs: Iterable[TokenSpec]) -> tuple[TokenSpec, ...]:
    """Check that specs go together, and give them as a tuple."""
    specs = tuple(specs)
    for spec in specs:
        if not isinstance(spec, TokenSpec):
            raise InvalidOption(f"special tokens are TokenSpec objects; got {spec!r}")
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidOption(
            f"token names must differ; given more than once: {', '.join(twice)}. Several tokens that share a role, "
            "a head and a name are one TokenSpec with count=..."
        )
    distilled = [spec for spec in specs if spec.role is Role.DISTILLATION]
    if len(distilled) > 1:
        raise InvalidOption(
            f"a model has at most one distillation token; got {len(distilled)} "
            f"({', '.join(spec.name for spec in distilled)}). Further teachers are task tokens with a head each"
        )
    return specs


def _role(role: Any) -> Role:
    special = [member.value for member in Role if member is not Role.PATCH]
    if role not in special:
        raise InvalidOption(f"a special token is {', '.join(special[:-1])} or {special[-1]}; got the role {role!r}")
    return Role(role)


def _check_name(name: Any) -> None:
    legal = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
    if not legal:
        raise InvalidOption(
            f"a token's name is a Python name and no keyword, such as cls, for it becomes part of its parameters' "
            f"names; got {name!r}"
        )
    if name in _TAKEN:
        raise InvalidOption(
            f"{name!r} cannot name a token: torch's containers use it themselves; try {name + '_token'!r}"
        )


def _whole(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
