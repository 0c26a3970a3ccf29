"""Verification: an exported file must have the model's outputs and its number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import ExportError
from vitrail.export._trace import first_line
from vitrail.export.formats import ExportedFile

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest allowed error by dtype, relative to the largest value of an output."""

DRAWS = 5
"""Batches to try before rejecting a merged model's file: rounding may decide a near-tie."""

Run = Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Comparison:
    """Distance of a file's outputs from the model's, on random images.

    Attributes:
        batch: batch size.
        max_abs: largest difference.
        max_rel: largest difference relative to the largest value of the same output for the same image.
        draws: batches drawn until one agreed; more than one means that rounding decided a near-tie between two pairs
            of tokens.
    """

    batch: int
    max_abs: float
    max_rel: float
    draws: int = 1


def compare(
    run: Run, file: ExportedFile, shape: Sequence[int], dtype: torch.dtype, tolerance: float, draws: int
) -> Comparison:
    """Compare a file with the model on random batches of ``shape``; raise if none of ``draws`` agrees.

    Merging chooses between pairs of tokens. Where two pairs are nearly equally similar, programs that round
    differently may choose differently and both be right, so such a batch is drawn again. A wrong program is wrong for
    every batch.
    """
    generator = torch.Generator().manual_seed(shape[0])
    found = []
    for draw in range(1, draws + 1):
        images = torch.randn(tuple(shape), generator=generator).to(dtype)
        wanted = run(images)
        try:
            got = file.run(images)
        except Exception as error:
            raise ExportError(
                f"the exported model fails for batch size {shape[0]} ({first_line(error)}); try a fixed batch size "
                "with batch=N"
            ) from error
        found.append(_difference(wanted, got, draw))
        if found[-1].max_rel <= tolerance:
            return found[-1]
    best = min(found, key=lambda comparison: comparison.max_rel)
    raise ExportError(
        f"the exported outputs differ from the model's: for batch size {shape[0]} by {best.max_abs:.3g}, "
        f"{best.max_rel:.3g} of the largest value; allowed is {tolerance:g}. Nothing was written"
    )


def _difference(wanted: dict[str, Tensor], got: dict[str, Tensor], draw: int) -> Comparison:
    batch, max_abs, max_rel = 0, 0.0, 0.0
    if list(wanted) != list(got):
        raise ExportError(f"the exported model returns {', '.join(got)}; expected {', '.join(wanted)}")
    for name, want in wanted.items():
        have = got[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            raise ExportError(
                f"the exported model's {name} is {have.dtype} of shape {tuple(have.shape)}; expected {want.dtype} of "
                f"shape {tuple(want.shape)}"
            )
        batch = want.shape[0] if want.dim() else 1
        want, have = want.double().reshape(batch, -1), have.double().reshape(batch, -1)
        if not want.numel():
            continue
        difference = (want - have).abs().amax(1)
        scale = want.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
        max_abs = max(max_abs, _largest(difference))
        max_rel = max(max_rel, _largest(difference / scale))
    return Comparison(batch, max_abs, max_rel, draw)


def _largest(values: Tensor) -> float:
    """Return the largest value, with NaN as infinity."""
    return float(values.nan_to_num(torch.inf).max())


def count_tokens(file: ExportedFile, feeds: Sequence[Sequence[str]]) -> list[int]:
    """Return the number of tokens that leave each block of a file: the length of what its MLP modules compute."""
    lengths: list[set[int | None]] = [set() for _ in feeds]
    for scopes, shape in file.values():
        if len(shape) != 3:
            continue
        for block, names in enumerate(feeds):
            if any(scope == name or scope.startswith(f"{name}.") for scope in scopes for name in names):
                lengths[block].add(shape[1])
    counts = []
    for block, found in enumerate(lengths):
        length = next(iter(found), None)
        if len(found) != 1 or length is None:
            raise ExportError(
                f"cannot read from the exported model how many tokens leave block {block} (found: "
                f"{', '.join(map(str, found)) or 'nothing'}), so its merging cannot be verified. Nothing was written"
            )
        counts.append(length)
    return counts
