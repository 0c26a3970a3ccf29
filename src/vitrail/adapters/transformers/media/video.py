"""transformers: VideoMAE and ViViT, whose patches are tubelets of clips with frames before channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter
from vitrail.adapters.named_block import MlpNames, NamedBlock
from vitrail.adapters.transformers.trunk import MODELS, TransformersEntryPoint, TransformersTrunk
from vitrail.adapters.transformers.vit import VIT_NAMES, VIT_NESTED_NAMES
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.errors import UnsupportedInput
from vitrail.tokens import Role, TokenLayout

_VIDEOMAE = f"{MODELS}.videomae.modeling_videomae"
_VIVIT = f"{MODELS}.vivit.modeling_vivit"


class VideoTrunk(TransformersTrunk):
    """A model of clips of one size.

    Attributes:
        rescale_factor: factor of the bytes of a frame, for models without a file of their preprocessing.
        offset: value subtracted after that.
    """

    modality = "video"
    rescale_factor: float = 1 / 255
    offset: float = 0.0

    def projection(self, trunk: Any) -> nn.Conv3d:
        """Return the convolution that makes tokens of tubelets."""
        found: nn.Conv3d = trunk.embeddings.patch_embeddings.projection
        return found

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        sides, steps = self.own_size(trunk) if size is None else size, self.projection(trunk).stride
        t, h, w = (side // step for side, step in zip(sides, steps, strict=True))
        return TokenLayout.of((Role.CLASS, int(bool(self.token_parameters(trunk)))), grid=(t, h, w))

    def resizes(self, trunk: Any) -> bool:
        return False

    def own_size(self, trunk: Any) -> tuple[int, ...]:
        """Return frames, height and width of the clips that the model was made for."""
        return trunk.config.num_frames, *super().own_size(trunk)

    def stored_spec(self, trunk: Any) -> InputSpec:
        """Return the size and normalization that the model was saved with, as its video or image processor has them."""
        stored = self.preprocessing(trunk)
        mean, std = stored.get("image_mean") or self.mean, stored.get("image_std") or self.std
        if not stored.get("do_normalize", True):
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        factor = stored.get("rescale_factor", self.rescale_factor) if stored.get("do_rescale", True) else 1.0
        offset = self.offset if stored.get("offset", True) and stored.get("do_rescale", True) else 0.0
        return InputSpec(
            self.own_size(trunk),
            tuple(value + offset for value in mean),
            tuple(std),
            self.modality,
            self.argument,
            scale=1 / factor,
            axes="TCHW",
        )

    def channels_first(self, trunk: nn.Module, inputs: Tensor) -> Tensor:
        return inputs.transpose(1, 2)

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (self.projection(trunk),)


class SumBlock(NamedBlock):
    """A block that adds its input to what it computes: without a class token, that makes tokens contiguous."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return y + x


class NestedVideoMaeBlock(SumBlock):
    """A block of VideoMAE, which in older versions has biases of queries and values as parameters of their own."""

    def project(self, block: Any, h: Tensor) -> Tensor | Sequence[Tensor]:
        attention = block.attention.attention
        if getattr(attention, "q_bias", None) is None:
            return super().project(block, h)
        q, k = F.linear(h, attention.query.weight, attention.q_bias), F.linear(h, attention.key.weight)
        return q, k, F.linear(h, attention.value.weight, attention.v_bias)


class VideoMaeEntryPoint(TransformersEntryPoint):
    """Entry point of VideoMAE, whose masked patches are not among its tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        masked = args[1] if len(args) > 1 else kwargs.get("bool_masked_pos")
        if masked is not None:
            raise UnsupportedInput(
                "bool_masked_pos: VideoMAE leaves masked patches out, so that its tokens are no grid of patches; call "
                "a changed model without a mask (VideoMAEModel, VideoMAEForVideoClassification), or remove the change"
            )
        return super().forward(*args, **kwargs)


class VideoMaeTrunk(VideoTrunk):
    """VideoMAE: patches alone, with sinusoidal positions."""

    nested_classes: Mapping[type | str, BlockAdapter] = {
        f"{_VIDEOMAE}.VideoMAELayer": NestedVideoMaeBlock(replace(VIT_NESTED_NAMES, arguments=()))
    }
    block_classes = nested_classes
    mean, std = MEAN, STD

    def entry_points(self) -> type:
        return VideoMaeEntryPoint


class VivitTrunk(VideoTrunk):
    """ViViT with joint attention over space and time: a class token, and clips scaled to −1 … 1."""

    block_classes: Mapping[type | str, BlockAdapter] = {
        f"{_VIVIT}.VivitLayer": NamedBlock(replace(VIT_NAMES, dense=MlpNames(("VivitMLP",), act="mlp.activation_fn")))
    }
    nested_classes: Mapping[type | str, BlockAdapter] = {f"{_VIVIT}.VivitLayer": NamedBlock(VIT_NESTED_NAMES)}
    rescale_factor, offset = 1 / 127.5, 1.0


TRUNKS: dict[str, TrunkAdapter] = {
    f"{_VIDEOMAE}.VideoMAEModel": VideoMaeTrunk(),
    f"{_VIVIT}.VivitModel": VivitTrunk(),
}
