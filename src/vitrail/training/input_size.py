"""Data that has a size of its own, and models that are made or were made for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitrail.adapters.registry import split_name
from vitrail.data.augment.arrays import REACH, ArrayAugment
from vitrail.data.augment.images import Augment
from vitrail.data.augment.normalize import Expects, Normalising
from vitrail.data.dataset import Examples
from vitrail.data.decoded import Form
from vitrail.data.sources.arrays import Arrays, bytes_like_pictures
from vitrail.data.spec import Preprocessing
from vitrail.errors import InvalidOption
from vitrail.training.config.config import Config


def own_form(data: Any) -> Form | None:
    """Give the form that data has and keeps; None for all that is made into pictures of any size."""
    return data.own if isinstance(data, Arrays | Examples) else None


def check_fits(config: Config, examples: Examples, held: Examples | None) -> None:
    """Check what a run was asked for, before anything is derived, against the form of its data."""
    own = examples.own
    if held is not None and _kind(held.own) != _kind(own):
        raise InvalidOption(
            f"validation: it is {_said(held.own)}, and the training data is {_said(own)}. Expected samples of the same "
            "shape and kind."
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


def _check_sizes(config: Config, own: Form) -> None:
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


def adapted(config: Config, own: Form) -> Config:
    """Ask for a model of the data's own size and channels."""
    return replace(config, image_size=own.sizes, options={**config.options, "in_chans": own.channels})


def expected_of(examples: Examples, expects: Expects | None, what: str) -> Expects:
    """Say how examples are prepared for a model that expects something, or says nothing; refuse what cannot fit."""
    own = examples.own
    if own is None:
        if isinstance(expects, Preprocessing):
            return expects
        told = "does not say what it expects of a picture; name its folder"
        raise InvalidOption(f"{what} {told if expects is None else 'was trained on arrays; give Arrays, not pictures'}")
    if not isinstance(expects, Normalising):
        if own.dtype.is_floating_point:
            raise InvalidOption(
                f"{what} does not say how numbers are normalised: expected a folder of a run that was trained on such "
                f"arrays. The data is {_said(own)}."
            )
        colours = expects is not None and own.channels == len(expects.mean)
        return Normalising(expects.mean, expects.std, 255) if expects and colours else bytes_like_pictures(own.channels)
    if len(expects.mean) != own.channels or expects.of_bytes == own.dtype.is_floating_point:
        kind = "bytes" if expects.of_bytes else "floating point numbers"
        raise InvalidOption(
            f"{what} was trained on {kind} of {len(expects.mean)} channels, and the data is {_said(own)}."
        )
    return expects


def prepares(
    expects: Expects,
    strength: Any = "none",
    crop_min: float = 1.0,
    erasing: float | None = None,
    compiled: bool = False,
) -> Augment | ArrayAugment:
    """Make what prepares a batch for a model: its ``plain`` for evaluation, the call itself for training."""
    if isinstance(expects, Normalising):
        return ArrayAugment(strength, expects)
    size, mean, std = expects.size[0], expects.mean, expects.std
    return Augment(strength, size, mean, std, crop_min=crop_min, erasing=erasing, compiled=compiled)


def _kind(own: Form | None) -> tuple[tuple[int, ...], bool] | None:
    return None if own is None else (own.shape, own.dtype.is_floating_point)


def _said(own: Form | None) -> str:
    return "pictures" if own is None else f"arrays of {own.shape} in {str(own.dtype).removeprefix('torch.')}"
