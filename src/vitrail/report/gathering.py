"""Several processes, one report: each looks at its part, and the first one gets everything.

What is summed is whole numbers or exact, and what is kept goes by the pictures' numbers, so that the report does not
depend on how many processes there were (but for rounding, where a model gives slightly different numbers for batches
of another size).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from vitrail._distributed import gathered, ranks
from vitrail.errors import ImageError, UnsupportedInput, VitrailError
from vitrail.report.looking import Evidence

NOTHING = "there was no picture to inspect: give one picture or more that can be read"


def gather(evidence: Evidence, error: Exception | None) -> Evidence | None:
    """Join what all processes saw, for the first one; the others get None.

    A process that failed tells the others before they wait for it, so that all of them raise. A part without one
    readable picture is no failure as long as another process has some.
    """
    rank, world = ranks()
    if world == 1:
        if error is not None:
            raise error
        return _not_empty(evidence)
    empty = isinstance(error, ImageError) and evidence.seen == 0
    mine = None if error is None or empty else f"{type(error).__name__}: {error}"
    states = gathered((mine, evidence.seen))
    failed = [(other, what) for other, (what, _) in enumerate(states) if what is not None]
    if error is not None and not empty:
        raise error
    if failed:
        raise UnsupportedInput(f"process {failed[0][0]} of {world} could not inspect its part. {failed[0][1]}")
    if not sum(seen for _, seen in states):
        raise error if error is not None else UnsupportedInput(NOTHING)
    parts: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(evidence, parts)
    if parts is None:
        return None
    for other in parts[1:]:
        evidence.join(other)
    return _not_empty(evidence)


def _not_empty(evidence: Evidence) -> Evidence:
    if evidence.seen == 0:
        raise _nothing(evidence)
    evidence.pictures = dict(sorted(evidence.pictures.items()))
    evidence.skipped.sort()
    return evidence


def _nothing(evidence: Evidence) -> VitrailError:
    return ImageError(NOTHING) if evidence.skipped else UnsupportedInput(NOTHING)
