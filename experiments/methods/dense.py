"""Segmentation and boxes on Oxford-IIIT Pet from frozen features, restored to full length after merging."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.common.datasets import Data, pets, trimaps_of
from experiments.common.results import pack
from experiments.common.shapes import SHAPES, render_images
from experiments.methods.measure import GROUP, UNMERGED, Row, Rows, reason, row_key
from experiments.methods.subjects import Size, Subject, read_inputs, shuffled
from experiments.methods.variants import FITTED, Budget, Variant, flops_of, ordered, quiet
from vitrail.adapters import find
from vitrail.analysis.discovery import iou, lost_batch, suggest_biases, sweep_lost
from vitrail.analysis.downstream.boundary import boundary_scores
from vitrail.analysis.downstream.decoder import fit_decoder
from vitrail.analysis.probes.linear import LinearClassifier, fit_classifier
from vitrail.data import Arrays, open_dataset
from vitrail.heads import DecoderHead
from vitrail.tokens import TokenLayout

DENSE = "dense.jsonl"
SIDE = 160
"""Pixels of masks and boxes."""

SHARES = (0.85, 0.6, 0.4)
TOLERANCE = 2
"""Tolerance of boundaries in pixels: 0.008 of the diagonal, rounded up."""

EPOCHS = 20
"""Passes of the decoder over the training images."""

FIT_STEPS = 100
"""Training steps of the restorer by attention."""

SWEPT = 200
"""Training images on which LOST's bias is chosen, for the unmerged model."""

MAX_PATCHES = 50_000


@dataclass(frozen=True)
class DenseData:
    """Images with the mask of their object (N, S, S)."""

    data: Data
    train_masks: Callable[[], Tensor]
    masks: Callable[[], Tensor]


def pets_with_masks() -> DenseData:
    """Open Pets with the masks of both parts."""
    return DenseData(pets(), lambda: trimaps_of("train", SIDE), lambda: trimaps_of("test", SIDE))


@cache
def reduced_masks() -> DenseData:
    """Render a few images of shapes with their masks."""
    drawn = [render_images(count, side=32, seed=seed) for seed, count in enumerate((24, 16))]
    data = Data(*(open_dataset(Arrays(one.images, {"shape": one.shape}, {"shape": SHAPES})) for one in drawn))
    return DenseData(data, drawn[0].float_masks, drawn[1].float_masks)


