"""The models that parity is proven on: tiny, built from the real classes, every parameter redrawn.

Libraries start LayerScale, biases, registers and norms at values (0, 1, 1e-6) that hide a forgotten branch.
Here each is drawn from a normal distribution, so that leaving any of them out changes the output visibly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """One model and the size of its inputs: images, unless their shape is given."""

    name: str
    build: Callable[[], nn.Module]
    size: tuple[int, ...]
    call: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9  # of the comparison with the oracle in float64
    bit_equal: bool = True  # whether r=0 gives the very bits of the unpatched model
    shape: tuple[int, ...] | None = None  # of one input, where it is not three channels of the size
    needs: tuple[str, str] | None = None  # a library, and its first version that has such a model

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """A fresh model with redrawn parameters, in evaluation mode; the test is skipped where it cannot be built."""
        if self.needs is not None:
            require(*self.needs)
        model = self.build().double()
        redraw(model, seed=sum(map(ord, self.name)))
        model = model.to(dtype).eval()
        if dtype == torch.float64:
            rebuild_rotary_tables(model)
        return model

    def images(self, dtype: torch.dtype = torch.float64, batch: int = 2) -> Tensor:
        """Random inputs, the same at every call."""
        generator = torch.Generator().manual_seed(7)
        shape = self.shape or (3, *self.size)
        return torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype)


def require(library: str, lowest: str) -> None:
    """Skip the test where an older version of a library is installed."""
    installed = version(library)
    if Version(installed) < Version(lowest):
        pytest.skip(f"{library} {installed} is installed; {lowest} has what is tested")


@torch.no_grad()
def redraw(model: nn.Module, seed: int) -> None:
    """Draw every parameter (and the key bias that timm's Eva keeps as a buffer) anew."""
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if last in ("gamma", "gamma_1", "gamma_2", "lambda1") or (last == "weight" and parameter.ndim == 1):
            parameter.copy_(1 + 0.3 * normal(parameter))
        elif last == "weight":
            parameter.copy_(normal(parameter) / parameter[0].numel() ** 0.5)
        elif last == "freqs":
            # Numbers that float32 holds as well: timm computes mixed rotary positions in float32.
            parameter.copy_((0.5 * normal(parameter)).float())
        elif parameter.ndim == 1:
            parameter.copy_(0.5 * normal(parameter))
        else:
            parameter.copy_(normal(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("k_bias"):
            buffer.copy_(0.5 * normal(buffer))


def rebuild_rotary_tables(model: nn.Module) -> None:
    """Libraries compute sines or frequencies in float32; give a float64 model those of its own precision."""
    from timm.layers.pos_embed_sincos import (
        RotaryEmbeddingCat,
        RotaryEmbeddingDinoV3,
        RotaryEmbeddingMixed,
        build_rotary_pos_embed,
    )

    frequencies = getattr(getattr(model, "rope_embeddings", None), "inv_freq", None)
    if frequencies is not None:  # transformers' DINOv3
        steps = torch.arange(0, 1, 1 / len(frequencies), dtype=torch.float64)
        frequencies.copy_(model.rope_embeddings.base**-steps)  # type: ignore[union-attr, operator]
    rope = getattr(model, "rope", None)
    if isinstance(rope, RotaryEmbeddingCat) and rope.pos_embed is not None:
        table = build_rotary_pos_embed(
            rope.feat_shape,
            bands=bands_of(rope, torch.float64),
            in_pixels=rope.in_pixels,
            ref_feat_shape=rope.ref_feat_shape,
            grid_offset=rope.grid_offset,
            grid_indexing=rope.grid_indexing,
            **({"rotate_half": rope.rotate_half} if hasattr(rope, "rotate_half") else {}),
            dtype=torch.float64,
        )
        rope.pos_embed = torch.cat(table, dim=-1)
    elif isinstance(rope, RotaryEmbeddingDinoV3) and rope.pos_embed_cached is not None:
        rope.pos_embed_cached = rope._create_embed(rope.feat_shape, no_aug=True)
    elif isinstance(rope, RotaryEmbeddingMixed) and rope.t_x is not None:
        # Multiplied by frequencies that timm turns into float32 whatever the model's precision.
        rope.t_x, rope.t_y = rope.t_x.float(), rope.t_y.float()


def bands_of(rope: Any, dtype: torch.dtype) -> Tensor:
    """Return the frequencies of timm's ``RotaryEmbeddingCat``, whatever its version."""
    from timm.layers.pos_embed_sincos import freq_bands, pixel_freq_bands

    if rope.in_pixels:
        return pixel_freq_bands(rope.dim // 4, float(rope.max_res), linear_bands=rope.linear_bands).to(dtype)
    return freq_bands(rope.dim // 4, temperature=rope.temperature, step=1).to(dtype)


def outputs_of(result: Any) -> dict[str, Tensor]:
    """The tensors of a model's output by name; timm gives a bare tensor."""
    if isinstance(result, Tensor):
        return {"output": result}
    return {name: value for name, value in result.items() if isinstance(value, Tensor)}


def by_name(cases: list[Case]) -> dict[str, Case]:
    """The cases as a dict; names must differ."""
    table = {case.name: case for case in cases}
    assert len(table) == len(cases)
    return table
