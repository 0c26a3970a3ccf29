"""transformers: towers that pack images of any size into one sequence: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and relatives.

Every frame of every image or video is a segment that attends to itself alone. Patches come in the order of the cells
of 2 × 2 that become one token of the language model. In most blocks of Qwen2.5-VL, patches attend inside windows; there
tokens merge inside their window in every block, so that each stays in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter, VisualTokens
from vitrail.adapters.forward_pass import EntryPoint, Segments, open_pass
from vitrail.adapters.named_block import BlockNames, NamedBlock
from vitrail.adapters.position import Position, Rotary, axial_frequencies
from vitrail.adapters.transformers.trunk import MODELS, TransformersTrunk, refuse_attentions
from vitrail.adapters.windows import LayerWindows, Tile, Windows
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
        adapter.check_call(self, grid_thw, kwargs)
        hidden = kwargs.get("output_hidden_states", getattr(self.config, "output_hidden_states", False))
        expose = bool(hidden) or frozenset(adapter.read_layers(self))
        windows = enumerate(adapter.layer_windows(self))
        together = frozenset(layer for layer, one in windows if one.windows.size is None)
        with open_pass(self, adapter.layout(self), expose=expose, gridded=True, segments=segments, together=together):
            return super().forward(hidden_states, grid_thw, *args, **kwargs)  # type: ignore[misc]


class PackedTrunk(TransformersTrunk):
    """A tower that packs images: rotary position over rows and columns, and a merger of 2 × 2 patches behind it."""

    argument = "hidden_states"
    packed = True
    block_classes: Mapping[type | str, BlockAdapter] = {
        f"{MODELS}.qwen2_vl.modeling_qwen2_vl.Qwen2VLVisionBlock": NamedBlock(_BLOCK),
        f"{MODELS}.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionBlock": NamedBlock(_BLOCK),
        f"{MODELS}.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionBlock": NamedBlock(_BLOCK),
        f"{MODELS}.qwen3_5.modeling_qwen3_5.Qwen3_5VisionBlock": NamedBlock(_BLOCK),
        f"{MODELS}.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeVisionBlock": NamedBlock(_BLOCK),
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
        found = []
        for (height, width), starts in _frames(grids).items():
            order = cell_order(height, width, trunk.config.spatial_merge_size)
            places = (torch.tensor([*starts.values()]).unsqueeze(1) + order).to(patches.device)
            layout = TokenLayout.of(grid=(1, height, width))
            images = partial(_images, patches, places, trunk.config, (height, width))
            found.append(Segments(layout, places, self.position(trunk, layout.grid), images))
        return tuple(found)

    def check_call(self, trunk: Any, grids: Tensor, call: Mapping[str, Any]) -> None:
        """Raise where other arguments of the call do not agree with the grids."""

    def boundaries(self, grids: Tensor) -> list[int]:
        """Return where frames begin and end in the packed sequence."""
        found = [0]
        for frames, height, width in grids.tolist():
            found += [found[-1] + (frame + 1) * height * width for frame in range(frames)]
        return found


class Qwen25Trunk(PackedTrunk):
    """Qwen2.5-VL's tower: windows of whole cells in most blocks, RMS norms and SwiGLU."""

    block_classes: Mapping[type | str, BlockAdapter] = {
        f"{MODELS}.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLVisionBlock": NamedBlock(_BLOCK),
    }

    def windows(self, trunk: Any) -> Windows:
        """Return the windows, whose sides are a whole number of cells."""
        side = trunk.window_size // trunk.spatial_merge_size // trunk.patch_size * trunk.spatial_merge_size
        return Windows((side, side))

    def own_size(self, trunk: Any) -> tuple[int, ...]:
        """Return a typical size of whole windows."""
        (side, _), _ = self.windows(trunk).on((0, 0))
        pixels = max(1, 32 // side) * side * trunk.config.patch_size
        return pixels, pixels

    def layer_windows(self, trunk: Any) -> tuple[LayerWindows, ...]:
        full, windows = set(trunk.fullatt_block_indexes), self.windows(trunk)
        return tuple(LayerWindows(1, Windows() if layer in full else windows) for layer in range(len(trunk.blocks)))

    def segments(self, trunk: Any, patches: Tensor, grids: Tensor) -> tuple[Segments, ...]:
        """Return the windows of all frames, those of one size in images of one size as one batch."""
        windows = self.windows(trunk)
        return tuple(
            self._batch(trunk, patches, tile, starts)
            for grid, starts in _frames(grids).items()
            for tile in windows.tiles(grid)
        )

    def _batch(self, trunk: Any, patches: Tensor, tile: Tile, frames: Mapping[int, int]) -> Segments:
        """Return the windows of one shape in frames of one size."""
        whole, cell = TokenLayout.of(grid=(1, *tile.grid)), trunk.config.spatial_merge_size
        rotary = self.position(trunk, whole.grid)
        assert isinstance(rotary, Rotary)
        assert rotary.positions is not None
        in_frame, starts = tile.places(torch.device("cpu")), torch.tensor([*frames.values()])
        begins = (starts.unsqueeze(1) + _window_starts(tile)).flatten()
        # the images are in the order of cells of the whole frame
        pixels = starts.view(-1, 1, 1) + cell_order(*tile.grid, cell)[in_frame]
        return Segments(
            TokenLayout.of(grid=(1, *tile.shape)),
            (begins.unsqueeze(1) + cell_order(*tile.shape, cell)).to(patches.device),
            replace(rotary, positions=rotary.positions[in_frame.to(rotary.positions.device)].repeat(len(frames), 1, 1)),
            partial(_images, patches, pixels.flatten(0, 1).to(patches.device), trunk.config, tile.shape),
            whole,
            tuple(frame for frame in frames for _ in range(tile.count)),
        )

    def check_call(self, trunk: Any, grids: Tensor, call: Mapping[str, Any]) -> None:
        lengths, found = call.get("cu_window_seqlens"), self.boundaries(grids)[-1:]
        if lengths is None:
            return
        for grid, starts in _frames(grids).items():
            for tile in self.windows(trunk).tiles(grid):
                found += [start + own for start in starts.values() for own in _window_starts(tile).tolist()]
        if lengths.tolist() != sorted(found):
            raise UnsupportedInput("cu_window_seqlens does not agree with grid_thw and the model's windows")


def _frames(grids: Tensor) -> dict[tuple[int, int], dict[int, int]]:
    """Return, for each size of frame, the index of each such frame and where its tokens start."""
    found: dict[tuple[int, int], dict[int, int]] = {}
    index = start = 0
    for frames, height, width in grids.tolist():
        for _ in range(frames):
            found.setdefault((height, width), {})[index] = start
            index, start = index + 1, start + height * width
    return found


def _window_starts(tile: Tile) -> Tensor:
    """Return where each window's tokens start among those of its frame, which come window by window, row by row."""
    first = tile.places(torch.device("cpu"))[:, 0]
    top, left = first // tile.grid[1], first % tile.grid[1]
    return top * tile.grid[1] + tile.shape[0] * left


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
    """The tower of Qwen3-VL, with mergers behind blocks in the middle (DeepStack), and of Qwen3.5, without."""

    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


TRUNKS: dict[str, TrunkAdapter] = {
    f"{MODELS}.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel": Qwen25Trunk(),
    f"{MODELS}.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel": PackedTrunk(),
    f"{MODELS}.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel": Qwen3Trunk(),
    f"{MODELS}.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel": Qwen3Trunk(),
    f"{MODELS}.qwen3_5.modeling_qwen3_5.Qwen3_5VisionModel": Qwen3Trunk(),
    f"{MODELS}.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeVisionModel": Qwen3Trunk(),
}
