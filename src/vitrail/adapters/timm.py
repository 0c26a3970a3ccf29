"""timm: ``VisionTransformer`` (DeiT, DINOv2, CLIP and SigLIP towers among them) and ``Eva`` (DINOv3 among them)."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.base import (
    BlockAdapter,
    Library,
    ModelRequest,
    TrunkAdapter,
    beside_tower,
    forward_class,
    known_block,
    parameters_by_role,
)
from vitrail.adapters.forward_pass import FeaturesEntry, IntermediatesEntry
from vitrail.adapters.named_block import TIMM_NAMES, MlpNames, NamedBlock
from vitrail.adapters.position import Position, Rotary, axial_frequencies
from vitrail.data.spec import InputSpec
from vitrail.errors import ModelLoadError, UnsupportedInput, UnsupportedModel
from vitrail.tokens import Role, TokenLayout

_VIT = replace(
    TIMM_NAMES,
    inner_norm="attn.norm",
    gate="attn.gate?",  # since timm 1.0.28
    arguments=(("attn_mask", "mask"), ("is_causal", "causal")),
    dense=MlpNames(("Mlp",), act="mlp.act", norm="mlp.norm", drops=("mlp.drop1", "mlp.drop2")),
)
_POST_NORM: dict[str, Any] = {"post_norm": True, "after_attend": ("drop_path1",), "after_feed": ("drop_path2",)}
_EVA = replace(
    _VIT,
    after_attend=("gamma_1", "drop_path1"),
    after_feed=("gamma_2", "drop_path2"),
    rotate_half="attn.rotate_half",
    prefix="attn.num_prefix_tokens",
    arguments=(("rope", "rope"), ("attn_mask", "mask"), ("is_causal", "causal")),
)


class EvaNamedBlock(NamedBlock):
    """A block of ``Eva``, whose projections may be packed or separate, with biases as separate parameters."""

    def project(self, block: Any, h: Tensor) -> Tensor | Sequence[Tensor]:
        attention = block.attn
        if attention.qkv is None:
            return attention.q_proj(h), attention.k_proj(h), attention.v_proj(h)
        if getattr(attention, "q_bias", None) is None:
            return attention.qkv(h)
        bias = torch.cat((attention.q_bias, attention.k_bias, attention.v_bias))
        if attention.qkv_bias_separate:
            return attention.qkv(h) + bias
        return F.linear(h, attention.qkv.weight, bias)


BLOCK = NamedBlock(_VIT)
"""The adapter of timm's ordinary ``Block``."""

_VIT_BLOCKS: dict[type | str, BlockAdapter] = {
    "timm.models.vision_transformer.Block": BLOCK,
    "timm.models.vision_transformer.ResPostBlock": NamedBlock(replace(_VIT, **_POST_NORM)),
}
_EVA_BLOCKS: dict[type | str, BlockAdapter] = {
    "timm.models.eva.EvaBlock": EvaNamedBlock(_EVA),
    "timm.models.eva.EvaBlockPostNorm": EvaNamedBlock(replace(_EVA, **_POST_NORM)),
}


class TimmEntryPoints(FeaturesEntry, IntermediatesEntry):
    """Entry points of a timm trunk."""


class TimmVisionTransformer(TrunkAdapter):
    """``VisionTransformer`` and its subclasses."""

    block_classes: Mapping[type | str, BlockAdapter] = _VIT_BLOCKS
    attention_classes: tuple[str, ...] = ("Attention",)

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks)

    def block_adapter(self, block: Any) -> BlockAdapter:
        adapter = known_block(block, self.block_classes)
        attention = forward_class(block.attn)
        if attention.__name__ not in self.attention_classes or not attention.__module__.startswith("timm."):
            raise UnsupportedModel(
                f"attention of class {type(block.attn).__name__} is not supported in {type(block).__name__}; "
                f"supported are {', '.join(self.attention_classes)}"
            )
        return adapter

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        classes, distillation = (int(getattr(trunk, name, None) is not None) for name in ("cls_token", "dist_token"))
        registers = trunk.num_prefix_tokens - classes - distillation
        grid = trunk.patch_embed.grid_size if size is None else trunk.patch_embed.dynamic_feat_size(size)
        special = ((Role.CLASS, classes), (Role.DISTILLATION, distillation), (Role.REGISTER, registers))
        return TokenLayout.of(*special, grid=(1, *grid))

    def resizes(self, trunk: Any) -> bool:
        return trunk.dynamic_img_size

    def input_spec(self, trunk: Any) -> InputSpec:
        declared = _declared(getattr(trunk, "pretrained_cfg", None) or {})
        return replace(declared, size=trunk.patch_embed.img_size or declared.size)

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        names = {Role.CLASS: "cls_token", Role.DISTILLATION: "dist_token", Role.REGISTER: "reg_token"}
        return parameters_by_role(trunk, names)

    def num_classes(self, model: nn.Module, trunk: Any) -> int:
        return trunk.num_classes

    def entry_points(self) -> type:
        return TimmEntryPoints

    def elsewhere(self, model: nn.Module, trunk: Any) -> Sequence[nn.Module]:
        return beside_tower(model, trunk)

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        pool = getattr(trunk.attn_pool, "kv", None)  # other poolings have no weights for patches
        return (trunk.patch_embed,) if pool is None else (trunk.patch_embed, pool)


