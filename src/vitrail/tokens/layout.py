"""Which index is which token."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod


class Role(enum.StrEnum):
    """What a token is for."""

    CLASS = "class"
    DISTILLATION = "distillation"
    REGISTER = "register"
    TASK = "task"
    PATCH = "patch"


@dataclass(frozen=True)
class TokenSpan:
    """``count`` neighbouring tokens of one role, optionally with a name (the task of a task token)."""

    role: Role
    count: int = 1
    name: str = ""


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
        if any(span.role is Role.PATCH or span.count < 1 for span in self.special):
            raise ValueError(f"special tokens must be other roles than patch, one or more each; got {self.special}")
        if len(self.grid) != 3 or min(self.grid) < 1:
            raise ValueError(f"the grid is (time, height, width), each 1 or more; got {self.grid}")

    @classmethod
    def of(cls, *special: Role | tuple[Role, int], grid: tuple[int, int, int]) -> TokenLayout:
        """Build a layout from roles, or pairs of a role and a count; a count of zero is left out."""
        pairs = [item if isinstance(item, tuple) else (item, 1) for item in special]
        return cls(tuple(TokenSpan(role, count) for role, count in pairs if count), grid)

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
        role = Role(role)
        found = [where for span, where in self.spans() if span.role is role and name in (None, span.name)]
        return found[0] if len(found) == 1 else tuple(index for where in found for index in where)

    def role_of(self, index: int) -> Role:
        """Role of the token at a position."""
        if not -self.num_tokens <= index < self.num_tokens:
            raise IndexError(f"token {index} of a sequence of {self.num_tokens}")
        index %= self.num_tokens
        return next(span.role for span, where in self.spans() if index in where)
