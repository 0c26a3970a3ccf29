"""Plain attention by PyTorch's kernels: the same values, and reliable gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.merging import attention
from vitrail.merging.attention import backends_without_cudnn, fused_attention, key_bias, overflows_in_cudnn

FAR = -150.0
"""Far enough below zero that exp(0 − log-sum-exp), a factor in cuDNN's gradients, overflows."""


def drawn(tokens: int, shift: float = 0.0, device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return queries, keys and values (2, 3, N, 64) whose scores are all shifted by the same amount."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, tokens, 64, device=device, dtype=dtype) for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, shift * 64**0.5
    return [one.requires_grad_() for one in (q, k, v)]


def test_numbers_of_tokens_that_leave_64_over_multiples_of_128() -> None:
    assert [tokens for tokens in range(600) if overflows_in_cudnn(tokens)] == [64, 192, 320, 448, 576]


@pytest.mark.parametrize("mask", [None, torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.7])
def test_it_is_attention(mask: Tensor | None) -> None:
    q, k, v = drawn(64)
    scores = q @ k.transpose(-2, -1) / 4
    weights = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
    torch.testing.assert_close(fused_attention(q, k, v, mask=mask, scale=0.25), weights @ v)


def allowed() -> dict[str, bool]:
    cuda = torch.backends.cuda
    return {"cudnn": cuda.cudnn_sdp_enabled(), "flash": cuda.flash_sdp_enabled(), "math": cuda.math_sdp_enabled()}


def kernels_allowed(monkeypatch: pytest.MonkeyPatch, tokens: int, device: str, grad: bool = True) -> set[str]:
    """Which kernels were allowed when PyTorch was called; nothing is computed."""
    seen: set[str] = set()

    def called(*given: Tensor, **options: object) -> Tensor:
        seen.update(name for name, on in allowed().items() if on)
        return given[0]

    class Anywhere(Tensor):
        is_cuda = device == "cuda"

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", called)
    with torch.set_grad_enabled(grad):
        fused_attention(*(one.detach().as_subclass(Anywhere) for one in drawn(tokens)))
    return seen


def test_cudnn_is_left_out_where_gradients_on_a_gpu_may_overflow_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = {"cudnn", "flash", "math"}
    assert kernels_allowed(monkeypatch, 64, "cuda") == {"flash", "math"}
    assert kernels_allowed(monkeypatch, 64, "cuda", grad=False) == every
    assert kernels_allowed(monkeypatch, 65, "cuda") == every
    assert kernels_allowed(monkeypatch, 64, "cpu") == every


def test_disabled_backends_stay_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, left in (
        ([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], {"math"}),
        ([SDPBackend.MATH], {"math"}),
        ([SDPBackend.CUDNN_ATTENTION], {"cudnn"}),
    ):
        with sdpa_kernel(chosen):
            before = allowed()
            assert kernels_allowed(monkeypatch, 64, "cuda") == left
            assert allowed() == before


def test_leaving_out_cudnn_compiles_as_one_graph() -> None:
    """Run the GPU branch of `fused_attention` on a CPU."""
    given = drawn(64)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends_without_cudnn()):
            return F.scaled_dot_product_attention(q, k, v)

    before = allowed()
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(out, fused_attention(*given))
    assert allowed() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [64, 65, 128, 192])
def test_gradients_are_right_where_all_scores_are_far_below_zero(tokens: int, compiled: bool) -> None:
    attend = torch.compile(fused_attention, fullgraph=True) if compiled else fused_attention
    given = drawn(tokens, FAR, "cuda", torch.bfloat16)
    upon = torch.randn_like(given[0])
    found = torch.autograd.grad(attend(*given), given, upon)
    exact = [one.detach().double().requires_grad_() for one in given]
    weights = (exact[0] @ exact[1].transpose(-2, -1) / 8).softmax(-1)
    wanted = torch.autograd.grad(weights @ exact[2], exact, upon.double())
    assert all(grad.isfinite().all() for grad in found)
    torch.testing.assert_close(found[2].double(), wanted[2], rtol=0, atol=0.1)


def test_the_gradient_of_a_bias_of_sizes_is_finite_at_size_0() -> None:
    torch.manual_seed(0)
    size = torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    scores, v = torch.randn(1, 1, 4, 3).double(), torch.randn(1, 1, 3, 2).double()
    out = (scores + key_bias(size, None, scores)).softmax(-1) @ v
    (found,) = torch.autograd.grad(out.square().sum(), size)
    parts = scores.exp() * size
    (wanted,) = torch.autograd.grad((parts / parts.sum(-1, keepdim=True) @ v).square().sum(), size)
    torch.testing.assert_close(found[0, [0, 2]], wanted[0, [0, 2]])
    assert found[0, 1] == 0
