"""timm as a library: models by name, built, loaded and trained."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitrail.adapters.base import Library, ModelRequest, TrunkAdapter
from vitrail.adapters.timm.beit import TimmBeit
from vitrail.adapters.timm.eva import TimmEva
from vitrail.adapters.timm.hiera import TimmHiera
from vitrail.adapters.timm.mvit import TimmMvit
from vitrail.adapters.timm.relpos import TimmRelPos
from vitrail.adapters.timm.sam import TimmSam
from vitrail.adapters.timm.swin import TimmSwin, TimmSwinV2
from vitrail.adapters.timm.vit import TimmVisionTransformer, declared
from vitrail.data.spec import InputSpec
from vitrail.errors import ModelLoadError
from vitrail.models.weights_file import find_weights, only_weights, read_tensors

_REMOTE = ("hf-hub:", "hf_hub:")
_LOCAL = "local-dir:"

OPTIONS = frozenset(
    {"num_classes", "in_chans", "img_size", "drop_rate", "drop_path_rate", "global_pool", "bn_eps", "bn_momentum"}
)
"""Options that most models take, some of them outside of their constructor."""


class Timm(Library):
    """Models of timm, by the names that ``timm.create_model`` takes."""

    prefix = package = extra = "timm"
    directory = "timm:local-dir:DIRECTORY"
    heads = {"head": "class", "head_dist": "distillation"}  # noqa: RUF012

    def trunks(self) -> Mapping[str, TrunkAdapter]:
        return {
            "timm.models.vision_transformer.VisionTransformer": TimmVisionTransformer(),
            "timm.models.eva.Eva": TimmEva(),
            "timm.models.beit.Beit": TimmBeit(),
            "timm.models.vision_transformer_relpos.VisionTransformerRelPos": TimmRelPos(),
            "timm.models.swin_transformer.SwinTransformer": TimmSwin(),
            "timm.models.swin_transformer_v2.SwinTransformerV2": TimmSwinV2(),
            "timm.models.hiera.Hiera": TimmHiera(),
            "timm.models.mvitv2.MultiScaleVit": TimmMvit(),
            "timm.models.vision_transformer_sam.VisionTransformerSAM": TimmSam(),
        }

    def load(self, name: str, pretrained: bool = True, **options: Any) -> nn.Module:
        timm = self.imported(name)
        if not timm.is_model(name.split(".")[0]) and not name.startswith((*_REMOTE, _LOCAL)):
            raise ModelLoadError(f"timm has no model named {name!r}; `timm.list_models('*vit*')` lists those it has")
        folder = Path(name.removeprefix(_LOCAL)).expanduser() if name.startswith(_LOCAL) else None
        states = read_tensors(find_weights(folder)) if pretrained and folder is not None and folder.is_dir() else None
        try:
            with only_weights():
                if states is None:
                    return timm.create_model(name, pretrained=pretrained, **options).eval()
                # read by us: timm's own reading runs pickles in some of its versions
                given = {"source": "", "state_dict": states, "custom_load": False, "file": None}
                model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=given, **options)
                model.pretrained_cfg.update(source="local-dir", state_dict=None, file=str(folder))
                return model.eval()
        except Exception as error:
            hint = (
                "Check the network, name a directory with its weights (timm:local-dir:DIRECTORY), or use random "
                "weights (pretrained=False) where they do not matter."
            )
            raise self.failed(name, error, hint if pretrained else "") from error

    def declared_spec(self, model: nn.Module) -> InputSpec | None:
        config: Any = getattr(model, "pretrained_cfg", None) or {}
        known = config.get("mean") and config.get("std") and len(config["mean"]) == 3
        return declared(config) if known else None

    def class_names(self, model: Any) -> tuple[str, ...] | None:
        """Return the names of ImageNet's classes, for models whose published head predicts these."""
        if not getattr(model, "pretrained_cfg", None):
            return None
        data: Any = import_module("timm.data")
        subset = data.infer_imagenet_subset(model)
        if subset is None:
            return None
        info = data.ImageNetInfo(subset)
        return tuple(str(info.index_to_description(number)) for number in range(info.num_classes()))

    def restores(self, config: Mapping[str, Any]) -> bool:
        return super().restores(config) or "pretrained_cfg" in config  # of timm's own save_for_hf

    def restore(self, folder: Path, config: Mapping[str, Any]) -> nn.Module:
        is_own = "pretrained_cfg" in config
        return self.load(f"{_LOCAL}{folder}") if is_own else super().restore(folder, config)

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
        self.check_options(name, options)
        options |= {option: value for option, value in given.items() if value is not None}
        optional = given.keys() & options.keys()
        for option in optional - self._accepted(name, optional) if optional else ():
            del options[option]
        model = self.load(name, bool(request.pretrained), **options)
        config = {"architecture": f"timm:{name}", "options": options}
        return model, config if request.image_size is None else {**config, "image_size": request.image_size}

    def reset_heads(self, model: Any) -> None:
        model.reset_classifier(model.num_classes)

    def check_options(self, name: str, options: Mapping[str, Any]) -> None:
        """Raise for options that are not the model's own, such as ``checkpoint_path``: files are read by us alone."""
        others = {*options} - OPTIONS
        refused = others - self._accepted(name, others) if others else ()
        if refused:
            raise ModelLoadError(
                f"options: {', '.join(sorted(map(str, refused)))} of timm:{name}: expected arguments of the model's "
                f"constructor, or {', '.join(sorted(OPTIONS))}; leave the others out"
            )

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
