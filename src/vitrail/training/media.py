"""How a run decodes clips and sounds: as its model was trained, or by its options."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from vitrail.adapters import load_model
from vitrail.adapters.registry import declared_spec, split_name
from vitrail.adapters.saved import is_saved, load_saved, model_folder, named, read_labels
from vitrail.data.dataset import Dataset
from vitrail.data.media.modality import MODALITIES
from vitrail.data.media.sampling import Spectrogram
from vitrail.data.spec import InputSpec
from vitrail.errors import ImageError, InvalidOption
from vitrail.training.config import Config
from vitrail.training.config.presets import PRESETS

FRAMES, BANDS = 8, 64
"""Default frames of a clip, and bands of a spectrogram."""

MOST_FRAMES, MEASURED = 1024, 64
"""Most frames of a spectrogram by default, and sounds whose length decides."""


def decoding_of(config: Config, dataset: Dataset) -> tuple[Config, InputSpec | None, bool]:
    """Return how clips and sounds are decoded, None for other data, and whether their normalization is measured.

    A model that was trained on such data decides; for a new one the options do, and the config is returned with them.
    """
    modality = dataset.modality
    if config.modality not in (None, modality):
        raise InvalidOption(f"modality={config.modality!r}: the data is {modality}; leave modality out")
    kind = MODALITIES[modality].sampling
    if kind is None or dataset.tensor_spec is not None:
        if config.sampling:
            raise InvalidOption(f"sampling={config.sampling}: it is for video and audio, and the data is {modality}")
        known = None if config.own or modality != "array" else _known_spec(config.model)
        if known is not None and known.axes:
            raise InvalidOption(
                f"model={config.model!r} takes {known.modality} with the axes {known.axes}, and the data is arrays; "
                f"give it files of {MODALITIES[known.modality].plural}, or use a Vitrail model"
            )
        return config, None, False
    if not config.own:
        known = _known_spec(config.model)
        if known is None or known.modality != modality:
            takes = "inputs of an unknown kind" if known is None else MODALITIES[known.modality].plural
            data = MODALITIES[modality].plural
            raise InvalidOption(
                f"model={config.model!r} takes {takes}, and the data holds {data}; use a model for {data}"
            )
        size = known.size if config.image_size is None else _media_size(modality, config.image_size)
        sampling = known.sampling if not config.sampling else kind(**config.sampling)
        return replace(config, image_size=size), replace(known, size=size, sampling=sampling), False
    try:
        sampling = kind(**config.sampling)
    except TypeError as error:
        names = ", ".join(field.name for field in fields(kind))
        raise InvalidOption(f"sampling={config.sampling}: expected {names}") from error
    preset = PRESETS[config.known_preset]
    patch = config.patch_size or preset["patch_size"] or 16
    if modality == "video":
        patch = (2, patch, patch) if isinstance(patch, int) else patch
        size = _media_size(modality, config.image_size or preset["image_size"] or 224)
        channels = 3
    else:
        patch = (patch, patch) if isinstance(patch, int) else patch
        size, channels = config.image_size, 1
        if size is None or isinstance(size, int):
            assert isinstance(sampling, Spectrogram)
            size = (size or BANDS, _typical_frames(dataset, sampling, patch[-1]))
    spec = InputSpec(size, (0.0,) * channels, (1.0,) * channels, modality, sampling=sampling)
    return replace(config, image_size=size, patch_size=patch), spec, True


def _media_size(modality: str, size: Any) -> tuple[int, ...]:
    """Return the input size of clips or spectrograms; one number, or two for clips, are height and width."""
    if modality == "video":
        sides = (size, size) if isinstance(size, int) else tuple(size)
        return sides if len(sides) == 3 else (FRAMES, *sides)
    if isinstance(size, int):
        raise InvalidOption(f"image_size={size}: expected the bands and frames of spectrograms, such as 64,96")
    return tuple(size)


def _typical_frames(dataset: Dataset, sampling: Spectrogram, patch: int) -> int:
    """Return how many frames show most of the sounds whole, in whole patches."""
    lengths = []
    for place in range(min(len(dataset), MEASURED)):
        try:
            sound: Any = dataset.read(place * len(dataset) // min(len(dataset), MEASURED)).image
            lengths.append(sound.seconds)
        except ImageError:
            continue
    typical = sorted(lengths)[len(lengths) * 9 // 10] if lengths else 1.0
    frames = min(sampling.frames(typical), MOST_FRAMES)
    return -(-frames // patch) * patch


def _known_spec(model: str) -> InputSpec | None:
    """Return the input specification of a trained model, or of a library's, built without memory."""
    if is_saved(model):
        trained = read_labels(model_folder(named(model))).get("preprocessing")
        if trained:
            return InputSpec.from_dict(trained)
    with torch.device("meta"):
        return declared_spec(load_model(model, pretrained=False) if split_name(model)[0] else load_saved(named(model)))