class TimmEva(TimmVisionTransformer):
    """``Eva``: the same outside, rotary position inside."""

    block_classes = _EVA_BLOCKS
    attention_classes = ("EvaAttention", "AttentionRope")

    def check(self, trunk: Any) -> None:
        if trunk.rope is not None and type(trunk.rope).__name__ not in ROTARY:
            raise UnsupportedModel(
                f"the rotary position {type(trunk.rope).__name__} of this Eva model is not supported; "
                f"supported are {', '.join(ROTARY)}"
            )

    def position(self, trunk: Any, grid: tuple[int, int, int]) -> Position | None:
        if trunk.rope is None:
            return None
        dropped = trunk.training and trunk.patch_drop is not None
        return ROTARY[type(trunk.rope).__name__](trunk.rope, grid[1:], dropped)


def _work_dtype(buffer: Tensor) -> torch.dtype:
    return torch.promote_types(buffer.dtype, torch.float32)


def _rotary_cat(rope: Any, grid: tuple[int, ...], dropped: bool) -> Rotary:
    """Read ``RotaryEmbeddingCat``: coordinates in patches or in −1 … 1, as EVA02 and PE use them."""
    reference = rope.pos_embed if rope.bands is None else rope.bands
    device, dtype = reference.device, _work_dtype(reference)
    bands = (_bands_cat(rope, device) if rope.bands is None else rope.bands).to(dtype)
    swap = rope.grid_indexing == "xy"
    shape = grid[::-1] if swap else grid
    if rope.in_pixels:
        axes = [torch.linspace(-1.0, 1.0, steps, device=device, dtype=dtype) for steps in shape]
    else:
        axes = [torch.arange(steps, device=device).to(dtype) + rope.grid_offset for steps in shape]
    if rope.ref_feat_shape is not None:
        wanted = rope.ref_feat_shape[::-1] if swap else rope.ref_feat_shape
        axes = [axis / steps * target for axis, steps, target in zip(axes, shape, wanted, strict=True)]
    positions = torch.stack(torch.meshgrid(axes, indexing=rope.grid_indexing), -1).flatten(0, 1)
    return Rotary(None if dropped else positions, axial_frequencies(bands), not getattr(rope, "rotate_half", False))


def _bands_cat(rope: Any, device: torch.device) -> Tensor:
    """Compute the frequencies on their device: a copy from the CPU cannot be recorded in a CUDA graph."""
    from timm.layers.pos_embed_sincos import freq_bands, pixel_freq_bands

    number = rope.dim // 4
    if rope.in_pixels:
        return pixel_freq_bands(number, float(rope.max_res), linear_bands=rope.linear_bands, device=device)
    return freq_bands(number, temperature=rope.temperature, step=1, device=device)


def _rotary_dinov3(rope: Any, grid: tuple[int, ...], dropped: bool) -> Rotary:
    """Read ``RotaryEmbeddingDinoV3``: coordinates in −1 … 1, augmented in training."""
    from timm.layers.pos_embed_sincos import make_coords_dinov3

    dtype = _work_dtype(rope.periods)
    frequencies = axial_frequencies(2 * torch.pi / rope.periods.to(dtype))
    if dropped or (rope.training and rope.aug_active):
        return Rotary(None, frequencies, not rope.rotate_half)
    options = {name: getattr(rope, name) for name in ("normalize_coords", "grid_indexing", "grid_offset")}
    positions = make_coords_dinov3(*grid, **options, device=rope.periods.device, dtype=dtype)
    return Rotary(positions, frequencies, not rope.rotate_half)


