"""The merged forward of a block that is nothing but its matrices, for inference on a GPU.

The same as ``merged_forward``, in fewer passes over memory: the sum after attention, the merge and the LayerNorm before
the MLP are one kernel; GELU is part of the first linear layer; the last sum is part of the second. What the second
linear layer adds beside its product, its bias, is put into the tokens by the kernel that writes them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail import kernels
from vitrail.adapters.base import BlockAdapter, DenseBlock
from vitrail.kernels import KernelAssignment, ops
from vitrail.merging import MergeState


def serves(block: nn.Module, x: Tensor, state: MergeState) -> bool:
    """Whether a block's forward can run here: half precision on a GPU, for inference, with tokens in paper order."""
    return (
        not torch.is_grad_enabled()
        and not block.training
        and x.dtype in (torch.bfloat16, torch.float16)
        and isinstance(state.protected, int)
        and state.order == "paper"
        and kernels.usable(x)
        and not torch.is_autocast_enabled(x.device.type)
    )


def dense_block(parts: BlockAdapter, block: nn.Module, x: Tensor, state: MergeState) -> DenseBlock | None:
    """Give a block as its matrices, where it is nothing more and the kernels serve it here."""
    if not serves(block, x, state) or parts.head_shape(block)[1] > kernels.WIDEST:
        return None
    return parts.dense(block)


def dense_forward(dense: DenseBlock, x: Tensor, state: MergeState, proportional: bool) -> tuple[Tensor, MergeState]:
    """Attend, merge and feed."""
    width = x.shape[2]
    x = x.contiguous()
    h = ops.norm(x, dense.norm1.weight, dense.norm1.bias, dense.norm1.eps)
    parts = dense.qkv[0](h).chunk(3, -1) if len(dense.qkv) == 1 else tuple(linear(h) for linear in dense.qkv)
    q, k, v = (part.unflatten(-1, (dense.heads, -1)).transpose(1, 2) for part in parts)
    with kernels.beside(k) as join:  # matching needs the keys alone
        step = kernels.match(k, state.r, state.protected, state.order) if state.r else None
    size = state.size if proportional else None
    y = dense.proj(kernels.attention(q, k, v, size, state.log2_size, scale=dense.scale))
    join()

    gamma1, gamma2 = dense.gammas
    norm2 = dense.norm2
    owed = dense.fc2.bias if gamma2 is None else None
    if step is not None:
        assert isinstance(step, KernelAssignment)
        x, size, log2_size, h = ops.merge_norm(
            x, y, gamma1, state.size, step.member, step.start, norm2.weight, norm2.bias, norm2.eps, owed
        )
        state = state.after(step, size, log2_size)
    else:
        x, h = ops.add_norm(x, y, gamma1, norm2.weight, norm2.bias, norm2.eps, owed)
        state = state.skip()

    hidden = _linear_gelu(dense.fc1, h.view(-1, width), dense.gelu)
    if gamma2 is None:
        return x.view(-1, width).addmm_(hidden, dense.fc2.weight.t()).view_as(x), state
    y = F.linear(hidden, dense.fc2.weight, dense.fc2.bias).view_as(x)
    return ops.add_scaled(x, y, gamma2), state


def _linear_gelu(linear: nn.Linear, h: Tensor, approximate: str) -> Tensor:
    """Linear layer and GELU as one matrix product with an epilogue.

    The library's epilogue is the tanh form of GELU. It is within 5·10⁻⁴ of the exact one, which is below what bfloat16
    keeps of values around one; float16 keeps more, and gets the exact form.
    """
    if approximate == "tanh" or h.dtype == torch.bfloat16:
        return torch._addmm_activation(linear.bias, h, linear.weight.t(), use_gelu=True)
    return F.gelu(linear(h), approximate=approximate)
