"""transformers: the encoder of ViT-MAE on whole images. Masked patches are no tokens, so that the rest is no grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter
from vitrail.adapters.named_block import NamedBlock
from vitrail.adapters.transformers.trunk import MODELS, TransformersEntryPoint
from vitrail.adapters.transformers.vit import VIT_NAMES, VIT_NESTED_NAMES, VitTrunk
from vitrail.data.spec import MEAN, STD
from vitrail.errors import UnsupportedInput, UnsupportedModel

_MODULE = f"{MODELS}.vit_mae.modeling_vit_mae"
_LAYER = f"{_MODULE}.ViTMAELayer"
_MASKED = "leaves patches out, so that its tokens are no grid; set model.config.mask_ratio = 0 to encode whole images"


class MaeEntryPoint(TransformersEntryPoint):
    """Entry point of ViT-MAE, which orders patches by noise: without noise of the caller, they stay in order."""

    def forward(self: Any, pixel_values: Tensor, noise: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if self.config.mask_ratio:
            raise UnsupportedInput(f"config.mask_ratio={self.config.mask_ratio} {_MASKED}")
        patches = self._vitrail_adapter.layout(self, tuple(pixel_values.shape[2:])).num_patches
        if noise is None:
            noise = in_order(pixel_values, patches)
        elif not torch.compiler.is_compiling() and bool((noise.diff(dim=1) < 0).any()):
            raise UnsupportedInput(
                "noise: it puts patches in another order, in which they are no grid; leave it out, or remove the "
                "merging or the added tokens"
            )
        if args:
            kwargs["interpolate_pos_encoding"] = args[0]
        return super().forward(pixel_values, noise=noise, **kwargs)


def in_order(images: Tensor, patches: int) -> Tensor:
    """Return the noise (B, P) that leaves patches in order."""
    return torch.arange(patches, dtype=torch.float32, device=images.device).expand(images.shape[0], -1)


class MaeTrunk(VitTrunk):
    """ViT-MAE without its decoder: a class token, and ImageNet's statistics."""

    block_classes: Mapping[type | str, BlockAdapter] = {_LAYER: NamedBlock(VIT_NAMES)}
    nested_classes: Mapping[type | str, BlockAdapter] = {_LAYER: NamedBlock(VIT_NESTED_NAMES)}
    mean, std = MEAN, STD

    def check(self, trunk: Any) -> None:
        if trunk.config.mask_ratio:
            raise UnsupportedModel(f"this ViT-MAE (config.mask_ratio={trunk.config.mask_ratio}) {_MASKED}")

    def entry_points(self) -> type:
        return MaeEntryPoint

    def image_module(self, trunk: Any) -> nn.Module:
        embeddings: nn.Module = trunk.embeddings
        return embeddings

    def read_images(
        self, trunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[int, ...], dict[str, Any] | None]:
        images = args[0] if args else kwargs["pixel_values"]
        size = tuple(images.shape[2:])
        return size, {"pixel_values": images, "noise": in_order(images, self.layout(trunk, size).num_patches)}


TRUNKS: dict[str, TrunkAdapter] = {f"{_MODULE}.ViTMAEModel": MaeTrunk()}
