"""timm: frequencies of rotary positions, and options that models take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.models.cases import bands_of
from vitrail.adapters import ModelRequest
from vitrail.adapters.registry import library
from vitrail.adapters.timm.eva import ROTARY
from vitrail.errors import ModelLoadError

KINDS = {
    "patches": {"in_pixels": False},
    "patches of another temperature": {"in_pixels": False, "temperature": 100.0},
    "pixels": {"in_pixels": True},
    "pixels, linear": {"in_pixels": True, "linear_bands": True, "max_res": 96},
}

every_kind = pytest.mark.parametrize("kind", KINDS)


class Devices(TorchDispatchMode):
    """Record the devices of all created tensors."""

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
    """timm stores the frequencies themselves, or only tables derived from them."""
    rope = RotaryEmbeddingCat(32, feat_shape=None if kept else [3, 5], **KINDS[kind])
    bands = bands_of(rope, torch.float32)
    found = ROTARY["RotaryEmbeddingCat"](rope, (3, 5), False).frequencies
    assert torch.equal(found[0, 0], torch.stack([torch.cat([bands, 0 * bands]), torch.cat([0 * bands, bands])]))


@every_kind
def test_nothing_is_copied_from_the_cpu(kind: str) -> None:
    """A CUDA graph cannot record such a copy."""
    rope = RotaryEmbeddingCat(32, feat_shape=[3, 5], ref_feat_shape=[4, 4], **KINDS[kind]).to("meta")
    with Devices() as devices:
        ROTARY["RotaryEmbeddingCat"](rope, (3, 5), False)
    assert devices.seen == {"meta"}


TAKES = {
    "vit_tiny_patch16_224": {"img_size", "drop_path_rate"},
    "deit_tiny_distilled_patch16_224": {"img_size", "drop_path_rate"},  # through **kwargs
    "resnet10t": {"drop_path_rate"},
    "vgg11": set(),
}


@pytest.mark.parametrize("name", TAKES)
def test_training_gives_a_model_the_options_that_its_constructor_takes(name: str) -> None:
    request = ModelRequest({"label": ("a", "b")}, pretrained=False, image_size=64, drop_path=0.1)
    with torch.device("meta"):
        model, config = library("timm").build(name, request)
    assert config["options"].keys() - {"num_classes"} == TAKES[name]
    assert config["architecture"] == f"timm:{name}"
    assert model.num_classes == 2


def test_an_option_that_the_user_gives_is_never_dropped() -> None:
    request = ModelRequest({"label": ("a",)}, pretrained=False, options={"no_such_option": 1})
    with torch.device("meta"), pytest.raises(ModelLoadError, match="no_such_option"):
        library("timm").build("resnet10t", request)
