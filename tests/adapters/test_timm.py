"""Frequencies of timm's rotary positions: the numbers are timm's, and no tensor comes from the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.adapters.timm import ROTARY

KINDS = {
    "patches": {"in_pixels": False},
    "patches of another temperature": {"in_pixels": False, "temperature": 100.0},
    "pixels": {"in_pixels": True},
    "pixels, linear": {"in_pixels": True, "linear_bands": True, "max_res": 96},
}

every_kind = pytest.mark.parametrize("kind", KINDS)


class Devices(TorchDispatchMode):
    """Takes down the devices of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.seen |= {made.device.type for made in torch.utils._pytree.tree_leaves(found) if isinstance(made, Tensor)}
        return found


@every_kind
@pytest.mark.parametrize("kept", [True, False])
def test_frequencies_are_timms(kind: str, kept: bool) -> None:
    """Whether timm keeps the frequencies, or only what it made of them."""
    rope = RotaryEmbeddingCat(32, feat_shape=None if kept else [3, 5], **KINDS[kind])
    bands = rope._compute_bands()
    found = ROTARY["RotaryEmbeddingCat"](rope, (3, 5), False).frequencies
    assert torch.equal(found[0, 0], torch.stack([torch.cat([bands, 0 * bands]), torch.cat([0 * bands, bands])]))


@every_kind
def test_nothing_is_copied_from_the_cpu(kind: str) -> None:
    """A CUDA graph cannot record such a copy."""
    rope = RotaryEmbeddingCat(32, feat_shape=[3, 5], ref_feat_shape=[4, 4], **KINDS[kind]).to("meta")
    with Devices() as devices:
        ROTARY["RotaryEmbeddingCat"](rope, (3, 5), False)
    assert devices.seen == {"meta"}