@dataclass
class Heads:
    """A linear head and a decoder on the patch tokens of the unmerged model, and LOST's bias for it."""

    linear: LinearClassifier
    decoder: DecoderHead
    bias: float
    grid: tuple[int, int]

    @property
    def nearest(self) -> int:
        """Number of patches that LOST grows an object from: an eighth of them."""
        return max(4, self.grid[0] * self.grid[1] // 8)

    @torch.no_grad()
    def masks(self, tokens: Tensor, size: tuple[int, int]) -> dict[str, Tensor]:
        """Return the predicted masks (N, H, W) of both heads."""
        layout = TokenLayout((), (1, *self.grid))
        found: dict[str, list[Tensor]] = {"linear": [], "decoder": []}
        for part in tokens.split(256):
            maps = self.linear.scores(part).transpose(1, 2).unflatten(2, self.grid)
            found["linear"].append(F.interpolate(maps, size=size, mode="bilinear").argmax(1) == 1)
            found["decoder"].append(self.decoder(part, layout, size).argmax(1) == 1)
        return {name: torch.cat(parts) for name, parts in found.items()}


@torch.inference_mode()
def patch_tokens(model: nn.Module, inputs: Tensor, batch: int) -> Tensor:
    """Return the patch tokens after the last block (N, P, D), restored to full length if the model is merged."""
    found = find(model)
    patches = found.adapter.layout(found.trunk).patches
    kept: list[Tensor] = []

    def keep(module: nn.Module, arguments: object, output: Tensor) -> None:
        kept.append(output[:, patches].float())

    hook = found.blocks[-1].register_forward_hook(keep)
    try:
        for part in inputs.split(batch):
            model(part)
    finally:
        hook.remove()
    return torch.cat(kept)


def fit_heads(tokens: Tensor, masks: Tensor, grid: tuple[int, int], epochs: int = EPOCHS) -> Heads:
    """Fit both heads on training images, and choose LOST's bias on some of them."""
    covered = (F.adaptive_avg_pool2d(masks[:, None], grid)[:, 0].flatten(1) > 0.5).long()
    image = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(covered).flatten()
    chosen = shuffled(image.numel(), MAX_PATCHES).to(tokens.device)
    linear = fit_classifier(
        tokens.flatten(0, 1)[chosen], covered.flatten()[chosen], groups=image[chosen], penalties=(1e-3,)
    )
    decoder = fit_decoder(tokens, masks > 0.5, grid, classes=2, epochs=epochs)
    heads = Heads(linear, decoder, 0.0, grid)
    few, patch = tokens[:SWEPT].cpu(), (masks.shape[1] // grid[0], masks.shape[2] // grid[1])
    boxes = [None if box is None else box[None] for box in boxes_of(masks[:SWEPT] > 0.5)]
    swept = sweep_lost(few, [grid] * len(few), boxes, biases=suggest_biases(few), patch=patch, k=heads.nearest)
    return replace(heads, bias=swept.best_bias)


def boxes_of(masks: Tensor) -> list[Tensor | None]:
    """Return the box around each mask (N, S, S) as x0, y0, x1, y1; None for empty masks."""
    found: list[Tensor | None] = []
    for rows, columns in zip(masks.any(2).cpu(), masks.any(1).cpu(), strict=True):
        y, x = rows.nonzero().flatten(), columns.nonzero().flatten()
        found.append(torch.stack([x[0], y[0], x[-1] + 1, y[-1] + 1]).double() if len(x) else None)
    return found


def score(tokens: Tensor, masks: Tensor, heads: Heads) -> Row:
    """Return the scores of both heads, and the shares of boxes found by the linear head and by LOST (CorLoc)."""
    size, true = (masks.shape[1], masks.shape[2]), masks > 0.5
    row: Row = {"count": len(masks)}
    found = heads.masks(tokens, size)
    for name, predicted in found.items():
        row |= segmentation_scores(predicted, true, "" if name == "linear" else f"{name}_")
    patch = (size[0] // heads.grid[0], size[1] // heads.grid[1])
    grown = lost_batch(tokens, heads.grid, k=heads.nearest, bias=heads.bias)
    truth = boxes_of(true)
    hits = [_hit(box, other) for box, other in zip(boxes_of(found["linear"]), truth, strict=True)]
    lost = [_hit(torch.tensor(one.pixels(patch)), other) for one, other in zip(grown, truth, strict=True)]
    return row | {
        "box_recall": sum(hits) / len(hits), "corloc": sum(lost) / len(lost), "boxes": pack(hits), "lost": pack(lost),
    }  # fmt: skip


def segmentation_scores(found: Tensor, true: Tensor, prefix: str) -> Row:
    """Return mIoU of object and background and the boundary F-score, with means over groups of images for intervals."""
    pairs = [(found, true), (~found, ~true)]
    overlap, union = (
        torch.stack([operation(a, b).flatten(1).sum(1) for a, b in pairs], 1).double()
        for operation in (torch.logical_and, torch.logical_or)
    )
    by_image = (overlap / union.clamp(min=1)).mean(1)
    boundaries = torch.cat(
        [
            boundary_scores(one, other, tolerance=TOLERANCE).f_score
            for one, other in zip(found.split(256), true.split(256), strict=True)
        ]
    )
    return {
        f"{prefix}miou": float((overlap.sum(0) / union.sum(0)).mean()),
        f"{prefix}image_miou": float(by_image.mean()),
        f"{prefix}boundary": float(boundaries.mean()),
        f"{prefix}miou_groups": _grouped(by_image),
        f"{prefix}boundary_groups": _grouped(boundaries),
    }


def _grouped(values: Tensor) -> list[float]:
    whole = len(values) // GROUP * GROUP
    groups = values[:whole].view(-1, GROUP).mean(1) if whole else values
    return [round(value, 4) for value in groups.tolist()]


def _hit(box: Tensor | None, truth: Tensor | None) -> bool:
    return box is not None and truth is not None and bool(iou(box, truth[None])[0] >= 0.5)


def dense_subject(subject: Subject, variants: Sequence[Variant], size: Size, rows: Rows, until: float) -> Iterator[str]:
    """Measure every variant on Pets with heads that are fitted to the unmerged model. Yield one line for each."""
    source = reduced_masks() if size.reduced else pets_with_masks()
    grid = find(subject.model).adapter.layout(find(subject.model).trunk).grid[1:]
    inputs, masks, training, training_masks = _inputs(subject, source, size)
    tokens = patch_tokens(subject.model, training, size.batch)
    heads = fit_heads(tokens, training_masks, (grid[0], grid[1]), 2 if size.reduced else EPOCHS)
    base = {"model": subject.kind, "seed": subject.seed}
    known, full = rows.known(), subject.gflops
    key = row_key(subject.kind, subject.seed, UNMERGED, 1)
    if key not in known:
        row = score(patch_tokens(subject.model, inputs, size.batch), masks, heads)
        rows.add({**base, "key": key, "variant": UNMERGED, "share": 1.0, "gflops": full, **row})
    shares = size.shares[-1:] if size.reduced else SHARES
    for variant, share in ordered(variants, lambda _: shares):
        key = row_key(subject.kind, subject.seed, variant.name, share)
        if key in known:
            continue
        if time.monotonic() > until:
            yield "out of time"
            return
        row = {**base, "key": key, "variant": variant.name, "share": share}
        try:
            budget = Budget(share * full, training[: size.tuning], size.batch)
            with quiet(), budget.merge(subject.model, variant) as merging:
                if variant.restore in FITTED:
                    merging.calibrate_restorer(training, steps=2 if size.reduced else FIT_STEPS, limit=size.batch)
                torch.manual_seed(0)
                row |= score(patch_tokens(subject.model, inputs, size.batch), masks, heads)
                flops = flops_of(subject.model, merging, inputs, size.batch)
                row |= {"gflops": sum(flops) / len(flops) / 1e9, "config": merging.config}
        except Exception as error:  # a failed method must not stop the others
            row["skipped"] = reason(error)
        rows.add(row)
        yield f"{key}  {row.get('skipped') or _described(row)}"


def _described(row: Row) -> str:
    names = ("miou", "decoder_miou", "decoder_boundary", "box_recall", "corloc")
    return "  ".join(f"{name} {row[name]:.3f}" for name in names)


def _inputs(subject: Subject, source: DenseData, size: Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return validation inputs and masks, and those of the training images."""
    found = find(subject.model)
    spec = found.adapter.input_spec(found.trunk)
    results = []
    for data, masks in ((source.data.validation, source.masks), (source.data.train, source.train_masks)):
        inputs, _ = read_inputs(subject.model, spec, data, size.dense)
        results += [inputs, masks()[shuffled(len(data), size.dense)].to(inputs.device)]
    return results[0], results[1], results[2], results[3]
