"""Vision-language models of the transformers library taken apart: from a tower's tokens to the language model.

Written from the library's source; nothing is shared with Vitrail. Each function returns what the language model
receives for the images, one tensor (tokens, channels) for each image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.oracle import describe, run
from tests.oracle.core import Result


def tower_result(tower: Any, images: Tensor, r: Any, **call: Any) -> Result:
    """Run a tower with the oracle's merging."""
    return run(describe(tower, images, **call), r)


def llava(model: Any, inputs: dict[str, Tensor], r: Any) -> list[Tensor]:
    """Return the hidden states of some layers, without the class token or with it, projected."""
    config, core = model.config, model.model
    result = tower_result(core.vision_tower, inputs["pixel_values"], r)
    embedded = core.vision_tower.pre_layrnorm(core.vision_tower.embeddings(inputs["pixel_values"]))
    states = [embedded, *result.hidden]
    chosen = config.vision_feature_layer
    layers = [chosen] if isinstance(chosen, int) else chosen
    first = {"default": 1, "full": 0}[config.vision_feature_select_strategy]
    features = torch.cat([states[layer][:, first:] for layer in layers], -1)
    projector = core.multi_modal_projector
    return list(projector.linear_2(projector.act(projector.linear_1(features))))


def paligemma(model: Any, inputs: dict[str, Tensor], r: Any) -> list[Tensor]:
    """Return the normalized last tokens, projected."""
    core = model.model
    result = tower_result(core.vision_tower, inputs["pixel_values"], r)
    return list(core.multi_modal_projector.linear(result.features))
