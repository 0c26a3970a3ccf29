"""A model that computes in bfloat16 throughout, while its weights stay float32.

Autocast rounds what goes into matrix products and leaves the stream of tokens, its sums and its norms in float32: a
narrow ViT spends more time on those than on the products, and kernels for half precision do not serve it. Here the
weights are rounded once, before the model is called, and everything follows from them. Gradients go through the
rounding to the float32 weights, which the optimiser moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Let a model have its float32 weights in another dtype for as long as this lasts, and autocast off.

    Weights beside which a module keeps numbers of its own, as batch norm its means, stay as they are: such modules
    compute in float32 inside and give back the dtype that they are given.
    """
    before = [
        (part._parameters, name, weight)
        for part in model.modules()
        if not any(kept is not None and kept.is_floating_point() for kept in part._buffers.values())
        for name, weight in part._parameters.items()
        if weight is not None and weight.dtype == torch.float32
    ]
    halves: dict[nn.Parameter, Tensor] = {}  # weights that modules share stay shared
    for there, name, weight in before:
        if weight not in halves:
            halves[weight] = weight.to(dtype)
        there[name] = halves[weight]  # type: ignore[assignment]
    try:
        with torch.autocast(next(model.parameters()).device.type, enabled=False):  # it would make norms float32 again
            yield
    finally:
        for there, name, weight in before:
            there[name] = weight
