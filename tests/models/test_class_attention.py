"""Attention of a single query is invariant to a shift of all of its scores, however far below zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vitrail.heads import AttentionPool
from vitrail.merging.attention import weights_of_few
from vitrail.models import ViTConfig
from vitrail.models.layers import ClassAttention

WIDTH, HEADS, TOKENS = 128, 2, 64
FAR = -150.0
"""A shift at which exp(0 − log-sum-exp), which cuDNN's gradients contain for padded tokens, overflows."""

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


def class_attention() -> tuple[nn.Module, Callable[[Tensor], Tensor], nn.Linear, nn.Linear]:
    module = ClassAttention(ViTConfig(width=WIDTH, heads=HEADS))
    return module, lambda x: module(x, 1), module.q, module.k


def pooling() -> tuple[nn.Module, Callable[[Tensor], Tensor], nn.Linear, nn.Linear]:
    module = AttentionPool(WIDTH, HEADS, mlp_ratio=0, norm=False)
    return module, module, module.q, module.kv


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("make", [class_attention, pooling])
def test_a_shift_of_all_scores_changes_nothing(make: Callable[[], tuple], device: str) -> None:
    torch.manual_seed(0)
    module, read, asks, answers = make()
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    module.to(device, dtype)
    with torch.no_grad():
        asks.bias.normal_()
        asks.weight.zero_()  # every query is the bias: adding it to all keys moves all scores of a head alike
    x = torch.randn(4, 1 + TOKENS, WIDTH, device=device, dtype=dtype, requires_grad=True)
    outs, grads = [], []
    for shift in (0.0, FAR):
        with torch.no_grad():
            q = asks.bias.unflatten(0, (HEADS, -1))
            along = shift * (WIDTH // HEADS) ** 0.5 * q / q.square().sum(-1, keepdim=True)
            answers.bias[:WIDTH] = along.flatten()
        out = read(x)
        outs.append(out)
        grads.append(torch.autograd.grad(out.sum(), (x, answers.weight, asks.bias)))
    assert all(grad.isfinite().all() for grad in grads[1])
    far = 1e-9 if device == "cpu" else 0.1
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=far)
    torch.testing.assert_close(grads[1][0], grads[0][0], rtol=0, atol=far)


def test_large_scores_are_not_rounded_to_half_precision() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, HEADS, tokens, 64).bfloat16() for tokens in (1, TOKENS))
    q *= 16
    exact = (q.double() @ k.double().transpose(-2, -1) / 8).softmax(-1)
    assert (q.double() @ k.double().transpose(-2, -1) / 8).abs().amax() > 30
    with torch.autocast("cpu", torch.bfloat16):
        found = weights_of_few(q, k)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-6)
    assert weights_of_few(q.to("meta"), k.to("meta")).shape == exact.shape
