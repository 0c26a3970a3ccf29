"""Verification: an exported file must have the model's outputs and its number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import ExportError
from vitrail.export._trace import explained
from vitrail.export.formats import OnnxFile, Pt2File

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
    run: Callable[[Tensor], dict[str, Tensor]],
    file: OnnxFile | Pt2File,
    shape: Sequence[int],
    dtype: torch.dtype,
    tolerance: float,
    draws: int,
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
        with explained(f"the exported model fails for batch size {shape[0]}", "; try a fixed batch size with batch=N"):
            got = file.run(images)
        found.append(_difference(wanted, got, draw))
        if found[-1].max_rel <= tolerance:
            return found[-1]
    best = min(found, key=lambda comparison: comparison.max_rel)
    raise ExportError(
        f"the exported outputs differ from the model's: for batch size {shape[0]} by {best.max_abs:.3g}, "
        f"{best.max_rel:.3g} of the largest value; allowed is {tolerance:g}. Nothing was written"
    )


def _difference(wanted: dict[str, Tensor], got: dict[str, Tensor], draw: int) -> Comparison:
    if list(wanted) != list(got):
        raise ExportError(f"the exported model returns {', '.join(got)}; expected {', '.join(wanted)}")
    batch, max_abs, max_rel = 0, 0.0, 0.0
    for name, want in wanted.items():
        have = got[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            raise ExportError(
                f"the exported model's {name} is {have.dtype} of shape {tuple(have.shape)}; expected {want.dtype} of "
                f"shape {tuple(want.shape)}"
            )
        batch = want.shape[0] if want.dim() else 1
        want, have = want.double().reshape(batch, -1), have.double().reshape(batch, -1)
        if want.numel():
            difference = (want - have).abs().amax(1).nan_to_num(torch.inf)
            scale = want.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
            max_abs = max(max_abs, float(difference.max()))
            max_rel = max(max_rel, float((difference / scale).nan_to_num(torch.inf).max()))
    return Comparison(batch, max_abs, max_rel, draw)


def check_tokens(
    file: OnnxFile | Pt2File,
    readers: Sequence[Sequence[str]],
    expected: Sequence[set[int]],
    beside: Collection[int] = (),
) -> None:
    """Raise if other numbers of tokens leave the blocks of a file than those expected.

    Args:
        readers: for each block, names of modules that run on the tokens that leave it; none for a block that is not
            checked.
        expected: for each block, the lengths of its batches of tokens; none for an unmerged block.
        beside: lengths of batches of added tokens, which run through the same modules where something reads them.
    """
    found: list[set[int | None]] = [set() for _ in readers]
    for scopes, shape in file.values():
        for lengths, names in zip(found, readers, strict=True):
            if len(shape) == 3 and any(f"{scope}.".startswith(f"{name}.") for scope in scopes for name in names):
                lengths.add(shape[1])
    for block, (lengths, wanted) in enumerate(zip(found, expected, strict=True)):
        if not wanted or not readers[block]:
            continue
        if not lengths or None in lengths:
            raise ExportError(
                f"cannot read from the exported model how many tokens leave block {block} (found: "
                f"{', '.join(map(str, lengths)) or 'nothing'}), so its merging cannot be verified. Nothing was written"
            )
        if not wanted <= lengths <= wanted.union(beside):
            raise ExportError(
                f"the exported model does not merge like the model: {_listed(lengths)} tokens leave block {block}, "
                f"expected {_listed(wanted)}. Nothing was written"
            )


def _listed(lengths: Iterable[int | None]) -> str:
    return ", ".join(map(str, sorted(filter(None, lengths))))
