"""Guarded memory: detects elements that a kernel left unwritten, and writes outside its result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

GUARD = 64
"""Elements on each side of a result; a multiple of what keeps results aligned."""

POISON = -7_777_777


def poison(dtype: torch.dtype) -> float | int:
    """Return a value that no kernel writes: NaN, or an index far out of range."""
    if dtype == torch.uint8:
        return 201
    return math.nan if dtype.is_floating_point else POISON


@contextmanager
def guarded() -> Iterator[None]:
    """Make ``torch.empty`` and ``torch.empty_like`` return poisoned memory between guards inside a ``with`` block.

    Raises ``AssertionError`` at the end where a guard has changed.
    """
    given: list[tuple[Tensor, int]] = []

    def empty(*shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
        count = math.prod(shape)
        whole = torch.full((count + 2 * GUARD,), 77, dtype=dtype, device=device)
        given.append((whole, count))
        return whole[GUARD : GUARD + count].fill_(poison(dtype)).view(shape)

    def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return empty(*tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)

    with mock.patch.multiple(torch, empty=empty, empty_like=empty_like):
        yield
    for whole, count in given:
        assert bool((whole[:GUARD] == 77).all()), "written before the beginning of a result"
        assert bool((whole[GUARD + count :] == 77).all()), "written behind the end of a result"


def surrounded(values: Tensor, axis: int) -> Tensor:
    """Return the same values as a view into memory with NaN before and after them along an axis."""
    shape = list(values.shape)
    shape[axis] += 2
    whole = torch.full(shape, math.nan, dtype=values.dtype, device=values.device)
    inside = whole.narrow(axis, 1, values.shape[axis])
    inside.copy_(values)
    return inside
