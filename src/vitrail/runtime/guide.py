"""External guidance for one forward pass: saliency, motion, a user's mask, attention of another pass."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from vitrail.adapters.forward_pass import Place
from vitrail.errors import UnsupportedInput
from vitrail.tokens import TokenLayout

_guides = Place()
"""The maps in effect in this thread, with the plan that they are for; None for none."""


def guiding(plan: object, maps: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Show these maps (1 or B, P) to the method of ``plan`` in passes of this thread."""
    return _guides.holding((plan, dict(maps)))


def current_guide(plan: object, layout: TokenLayout, batch: int, device: torch.device) -> dict[str, Tensor]:
    """Return the maps for a pass of ``plan`` over all tokens (B, N): 0 for special tokens."""
    current = _guides.here().current
    if current is None or current[0] is not plan:
        return {}
    found = {}
    for name, values in current[1].items():
        if values.shape[1] != layout.num_patches or values.shape[0] not in (1, batch):
            raise UnsupportedInput(
                f"the guide {name!r} is for {values.shape[0]} images of {values.shape[1]} patches, but this batch has "
                f"{batch} of {layout.num_patches}"
            )
        values = values.to(device, torch.promote_types(values.dtype, torch.float32)).expand(batch, -1)
        found[name] = torch.cat([values.new_zeros(batch, layout.num_special), values], 1)
    return found
