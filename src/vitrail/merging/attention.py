"""Proportional attention: a token of size s counts as s tokens."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def proportional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor | None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention with ``softmax(q·kᵀ·scale + log size)``: a key of size s equals s copies of it.

    Args:
        q: queries (B, H, N, d), and ``k``, ``v`` likewise.
        size: sizes of the keys (B, N); None where all are 1, or for plain attention. Keys of size 0 get no weight.
        mask: boolean or additive mask.
        causal: whether each token sees only those before it; only while all sizes are 1.
        scale: factor of the scores, 1/√d by default.
        dropout: probability with which attention weights are dropped.
    """
    if size is not None and size.requires_grad:
        return _differentiable_in_sizes(q, k, v, size, mask, scale, dropout)
    bias = mask if size is None else key_bias(size, mask, q)
    return fused_attention(q, k, v, mask=bias, causal=causal, scale=scale, dropout=dropout)


def _differentiable_in_sizes(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor, mask: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    """Compute proportional attention as ``size · exp(scores)``, whose gradient is finite also at size 0."""
    work, device = torch.promote_types(q.dtype, torch.float32), q.device.type
    with torch.autocast(device, enabled=False):
        scores = q.to(work) @ k.to(work).transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        weights = (scores - scores.amax(-1, keepdim=True).detach()).exp() * size.to(work)[:, None, None]
        weights = weights / weights.sum(-1, keepdim=True)
        return (F.dropout(weights, dropout) @ v.to(work)).to(v.dtype)


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention with the fastest of PyTorch's kernels whose gradients are reliable.

    That is PyTorch's own choice, except for cuDNN's kernel on a GPU where gradients are needed and
    `overflows_in_cudnn`; it is still used if the caller allows no other. Arguments as for
    `proportional_attention`.
    """
    others = (
        backends_without_cudnn() if q.is_cuda and torch.is_grad_enabled() and overflows_in_cudnn(k.shape[-2]) else []
    )
    with sdpa_kernel(others) if others else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale)


def overflows_in_cudnn(tokens: int) -> bool:
    """Return whether cuDNN's gradients of attention over this many tokens may be NaN, as on Hopper for 8 × 8 patches.

    Where the number of tokens is 64 modulo 128, cuDNN pads with scores of 0. If the log-sum-exp of the real scores is
    below −88.7, that overflows float32 (pytorch#196678). Nothing bounds scores from below, since softmax is invariant
    to a shift of all of them.
    """
    return tokens % 128 == 64


def backends_without_cudnn() -> list[SDPBackend]:
    """Return the enabled kernels other than cuDNN's; compiled code keeps those enabled when it was compiled."""
    flags: Any = torch.backends.cuda
    allowed = {
        SDPBackend.FLASH_ATTENTION: flags.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: flags.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: flags.math_sdp_enabled(),
    }
    return [kind for kind, on in allowed.items() if on]


# What torch.compiler.assume_constant_result does, which would import the compiler to do it.
vars(backends_without_cudnn)["_dynamo_marked_constant"] = True


def key_bias(size: Tensor | None, mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return sizes (B, N) and a mask, boolean or additive, as one bias on scores (B, H, Q, N) of ``like``'s dtype."""
    if size is None and mask is None:
        return None
    bias = like.new_zeros(1, 1, 1, 1) if size is None else _log_size(size).to(like.dtype)[:, None, None]
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _log_size(size: Tensor) -> Tensor:
    """Return the logarithm of sizes; where they need gradients, that of a size of 0 is 0 instead of NaN."""
    if not size.requires_grad:
        return size.log()
    present = size > 0
    return torch.where(present, torch.where(present, size, 1).log(), -torch.inf)


def weights_of_few(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the attention weights (B, H, Q, N) of a few queries, in float32 or better, also under autocast.

    Not computed by PyTorch's fused attention: for one query whose scores are all far below zero, cuDNN's gradients are
    not finite (NVIDIA/cudnn-frontend#1072), and with so few queries there is nothing to fuse.

    Args:
        q: queries (B, H, Q, d).
        k: keys (B, H, N, d).
        mask: true where a query may attend.
    """
    work, device = torch.promote_types(q.dtype, torch.float32), q.device.type
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        scores: Tensor = q.to(work) @ k.to(work).transpose(-2, -1) * q.shape[-1] ** -0.5
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
