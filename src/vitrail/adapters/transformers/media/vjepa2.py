"""transformers: V-JEPA 2, whose blocks rotate queries and keys by frame, row and column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter
from vitrail.adapters.named_block import BlockNames, MlpNames
from vitrail.adapters.position import Position
from vitrail.adapters.transformers.media.video import SumBlock, VideoTrunk
from vitrail.adapters.transformers.trunk import MODELS
from vitrail.data.spec import MEAN, STD
from vitrail.tokens import TokenLayout

_MODULE = f"{MODELS}.vjepa2.modeling_vjepa2"
_LAYER = BlockNames(
    norm1="norm1",
    qkv=("attention.query", "attention.key", "attention.value"),
    proj="attention.proj",
    norm2="norm2",
    mlp="mlp",
    heads="attention.num_attention_heads",
    head_dim="attention.attention_head_size",
    attention="attention",
    after_attend=("drop_path",),
    after_feed=("drop_path",),
    scale="attention.scaling",
    attention_dropout="attention.dropout",
    rotate_half=False,
    tokens="hidden_states",
    arguments=(("position_mask", "places"),),
    dense=MlpNames(("VJEPA2MLP",), act="mlp.activation"),
)


class VJepaBlock(SumBlock):
    """A block that computes its rotation itself, and returns a tuple."""

    rotates = True
    tuple_length = 2


@dataclass(frozen=True)
class TubeletRotary(Position):
    """Rotation by frame, row and column, each with a third of the channels; the last few channels do not turn.

    The two channels of a pair have angles of their own, as in the model: channel ``c`` of an axis turns by frequency
    ``c`` modulo half of them.

    Attributes:
        places: frame, row and column of each patch (P, 3), in the model's dtype.
        frequencies: (3, d), in the model's dtype; zero for the channels of other axes.
    """

    places: Tensor
    frequencies: Tensor

    def coordinates(self, layout: TokenLayout, x: Tensor, table: Tensor | None) -> Tensor:
        return self.places.to(torch.promote_types(self.places.dtype, torch.float32)).unsqueeze(0)

    def table(self, layer: int, positions: Tensor | None) -> Tensor:
        places = self.places.unsqueeze(0) if positions is None else positions
        angle = (places.unsqueeze(-1) * self.frequencies.to(places.dtype)).sum(-2).unsqueeze(1)
        return torch.cat([angle.sin(), angle.cos()], -1)


class VJepaTrunk(VideoTrunk):
    """The encoder of V-JEPA 2: patches alone, of clips of any number of frames."""

    argument = "pixel_values_videos"
    norm = "encoder.layernorm"
    block_classes: Mapping[type | str, BlockAdapter] = {f"{_MODULE}.VJEPA2Layer": VJepaBlock(_LAYER)}
    nested_classes = block_classes
    mean, std = MEAN, STD

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.encoder.layer)

    def projection(self, trunk: Any) -> nn.Conv3d:
        found: nn.Conv3d = trunk.encoder.embeddings.patch_embeddings.proj
        return found

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        frames, *sides = self.own_size(trunk) if size is None else size
        return super().layout(trunk, (max(frames, trunk.config.tubelet_size), *sides))  # fewer frames are repeated

    def own_size(self, trunk: Any) -> tuple[int, ...]:
        """Return frames, height and width of the clips that the model was made for."""
        config = trunk.config
        return config.frames_per_clip, config.crop_size, config.crop_size

    def resizes(self, trunk: Any) -> bool:
        return True

    def token_parameters(self, trunk: Any) -> dict[Any, Tensor]:
        return {}

    def elsewhere(self, model: nn.Module, trunk: Any) -> Sequence[nn.Module]:
        """Return the predictor, which classifiers leave out."""
        return [*super().elsewhere(model, trunk), trunk.predictor]

    def behind(self, model: nn.Module, trunk: Any) -> Sequence[tuple[nn.Module, int]]:
        """Return the parts of a classifier's pooling that run on every patch."""
        found: list[tuple[nn.Module, int]] = []
        for pooler in _poolers(model):
            attention = pooler.cross_attention_layer.cross_attn
            found += [(part, 1) for part in (pooler.self_attention_layers, attention.k_proj, attention.v_proj)]
        return found

    def pairs_behind(self, model: nn.Module, trunk: Any) -> int:
        """Count what the layers of a classifier's pooling compute for each pair of patches."""
        layers = [layer for pooler in _poolers(model) for layer in pooler.self_attention_layers]
        return sum(2 * layer.self_attn.embed_dim for layer in layers)

    def position(self, trunk: Any, grid: tuple[int, int, int]) -> Position:
        attention = trunk.encoder.layer[0].attention
        weight, width = attention.query.weight, attention.attention_head_size
        device, dtype = weight.device, weight.dtype
        side = attention.grid_size  # places are counted in the model's own grid, whatever that of the clip
        index = torch.arange(grid[0] * grid[1] * grid[2], device=device)
        places = torch.stack([index // side**2, index % side**2 // side, index % side], -1).to(dtype)
        turning = attention.d_dim
        steps = torch.arange(turning // 2, dtype=dtype, device=device) / (turning / 2.0)
        omega = (1.0 / 10000**steps).repeat(2)
        frequencies = torch.zeros(3, width, dtype=dtype, device=device)
        for axis in range(3):
            frequencies[axis, axis * turning : (axis + 1) * turning] = omega
        return TubeletRotary(places, frequencies)


def _poolers(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if type(part).__name__ == "VJEPA2AttentivePooler"]


TRUNKS: dict[str, TrunkAdapter] = {f"{_MODULE}.VJEPA2Model": VJepaTrunk()}
