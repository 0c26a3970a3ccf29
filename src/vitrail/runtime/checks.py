"""What is checked before anything is changed or drawn; each raises an error of ours and touches nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from vitrail.adapters import Found
from vitrail.errors import AlreadyApplied, InvalidOption, UnsupportedModel
from vitrail.runtime.layout import MARK

if TYPE_CHECKING:
    from PIL.Image import Image


def merged_trunk(model: nn.Module) -> nn.Module | None:
    """Give the merged trunk in a model, if there is one."""
    return next((part for part in model.modules() if getattr(_plan(part), "merges", False)), None)


def extended_trunk(model: nn.Module) -> nn.Module | None:
    """Give the trunk in a model that tokens were added to, if there is one."""
    return next((part for part in model.modules() if getattr(_plan(part), "added", None) is not None), None)


def _plan(part: nn.Module) -> Any:
    return vars(part).get("_vitrail_plan")


def refuse_merged(model: nn.Module) -> None:
    """Refuse a model that carries a merging already."""
    if merged_trunk(model) is not None:
        raise AlreadyApplied(
            "this model is merged already; change its r with `Merging.of(model).r = ...`, or remove the merging with "
            "`Merging.of(model).remove()` first"
        )


def refuse_extended(model: nn.Module) -> None:
    """Refuse a model that tokens were added to."""
    if extended_trunk(model) is not None:
        raise AlreadyApplied(
            "tokens were added to this model already; remove them with `AddedTokens.of(model).remove()` first. "
            "vitrail.add_tokens takes all that are wanted at once"
        )


def refuse_registers(found: Found) -> None:
    """Refuse a model with test-time registers: they would be taken for patches."""
    if hasattr(found.trunk, MARK):
        raise AlreadyApplied(
            "this model has test-time registers, which neither merging nor added tokens know; remove them first with "
            "`TestTimeRegisters.of(model).remove()`"
        )


def refuse_patched(found: Found) -> None:
    """Refuse parts whose forward somebody replaced on the object itself: it would not be run."""
    attending = [
        part
        for parts, block in zip(found.block_adapters, found.blocks, strict=True)
        for part in parts.attend_parts(block)
    ]
    for part in (*found.blocks, *attending):
        if "forward" in vars(part):
            raise UnsupportedModel(
                f"the forward of a {type(part).__name__} was replaced on the object (accelerate's dispatch does so), "
                "and merging would bypass it; merge first, then wrap or dispatch the model"
            )


def refuse_meta(model: nn.Module) -> None:
    """Refuse a model without values."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            raise UnsupportedModel(
                f"{name} is on the meta device and has no values; materialise the model (to_empty and load its "
                "weights) before merging"
            )


def embedding(found: Found) -> list[nn.Module]:
    """Give the modules that make patches into tokens."""
    return [part for root in found.adapter.patch_parts(found.trunk) for part in root.modules()]


def refuse_other_channels(found: Found) -> None:
    """Refuse to show colour pictures to a model that takes something else."""
    channels = next((part.in_channels for part in embedding(found) if isinstance(part, nn.Conv2d)), 3)
    if channels != 3:
        raise InvalidOption(
            f"draw shows colour pictures to the model, which takes {channels} channels instead of three"
        )


def as_pictures(images: Any) -> list[Image]:
    """Give one picture or several, PIL images or paths, as a list of RGB images."""
    from PIL.Image import Image as Picture

    from vitrail.data import as_rgb, read_image

    several = images if isinstance(images, Sequence) and not isinstance(images, str) else [images]
    for image in several:
        if not isinstance(image, Picture | str | os.PathLike):
            raise InvalidOption(
                f"draw takes PIL images or paths of picture files, at their own resolution; got {type(image).__name__}"
            )
    pictures = [as_rgb(image) if isinstance(image, Picture) else read_image(image) for image in several]
    if not pictures:
        raise InvalidOption("draw needs at least one picture")
    return pictures
