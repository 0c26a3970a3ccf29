"""transformers as a library: models by directory or by repository of the Hub."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitrail.adapters.base import Library, ModelRequest, TrunkAdapter
from vitrail.adapters.saved import read_config
from vitrail.adapters.transformers.trunk import preprocessor_config
from vitrail.errors import InvalidOption, ModelLoadError, VitrailError
from vitrail.models.saving import CONFIG
from vitrail.models.weights_file import only_weights

FAMILIES = (
    "aimv2",
    "beit",
    "clip",
    "dinov3",
    "pixio",
    "radio",
    "siglip2",
    "vit",
    "vit_mae",
    "language.qwen_vl",
    "language.vlm",
    "media.audio_spectrogram",
    "media.video",
    "media.vjepa2",
    "windows.sam",
    "windows.sam2",
    "windows.swin",
    "windows.vitdet",
)
"""Modules of this package with the adapters of a family, as their ``TRUNKS``."""

_IN_LAYER = re.compile(r"\.\d+\.")
"""Part of the name of a weight in a numbered layer."""

CLASSIFIERS = {
    "ForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "ForAudioClassification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "ForVideoClassification": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING",
}
"""Endings of the names of classifiers, which are loaded with their heads, and the table of their configs."""


class Transformers(Library):
    """Models of transformers, by a directory that ``save_pretrained`` wrote or a repository of the Hub."""

    prefix, package, extra = "hf", "transformers", "transformers"
    directory = "hf:DIRECTORY, written by save_pretrained"
    heads = {"cls_classifier": "class", "distillation_classifier": "distillation"}  # noqa: RUF012

    def trunks(self) -> Mapping[str, TrunkAdapter]:
        families = [import_module(f"vitrail.adapters.transformers.{name}").TRUNKS for name in FAMILIES]
        return {kind: adapter for trunks in families for kind, adapter in trunks.items()}

    def load(self, name: str, pretrained: bool = True, **options: Any) -> nn.Module:
        """Load a model from a directory or the Hub, with its classification head where it has one."""
        library = self.imported(name)
        if (Path(name) / CONFIG).is_file():
            read_config(Path(name))  # numbers that no model has
        try:
            trusted = options.get("trust_remote_code", False)  # by default transformers would ask on the terminal
            config = library.AutoConfig.from_pretrained(name, trust_remote_code=trusted)
            kinds = {f"AutoModel{head}" for head in CLASSIFIERS for kind in config.architectures or () if head in kind}
            auto = getattr(library, next(iter(kinds), "AutoModel"))
            with only_weights():
                if pretrained:
                    model, found = auto.from_pretrained(name, **options, output_loading_info=True)
                    _check_loaded(name, model, found)
                else:
                    model = auto.from_config(config, **options)
        except VitrailError:
            raise
        except Exception as error:
            hint = "Name a directory written by save_pretrained, or a repository of the Hub that can be reached."
            raise self.failed(name, error, hint) from error
        if pretrained:
            takes = getattr(model, "input_modalities", ())
            preprocessor_config(name, "video" if takes in ("video", ("video",)) else "image", download=True)
        return model.eval()

    def class_names(self, model: Any) -> tuple[str, ...] | None:
        names: dict[Any, str] = getattr(getattr(model, "config", None), "id2label", None) or {}
        known = names and not all(re.fullmatch(r"LABEL_\d+", str(name)) for name in names.values())
        return tuple(str(names[number]) for number in sorted(names)) if known else None

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
        self.check_options(name, options)
        channels = options.pop("in_chans", None)
        try:
            own = library.AutoConfig.from_pretrained(name, trust_remote_code=False)
            kinds = (kind for kind, table in CLASSIFIERS.items() if type(own) in getattr(library, table))
            kind = next(kinds, "ForImageClassification")
            of_images = kind == "ForImageClassification"
            resized = {"image_size": request.image_size, "num_channels": channels} if of_images else {}
            options |= {option: value for option, value in resized.items() if value is not None}
            config = library.AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
            auto = getattr(library, f"AutoModel{kind}")
            if request.pretrained is False:
                model = auto.from_config(config)
            else:
                with only_weights():
                    model = auto.from_pretrained(name, config=config, ignore_mismatched_sizes=True)
        except Exception as error:
            raise self.failed(name, error) from error
        if not of_images:
            _check_size(name, model, request.image_size)
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


def _check_size(name: str, model: nn.Module, size: int | tuple[int, ...] | None) -> None:
    """Raise unless a model of clips or sounds is a supported one, and is for inputs of this size."""
    from vitrail.adapters.registry import input_spec

    own = input_spec(model).size
    if size not in (None, own):
        shown = ",".join(map(str, own))
        raise InvalidOption(f"image_size={size}: {name} takes inputs of {shown}, and no others; leave image_size out")


def _check_loaded(name: str, model: nn.Module, found: Mapping[str, Any]) -> None:
    """Raise if weights of the model itself are not in the file, or have another shape: they would stay random.

    A head or a pooling layer may be missing: models are loaded for features, too.
    """
    mismatched = {one[0] if isinstance(one, tuple) else one for one in found.get("mismatched_keys", ())}
    random = sorted({*map(str, found.get("missing_keys", ())), *map(str, mismatched)})
    in_layers = [key for key in random if _IN_LAYER.search(key)]
    if in_layers or len(random) > len(model.state_dict()) // 2:
        shown = (in_layers or random)[:3]
        raise ModelLoadError(
            f"the weights of {name} do not fit its config: {len(random)} of {len(model.state_dict())} tensors are "
            f"missing or have another shape ({', '.join(shown)}, ...), and would stay random. Save the model again "
            "with save_pretrained, or use random weights with pretrained=False"
        )


LIBRARY = Transformers()
