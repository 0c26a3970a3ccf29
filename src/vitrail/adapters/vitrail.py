"""Vitrail's own models: ViT, DeiT and CaiT, with tokens of any roles.

Blocks are those in which patches attend; the class-attention stage, where patches no longer change, comes after them
and sees every patch again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, Library, ModelRequest, TrunkAdapter, around, copy_weights, known_block
from vitrail.adapters.forward_pass import FeaturesEntry, hand_over
from vitrail.adapters.named_block import TIMM_NAMES, NamedBlock
from vitrail.adapters.position import Position, Rotary
from vitrail.adapters.saved import EMBEDDED, PREFIX, load_saved, named
from vitrail.data.labels.targets import PIXEL_BYTES, TargetSpec
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedInput
from vitrail.models import ViT, create_model
from vitrail.models.layers import Block, TalkingHeadsAttention
from vitrail.models.position import coordinates, resample, rotary_frequencies
from vitrail.models.saving import LABELS_ATTRIBUTE, write_folder
from vitrail.tokens import Role, TokenLayout, TokenSpec

_BLOCK = replace(TIMM_NAMES, arguments=(("rope", "rope"), ("mask", "mask")), among_special=True)


class TalkingHeadsBlock(NamedBlock):
    """A block whose heads mix their scores before the softmax and their weights after it."""

    fused = False

    def weigh(self, block: Any, scores: Tensor, bias: Tensor | None = None) -> Tensor:
        """Turn scores into weights; a key of size s equals s copies of it, also for the bias of the second map."""
        attention = block.attn
        mixed = attention.proj_l(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        weights = super().weigh(block, mixed, bias)
        floor = attention.proj_w.bias[:, None, None]
        if bias is not None:
            floor = floor * bias.exp().to(weights.dtype)
        return F.linear(weights.permute(0, 2, 3, 1), attention.proj_w.weight).permute(0, 3, 1, 2) + floor

    def attend_parts(self, block: Any) -> Sequence[nn.Module]:
        return (block.attn.qkv, block.attn.proj)

    def pair_weights(self, block: Any) -> int:
        return block.attn.proj_l.weight.numel() + block.attn.proj_w.weight.numel()


_PLAIN = NamedBlock(_BLOCK)
_TALKING_HEADS = TalkingHeadsBlock(replace(_BLOCK, dense=None))


class VitrailEntryPoint(FeaturesEntry):
    """Entry point of a model of ours; also hands the state of a pass on where tokens enter between blocks."""

    def _enter(self: Any, x: Tensor, entered: Sequence[TokenSpec], here: Sequence[TokenSpec], special: Any) -> Tensor:
        woven: Tensor = super()._enter(x, entered, here, special)  # type: ignore[misc]
        layout = TokenLayout.from_specs(entered, (1, 1, 1))
        spans = zip(entered, layout.spans(), strict=False)
        places = [place for spec, (_, where) in spans if spec not in here for place in where]
        hand_over(x, woven, places, layout.special)
        return woven


class VitrailTrunk(TrunkAdapter):
    """``ViT``."""

    norm = "norm"

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks)

    def block_adapter(self, block: Any) -> BlockAdapter:
        adapter = _TALKING_HEADS if isinstance(getattr(block, "attn", None), TalkingHeadsAttention) else _PLAIN
        return known_block(block, {Block: adapter})

    def layout(self, trunk: Any, size: Any = None) -> TokenLayout:
        return trunk.layout(size, layer=0)

    def layout_in(self, trunk: Any, layer: int, size: Any = None) -> TokenLayout:
        return trunk.layout(size, layer=layer if layer >= 0 else trunk.config.depth + layer)

    def stage(self, trunk: Any) -> Sequence[nn.Module]:
        return list(trunk.blocks_token_only)

    def stage_attention(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return block.weights(*args, **kwargs)

    def resizes(self, trunk: Any) -> bool:
        return True

    def input_spec(self, trunk: Any) -> InputSpec:
        """Return the specification that the model was trained with, or else the usual one of its modality.

        Arrays of bytes in the shape of images or clips count as these; other arrays have no modality but their own.
        """
        config = trunk.config
        trained = vars(trunk).get(LABELS_ATTRIBUTE, {}).get("preprocessing")
        known = InputSpec.from_dict(trained) if trained else None
        modality = "video" if len(config.image) == 3 else "image" if config.in_chans == 3 else "audio"
        if known is not None:
            is_colors = known.of_bytes and modality != "audio"
            return replace(known, size=config.image, modality=modality if is_colors else known.modality)
        if modality == "audio":
            return InputSpec(config.image, (0.0,) * config.in_chans, (1.0,) * config.in_chans, modality, scale=1.0)
        colors = (MEAN, STD) if config.in_chans == 3 else ((0.5,) * config.in_chans,) * 2
        return InputSpec(config.image, colors[0], colors[1], modality)

    def savers(self, model: nn.Module, trunk: nn.Module) -> Sequence[nn.Module]:
        return around(model, trunk, ViT)

    def config(self, trunk: Any) -> Mapping[str, Any]:
        return trunk.config.to_dict()

    def entry_points(self) -> type:
        return VitrailEntryPoint

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        gathering = [part for block in trunk.blocks_token_only for part in (block.attn.k, block.attn.v)]
        return (trunk.patch_embed, *gathering)

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        return {(spec.role, spec.name): trunk.tokens[spec.name] for spec in trunk.config.tokens}

    def num_classes(self, model: nn.Module, trunk: Any) -> int:
        return trunk.config.num_classes

    def position(self, trunk: Any, grid: tuple[int, int, int]) -> Position | None:
        config = trunk.config
        if config.position != "rotary":
            return None
        if trunk.training and config.patch_drop:
            raise UnsupportedInput(
                "this model drops patches in training and has rotary position, and where a patch came from is then "
                "not known; train it with patch_drop=0, or merge in eval mode only"
            )
        weight = trunk.patch_embed.proj.weight
        dtype, axes = torch.promote_types(weight.dtype, torch.float32), len(config.patch)
        frequencies = rotary_frequencies(config.head_width, axes, weight.device, dtype)
        return Rotary(coordinates(grid, axes, weight.device, dtype), frequencies[None, None], False)


class Vitrail(Library):
    """Vitrail's own models: embedded ones, run directories, and architectures by name."""

    prefix = "vitrail"
    package = "vitrail.models"
    directory = "vitrail:DIRECTORY"
    modalities = ("image", "video", "audio")

    def trunks(self) -> Mapping[str, TrunkAdapter]:
        return {"vitrail.models.vit.ViT": VitrailTrunk()}

    def load(self, name: str, pretrained: bool = True, **options: Any) -> nn.Module:
        """Load an embedded model, a saved one or that of a run directory, or create one with random weights."""
        folder = named(f"{PREFIX}{name}")
        if folder.is_dir() or name in EMBEDDED:
            return load_saved(folder)
        if "/" in name or name.startswith("."):
            raise ModelLoadError(f"there is no directory {name!r}; expected a run directory or a saved model")
        if pretrained:
            raise ModelLoadError(
                f"there are no trained weights for {name!r}; expected {', '.join(PREFIX + one for one in EMBEDDED)}, "
                "or a directory that a model was saved to. Use random weights with pretrained=False"
            )
        try:
            return create_model(name, **options).eval()
        except InvalidOption as error:
            raise ModelLoadError(str(error)) from error

    def build(self, name: str, request: ModelRequest) -> tuple[nn.Module, dict[str, Any]]:
        raise ModelLoadError(f"there is no directory {name!r} to start training from; expected a run directory")

    def rebuild(
        self, model: Any, folder: Path, config: Mapping[str, Any], request: ModelRequest, *, keep_heads: bool
    ) -> tuple[nn.Module, dict[str, Any]]:
        classes, own = request.classes, model.config
        changes = dict(request.options)
        if request.drop_path is not None:
            changes.setdefault("drop_path", request.drop_path)
        if request.image_size is not None:
            changes["image_size"] = request.image_size
        if changes.get("in_chans", own.in_chans) != own.in_chans:
            raise InvalidOption(f"in_chans={changes['in_chans']}: the model in {folder} has {own.in_chans} channels")
        tasks = [spec.name for spec in own.tokens if spec.role is Role.TASK]
        dense = [column for column, target in request.targets.items() if target.pixel_bytes]
        own_columns = [column for column in classes if column not in (*tasks, *dense)]
        changes["num_classes"] = sum(len(classes[column]) for column in own_columns)
        changes["dense"] = sum(len(classes[column]) for column in dense)
        changes["tokens"] = tuple(
            replace(spec, classes=len(classes[spec.name])) if spec.name in tasks and spec.name in classes else spec
            for spec in own.tokens
        )
        changes["tokens"] = with_kinds(changes["tokens"], classes, request.targets)
        made = ViT(replace(own, **changes))
        states = model.state_dict()
        copy_weights(
            made, {k: v for k, v in states.items() if keep_heads or not k.startswith(("heads.", "dense_head."))}
        )
        if model.pos_embed is not None and made.pos_embed is not None:
            _copy_positions(model, made)
        return made, {}

    def describe(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def save(
        self,
        folder: Path,
        model: Any,
        states: Mapping[str, Tensor],
        config: Mapping[str, Any],
        labels: Mapping[str, Any],
    ) -> None:
        write_folder(folder, model.config.to_dict(), states, labels)

    def restores(self, config: Mapping[str, Any]) -> bool:
        return "width" in config  # of a ViTConfig

    def restore(self, folder: Path, config: Mapping[str, Any]) -> nn.Module:
        return ViT.from_pretrained(folder)


def with_kinds(
    tokens: Sequence[TokenSpec], classes: Mapping[str, Sequence[str]], targets: Mapping[str, TargetSpec]
) -> tuple[TokenSpec, ...]:
    """Return token specs whose heads are of the kind of the columns that they learn: values, or classes.

    A task token learns the column of its name, class and distillation tokens the other ones.
    """
    kinds = {column: targets[column].kind if column in targets else "classification" for column in classes}
    tasks = {spec.name for spec in tokens if spec.role is Role.TASK}
    own = {kind for column, kind in kinds.items() if column not in tasks and kind not in PIXEL_BYTES}

    def kind_of(spec: TokenSpec) -> Literal["classification", "regression"]:
        learned = {kinds[spec.name]} if spec.role is Role.TASK and spec.name in kinds else own
        return "regression" if learned == {"regression"} else "classification"

    return tuple(spec if spec.role is Role.REGISTER else replace(spec, kind=kind_of(spec)) for spec in tokens)


@torch.no_grad()
def _copy_positions(old: Any, new: Any) -> None:
    """Copy learned positions to another grid, resampled as the model does for inputs of another size."""
    front = old._num_positioned
    patches = resample(old.pos_embed[:, front:], old.config.grid, new.config.grid)
    new.pos_embed.copy_(torch.cat([old.pos_embed[:, :front], patches], 1))


LIBRARY = Vitrail()
