"""Sums that do not depend on the order, and so not on how data were split."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt


def exact_sum(values: npt.NDArray[np.float64]) -> Fraction:
    """Add up numbers without rounding, so that the order does not matter."""
    total = Fraction(0)
    for part in np.split(values, range(1 << 24, len(values), 1 << 24)):
        mantissa, exponent = np.frexp(part)
        whole = np.ldexp(mantissa, 53).astype(np.int64)
        exponents, group = np.unique(exponent, return_inverse=True)
        # Two halves of at most 27 bits: their float64 sums over 2²⁴ numbers are exact.
        high, low = (np.bincount(group, half.astype(np.float64)) for half in (whole >> 27, whole & ((1 << 27) - 1)))
        for power, upper, lower in zip(exponents.tolist(), high, low, strict=True):
            total += ((int(upper) << 27) + int(lower)) * Fraction(2) ** (power - 53)
    return total
