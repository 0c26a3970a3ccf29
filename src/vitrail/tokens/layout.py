"""Token layout: which index of the sequence is which token."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from vitrail._arguments import fitting
from vitrail._checks import as_tuple, is_int
from vitrail.errors import InvalidOption

if TYPE_CHECKING:
    from vitrail.tokens.spec import TokenSpec


class Role(enum.StrEnum):
    """The purpose of a token."""

    CLASS = "class"
    DISTILLATION = "distillation"
    REGISTER = "register"
    TASK = "task"
    PATCH = "patch"


_ROLES = {role.value: role for role in Role}  # torch.compile traces a lookup, but not a loop over an enumeration


@dataclass(frozen=True)
class TokenSpan:
    """``count`` consecutive tokens of one role, optionally named (the task of a task token)."""

    role: Role
    count: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", as_role(self.role))
        if not _is_length(self.count):
            raise InvalidOption(f"the count of {self.role} tokens in a span is 1 or more; got {self.count!r}")


@dataclass(frozen=True)
class TokenLayout:
    """The single source of truth for "which index is which token".

    A layout is the special tokens, in order, followed by the patch grid ``(time, height, width)``. Special tokens
    never merge.

    >>> layout = TokenLayout.of(Role.CLASS, (Role.REGISTER, 4), grid=(1, 14, 14))
    >>> layout.num_tokens, layout.indices(Role.REGISTER), layout.role_of(0)
    (201, range(1, 5), <Role.CLASS: 'class'>)
    """

    special: tuple[TokenSpan, ...]
    grid: tuple[int, int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.special, tuple) or not all(isinstance(span, TokenSpan) for span in self.special):
            raise InvalidOption(
                f"special tokens must be a tuple of TokenSpan; got {self.special!r}. Use TokenLayout.of for roles, "
                "TokenLayout.from_specs for TokenSpec objects"
            )
        if any(span.role is Role.PATCH for span in self.special):
            raise InvalidOption(f"special tokens cannot have the role patch; got {self.special}")
        if isinstance(self.grid, list):
            object.__setattr__(self, "grid", tuple(self.grid))
        if not isinstance(self.grid, tuple) or len(self.grid) != 3 or not all(map(_is_length, self.grid)):
            raise InvalidOption(f"the grid is (time, height, width), each 1 or more; got {self.grid!r}")

    @classmethod
    def of(cls, *special: Role | str | tuple[Role | str, int], grid: tuple[int, int, int]) -> TokenLayout:
        """Build a layout from roles or (role, count) pairs; counts of zero are skipped."""
        pairs = [(item, 1) if isinstance(item, str) else item for item in special]
        wrong = [item for item in pairs if not isinstance(item, tuple) or len(item) != 2]
        if wrong:
            raise InvalidOption(
                f"TokenLayout.of takes roles or (role, count) pairs; got {wrong[0]!r}. "
                "Use TokenLayout.from_specs for TokenSpec objects"
            )
        return cls(tuple(TokenSpan(as_role(role), count) for role, count in pairs if count != 0), grid)

    @classmethod
    def from_specs(cls, specs: Iterable[TokenSpec], grid: tuple[int, int, int]) -> TokenLayout:
        """Build the layout of a model with these special tokens.

        >>> from vitrail import TokenSpec
        >>> TokenLayout.from_specs([TokenSpec("color", "task", classes=3)], (1, 2, 2)).indices("task", "color")
        range(0, 1)
        """
        try:
            special = tuple(TokenSpan(spec.role, spec.count, spec.name) for spec in specs)
        except (AttributeError, TypeError) as error:
            raise InvalidOption(f"expected a list of TokenSpec objects; got {specs!r}") from error
        return cls(special, grid)

    def with_grid(self, grid: tuple[int, int, int]) -> TokenLayout:
        """Return the same special tokens with another patch grid."""
        return replace(self, grid=grid)

    @property
    def num_special(self) -> int:
        """Number of tokens that are not patches."""
        return sum(span.count for span in self.special)

    @property
    def num_patches(self) -> int:
        """Number of patches in the grid."""
        return prod(self.grid)

    @property
    def num_tokens(self) -> int:
        """Length of the sequence."""
        return self.num_special + self.num_patches

    @property
    def patches(self) -> slice:
        """Slice of the patches."""
        return slice(self.num_special, self.num_tokens)

    def spans(self) -> Iterator[tuple[TokenSpan, range]]:
        """Iterate over all spans with their positions, patches last."""
        start = 0
        for span in (*self.special, TokenSpan(Role.PATCH, self.num_patches)):
            yield span, range(start, start + span.count)
            start += span.count

    def indices(self, role: Role | str, name: str | None = None) -> range | tuple[int, ...]:
        """Return the positions of a role, and of a name if given; empty if there are none."""
        role = as_role(role)
        found = [where for span, where in self.spans() if span.role is role and name in (None, span.name)]
        return found[0] if len(found) == 1 else tuple(index for where in found for index in where)

    def role_of(self, index: int) -> Role:
        """Return the role of the token at a position."""
        if not -self.num_tokens <= index < self.num_tokens:
            raise IndexError(f"token {index} is outside a sequence of {self.num_tokens}")
        index %= self.num_tokens
        return next(span.role for span, where in self.spans() if index in where)

    def find(self, tokens: Any = None) -> tuple[int, ...]:
        """Return the positions of roles and positions, each once; by default those of all special tokens.

        "all" are all tokens.

        >>> TokenLayout.of("class", ("register", 4), grid=(1, 14, 14)).find(["class", -1])
        (0, 200)
        """
        found: list[int] = []
        for token in as_tuple(range(self.num_special) if tokens is None else tokens, str):
            if is_int(token) and -self.num_tokens <= token < self.num_tokens:
                found.append(token % self.num_tokens)
            elif isinstance(token, str) and token in _ROLES:
                found += self.indices(token)
            elif token == "all":
                found += range(self.num_tokens)
            else:
                known = f"roles ({', '.join(_ROLES)}), 'all', or positions below {self.num_tokens}"
                raise InvalidOption(f"tokens are {known}; got {token!r}")
        if not found:
            wanted = "special tokens" if tokens is None else repr(tokens)
            hint = "; name others, such as 'all' or positions (queries= of record)" if tokens is None else ""
            raise InvalidOption(f"no such token: the model has {self.describe()}, but not {wanted}{hint}")
        return tuple(dict.fromkeys(found))

    def describe(self) -> str:
        """Return the number of tokens of each span as text, such as "1 class, 4 register, 196 patch"."""
        return ", ".join(f"{span.count} {span.role.value}" for span, _ in self.spans())


def as_role(role: Any) -> Role:
    """Return a role, which may be given as a string."""
    if isinstance(role, Role):
        return role
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidOption(f"a role is one of {', '.join(_ROLES)}; got {role!r}")
    return _ROLES[role]


@fitting
def span_names(special: Iterable[TokenSpan]) -> tuple[str, ...]:
    """Return display names of spans: the task, or the role, or the name if several spans share the role.

    >>> span_names([TokenSpan(Role.CLASS, 1, "cls"), TokenSpan(Role.REGISTER, 4), TokenSpan(Role.TASK, 1, "color")])
    ('class', 'register', 'color')
    """
    special = tuple(special)
    roles = Counter(span.role for span in special)
    return tuple(
        span.name if span.name and (span.role is Role.TASK or roles[span.role] > 1) else span.role.value
        for span in special
    )


@fitting
def token_names(special: Iterable[TokenSpan]) -> tuple[str, ...]:
    """Return a display name for each token, numbered from 1 if several share a name.

    >>> token_names([TokenSpan(Role.CLASS), TokenSpan(Role.REGISTER, 2)])
    ('class', 'register 1', 'register 2')
    """
    special = tuple(special)
    names = [name for name, span in zip(span_names(special), special, strict=True) for _ in range(span.count)]
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(name if names.count(name) == 1 else f"{name} {seen[name]}")
    return tuple(numbered)


def _is_length(value: Any) -> bool:
    return (is_int(value) or isinstance(value, torch.SymInt)) and bool(value >= 1)
