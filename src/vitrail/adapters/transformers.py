"""transformers: its library, and ViT, DeiT, DINOv2 and DINOv2 with registers, with any of their heads.

Other families are in ``_transformers_*.py``, each with its ``TRUNKS``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import BlockAdapter, Library, ModelRequest, TrunkAdapter, known_block, parameters_by_role
from vitrail.adapters.forward_pass import EntryPoint
from vitrail.adapters.named_block import BlockNames, MlpNames, NamedBlock
from vitrail.data.spec import MEAN, STD, InputSpec
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.tokens import Role, TokenLayout

_VIT = BlockNames(
    norm1="layernorm_before",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    proj="attention.o_proj",
    norm2="layernorm_after",
    mlp="mlp",
    heads="attention.num_attention_heads",
    head_dim="attention.head_dim",
    attention="attention",
    after_attend=("dropout",),
    after_feed=("dropout",),
    scale="attention.scaling",
    attention_dropout="attention.attention_dropout",
    tokens="hidden_states",
    arguments=(("attention_mask", "mask"),),
    dense=MlpNames(("ViTMLP", "DeiTMLP", "Dinov2MLP", "Dinov2WithRegistersMLP"), act="mlp.activation_fn"),
)
_DINOV2 = replace(
    _VIT,
    norm1="norm1",
    norm2="norm2",
    after_attend=("layer_scale1", "drop_path"),
    after_feed=("layer_scale2", "drop_path"),
)
# transformers before 5.18: attention and MLP are two modules deep, and the MLP adds its residual itself
_VIT_NESTED = replace(
    _VIT,
    qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    proj="attention.output.dense",
    mlp=("intermediate", "output.dense"),
    heads="attention.attention.num_attention_heads",
    head_dim=None,
    proj_drop="attention.output.dropout",
    after_attend=(),
    after_feed=("output.dropout",),
    scale="attention.attention.scaling",
    attention_dropout="attention.attention.dropout_prob",
    dense=None,
)
_DINOV2_NESTED = replace(
    _VIT_NESTED,
    norm1="norm1",
    norm2="norm2",
    mlp="mlp",
    after_attend=_DINOV2.after_attend,
    after_feed=_DINOV2.after_feed,
)
MODELS = "transformers.models"
FAMILIES = (
    "beit",
    "clip",
    "dinov3",
    "packed",
    "vlm",
)
"""Modules ``_transformers_*`` with the adapters of other families, as their ``TRUNKS``."""
_TEXT = ("text_model", "text_projection", "language_model", "lm_head")
"""Attributes of models around a trunk that hold parts which do not run on images."""
_PROJECTORS = ("multi_modal_projector", "connector")
"""Attributes of models around a trunk that hold what turns its patches into tokens of a language model."""

_DINOV2_LAYER = f"{MODELS}.dinov2.modeling_dinov2.Dinov2Layer"
_REGISTERS_LAYER = f"{MODELS}.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayer"
_BLOCKS: dict[type | str, BlockAdapter] = {
    f"{MODELS}.vit.modeling_vit.ViTLayer": NamedBlock(_VIT),
    f"{MODELS}.deit.modeling_deit.DeiTLayer": NamedBlock(_VIT),
    _DINOV2_LAYER: NamedBlock(_DINOV2),
    _REGISTERS_LAYER: NamedBlock(_DINOV2),
}
_NESTED_BLOCKS: dict[type | str, BlockAdapter] = {
    **dict.fromkeys(_BLOCKS, NamedBlock(_VIT_NESTED)),
    **dict.fromkeys((_DINOV2_LAYER, _REGISTERS_LAYER), NamedBlock(_DINOV2_NESTED)),
}


def refuse_attentions(config: Any, call: Mapping[str, Any]) -> None:
    """Raise if a model is called for its attention maps."""
    if call.get("output_attentions", getattr(config, "output_attentions", False)):
        raise UnsupportedInput(
            "output_attentions: attention maps of a merged model are not square and are not returned; use "
            "vitrail.record, remove the merging or the added tokens, or call the model without output_attentions"
        )


class TransformersEntryPoint(EntryPoint):
    """Entry point of a transformers trunk; opens a pass with the layout of its input."""

    def forward(self: Any, pixel_values: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        refuse_attentions(config, kwargs)
        if pixel_values is None:
            return super().forward(pixel_values, *args, **kwargs)  # type: ignore[misc]
        hidden = kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False))
        adapter = self._vitrail_adapter
        expose = adapter.exposes or bool(hidden)
        gridded = adapter.exposes and getattr(config, "reshape_hidden_states", False)
        # while exporting, transformers makes a mask that allows everything
        masks = [*(kwargs.get(name) for name in adapter.masks), *args[2:]]
        unmasked = not any(isinstance(value, Tensor) for value in masks)
        with self._vitrail_pass(pixel_values, expose=expose, gridded=gridded, unmasked=unmasked):
            return super().forward(pixel_values, *args, **kwargs)  # type: ignore[misc]


class TransformersTrunk(TrunkAdapter):
    """A model without its head.

    Attributes:
        block_classes: adapters by block class.
        nested_classes: the same for versions of transformers in which attention holds a module of the same name.
        exposes: whether the model always reads the tokens between blocks.
        interpolates: whether it takes inputs of other sizes without ``interpolate_pos_encoding``.
        masks: names of the arguments that may mask tokens.
        mean, std: statistics of each channel, for models without a ``preprocessor_config.json``.
    """

    argument = "pixel_values"
    block_classes: Mapping[type | str, BlockAdapter] = _BLOCKS
    nested_classes: Mapping[type | str, BlockAdapter] = _NESTED_BLOCKS
    exposes = False
    interpolates = False
    masks: tuple[str, ...] = ("attention_mask",)
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def blocks(self, trunk: Any) -> Sequence[nn.Module]:
        # before 5.10, and in DINOv2 still, the layers belong to an encoder
        return list(trunk.encoder.layer if hasattr(trunk, "encoder") else trunk.layers)

    def block_adapter(self, block: Any) -> BlockAdapter:
        nested = hasattr(getattr(block, "attention", None), "attention")
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
        """Return the size and normalization that the model was saved with, in its ``preprocessor_config.json``."""
        plain = InputSpec(self.own_size(trunk), self.mean, self.std, argument=self.argument)
        stored = _preprocessor_config(str(getattr(trunk, "name_or_path", None) or ""))
        mean, std = stored.get("image_mean") or self.mean, stored.get("image_std") or self.std
        if not stored.get("do_normalize", True):
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        try:
            return replace(plain, size=(self.interpolates and _stored_size(stored)) or plain.size, mean=mean, std=std)
        except (InvalidOption, TypeError, ValueError):  # not a file of images
            return plain

    def token_parameters(self, trunk: Any) -> dict[tuple[Role, str], Tensor]:
        names = {Role.CLASS: "cls_token", Role.DISTILLATION: "distillation_token", Role.REGISTER: "register_tokens"}
        return parameters_by_role(trunk.embeddings, names)

    def num_classes(self, model: Any, trunk: Any) -> int:
        return next((one.config.num_labels for one in model.modules() if "Classification" in type(one).__name__), 0)

    def elsewhere(self, model: nn.Module, trunk: Any) -> Sequence[nn.Module]:
        return [part for name, part in model.named_modules() if name.rpartition(".")[2] in _TEXT]

    def behind(self, model: nn.Module, trunk: Any) -> Sequence[tuple[nn.Module, int]]:
        """Return the projector to a language model, with the number of patches that become one token."""
        places = [name.rpartition(".") for name, _ in model.named_modules()]
        owners = [(model.get_submodule(owner), name) for owner, _, name in places if name in _PROJECTORS]
        return [(getattr(owner, name), _patches_per_token(owner.config, self.layout(trunk))) for owner, name in owners]

    def entry_points(self) -> type:
        return TransformersEntryPoint

    def patch_parts(self, trunk: Any) -> Sequence[nn.Module]:
        return (trunk.embeddings.patch_embeddings,)


class Dinov2Trunk(TransformersTrunk):
    """DINOv2: any size without asking, and ImageNet's statistics."""

    interpolates = True
    mean, std = MEAN, STD


