"""Launch Triton kernels without Triton's inspection of every argument, which takes longer than a small kernel runs.

Triton looks up the compiled kernel by the dtype and alignment of each tensor and by the divisibility of each number.
Here the numbers themselves are part of the key: the key is cheaper, and shapes repeat from call to call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""The compiled kernel for a key, and its constants in the order of its parameters."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor],
    numbers: Sequence[int | float],
    constants: Mapping[str, Any],
    **options: int,
) -> None:
    """Launch a kernel on the device of its tensors, in the current stream of that device.

    Args:
        kernel: a Triton function whose parameters are tensors, then numbers, then constants.
        grid: programs along each axis.
        constants: compile-time constants by name.
        options: Triton's own, such as ``num_warps``.
    """
    device = tensors[0].get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():  # not where Triton would launch
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, numbers, constants, **options)
        return
    key = (
        kernel,
        device,
        tuple([(tensor.dtype, tensor.data_ptr() & 15) for tensor in tensors]),
        *numbers,
        *constants.values(),
        *options.values(),
    )
    found = _known.get(key)
    if found is None:
        compiled = kernel[grid](*tensors, *numbers, **constants, **options)
        if type(kernel) is JITFunction and hasattr(compiled, "packed_metadata"):
            _known[key] = compiled, tuple(constants[name] for name in kernel.arg_names[-len(constants) :])
        return
    compiled, ordered = found
    compiled.run(
        *grid, *(1,) * (3 - len(grid)), torch._C._cuda_getCurrentRawStream(device), compiled.function,
        compiled.packed_metadata, None, None, None, *tensors, *numbers, *ordered,
    )  # fmt: skip


def power_of_two(number: int) -> int:
    """Return the next power of two; Triton's own function takes as long as a launch."""
    return 1 << (number - 1).bit_length()


def blocks(length: int, block: int) -> int:
    """Return the number of blocks that cover a length."""
    return -(-length // block)
