"""Static methods stay on the device: tensors without values reject every read of one, and every mix of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vitrail.merging import Context, MergeState, as_method

METHODS: list[Any] = [
    "energy",
    "mctf",
    "mlerp",
    "grid",
    {"name": "grid", "pool": "mean"},
    "prune",
    {"name": "prune", "matcher": "energy"},
    {"name": "prune", "matcher": "grid"},
]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layer", [0, 3])
def test_nothing_leaves_the_device(method: Any, dtype: torch.dtype, masked: bool, layer: int) -> None:
    protected: int | torch.Tensor = 1
    with FakeTensorMode():
        x = torch.empty(2, 17, 8, dtype=dtype, device="cuda")
        k = torch.empty(2, 2, 17, 4, dtype=dtype, device="cuda")
        size, received = torch.empty(2, 17, device="cuda"), torch.empty(2, 2, 17, device="cuda")
        if masked and "grid" not in str(method):  # a grid takes no masks
            protected = torch.zeros(2, 17, dtype=torch.bool, device="cuda")
        context = Context(
            layer, (1, 4, 4), x, size, protected, depth=4, project=lambda: (k, k, k), attend=lambda _: received
        )
        made = as_method(method)
        reduction = made.reduce(context, 4)
        assert reduction is not None
        tokens, state = MergeState((4,), size=size, protected=protected).apply(x, reduction, made)
    assert tokens.device.type == "cuda"
    assert (tokens.dtype, tuple(tokens.shape)) == (dtype, (2, 13, 8))
    assert state.size is not None
    assert state.size.device.type == "cuda"
