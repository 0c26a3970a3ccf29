"""The vision tower of SigLIP 2 NaFlex of the transformers library, with images of one grid and of several."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.parity.models.cases import Case, redraw
from tests.parity.models.transformers_clip import TEXT

PATCH, MOST = 8, 16
SMALL = {
    "num_patches": MOST,
    "patch_size": PATCH,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
GRIDS = ((4, 4), (3, 5), (2, 4), (1, 7))
"""Patch grids of the images of a batch."""


def tower(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return a small tower with redrawn parameters."""
    config = hf.Siglip2VisionConfig(**{**SMALL, **options}, attn_implementation="sdpa")
    return redrawn(hf.Siglip2VisionModel(config), dtype)


class CuttingTower(hf.Siglip2VisionModel):
    """A tower that takes images of one size, as a changed one does, and cuts them itself."""

    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        if pixel_values.dim() == 3:
            return super().forward(pixel_values, *args, **kwargs)
        rows, columns = (side // PATCH for side in pixel_values.shape[2:])
        cells = pixel_values.unflatten(3, (columns, PATCH)).unflatten(2, (rows, PATCH)).permute(0, 2, 4, 3, 5, 1)
        shapes = torch.tensor([[rows, columns]]).expand(pixel_values.shape[0], -1)
        return super().forward(cells.reshape(pixel_values.shape[0], rows * columns, -1), None, shapes)


def cutting() -> nn.Module:
    """Return a small tower that takes images."""
    return CuttingTower(hf.Siglip2VisionConfig(**SMALL))


IMAGES = Case("naflex-images", cutting, (32, 32), needs=("transformers", "5.6"))


def with_text(kind: type[hf.PreTrainedModel], dtype: torch.dtype = torch.float64) -> Any:
    """Return a small model of both towers, or with a head on the vision tower."""
    text = {**TEXT, "projection_size": 32}
    return redrawn(kind(hf.Siglip2Config(text_config=text, vision_config=SMALL, num_labels=5)), dtype)


def redrawn(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a model with redrawn parameters, in evaluation mode."""
    model = model.double()
    redraw(model, seed=5)
    return model.to(dtype).eval()


def padded(dtype: torch.dtype = torch.float64, grids: tuple[tuple[int, int], ...] = GRIDS) -> dict[str, Tensor]:
    """Return images of different grids as the processor makes them; the padding holds numbers that must not matter."""
    generator = torch.Generator().manual_seed(7)
    pixels = torch.randn(len(grids), MOST, 3 * PATCH * PATCH, generator=generator, dtype=torch.float64)
    counts = torch.tensor([[height * width] for height, width in grids])
    return {
        "pixel_values": pixels.to(dtype),
        "pixel_attention_mask": (torch.arange(MOST) < counts).int(),
        "spatial_shapes": torch.tensor(grids),
    }


def alone(inputs: dict[str, Tensor], image: int) -> dict[str, Tensor]:
    """Return one image of a batch, without padding."""
    count = int(inputs["spatial_shapes"][image].prod())
    return {
        "pixel_values": inputs["pixel_values"][image : image + 1, :count],
        "pixel_attention_mask": inputs["pixel_attention_mask"][image : image + 1, :count],
        "spatial_shapes": inputs["spatial_shapes"][image : image + 1],
    }
