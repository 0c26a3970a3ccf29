"""External guidance for one forward pass: saliency, motion, a user's mask, attention of another pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from vitrail._wording import counted
from vitrail.adapters.forward_pass import Place
from vitrail.errors import BrokenPass, InvalidOption, UnsupportedInput
from vitrail.merging import Method
from vitrail.tokens import TokenLayout

_guides = Place()
"""The maps in effect in this thread, with the plan that they are for; None for none."""


def guiding(plan: object, maps: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Show these maps (1 or B, P) to the method of ``plan`` in passes of this thread."""
    return _guides.holding((plan, dict(maps)))


def present_maps(plan: object) -> dict[str, Tensor]:
    """Return the maps that are shown to the method of ``plan`` in this thread now."""
    current = _guides.here().current
    return {} if current is None or current[0] is not plan else dict(current[1])


def is_guiding() -> bool:
    """Return whether maps are shown to any method in this thread."""
    return _guides.here().current is not None


def current_guide(plan: object, layout: TokenLayout, batch: int, device: torch.device) -> dict[str, Tensor]:
    """Return the maps for a pass of ``plan`` over all tokens (B, N): 0 for special tokens."""
    current = _guides.here().current
    if current is None or current[0] is not plan:
        return {}
    found = {}
    for name, values in current[1].items():
        if values.shape[1] != layout.num_patches or values.shape[0] not in (1, batch):
            raise UnsupportedInput(
                f"the guide {name!r} is for {counted(values.shape[0], 'image')} of {values.shape[1]} patches, but this "
                f"batch has {batch} of {layout.num_patches}"
            )
        values = values.to(device, torch.promote_types(values.dtype, torch.float32)).expand(batch, -1)
        found[name] = torch.cat([values.new_zeros(batch, layout.num_special), values], 1)
    return found


def method_maps(
    method: Method, layout: TokenLayout, inputs: Tensor | Callable[[], Tensor] | None, x: Tensor
) -> dict[str, Tensor]:
    """Return the maps that a method computes from the model's input, over all tokens (B, N, …)."""
    if type(method).maps is Method.maps:
        return {}
    if inputs is None:
        raise BrokenPass(
            f"method {method.label} reads the model's input, and the blocks were called without it: call the model, "
            "its forward_features or forward_intermediates instead of its blocks"
        )
    found = {}
    inputs = inputs if isinstance(inputs, Tensor) else inputs()
    for name, values in method.maps(inputs, layout.grid).items():
        if tuple(values.shape[:2]) != (x.shape[0], layout.num_patches):
            raise InvalidOption(
                f"{method.label}.maps returns maps of shape {(x.shape[0], layout.num_patches)} or more axes; {name!r} "
                f"has {tuple(values.shape)}"
            )
        found[name] = torch.cat([values.new_zeros(x.shape[0], layout.num_special, *values.shape[2:]), values], 1)
    return found
