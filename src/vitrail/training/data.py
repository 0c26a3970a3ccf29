"""The data of a run, checked against options and models: shape and dtype, input specification, missing labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vitrail.adapters.registry import split_name
from vitrail.adapters.saved import is_saved, model_folder, named, read_labels
from vitrail.data.augment.arrays import REACH, ArrayAugment
from vitrail.data.augment.images import COLORS, Augment
from vitrail.data.dataset import Dataset, open_dataset
from vitrail.data.labels.targets import PIXEL_COLUMNS, spans
from vitrail.data.media.modality import MODALITIES
from vitrail.data.sample import TensorSpec
from vitrail.data.sources.arrays import byte_statistics
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption
from vitrail.training.config import Config
from vitrail.training.config.config import NO_LABELS
from vitrail.training.media import decoding_of


def open_data(config: Config) -> tuple[Config, Dataset, Dataset | None]:
    """Return the training data and the held-out data: separate data, or a fraction of the training data.

    The config has the sizes of inputs and patches of clips and sounds filled in.
    """
    columns: tuple[str, ...] | None = config.tasks or ((config.labels,) if config.labels else ())
    if config.labels == NO_LABELS:
        columns = None
    if columns == () and isinstance(config.kind, str) and config.kind in PIXEL_COLUMNS:
        columns = (PIXEL_COLUMNS[config.kind],)
    common: dict[str, Any] = {"labels": columns, "modality": config.modality, "labeled": True}
    kinds = {"kind": config.kind, "mask_classes": config.mask_classes}
    dataset = open_dataset(config.data, **common, **kinds, masks=config.masks)
    if not config.own and is_saved(config.model):  # number the same classes as the model does, so that its heads fit
        known = read_labels(model_folder(named(config.model))).get("classes", {})  # also of dense and other targets
        theirs, ours = ({name: set(names) for name, names in each.items()} for each in (known, dataset.classes))
        if ours and theirs == ours:
            dataset = open_dataset(dataset, classes=known, labeled=True)
    held = None
    if isinstance(config.validation, float) and columns is not None:
        dataset, held = dataset.split(config.validation, config.seed)
    elif config.validation is not None and columns is not None:
        kinds["kind"] = {name: target.kind for name, target in dataset.targets.items()} or None
        held = open_dataset(
            config.validation, **common, **kinds, classes=dataset.classes, masks=config.validation_masks
        )
    config, spec, measure = decoding_of(config, dataset)
    if spec is not None:
        dataset = dataset.decoded(spec, measure=measure)
        held = held and held.decoded(spec, measure=measure)
    for problem in chain(_problems(config, dataset, held), _dense_problems(config, dataset)):
        raise InvalidOption(problem)
    if dataset.pixel_bytes:  # those of other images cannot be mixed in
        config = replace(config, mixup=0.0, cutmix=0.0)
    return config, dataset.take(config.share, config.seed), held


def _problems(config: Config, dataset: Dataset, held: Dataset | None) -> Iterator[str]:
    """Yield contradictions between options and the shape and dtype of the data."""
    own = dataset.tensor_spec
    noun = f"{dataset.noun} as " if dataset.modality not in ("image", "array") else ""
    data = f"the data is {noun}{_describe(own)}"
    if held is not None and _kind(held.tensor_spec) != _kind(own):
        expected = "expected the same shape and dtype"
        yield f"validation: it is {_describe(held.tensor_spec)}, and the training data is {_describe(own)}; {expected}"
    if own is None:
        if isinstance(config.image_size, tuple):
            yield f"image_size={config.image_size}: images are made square; expected one number"
        return
    for name, refused in {"recipe": config.recipe != "labels", "teacher": config.teacher, "side": config.side}.items():
        if refused:
            yield f"{name}={getattr(config, name)!r} is for images, and {data}"
    if config.augment not in (None, *REACH):
        yield f"augment={config.augment!r} is for images; arrays take {', '.join(REACH)}"
    size, patch, axes = config.image_size, config.patch_size, len(own.sizes)
    if size is not None and own.sizes != ((size, size) if isinstance(size, int) else size):
        yield f"image_size={size}: {data}, and is not resized. Leave it out."
    channels = config.options.get("in_chans", own.channels)
    if channels != own.channels:
        yield f"in_chans={channels}: {data}. Leave it out."
    library = None if config.own else split_name(config.model)[0]
    arrays_of_clips = axes == 3 and dataset.modality == "array"
    if arrays_of_clips and library is not None and "video" not in library.modalities:
        yield f"model={config.model!r} is for images, and {data}; use a Vitrail model"
    if config.own and axes != (len(patch) if isinstance(patch, tuple) else 2):
        like = "(time, height, width), like (2, 8, 8)" if axes == 3 else "one number, or (height, width)"
        yield f"patch_size={patch}: {data}. Expected {like}."


def _dense_problems(config: Config, dataset: Dataset) -> Iterator[str]:
    """Yield what masks and depth maps as a target do not support."""
    if not dataset.pixel_bytes:
        return
    if dataset.modality != "image" or dataset.tensor_spec is not None:
        yield f"masks and depth maps are for images, and the data is {dataset.modality}"
    for name in ("mixup", "cutmix"):
        if getattr(config, name):
            yield f"{name}={getattr(config, name)} mixes images, and masks and depth maps cannot be mixed; leave it out"
    if not config.own and split_name(config.model)[0] is not None and not named(config.model).is_dir():
        yield (
            f"model={config.model!r}: masks and depth maps need a Vitrail model, by name or a run directory. "
            "ViTs of timm can be converted: vitrail.models.from_timm, then save_pretrained"
        )


def split_pixels(images: Tensor, labels: Tensor, pixel_bytes: int) -> tuple[Tensor, Tensor]:
    """Split what is true of pixels off prepared images (B, 3 + bytes, H, W).

    It is appended, flattened, to the table of labels (B, W): classes, or depths in float32.
    """
    if not pixel_bytes:
        return images, labels
    pixels = images[:, COLORS:]
    if pixel_bytes > 1:
        pixels = pixels.to(torch.uint8).permute(0, 2, 3, 1).contiguous().view(torch.float32)
    pixels = pixels.flatten(1)
    return images[:, :COLORS], torch.cat([labels.to(pixels), pixels], 1)


def expected_of(dataset: Dataset, expects: InputSpec | None, what: str) -> InputSpec:
    """Return the preprocessing of a dataset for a model; raise if they do not fit."""
    own = dataset.tensor_spec
    if own is None:
        if MODALITIES[dataset.modality].sampling:
            raise InvalidOption(f"{what} takes no {dataset.modality}; give a model that was trained on such data")
        if expects is not None and not expects.is_array:
            return expects
        told = "has no known preprocessing of images; give its directory"
        raise InvalidOption(f"{what} {told if expects is None else 'was trained on arrays; give Arrays, not images'}")
    if expects is None or expects.modality not in ("array", dataset.modality):
        if own.dtype.is_floating_point:
            raise InvalidOption(
                f"{what} has no known normalization of arrays; give the directory of a run that was trained on them. "
                f"The data is {_describe(own)}"
            )
        if expects is not None and own.channels == len(expects.mean):
            return InputSpec.of_arrays(expects.mean, expects.std, 255)
        return byte_statistics(own.channels)
    if len(expects.mean) != own.channels or expects.of_bytes == own.dtype.is_floating_point:
        kind = "bytes" if expects.of_bytes else "floating point numbers"
        raise InvalidOption(
            f"{what} was trained on {kind} of {len(expects.mean)} channels, and the data is {_describe(own)}."
        )
    return expects


def prepares(
    expects: InputSpec,
    strength: Any = "none",
    crop_min: float = 1.0,
    erasing: float | None = None,
    compiled: bool = False,
) -> Augment | ArrayAugment:
    """Return the augmentation of a batch; its ``plain`` is the preprocessing for evaluation."""
    if expects.is_array:
        return ArrayAugment(strength, expects)
    size, mean, std = expects.size[0], expects.mean, expects.std
    return Augment(strength, size, mean, std, crop_min=crop_min, erasing=erasing, compiled=compiled)


def data_notes(config: Config, dataset: Dataset, held: Dataset | None) -> list[str]:
    """Return notes on samples without a label and on columns with a single class."""
    notes = [unlabeled_note("data", dataset)]
    if held is not None and not isinstance(config.validation, float):  # else held out of the same data
        notes.append(unlabeled_note("validation", held))
    places = spans(dataset.classes, dataset.targets)
    for column, names in dataset.classes.items():
        labels = dataset.labels[:, places[column]].flatten()
        if column in dataset.targets:
            if dataset.targets[column].kind == "regression" and labels.min() == labels.max():
                notes.append(f"{column}: all {len(labels)} training samples have the value {labels[0]:g}.")
        elif labels.min() == labels.max():
            notes.append(
                f"{column}: all {len(labels)} training samples have the class {names[int(labels[0])]!r}, so accuracy "
                "is meaningless. Expected at least two classes."
            )
    return [text for text in notes if text]


def unlabeled_note(name: str, dataset: Dataset) -> str:
    """Return a note on the samples that were skipped because they have no label; empty if there are none."""
    if not dataset.num_unlabeled:
        return ""
    columns, none = ", ".join(dataset.classes), "" if dataset.targets else " (none, or a negative number)"
    return f"{name}: skipped {dataset.num_unlabeled} samples without a label{none} in {columns}."


def _kind(own: TensorSpec | None) -> tuple[tuple[int, ...], bool] | None:
    return None if own is None else (own.shape, own.dtype.is_floating_point)


def _describe(own: TensorSpec | None) -> str:
    return "images" if own is None else f"arrays of {own.shape} in {str(own.dtype).removeprefix('torch.')}"