def _rotary_mixed(rope: Any, grid: tuple[int, ...], dropped: bool) -> Rotary:
    """Read ``RotaryEmbeddingMixed``: learned directions, different in every layer and head."""
    from timm.layers.pos_embed_sincos import get_mixed_grid

    if dropped:
        raise UnsupportedInput(
            "this model drops patches in training and has mixed rotary position, which does not tell where a patch "
            "came from; train it with patch_drop_rate=0, or merge in eval mode only"
        )
    dtype = _work_dtype(rope.freqs)
    axes = get_mixed_grid(list(grid), rope.grid_indexing, device=rope.freqs.device, dtype=dtype)
    return Rotary(torch.stack(axes, -1), rope.freqs.to(dtype).permute(1, 2, 0, 3), True)


ROTARY = {
    "RotaryEmbeddingCat": _rotary_cat,
    "RotaryEmbeddingDinoV3": _rotary_dinov3,
    "RotaryEmbeddingMixed": _rotary_mixed,
}
"""Readers of timm's rotary modules, by class name: (module, grid, whether patches are dropped)."""


def _declared(config: Mapping[str, Any]) -> InputSpec:
    """Read a ``pretrained_cfg``."""
    half = (0.5, 0.5, 0.5)
    return InputSpec(config.get("input_size", (3, 224, 224))[-2:], config.get("mean", half), config.get("std", half))


_REMOTE = ("hf-hub:", "hf_hub:")
_LOCAL = "local-dir:"


class Timm(Library):
    """Models of timm, by the names that ``timm.create_model`` takes."""

    prefix = package = extra = "timm"
    directory = "timm:local-dir:DIRECTORY"
    heads = {"head": "class", "head_dist": "distillation"}  # noqa: RUF012

    def trunks(self) -> Mapping[str, TrunkAdapter]:
        from vitrail.adapters._timm_beit import TimmBeit

        return {
            "timm.models.vision_transformer.VisionTransformer": TimmVisionTransformer(),
            "timm.models.eva.Eva": TimmEva(),
            "timm.models.beit.Beit": TimmBeit(),
        }

    def load(self, name: str, pretrained: bool = True, **options: Any) -> nn.Module:
        timm = self.imported(name)
        if not timm.is_model(name.split(".")[0]) and not name.startswith((*_REMOTE, _LOCAL)):
            raise ModelLoadError(f"timm has no model named {name!r}; `timm.list_models('*vit*')` lists those it has")
        try:
            return timm.create_model(name, pretrained=pretrained, **options).eval()
        except Exception as error:
            hint = (
                "Check the network, name a directory with its weights (timm:local-dir:DIRECTORY), or use random "
                "weights (pretrained=False) where they do not matter."
            )
            raise self.failed(name, error, hint if pretrained else "") from error

    def declared_spec(self, model: nn.Module) -> InputSpec | None:
        declared: Any = getattr(model, "pretrained_cfg", None) or {}
        known = declared.get("mean") and declared.get("std") and len(declared["mean"]) == 3
        return _declared(declared) if known else None

    def size_options(self, size: tuple[int, ...]) -> dict[str, Any]:
        return {"img_size": size}

    def uses_hub(self, name: str, pretrained: bool) -> bool:
        return not name.startswith(_LOCAL) if pretrained else name.startswith(_REMOTE)

    def looks_like(self, name: str) -> bool:
        return re.fullmatch(r"[\w.-]+", name) is not None

    def build(self, name: str, request: ModelRequest) -> tuple[nn.Module, dict[str, Any]]:
        """Build a model to train; input size and drop path are given only to models that take them."""
        given = {"drop_path_rate": request.drop_path or None, "img_size": request.image_size}
        options = {"num_classes": len(request.outputs), **request.options}
        options |= {option: value for option, value in given.items() if value is not None}
        optional = given.keys() & options.keys()
        for option in optional - self._accepted(name, optional) if optional else ():
            del options[option]
        model = self.load(name, bool(request.pretrained), **options)
        config = {"architecture": f"timm:{name}", "options": options}
        return model, config if request.image_size is None else {**config, "image_size": request.image_size}

    def reset_heads(self, model: Any) -> None:
        model.reset_classifier(model.num_classes)

    def _accepted(self, name: str, options: set[str]) -> set[str]:
        """Return those options that the constructor of a model's class takes; the model is built without memory."""
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kinds = type(self.load(name, pretrained=False)).__mro__
        accepted: set[str] = set()
        for kind in kinds:
            parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
            accepted |= options & parameters.keys()
            if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                break
        return accepted


LIBRARY = Timm()
