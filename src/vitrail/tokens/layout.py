"""Which index is which token."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from vitrail.errors import InvalidOption

if TYPE_CHECKING:
    from vitrail.tokens.spec import TokenSpec


class Role(enum.StrEnum):
    """What a token is for."""

    CLASS = "class"
    DISTILLATION = "distillation"
    REGISTER = "register"
    TASK = "task"
    PATCH = "patch"


_ROLES = {role.value: role for role in Role}  # PyTorch 2.11 compiles a look-up, and no loop over an enumeration


@dataclass(frozen=True)
class TokenSpan:
    """``count`` neighbouring tokens of one role, optionally with a name (the task of a task token)."""

    role: Role
    count: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.role, Role):
            object.__setattr__(self, "role", as_role(self.role))
        if not _is_whole(self.count) or self.count < 1:
            raise InvalidOption(
                f"a span has a whole number of tokens, 1 or more; got {self.count!r} {self.role} tokens"
            )


@dataclass(frozen=True)
class TokenLayout:
    """The one source of truth for "which index is which token".

    A layout lists the special tokens in front of the patches, in their order, and the patch grid behind them
    as ``(time, height, width)``. Everything that is not a patch is protected: it never merges.

    >>> layout = TokenLayout.of(Role.CLASS, (Role.REGISTER, 4), grid=(1, 14, 14))
    >>> layout.num_tokens, layout.indices(Role.REGISTER), layout.role_of(0)
    (201, range(1, 5), <Role.CLASS: 'class'>)
    """

    special: tuple[TokenSpan, ...]
    grid: tuple[int, int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.special, tuple) or not all(isinstance(span, TokenSpan) for span in self.special):
            raise InvalidOption(
                f"special tokens are a tuple of TokenSpan; got {self.special!r}. TokenLayout.of takes roles, "
                "TokenLayout.from_specs the specs of a model"
            )
        if any(span.role is Role.PATCH for span in self.special):
            raise InvalidOption(f"special tokens are of other roles than patch; got {self.special}")
        if isinstance(self.grid, list):
            object.__setattr__(self, "grid", tuple(self.grid))
        right = isinstance(self.grid, tuple) and len(self.grid) == 3 and all(map(_is_whole, self.grid))
        if not right or min(self.grid) < 1:
            raise InvalidOption(f"the grid is (time, height, width), each 1 or more; got {self.grid!r}")

    @classmethod
    def of(cls, *special: Role | str | tuple[Role | str, int], grid: tuple[int, int, int]) -> TokenLayout:
        """Build a layout from roles, or pairs of a role and a count; a count of zero is left out."""
        pairs = [(item, 1) if isinstance(item, str) else item for item in special]
        wrong = [item for item in pairs if not isinstance(item, tuple) or len(item) != 2]
        if wrong:
            raise InvalidOption(
                f"TokenLayout.of takes roles, or pairs of a role and a count; got {wrong[0]!r}. "
                "TokenLayout.from_specs takes the specs of a model"
            )
        return cls(tuple(TokenSpan(as_role(role), count) for role, count in pairs if count != 0), grid)

    @classmethod
    def from_specs(cls, specs: Iterable[TokenSpec], grid: tuple[int, int, int]) -> TokenLayout:
        """Build the layout of a model with these special tokens: in the order of their specs, then the patches.

        >>> from vitrail import TokenSpec
        >>> TokenLayout.from_specs([TokenSpec("colour", "task", classes=3)], (1, 2, 2)).indices("task", "colour")
        range(0, 1)
        """
        try:
            special = tuple(TokenSpan(spec.role, spec.count, spec.name) for spec in specs)
        except (AttributeError, TypeError) as error:
            raise InvalidOption(f"expected a list of TokenSpec objects; got {specs!r}") from error
        return cls(special, grid)

    def with_grid(self, grid: tuple[int, int, int]) -> TokenLayout:
        """Give the same special tokens with another patch grid."""
        return replace(self, grid=grid)

    @property
    def num_special(self) -> int:
        """How many tokens are not patches."""
        return sum(span.count for span in self.special)

    @property
    def num_patches(self) -> int:
        """How many patches the grid has."""
        return prod(self.grid)

    @property
    def num_tokens(self) -> int:
        """Length of the whole sequence."""
        return self.num_special + self.num_patches

    @property
    def patches(self) -> slice:
        """Where the patches are."""
        return slice(self.num_special, self.num_tokens)

    def spans(self) -> Iterator[tuple[TokenSpan, range]]:
        """Walk over all spans, patches last, each with its positions."""
        start = 0
        for span in (*self.special, TokenSpan(Role.PATCH, self.num_patches)):
            yield span, range(start, start + span.count)
            start += span.count

    def indices(self, role: Role | str, name: str | None = None) -> range | tuple[int, ...]:
        """Positions of a role (and name, where given); empty where the layout has none."""
        role = as_role(role)
        found = [where for span, where in self.spans() if span.role is role and name in (None, span.name)]
        return found[0] if len(found) == 1 else tuple(index for where in found for index in where)

    def role_of(self, index: int) -> Role:
        """Role of the token at a position."""
        if not -self.num_tokens <= index < self.num_tokens:
            raise IndexError(f"token {index} of a sequence of {self.num_tokens}")
        index %= self.num_tokens
        return next(span.role for span, where in self.spans() if index in where)


def as_role(role: Any) -> Role:
    """Give a role that may be written as a word."""
    if isinstance(role, Role):
        return role
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidOption(f"a role is one of {', '.join(_ROLES)}; got {role!r}")
    return _ROLES[role]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
