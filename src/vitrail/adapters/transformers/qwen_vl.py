"""transformers: towers of vision-language models that pack images of any size into one sequence: Qwen2-VL, Qwen3-VL.

Every frame of every image or video is a segment that attends to itself alone. Patches come in the order of the cells
of 2 × 2 that become one token of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter, VisualTokens
from vitrail.adapters.forward_pass import EntryPoint, Segments, open_pass
from vitrail.adapters.named_block import BlockNames, NamedBlock
from vitrail.adapters.position import Position, Rotary, axial_frequencies
from vitrail.adapters.transformers.trunk import MODELS, TransformersTrunk, refuse_attentions
from vitrail.errors import UnsupportedInput, UnsupportedModel
from vitrail.tokens import Role, TokenLayout

_BLOCK = BlockNames(
    norm1="norm1",
    qkv="attn.qkv",
    proj="attn.proj",
    norm2="norm2",
    mlp="mlp",
    heads="attn.num_heads",
    head_dim="attn.head_dim",
    attention="attn",
    scale="attn.scaling",
    attention_dropout="attn.attention_dropout",
    tokens="hidden_states",
    arguments=(("cu_seqlens", "lengths"), ("position_embeddings", "cos_sin")),
)


class PackedEntryPoint(EntryPoint):
    """Entry point of a tower that takes patches (tokens, pixels) and the grid of each image or video."""

    def forward(self: Any, hidden_states: Tensor, grid_thw: Tensor, *args: Any, **kwargs: Any) -> Any:
        refuse_attentions(self.config, kwargs)
        adapter = self._vitrail_adapter
        segments = adapter.segments(self, hidden_states, grid_thw)
        lengths = kwargs.get("cu_seqlens")
        if lengths is not None and lengths.tolist() != adapter.boundaries(grid_thw):
            raise UnsupportedInput("cu_seqlens does not agree with grid_thw: each frame is a segment of its own")
        hidden = kwargs.get("output_hidden_states", getattr(self.config, "output_hidden_states", False))
        expose = bool(hidden) or frozenset(adapter.read_layers(self))
        with open_pass(self, adapter.layout(self), expose=expose, gridded=True, segments=segments):
            return super().forward(hidden_states, grid_thw, *args, **kwargs)  # type: ignore[misc]


class PackedTrunk(TransformersTrunk):
    """A tower that packs images: rotary position over rows and columns, and a merger of 2 × 2 patches behind it."""

    argument = "hidden_states"
    packed = True
    block_classes: Mapping[type | str, BlockAdapter] = {
        f"{MODELS}.qwen2_vl.modeling_qwen2_vl.Qwen2VLVisionBlock": NamedBlock(_BLOCK),
        f"{MODELS}.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionBlock": NamedBlock(_BLOCK),
    }
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks)

    def own_size(self, trunk: Any) -> tuple[int, ...]:
        """Return a typical size: these towers take any."""
        cell = trunk.config.patch_size * trunk.config.spatial_merge_size
        return (32 * cell // 2, 32 * cell // 2)

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = (self.input_spec(trunk).size if size is None else size)[-2:]
        patch = trunk.config.patch_size
        return TokenLayout.of(grid=(1, height // patch, width // patch))

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        return {}

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.patch_embed,)

    def behind(self, model: nn.Module, trunk: Any) -> Sequence[tuple[nn.Module, int]]:
        """Return the merger, and those behind blocks in the middle."""
        mergers = [trunk.merger, *getattr(trunk, "deepstack_merger_list", ())]
        return [(merger, trunk.config.spatial_merge_size**2) for merger in mergers]

    def visual_tokens(self, model: nn.Module, trunk: Any) -> VisualTokens:
        raise UnsupportedModel(
            f"shorten= is not supported for {type(model).__name__}: its language model places visual tokens by rows "
            "and columns of their grid. Merging inside the tower is supported"
        )

    def read_layers(self, trunk: Any) -> Sequence[int]:
        """Return the indices of the blocks whose output the tower reads besides that of the last."""
        return getattr(trunk, "deepstack_visual_indexes", ())

    def position(self, trunk: Any, grid: tuple[int, int, int]) -> Position:
        bands = trunk.rotary_pos_emb.inv_freq
        bands = bands.to(torch.promote_types(bands.dtype, torch.float32))
        axes = [torch.arange(steps, device=bands.device, dtype=bands.dtype) for steps in grid[1:]]
        positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 1)
        return Rotary(positions, axial_frequencies(bands), interleaved=False)

    def entry_points(self) -> type:
        return PackedEntryPoint

    def segments(self, trunk: Any, patches: Tensor, grids: Tensor) -> tuple[Segments, ...]:
        """Return the frames of all images and videos, those of one size as one batch."""
        starts: dict[tuple[int, int], list[int]] = {}
        start = 0
        for frames, height, width in grids.tolist():
            own = starts.setdefault((height, width), [])
            own += range(start, start + frames * height * width, height * width)
            start += frames * height * width
        found = []
        for (height, width), own in starts.items():
            order = cell_order(height, width, trunk.config.spatial_merge_size)
            places = (torch.tensor(own).unsqueeze(1) + order).to(patches.device)
            layout = TokenLayout.of(grid=(1, height, width))
            images = partial(_images, patches, places, trunk.config, (height, width))
            found.append(Segments(layout, places, self.position(trunk, layout.grid), images))
        return tuple(found)

    def boundaries(self, grids: Tensor) -> list[int]:
        """Return where frames begin and end in the packed sequence."""
        found = [0]
        for frames, height, width in grids.tolist():
            found += [found[-1] + (frame + 1) * height * width for frame in range(frames)]
        return found


def cell_order(height: int, width: int, side: int) -> Tensor:
    """Return where the patches of a grid, row by row, are in the order of cells of side × side patches."""
    place = torch.arange(height * width).view(height // side, width // side, side, side)
    return place.transpose(1, 2).flatten()


def _images(patches: Tensor, places: Tensor, config: Any, grid: tuple[int, int]) -> Tensor:
    """Return the first image of each frame (B, C, H, W), from packed patches (tokens, pixels)."""
    size = config.patch_size
    first = patches[places].unflatten(2, (-1, config.temporal_patch_size, size, size))[:, :, :, 0]
    cells = first.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5)
    return cells.reshape(len(places), -1, grid[0] * size, grid[1] * size)


class Qwen3Trunk(PackedTrunk):
    """Qwen3-VL's tower, with mergers behind blocks in the middle (DeepStack)."""

    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


TRUNKS: dict[str, TrunkAdapter] = {
    f"{MODELS}.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel": PackedTrunk(),
    f"{MODELS}.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel": Qwen3Trunk(),
}
