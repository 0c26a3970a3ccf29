"""transformers: Pixio, a ViT with several class tokens, alone or as a backbone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitrail.adapters.base import BlockAdapter, TrunkAdapter
from vitrail.adapters.named_block import NamedBlock
from vitrail.adapters.transformers.trunk import MODELS
from vitrail.adapters.transformers.vit import DINOV2_NAMES, VIT_NAMES, VIT_NESTED_NAMES, VitTrunk
from vitrail.data.spec import MEAN, STD
from vitrail.tokens import Role, TokenLayout

_MODULE = f"{MODELS}.pixio.modeling_pixio"
_LAYER = f"{_MODULE}.PixioLayer"


class PixioTrunk(VitTrunk):
    """Pixio: class tokens whose mean is its output, and any size."""

    block_classes: Mapping[type | str, BlockAdapter] = {
        _LAYER: NamedBlock(
            replace(VIT_NAMES, after_attend=("dropout", "drop_path"), after_feed=("dropout", "drop_path"))
        )
    }
    nested_classes: Mapping[type | str, BlockAdapter] = {
        _LAYER: NamedBlock(
            replace(
                VIT_NESTED_NAMES,
                norm1=DINOV2_NAMES.norm1,
                norm2=DINOV2_NAMES.norm2,
                mlp="mlp",
                after_attend=("drop_path",),
                after_feed=("drop_path",),
            )
        )
    }
    interpolates = True
    mean, std = MEAN, STD

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        return TokenLayout.of((Role.CLASS, trunk.config.n_cls_tokens), grid=super().layout(trunk, size).grid)


class PixioBackboneTrunk(PixioTrunk):
    """Pixio as a backbone: its feature maps are the tokens between blocks."""

    exposes = True


TRUNKS: dict[str, TrunkAdapter] = {
    f"{_MODULE}.PixioModel": PixioTrunk(),
    f"{_MODULE}.PixioBackbone": PixioBackboneTrunk(),
}