class Dinov2BackboneTrunk(Dinov2Trunk):
    """DINOv2 as a backbone: its feature maps are the tokens between blocks."""

    exposes = True


def _patches_per_token(config: Any, layout: TokenLayout) -> int:
    """Return how many patches a projector turns into one token: by pixel shuffle, or by pooling to a fixed number."""
    pooled = getattr(config, "mm_tokens_per_image", None)
    if pooled is not None:
        return layout.num_patches // int(pooled)
    ratio = getattr(config, "downsample_ratio", None)
    side = getattr(config, "scale_factor", getattr(config, "downsample_factor", 1)) if ratio is None else 1 / ratio
    return round(side) ** 2


def _preprocessor_config(name: str, *, download: bool = False) -> dict[str, Any]:
    """Read the ``preprocessor_config.json`` of a directory or of a Hub repository in the cache; empty without one."""
    if not name:
        return {}
    try:
        path = Path(name) / _PREPROCESSOR
        if not Path(name).is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, _PREPROCESSOR, local_files_only=not download))
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


_PREPROCESSOR = "preprocessor_config.json"


class Transformers(Library):
    """Models of transformers, by a directory that ``save_pretrained`` wrote or a repository of the Hub."""

    prefix, package, extra = "hf", "transformers", "transformers"
    directory = "hf:DIRECTORY, written by save_pretrained"
    heads = {"cls_classifier": "class", "distillation_classifier": "distillation"}  # noqa: RUF012

    def trunks(self) -> Mapping[str, TrunkAdapter]:
        families = [import_module(f"vitrail.adapters._transformers_{name}").TRUNKS for name in FAMILIES]
        dinov2, registers = "dinov2.modeling_dinov2", "dinov2_with_registers.modeling_dinov2_with_registers"
        return {
            **{kind: adapter for trunks in families for kind, adapter in trunks.items()},
            f"{MODELS}.vit.modeling_vit.ViTModel": TransformersTrunk(),
            f"{MODELS}.deit.modeling_deit.DeiTModel": TransformersTrunk(),
            f"{MODELS}.{dinov2}.Dinov2Model": Dinov2Trunk(),
            f"{MODELS}.{registers}.Dinov2WithRegistersModel": Dinov2Trunk(),
            f"{MODELS}.{dinov2}.Dinov2Backbone": Dinov2BackboneTrunk(),
            f"{MODELS}.{registers}.Dinov2WithRegistersBackbone": Dinov2BackboneTrunk(),
        }

    def load(self, name: str, pretrained: bool = True, **options: Any) -> nn.Module:
        """Load a model from a directory or the Hub, with its classification head where it has one."""
        library = self.imported(name)
        try:
            config = library.AutoConfig.from_pretrained(name)
            classifies = any("ForImageClassification" in kind for kind in config.architectures or ())
            auto = library.AutoModelForImageClassification if classifies else library.AutoModel
            model = auto.from_pretrained(name, **options) if pretrained else auto.from_config(config, **options)
        except Exception as error:
            hint = "Name a directory written by save_pretrained, or a repository of the Hub that can be reached."
            raise self.failed(name, error, hint) from error
        if pretrained:
            _preprocessor_config(name, download=True)
        return model.eval()

    def uses_hub(self, name: str, pretrained: bool) -> bool:
        return not Path(name).is_dir()

    def is_missing_directory(self, name: str) -> bool:
        # a repository of the Hub has at most an owner and a name
        return (name.startswith(("/", "./", "../", "~")) or name.count("/") > 1) and not Path(name).is_dir()

    def looks_like(self, name: str) -> bool:
        return Path(name).is_dir() or re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Silence progress bars where stderr is no terminal: in a file each step would be a line."""
        try:
            log: Any = import_module("transformers.utils.logging")
        except ImportError:
            log = None
        if log is None or sys.stderr.isatty() or not log.is_progress_bar_enabled():
            yield
            return
        log.disable_progress_bar()
        try:
            yield
        finally:
            log.enable_progress_bar()

    def build(self, name: str, request: ModelRequest) -> tuple[nn.Module, dict[str, Any]]:
        """Build a classifier to train, with trained weights unless ``request.pretrained`` is False."""
        library = self.imported(name)
        labels = dict(enumerate(request.outputs))
        options = {"id2label": labels, "label2id": {label: one for one, label in labels.items()}, **request.options}
        if request.image_size is not None:
            options["image_size"] = request.image_size
        if "in_chans" in options:
            options["num_channels"] = options.pop("in_chans")
        try:
            config = library.AutoConfig.from_pretrained(name, **options)
            auto = library.AutoModelForImageClassification
            if request.pretrained is False:
                model = auto.from_config(config)
            else:
                model = auto.from_pretrained(name, config=config, ignore_mismatched_sizes=True)
        except Exception as error:
            raise self.failed(name, error) from error
        return model, {"architecture": "hf"}

    def rebuild(
        self, model: nn.Module, folder: Path, config: Mapping[str, Any], request: ModelRequest, *, keep_heads: bool
    ) -> tuple[nn.Module, dict[str, Any]]:
        return self.build(str(folder), request)

    def describe(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"architecture": "hf"}

    def save(
        self,
        folder: Path,
        model: Any,
        states: Mapping[str, Tensor],
        config: Mapping[str, Any],
        labels: Mapping[str, Any],
    ) -> None:
        from vitrail.models.saving import write_labels

        folder.mkdir(parents=True, exist_ok=True)
        kept = {name: value.detach().cpu().contiguous().clone() for name, value in states.items()}
        model.save_pretrained(folder, state_dict=kept)
        write_labels(folder, labels)

    def restores(self, config: Mapping[str, Any]) -> bool:
        return "model_type" in config or config.get("architecture") == self.prefix

    def restore(self, folder: Path, config: Mapping[str, Any]) -> nn.Module:
        return self.load(str(folder))


LIBRARY = Transformers()
