"""Checks that run before a model is changed; each raises one of our errors and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from vitrail.adapters import Found
from vitrail.errors import AlreadyApplied, InvalidOption, UnsupportedModel
from vitrail.merging import Method
from vitrail.runtime.layout import MARK


def merged_trunk(model: nn.Module) -> nn.Module | None:
    """Return the merged trunk of a model; None if there is none."""
    return next((part for part in model.modules() if getattr(_plan(part), "merges", False)), None)


def extended_trunk(model: nn.Module) -> nn.Module | None:
    """Return the trunk of a model that has added tokens; None if there is none."""
    return next((part for part in model.modules() if getattr(_plan(part), "added", None) is not None), None)


def _plan(part: nn.Module) -> Any:
    return vars(part).get("_vitrail_plan")


def _refuse(refused: bool, reason: str) -> None:
    if refused:
        raise AlreadyApplied(f"this model {reason}")


def refuse_merged(model: nn.Module) -> None:
    """Raise if a model is merged."""
    _refuse(
        merged_trunk(model) is not None,
        "is already merged; change r with `Merging.of(model).r = ...`, or remove the merging with "
        "`Merging.of(model).remove()` first",
    )


def refuse_extended(model: nn.Module) -> None:
    """Raise if a model has added tokens."""
    _refuse(
        extended_trunk(model) is not None,
        "already has added tokens; remove them with `AddedTokens.of(model).remove()` first. vitrail.add_tokens adds "
        "all of them at once",
    )


def check_changeable(model: nn.Module, found: Found) -> None:
    """Raise if blocks cannot be changed: they run no forward of their class, have no values, or have registers."""
    # test-time registers would be taken for patches
    _refuse(
        hasattr(found.trunk, MARK),
        "has test-time registers, which do not combine with merging or added tokens; remove them first with "
        "`TestTimeRegisters.of(model).remove()`",
    )
    pairs = zip(found.block_adapters, found.blocks, strict=True)
    refuse_replaced_forward(*found.blocks, *(part for parts, block in pairs for part in parts.attend_parts(block)))
    refuse_meta(model)


def refuse_replaced_forward(*parts: nn.Module) -> None:
    """Raise if the forward of a module was replaced on the object."""
    for part in parts:
        if "forward" in vars(part) and not has_own_forward(part):
            raise UnsupportedModel(
                f"the forward of a {type(part).__name__} was replaced on the object (accelerate's dispatch does so), "
                "and merging would bypass it; merge first, then wrap or dispatch the model"
            )


def has_own_forward(part: nn.Module) -> bool:
    """Return whether the forward on an object is that of its class: transformers before 5.9 leaves it there."""
    forward = vars(part).get("forward")
    bound = getattr(forward, "__self__", None), getattr(forward, "__func__", None)
    return bound[0] is part and bound[1] is type(part).forward


def refuse_meta(model: nn.Module) -> None:
    """Raise if a model has parameters or buffers without values."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            raise UnsupportedModel(
                f"{name} is on the meta device and has no values; materialize the model (to_empty and load its "
                "weights) before merging"
            )


def refuse_packed(found: Found, what: str) -> None:
    """Raise if a model packs images into one sequence of patches, so that it is not called with batches of images."""
    if found.adapter.packed:
        raise UnsupportedModel(
            f"{type(found.trunk).__name__} takes patches of several images in one sequence, not a batch of images: "
            f"{what} is not supported for it; merging and counting are"
        )


def refuse_windowed(found: Found, what: str) -> None:
    """Raise if attention runs inside windows, so that no token is seen by all others."""
    if found.adapter.layer_windows(found.trunk):
        raise UnsupportedModel(
            f"the attention of {type(found.trunk).__name__} runs inside windows, where no token is seen by all others: "
            f"{what} is not supported for it; merging, recording and counting are"
        )


def refuse_in_windows(found: Found, method: Method, options: Sequence[str]) -> None:
    """Raise if a method, or one of the given options, cannot serve windows, where tokens merge and are restored."""
    trunk = type(found.trunk).__name__
    if options:
        raise InvalidOption(
            f"{trunk} merges inside windows and restores all tokens behind them, so it does not take "
            f"{', '.join(options)}; leave it out"
        )
    reason = None
    if not method.static:
        reason = "decides for each image how many tokens merge, and all windows must merge the same share"
    elif method.decides or method.relaxes or next(method.parameters(), None) is not None:
        reason = "is trained for blocks of one width that see all tokens"
    if reason is not None:
        raise UnsupportedModel(
            f"method {method.label} {reason}; {trunk} merges inside windows, by a static method without parameters "
            "such as tome, energy or grid"
        )


def biased_layers(found: Found) -> list[bool]:
    """Return, for each block, whether its scores have a position bias."""
    if not any(parts.biased for parts in found.block_adapters):
        return [False] * len(found.blocks)
    if found.adapter.layer_windows(found.trunk):
        return [parts.biased for parts in found.block_adapters]
    position = found.adapter.position(found.trunk, found.adapter.layout(found.trunk).grid)
    return [position is not None and position.bias(layer, None) is not None for layer in range(len(found.blocks))]


def embedding(found: Found) -> list[nn.Module]:
    """Return the modules that embed patches."""
    return [part for root in found.adapter.patch_parts(found.trunk) for part in root.modules()]
