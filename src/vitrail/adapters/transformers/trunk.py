"""What the families of transformers share: the trunk, its entry point, and the preprocessing that it was saved with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, TrunkAdapter, VisualTokens, around, known_block, parameters_by_role
from vitrail.adapters.forward_pass import EntryPoint
from vitrail.adapters.saved import read_labels
from vitrail.adapters.transformers.language.projector import patches_per_token, projectors, visual_tokens
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.tokens import Role, TokenLayout

MODELS = "transformers.models"
_TEXT = ("text_model", "text_projection", "language_model", "lm_head")
"""Attributes of models around a trunk that hold parts which do not run on images."""


def refuse_attentions(config: Any, call: Mapping[str, Any]) -> None:
    """Raise if a model is called for its attention maps."""
    if call.get("output_attentions", getattr(config, "output_attentions", False)):
        raise UnsupportedInput(
            "output_attentions: attention maps of a merged model are not square and are not returned; use "
            "vitrail.record, remove the merging or the added tokens, or call the model without output_attentions"
        )


class TransformersEntryPoint(EntryPoint):
    """Entry point of a transformers trunk; opens a pass with the layout of its input."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, adapter = self.config, self._vitrail_adapter
        refuse_attentions(config, kwargs)
        inputs = args[0] if args else kwargs.get(adapter.argument)
        if inputs is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        hidden = kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False))
        expose = adapter.exposes or bool(hidden)
        gridded = adapter.exposes and getattr(config, "reshape_hidden_states", False)
        # while exporting, transformers makes a mask that allows everything
        masks = [*(kwargs.get(name) for name in adapter.masks), *args[1:]]
        unmasked = not any(isinstance(value, Tensor) for value in masks)
        with self._vitrail_pass(inputs, expose=expose, gridded=gridded, unmasked=unmasked):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class TransformersTrunk(TrunkAdapter):
    """A model without its head.

    Attributes:
        block_classes: adapters by block class.
        nested_classes: the same for versions of transformers in which attention holds another module with its heads.
        interpolates: whether it takes inputs of other sizes without ``interpolate_pos_encoding``.
        masks: names of the arguments that may mask tokens.
        modality: what the model takes, as in `InputSpec`.
        mean, std: statistics of each channel, for models without a ``preprocessor_config.json``.
    """

    modality = "image"
    argument = "pixel_values"
    norm = "layernorm"
    block_classes: Mapping[type | str, BlockAdapter]
    nested_classes: Mapping[type | str, BlockAdapter] = MappingProxyType({})
    interpolates = False
    masks: tuple[str, ...] = ("attention_mask",)
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        # before 5.10, and in DINOv2 still, the layers belong to an encoder
        return list(trunk.encoder.layer if hasattr(trunk, "encoder") else trunk.layers)

    def block_adapter(self, block: Any) -> BlockAdapter:
        nested = any(hasattr(getattr(block, "attention", None), name) for name in ("attention", "self"))
        return known_block(block, self.nested_classes if nested else self.block_classes)

    def layout(self, trunk: Any, size: tuple[int, ...] | None = None) -> TokenLayout:
        patch = trunk.embeddings.patch_embeddings.patch_size
        height, width = self.input_spec(trunk).size if size is None else size
        distillation = (Role.DISTILLATION, int(hasattr(trunk.embeddings, "distillation_token")))
        registers = (Role.REGISTER, getattr(trunk.config, "num_register_tokens", 0))
        grid = (1, height // patch[0], width // patch[1])
        return TokenLayout.of(Role.CLASS, distillation, registers, grid=grid)

    def resizes(self, trunk: Any) -> bool:
        return True

    def own_size(self, trunk: Any) -> tuple[int, ...]:
        """Return the size of the images that the model was made for."""
        own = trunk.config.image_size
        return (own, own) if isinstance(own, int) else tuple(own)

    def input_spec(self, trunk: Any) -> InputSpec:
        """Return the specification that Vitrail trained the model with, or else the one that it was saved with."""
        name = _name_or_path(trunk)
        trained = read_labels(Path(name)).get("preprocessing") if name else None
        if trained and trained.get("modality") == self.modality:
            return replace(InputSpec.from_dict(trained), argument=self.argument)
        return self.stored_spec(trunk)

    def stored_spec(self, trunk: Any) -> InputSpec:
        """Return the size and normalization that the model was saved with, in its ``preprocessor_config.json``."""
        plain = InputSpec(self.own_size(trunk), self.mean, self.std, argument=self.argument)
        stored = self.preprocessing(trunk)
        mean, std = stored.get("image_mean") or self.mean, stored.get("image_std") or self.std
        if not stored.get("do_normalize", True):
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        try:
            return replace(plain, size=(self.interpolates and _stored_size(stored)) or plain.size, mean=mean, std=std)
        except (InvalidOption, TypeError, ValueError):  # not a file of images
            return plain

    def preprocessing(self, trunk: Any) -> dict[str, Any]:
        """Return the preprocessing that the model was saved with; empty where it was saved without."""
        return preprocessor_config(_name_or_path(trunk), self.modality)

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        names = {Role.CLASS: "cls_token", Role.DISTILLATION: "distillation_token", Role.REGISTER: "register_tokens"}
        return parameters_by_role(trunk.embeddings, names)

    def num_classes(self, model: Any, trunk: Any) -> int:
        return next((one.config.num_labels for one in model.modules() if "Classification" in type(one).__name__), 0)

    def elsewhere(self, model: nn.Module, trunk: Any) -> Sequence[nn.Module]:
        return [part for name, part in model.named_modules() if name.rpartition(".")[2] in _TEXT]

    def image_model(self, model: nn.Module, trunk: nn.Module) -> nn.Module:
        """Return the trunk where something beside it takes text or prompts, which images alone do not bring."""
        return trunk if set(self.elsewhere(model, trunk)) - set(trunk.modules()) else model

    def behind(self, model: nn.Module, trunk: Any) -> Sequence[tuple[nn.Module, int]]:
        """Return the projector to a language model, with the number of patches that become one token."""
        layout = self.layout(trunk)
        return [(part, patches_per_token(owner.config, layout)) for owner, part in projectors(model)]

    def visual_tokens(self, model: nn.Module, trunk: Any) -> VisualTokens:
        return visual_tokens(model, self.layout(trunk))

    def savers(self, model: nn.Module, trunk: nn.Module) -> Sequence[nn.Module]:
        return around(model, trunk, import_module("transformers").PreTrainedModel)

    def config(self, trunk: Any) -> Mapping[str, Any]:
        """Return the config without names, labels and how the model is run."""
        values = trunk.config.to_dict()
        return {name: value for name, value in values.items() if not name.startswith("_") and name not in _NOT_BASE}

    def entry_points(self) -> type:
        return TransformersEntryPoint

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.embeddings.patch_embeddings,)


