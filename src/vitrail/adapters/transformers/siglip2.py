"""transformers: the vision tower of SigLIP 2 NaFlex, which takes patches of images of any aspect ratio, padded behind.

The checkpoints of SigLIP 2 with a fixed resolution are models of class ``SiglipVisionModel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters.base import TrunkAdapter
from vitrail.adapters.forward_pass import EntryPoint, Grid, open_pass
from vitrail.adapters.named_block import NamedBlock
from vitrail.adapters.transformers.clip import LAYER_NAMES, SiglipTrunk
from vitrail.adapters.transformers.trunk import MODELS, refuse_attentions
from vitrail.errors import UnsupportedInput
from vitrail.tokens import TokenLayout

_MODULE = f"{MODELS}.siglip2.modeling_siglip2"
_ARGUMENTS = ("pixel_values", "pixel_attention_mask", "spatial_shapes")


class NaflexEntryPoint(EntryPoint):
    """Entry point of a tower that takes patches (B, N, pixels), which of them are there, and the grid of each image."""

    def forward(
        self: Any,
        pixel_values: Tensor,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        refuse_attentions(self.config, kwargs)
        size: int = self.config.patch_size
        expose = bool(kwargs.get("output_hidden_states", getattr(self.config, "output_hidden_states", False)))
        if spatial_shapes is None:  # images; their grid follows from their shape
            options: dict[str, Any] = {"inputs": pixel_values}
            pixel_values, spatial_shapes = cut(pixel_values, size)
            layout = self._vitrail_adapter.layout(self, tuple(options["inputs"].shape[2:]))
        else:
            grids = tuple((1, height, width) for height, width in spatial_shapes.tolist())
            check_mask(pixel_attention_mask, grids, pixel_values)
            layout, options = TokenLayout.of(grid=(1, 1, pixel_values.shape[1])), {"grids": grids}
            if len(set(grids)) == 1 and prod(grids[0]) == pixel_values.shape[1]:
                layout, options = (
                    TokenLayout.of(grid=grids[0]),
                    {"inputs": partial(joined, pixel_values, grids[0], size)},
                )
        with open_pass(self, layout, expose=expose, unmasked=True, **options):
            return super().forward(pixel_values, pixel_attention_mask, spatial_shapes, **kwargs)  # type: ignore[misc]


class NaflexTrunk(SiglipTrunk):
    """SigLIP 2 NaFlex's vision tower: patches alone, at most as many as it was made for, and attention pooling."""

    block_classes = {f"{_MODULE}.Siglip2EncoderLayer": NamedBlock(LAYER_NAMES)}  # noqa: RUF012

    def own_size(self, trunk: Any) -> tuple[int, ...]:
        """Return the size of the square image with the number of patches that the model was made for."""
        side = isqrt(trunk.config.num_patches) * trunk.config.patch_size
        return side, side

    def entry_points(self) -> type:
        return NaflexEntryPoint

    def image_module(self, trunk: nn.Module) -> nn.Module:
        return trunk

    def image_model(self, model: nn.Module, trunk: nn.Module) -> nn.Module:
        if isinstance(model, NaflexImages):
            return model
        return NaflexImages(super().image_model(model, trunk), trunk)

    def read_images(
        self, trunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[int, ...], dict[str, Any] | None]:
        given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        pixels, shapes, size = given["pixel_values"], given.get("spatial_shapes"), trunk.config.patch_size
        if shapes is None:
            patches, shapes = cut(pixels, size)
            changed = {"pixel_values": patches, "pixel_attention_mask": None, "spatial_shapes": shapes}
            return tuple(pixels.shape[2:]), changed
        grids = {(height, width) for height, width in shapes.tolist()}
        if len(grids) != 1 or prod(one := grids.pop()) != pixels.shape[1]:
            raise UnsupportedInput(
                f"a recording holds images of one patch grid, without padding; got {shapes.tolist()} in "
                f"{pixels.shape[1]} patches. Record them separately, or pass images of one size"
            )
        return (one[0] * size, one[1] * size), None


class NaflexImages(nn.Module):
    """A model of NaFlex, called with images (B, C, H, W) instead of patches; its attributes are the model's."""

    def __init__(self, model: nn.Module, trunk: Any) -> None:
        super().__init__()
        self.model = model
        self.size: int = trunk.config.patch_size
        self.train(model.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(self.model, name)

    def forward(self, images: Tensor) -> Any:
        if any(isinstance(part, NaflexEntryPoint) for part in self.model.modules()):
            return self.model(pixel_values=images)  # an exported program has no values of spatial_shapes
        patches, shapes = cut(images, self.size)
        return self.model(pixel_values=patches, pixel_attention_mask=None, spatial_shapes=shapes)


def cut(images: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return images (B, C, H, W) as patches (B, N, pixels), channels last, and the grid (B, 2) of each image."""
    if images.dim() != 4:
        raise UnsupportedInput(
            "NaFlex takes patches (B, N, pixels) with spatial_shapes, the grid of each image, as its processor makes "
            f"them, or images (B, C, H, W); got {tuple(images.shape)} without spatial_shapes"
        )
    rows, columns = images.shape[2] // size, images.shape[3] // size
    cells = images[:, :, : rows * size, : columns * size].unflatten(3, (columns, size)).unflatten(2, (rows, size))
    shapes = torch.tensor([[rows, columns]], device=images.device).expand(len(images), -1)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(len(images), rows * columns, -1), shapes


def joined(patches: Tensor, grid: Grid, size: int) -> Tensor:
    """Return patches (B, N, pixels) of one grid as images (B, C, H, W)."""
    cells = patches.unflatten(2, (size, size, -1)).unflatten(1, grid[1:])
    return cells.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def check_mask(mask: Tensor | None, grids: Sequence[Grid], patches: Tensor) -> None:
    """Raise if a mask does not show the patches of each grid, in front."""
    if len(grids) != len(patches) or any(not 0 < prod(grid) <= patches.shape[1] for grid in grids):
        raise UnsupportedInput(
            f"spatial_shapes holds the grid of each image, with at most as many patches as there are; got "
            f"{[grid[1:] for grid in grids]} for {len(patches)} images of {patches.shape[1]} patches"
        )
    counts = torch.tensor([[prod(grid)] for grid in grids], device=patches.device)
    present = torch.arange(patches.shape[1], device=patches.device) < counts
    if not torch.equal(present, torch.ones_like(present) if mask is None else mask.to(present)):
        raise UnsupportedInput(
            "pixel_attention_mask does not agree with spatial_shapes: the patches of each image stand in front and "
            "padding behind them, as the processor makes them"
        )


TRUNKS: dict[str, TrunkAdapter] = {f"{_MODULE}.Siglip2VisionModel": NaflexTrunk()}
