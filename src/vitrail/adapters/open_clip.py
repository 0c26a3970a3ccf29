"""open_clip: its own vision tower, alone or inside CLIP and CoCa. Towers from timm have timm's adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, Library, TrunkAdapter, beside_tower, known_block
from vitrail.adapters.forward_pass import ForwardEntry, IntermediatesEntry
from vitrail.adapters.named_block import BlockNames, MlpNames, NamedBlock
from vitrail.data.spec import InputSpec
from vitrail.errors import ModelLoadError, UnsupportedModel
from vitrail.models.weights_file import only_weights
from vitrail.tokens import Role, TokenLayout

_BLOCK = BlockNames(
    norm1="ln_1",
    qkv="attn.in_proj_weight",
    proj="attn.out_proj",
    norm2="ln_2",
    mlp="mlp",
    heads="attn.num_heads",
    head_dim="attn.head_dim",
    attention="attn",
    after_attend=("ls_1",),
    after_feed=("ls_2",),
    attention_dropout="attn.dropout",
    tokens="q_x",
    arguments=(("k_x", "other keys"), ("v_x", "other values"), ("attn_mask", "mask")),
    dense=MlpNames(("Sequential",), fc1="mlp.c_fc", act="mlp.gelu", fc2="mlp.c_proj"),
)
_CUSTOM = replace(
    _BLOCK,
    q_norm="attn.ln_q",
    k_norm="attn.ln_k",
    inner_norm="attn.ln_inner",
    proj_drop="attn.out_drop",
    after_attend=("ln_attn", "ls_1"),
    attention_dropout="attn.attn_drop",
    tokens="x",
    arguments=(("attn_mask", "mask"),),
    dense=None,
)


class _CustomBlock(NamedBlock):
    """A block with any of open_clip's options; heads may have factors of their own."""

    def attend_output(self, block: Any, attended: Tensor, h: Tensor) -> Tensor:
        factors = block.attn.head_scale
        if factors is not None:
            attended = (attended.unflatten(-1, (block.attn.num_heads, -1)) * factors.squeeze(-1)).flatten(-2)
        return super().attend_output(block, attended, h)


_BLOCKS: dict[type | str, BlockAdapter] = {
    "open_clip.transformer.ResidualAttentionBlock": NamedBlock(_BLOCK),
    "open_clip.transformer.CustomResidualAttentionBlock": _CustomBlock(_CUSTOM),
}


class OpenClipEntry(ForwardEntry, IntermediatesEntry):
    """Entry points of the tower."""


class OpenClipTrunk(TrunkAdapter):
    """The vision tower: a class token, a norm before the blocks, and class, mean, attention or no pooling."""

    norm = "ln_post"

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.transformer.resblocks)

    def block_adapter(self, block: Any) -> BlockAdapter:
        adapter = known_block(block, _BLOCKS)
        if getattr(block.attn, "in_proj_weight", None) is None:
            raise UnsupportedModel(
                f"attention of class {type(block.attn).__name__} is not supported in {type(block).__name__}; supported "
                "is attention with one packed projection"
            )
        return adapter

    def check(self, trunk: Any) -> None:
        if not trunk.transformer.batch_first:
            raise UnsupportedModel("this tower runs with batch_first=False; build it with batch_first=True")
        if any(getattr(block.attn, "logit_scale", None) is not None for block in trunk.transformer.resblocks):
            raise UnsupportedModel(
                "scaled cosine attention (scaled_cosine_attn=True) is not supported; supported are dot-product "
                "attention and qk_norm"
            )

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        height, width = size or trunk.image_size
        return TokenLayout.of(Role.CLASS, grid=(1, height // trunk.patch_size[0], width // trunk.patch_size[1]))

    def resizes(self, trunk: Any) -> bool:
        return False

    def input_spec(self, trunk: Any) -> InputSpec:
        """Return the normalization that the model was created with."""
        stored: Mapping[str, Any] = getattr(trunk, "preprocess_cfg", None) or {}
        return InputSpec(tuple(trunk.image_size), stored.get("mean", MEAN), stored.get("std", STD))

    def entry_points(self) -> type:
        return OpenClipEntry

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.conv1,)

    def pooled_weights(self, trunk: Any) -> int:
        """Count keys and values of attention pooling."""
        pools = (trunk.attn_pool, getattr(trunk, "attn_pool_contrastive", None))
        read = [pool.attn for pool in pools[: 1 if self._cascades(trunk) else 2] if pool is not None]
        return sum(one.num_heads * one.head_dim * (one.kdim + one.vdim) for one in read)

    def _cascades(self, trunk: Any) -> bool:
        """Return whether the second pooling reads the first one's output."""
        return getattr(trunk, "attn_pool_type", "") == "cascade"

    def elsewhere(self, model: nn.Module, trunk: Any) -> Sequence[nn.Module]:
        return beside_tower(model, trunk)

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        return {(Role.CLASS, ""): trunk.class_embedding.view(1, 1, -1)}


MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Statistics of each channel, for towers that were not created by name."""
_SCHEMAS = ("hf-hub:", "local-dir:")


class OpenClip(Library):
    """Vision towers of open_clip, by ``NAME:TAG`` as ``open_clip.list_pretrained`` has them, or ``hf-hub:REPO``."""

    prefix = package = "open_clip"
    extra = "open-clip"
    directory = "open_clip:local-dir:DIRECTORY"

    def trunks(self) -> Mapping[str, TrunkAdapter]:
        return {"open_clip.transformer.VisionTransformer": OpenClipTrunk()}

    def load(self, name: str, pretrained: bool = True, **options: Any) -> nn.Module:
        """Load the vision tower of a model, whose output is the image's embedding."""
        library = self.imported(name)
        has_schema = name.startswith(_SCHEMAS)
        model, _, tag = (name, "", "") if has_schema else name.partition(":")
        if not has_schema:
            self._check_name(library, model, tag, pretrained)
        try:
            with only_weights():
                made = library.create_model(
                    model,
                    tag if pretrained and tag else None,
                    load_weights=pretrained,
                    pretrained_text=False,
                    **{"device": torch.get_default_device(), **options},
                )
        except Exception as error:
            hint = (
                "Check the network, name a directory (open_clip:local-dir:DIRECTORY), or use random weights "
                "(pretrained=False)."
            )
            raise self.failed(name, error, hint if pretrained else "") from error
        tower: nn.Module = made.visual.eval()
        return tower

    def _check_name(self, library: Any, model: str, tag: str, pretrained: bool) -> None:
        if model not in library.list_models():
            raise ModelLoadError(
                f"open_clip has no model named {model!r}; `open_clip.list_pretrained()` lists models with their tags"
            )
        tags = library.list_pretrained_tags_by_model(model)
        if pretrained and tag not in tags:
            known = ", ".join(tags) if tags else "none (use pretrained=False for random weights)"
            raise ModelLoadError(
                f"open_clip:{model} needs the tag of its weights, open_clip:{model}:TAG; tags: {known}"
            )

    def uses_hub(self, name: str, pretrained: bool) -> bool:
        return pretrained if not name.startswith(_SCHEMAS) else name.startswith("hf-hub:")

    def size_options(self, size: tuple[int, ...]) -> dict[str, Any]:
        return {"force_image_size": size}


LIBRARY = OpenClip()
