"""What timm's models with windows or stages share: Swin, Hiera, MViT and ``VisionTransformerSAM``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from vitrail.adapters.timm.vit import TimmEntryPoints, declared
from vitrail.adapters.windows import WindowedTrunk
from vitrail.data.spec import InputSpec
from vitrail.tokens import TokenLayout


class TimmWindowedTrunk(WindowedTrunk):
    """A model of timm with windows or stages; by default its ``patch_embed`` knows the grid and the input size."""

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        grid = trunk.patch_embed.grid_size if size is None else trunk.patch_embed.dynamic_feat_size(size)
        return TokenLayout.of(grid=(1, *grid))

    def resizes(self, trunk: Any) -> bool:
        return not trunk.patch_embed.strict_img_size

    def input_spec(self, trunk: Any) -> InputSpec:
        spec = declared(getattr(trunk, "pretrained_cfg", None) or {})
        return replace(spec, size=self.input_size(trunk) or spec.size)

    def input_size(self, trunk: Any) -> tuple[int, ...] | None:
        """Return height and width of the inputs that a model was built for; None for any."""
        size: tuple[int, ...] | None = trunk.patch_embed.img_size
        return size

    def num_classes(self, model: nn.Module, trunk: Any) -> int:
        count: int = trunk.num_classes
        return count

    def entry_points(self) -> type:
        return TimmEntryPoints

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.patch_embed,)