def _name_or_path(trunk: Any) -> str:
    """Return the directory or the Hub repository that a model was loaded from; empty for one that was not."""
    return str(getattr(trunk, "name_or_path", None) or "")


def preprocessor_config(name: str, modality: str = "image", *, download: bool = False) -> dict[str, Any]:
    """Read the preprocessing saved in a directory or in a Hub repository in the cache; empty without any."""
    files = (_PREPROCESSOR,) if modality != "video" else (_VIDEO_PREPROCESSOR, _PREPROCESSOR)
    found = (_stored_json(name, file, download) for file in files if name)
    return next((stored for stored in found if stored), {})


def _stored_json(name: str, file: str, download: bool) -> dict[str, Any]:
    try:
        path = Path(name) / file
        if not Path(name).is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, file, local_files_only=not download))
        stored = json.loads(path.read_text(encoding="utf-8"))
    except Exception:  # optional: `input_spec` then takes the family's usual normalization
        return {}
    return stored if isinstance(stored, dict) else {}


def _stored_size(stored: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the size of what an image processor makes: the crop where it crops, what it resizes to otherwise."""
    size = stored.get("crop_size" if stored.get("do_center_crop") else "size")
    if isinstance(size, int):
        return size, size
    if not isinstance(size, dict):
        return None
    edge = size.get("shortest_edge")
    height, width = size.get("height", edge), size.get("width", edge)
    return None if height is None or width is None else (int(height), int(width))


_NOT_BASE = (
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
)
"""Entries of a config that say nothing about the trunk's weights or what it computes."""

_PREPROCESSOR, _VIDEO_PREPROCESSOR = "preprocessor_config.json", "video_preprocessor_config.json"
