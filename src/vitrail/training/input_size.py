"""Data that has a size of its own, and models that are made or were made for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitrail.adapters.registry import split_name
from vitrail.data.augment.arrays import REACH, ArrayAugment
from vitrail.data.augment.images import Augment
from vitrail.data.dataset import Dataset
from vitrail.data.sample import TensorSpec
from vitrail.data.sources.arrays import Arrays, byte_statistics
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption
from vitrail.training.config import Config


def own_form(data: Any) -> TensorSpec | None:
    """Give the form that data has and keeps; None for all that is made into pictures of any size."""
    return data.tensor_spec if isinstance(data, Arrays | Dataset) else None


def check_fits(config: Config, examples: Dataset, held: Dataset | None) -> None:
    """Check what a run was asked for, before anything is derived, against the form of its data."""
    own = examples.tensor_spec
    if held is not None and _kind(held.tensor_spec) != _kind(own):
        raise InvalidOption(
            f"validation: it is {_said(held.tensor_spec)}, and the training data is {_said(own)}; expected "
            "the same shape and dtype"
        )
    if own is None:
        if isinstance(config.image_size, tuple):
            raise InvalidOption(f"image_size={config.image_size}: pictures are made square. Expected one number.")
        return
    for name, refused in {"recipe": config.recipe != "labels", "teacher": config.teacher, "side": config.side}.items():
        if refused:
            raise InvalidOption(f"{name}={getattr(config, name)!r} is for pictures, and the data is {_said(own)}.")
    if config.augment not in (None, *REACH):
        raise InvalidOption(f"augment={config.augment!r} is for pictures; arrays know {', '.join(REACH)}.")
    _check_sizes(config, own)


def _check_sizes(config: Config, own: TensorSpec) -> None:
    size, patch, axes = config.image_size, config.patch_size, len(own.sizes)
    if size is not None and own.sizes != ((size, size) if isinstance(size, int) else size):
        raise InvalidOption(f"image_size={size}: the data is {_said(own)}, and is not resized. Leave it out.")
    channels = config.options.get("in_chans", own.channels)
    if channels != own.channels:
        raise InvalidOption(f"in_chans={channels}: the data is {_said(own)}. Leave it out.")
    library = None if config.own else split_name(config.model)[0]
    if axes == 3 and library is not None and "video" not in library.modalities:
        raise InvalidOption(f"model={config.model!r} is for pictures, and the data is {_said(own)}. Use one of ours.")
    numbers = len(patch) if isinstance(patch, tuple) else 2
    if config.own and numbers != axes:
        like = "(time, height, width), like (2, 8, 8)" if axes == 3 else "one number, or (height, width)"
        raise InvalidOption(f"patch_size={patch}: the data is {_said(own)}. Expected {like}.")


def adapted(config: Config, own: TensorSpec) -> Config:
    """Ask for a model of the data's own size and channels."""
    return replace(config, image_size=own.sizes, options={**config.options, "in_chans": own.channels})


def expected_of(examples: Dataset, expects: InputSpec | None, what: str) -> InputSpec:
    """Say how examples are prepared for a model that expects something, or says nothing; refuse what cannot fit."""
    own = examples.tensor_spec
    if own is None:
        if expects is not None and not expects.is_array:
            return expects
        told = "does not say what it expects of a picture; name its folder"
        raise InvalidOption(f"{what} {told if expects is None else 'was trained on arrays; give Arrays, not pictures'}")
    if expects is None or not expects.is_array:
        if own.dtype.is_floating_point:
            raise InvalidOption(
                f"{what} does not say how numbers are normalised: expected a folder of a run that was trained on such "
                f"arrays. The data is {_said(own)}."
            )
        if expects is not None and own.channels == len(expects.mean):
            return InputSpec.of_arrays(expects.mean, expects.std, 255)
        return byte_statistics(own.channels)
    if len(expects.mean) != own.channels or expects.of_bytes == own.dtype.is_floating_point:
        kind = "bytes" if expects.of_bytes else "floating point numbers"
        raise InvalidOption(
            f"{what} was trained on {kind} of {len(expects.mean)} channels, and the data is {_said(own)}."
        )
    return expects


def prepares(
    expects: InputSpec,
    strength: Any = "none",
    crop_min: float = 1.0,
    erasing: float | None = None,
    compiled: bool = False,
) -> Augment | ArrayAugment:
    """Make what prepares a batch for a model: its ``plain`` for evaluation, the call itself for training."""
    if expects.is_array:
        return ArrayAugment(strength, expects)
    size, mean, std = expects.size[0], expects.mean, expects.std
    return Augment(strength, size, mean, std, crop_min=crop_min, erasing=erasing, compiled=compiled)


def _kind(own: TensorSpec | None) -> tuple[tuple[int, ...], bool] | None:
    return None if own is None else (own.shape, own.dtype.is_floating_point)


def _said(own: TensorSpec | None) -> str:
    return "pictures" if own is None else f"arrays of {own.shape} in {str(own.dtype).removeprefix('torch.')}"
