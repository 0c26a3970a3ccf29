"""Whether a file does what the model does: the same outputs, and as few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vitrail.errors import ExportError
from vitrail.export.base import Comparison, Written, first_line

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest error that is allowed, relative to the largest value of an output, by precision."""

DRAWS = 5
"""How many batches are drawn before a merged model's file is given up: rounding may decide a near-tie."""

Run = Callable[[Tensor], dict[str, Tensor]]


def compare(
    wanted: Run, written: Written, shape: Sequence[int], dtype: torch.dtype, tolerance: float, draws: int
) -> Comparison:
    """Compare a file with the model on random pictures, a batch of ``shape``.

    Merging is a choice between pairs. Two programs that round differently may choose differently where two pairs are
    as good as equal, which is no fault of either; so a batch in which that happens is drawn again. A program that is
    wrong is wrong for every batch.
    """
    generator = torch.Generator().manual_seed(shape[0])
    least: Comparison | None = None
    for draw in range(1, draws + 1):
        images = torch.randn(tuple(shape), generator=generator).to(dtype)
        here = _difference(wanted(images), _run(written, images), draw)
        if here.max_rel <= tolerance:
            return here
        if least is None or here.max_rel < least.max_rel:
            least = here
    assert least is not None
    raise ExportError(
        f"the exported model does not give what the model gives: for {shape[0]} random pictures at a time the largest "
        f"difference is {least.max_abs:.3g}, {least.max_rel:.3g} of the largest value, and {tolerance:g} is allowed. "
        "Nothing was written"
    )


def _run(written: Written, images: Tensor) -> dict[str, Tensor]:
    try:
        return written.run(images)
    except Exception as error:
        raise ExportError(
            f"the exported model fails for {images.shape[0]} pictures at a time ({first_line(error)}); batch=N exports "
            "it for N pictures"
        ) from error


def _difference(wanted: dict[str, Tensor], got: dict[str, Tensor], draw: int) -> Comparison:
    batch, max_abs, max_rel = 0, 0.0, 0.0
    if list(wanted) != list(got):
        raise ExportError(f"the exported model gives {', '.join(got)}; expected {', '.join(wanted)}")
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
        max_abs = max(max_abs, _finite(difference))
        max_rel = max(max_rel, _finite(difference / scale))
    return Comparison(batch, max_abs, max_rel, draw)


def _finite(values: Tensor) -> float:
    """Give the largest value; what is not a number is infinitely wrong."""
    return float(values.nan_to_num(torch.inf).max())


def count_tokens(written: Written, feeds: Sequence[Sequence[str]]) -> list[int]:
    """Read from a file how many tokens leave each block: the length of what its MLP computes.

    Args:
        written: the file.
        feeds: for each block, the names of the modules that feed.
    """
    lengths: list[set[int | None]] = [set() for _ in feeds]
    for scopes, shape in written.values():
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
                f"the exported model does not say how many tokens leave block {block} (found: "
                f"{', '.join(map(str, found)) or 'nothing'}), so it cannot be known whether it merges. Nothing was "
                "written"
            )
        counts.append(length)
    return counts
