"""Segmentation of frozen features by a small convolutional decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail._checks import check_int
from vitrail.errors import UnsupportedInput
from vitrail.heads import DecoderHead
from vitrail.tokens import TokenLayout

RATE, DECAY = 2e-3, 1e-2
"""Peak learning rate and weight decay of AdamW."""


def fit_decoder(
    features: Tensor,
    masks: Tensor,
    grid: tuple[int, int],
    *,
    classes: int,
    hidden: int = 64,
    epochs: int = 20,
    batch_size: int = 32,
    ignore: int = 255,
    seed: int = 0,
) -> DecoderHead:
    """Fit a `vitrail.heads.DecoderHead` to patch features (B, P, D) and return it in evaluation mode.

    Cross-entropy of every pixel, AdamW with a cosine schedule, random order and horizontal flips of features and masks.
    The same inputs give the same decoder on the same device, up to the order of sums on a GPU. Score it with
    ``decoder(features, TokenLayout((), (1, h, w)), size)``.

    Args:
        features: patch features of the training images, frozen.
        masks: (B, H, W) class of each pixel, integers from 0.
        grid: rows and columns of patches.
        classes: number of classes.
        hidden: channels of the decoder.
        epochs: passes over the images.
        batch_size: images per step.
        ignore: pixels of this value do not count.
        seed: seed of the weights, the order and the flips.
    """
    if features.ndim != 3 or features.shape[1] != grid[0] * grid[1] or len(masks) != len(features) or masks.ndim != 3:
        raise UnsupportedInput(
            f"features of shape {tuple(features.shape)} and masks {tuple(masks.shape)} do not match a grid {grid}; "
            "expected (B, P, D) and (B, H, W)"
        )
    check_int("epochs", epochs)
    check_int("batch_size", batch_size)
    valid = masks[masks != ignore]
    if not len(valid) or int(valid.min()) < 0 or int(valid.max()) >= classes:
        raise UnsupportedInput(f"the masks need values from 0 to {classes - 1}, or {ignore} for pixels to ignore")
    device, layout = features.device, TokenLayout((), (1, *grid))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        decoder = DecoderHead(features.shape[2], classes, hidden=hidden).to(device)
    optimizer = torch.optim.AdamW(decoder.parameters(), RATE, weight_decay=DECAY)
    steps = epochs * -(-len(features) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    source = torch.Generator().manual_seed(seed)
    with torch.enable_grad():
        for _ in range(epochs):
            for rows in torch.randperm(len(features), generator=source).split(batch_size):
                rows = rows.to(device)
                x, truth = features[rows].to(decoder.project.weight.dtype), masks[rows].to(device).long()
                if torch.rand((), generator=source) < 0.5:
                    x, truth = x.unflatten(1, grid).flip(2).flatten(1, 2), truth.flip(2)
                logits = decoder(x, layout, (truth.shape[1], truth.shape[2]))
                loss = F.cross_entropy(logits, truth, ignore_index=ignore)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                schedule.step()
    return decoder.eval().requires_grad_(False)
