"""transformers: C-RADIO, whose class tokens (one for each teacher) and registers are one parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter
from vitrail.adapters.named_block import NamedBlock
from vitrail.adapters.transformers.trunk import MODELS, TransformersEntryPoint, TransformersTrunk
from vitrail.adapters.transformers.vit import DINOV2_NAMES
from vitrail.errors import UnsupportedInput
from vitrail.tokens import Role, TokenLayout

_MODULE = f"{MODELS}.radio.modeling_radio"
_LAYER = NamedBlock(replace(DINOV2_NAMES, arguments=(("attention_mask", "mask"), ("cu_seqlens", "lengths"))))


class RadioEntryPoint(TransformersEntryPoint):
    """Entry point of C-RADIO for images of one size in a batch."""

    def forward(self, pixel_values: Tensor, image_grid_hw: Tensor | None = None, **kwargs: Any) -> Any:
        if image_grid_hw is not None:
            raise UnsupportedInput(
                "image_grid_hw: a changed C-RADIO takes images of one size (B, C, H, W), not packed patches of several "
                "sizes; call it once for each size, or remove the change"
            )
        return super().forward(pixel_values, **kwargs)


class RadioTrunk(TransformersTrunk):
    """C-RADIO: any size, and images with values from 0 to 1, which the model normalizes itself."""

    norm = ""
    interpolates = True
    block_classes: Mapping[type | str, BlockAdapter] = {f"{_MODULE}.RadioLayer": _LAYER}
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = self.input_spec(trunk).size if size is None else size
        patch = trunk.config.patch_size
        special = (Role.CLASS, trunk.config.num_cls_tokens), (Role.REGISTER, trunk.config.num_registers)
        return TokenLayout.of(*special, grid=(1, height // patch, width // patch))

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        both, classes = trunk.embeddings.cls_register_token.unsqueeze(0), trunk.config.num_cls_tokens
        return {(Role.CLASS, ""): both[:, :classes], (Role.REGISTER, ""): both[:, classes:]}

    def elsewhere(self, model: nn.Module, trunk: Any) -> Sequence[nn.Module]:
        video = trunk.embeddings.video_patch_projection
        return [*super().elsewhere(model, trunk), *([] if video is None else [video])]

    def entry_points(self) -> type:
        return RadioEntryPoint

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.embeddings.patch_projection,)

    def image_module(self, trunk: Any) -> nn.Module:
        embeddings: nn.Module = trunk.embeddings
        return embeddings


TRUNKS: dict[str, TrunkAdapter] = {f"{_MODULE}.RadioModel": RadioTrunk()}
