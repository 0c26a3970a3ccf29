"""The registry of models: ``create_model``, ``list_models``."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

from vitrail._arguments import checked
from vitrail.errors import InvalidOption
from vitrail.models.config import CLASS_TOKEN, DISTILLATION_TOKEN, ViTConfig, check_options, depth_rule
from vitrail.models.vit import ViT

GATHERING_CLASS_TOKEN = replace(CLASS_TOKEN, enters=-1, position=False)
"""The class token of CaiT, which enters after the last block."""


def _cait(width: int, depth: int, image_size: int, layer_scale: float | None = None) -> ViTConfig:
    return ViTConfig(
        image_size=image_size,
        width=width,
        depth=depth,
        heads=width // 48,
        tokens=(GATHERING_CLASS_TOKEN,),
        layer_scale=depth_rule(depth) if layer_scale is None else layer_scale,
        class_attention=2,
        talking_heads=True,
        drop_path_uniform=True,
    )


_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 192, "heads": 3},
    "small": {"width": 384, "heads": 6},
    "base": {"width": 768, "heads": 12},
    "large": {"width": 1024, "depth": 24, "heads": 16},
}
_DEIT, _DISTILLED = ("tiny", "small", "base"), (CLASS_TOKEN, DISTILLATION_TOKEN)

MODELS: dict[str, ViTConfig] = {
    **{f"vit_{size}_patch16": ViTConfig(**given) for size, given in _SIZES.items()},
    **{f"deit_{size}_patch16": ViTConfig(**_SIZES[size]) for size in _DEIT},
    **{f"deit_{size}_patch16_distilled": ViTConfig(**_SIZES[size], tokens=_DISTILLED) for size in _DEIT},
    "cait_xxs24": _cait(192, 24, 224),
    "cait_xxs36": _cait(192, 36, 224, layer_scale=1e-5),  # as released; the rule gives 1e-6
    "cait_xs24": _cait(288, 24, 384),
    "cait_s24": _cait(384, 24, 224),
    "cait_s36": _cait(384, 36, 384),
    "cait_m36": _cait(768, 36, 384),
    "cait_m48": _cait(768, 48, 448),
}
"""Configurations by name, with the published image sizes."""


@checked
def list_models(pattern: str = "*") -> list[str]:
    """Return the names of models that match a pattern (``"*_patch16"``) or start with it (``"cait"``)."""
    if not isinstance(pattern, str):
        raise InvalidOption(f"pattern must be a string such as 'cait'; got {pattern!r}")
    return sorted(name for name in MODELS if fnmatch(name, pattern) or name.startswith(pattern))


def model_config(name: str, **options: Any) -> ViTConfig:
    """Return the configuration of a named model, with some options of `ViTConfig` changed.

    If the depth of a CaiT changes, ``layer_scale`` follows CaiT's rule for the new depth unless given.
    """
    if name not in MODELS:
        # timm's names have the same words in another order, and the image size
        near = [model for model in MODELS if set(model.split("_")) <= set(name.split("_"))]
        near = near or get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean {max(near, key=len)!r}? Set the image size with image_size" if near else ""
        raise InvalidOption(f"no model {name!r}{hint}; available: {', '.join(list_models())}")
    check_options(options)
    config = MODELS[name]
    depth = options.get("depth", config.depth)
    if config.layer_scale is not None and "layer_scale" not in options and depth != config.depth:
        options = {**options, "layer_scale": depth_rule(depth)}
    return replace(config, **options)


@checked
def create_model(name: str, **options: Any) -> ViT:
    """Build a model by name with random weights, or load one from files.

    Options are those of `ViTConfig`. ``local-dir:DIRECTORY`` and ``hf-hub:OWNER/NAME`` load a model written by
    ``save_pretrained``; the only option is then ``num_classes``.

    >>> model = create_model("deit_tiny_patch16_distilled", num_classes=10, depth=2)
    >>> model.num_prefix_tokens
    2
    """
    if not isinstance(name, str):
        raise InvalidOption(
            f"create_model takes the name of a model as a string; got {name!r}. Use ViT(config) for a config"
        )
    if not name.startswith(("local-dir:", "hf-hub:")):
        return ViT(model_config(name, **options))
    wrong = sorted(set(options) - {"num_classes"})
    if wrong:
        raise InvalidOption(f"only num_classes can be changed when loading {name}; got {', '.join(wrong)}")
    model = ViT.from_pretrained(name)
    if "num_classes" in options and options["num_classes"] != model.config.num_classes:
        model.reset_classifier(options["num_classes"])
    return model
