"""Stages: pruning in three blocks, after each quarter of the depth."""

from __future__ import annotations

from vitrail.errors import InvalidOption


def stage_blocks(depth: int) -> tuple[int, ...]:
    """Return the indices of the blocks that prune: the fourth, seventh and tenth of 12.

    >>> stage_blocks(12)
    (3, 6, 9)
    """
    return tuple(sorted({depth * quarter // 4 for quarter in (1, 2, 3)}))


def stage_shares(depth: int, rate: float) -> list[float]:
    """Return the share of each layer if every stage keeps the same ``rate`` of the tokens that it receives."""
    shares, kept = [0.0] * depth, 1.0
    for block in stage_blocks(depth):
        shares[block] = kept * (1 - rate)
        kept *= rate
    return shares


def check_rate(rate: object) -> float:
    """Return a valid keep rate; raise ``InvalidOption`` for others."""
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1:
        raise InvalidOption(
            f"rate is the share of tokens that each of three stages keeps, between 0 and 1, such as 0.7; got {rate!r}"
        )
    return float(rate)
