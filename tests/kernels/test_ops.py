"""Operators, their fake implementations, and the choice between kernels and reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.conftest import Interpreted
from vitrail import kernels
from vitrail.adapters.base import DenseBlock, DenseMlp
from vitrail.adapters.timm.vit import BLOCK
from vitrail.kernels import KernelAssignment, ops
from vitrail.merging import Assignment, Context, MergeState, Random, ToMe, match, proportional_attention
from vitrail.runtime.dense_forward import dense_block, dense_forward, serves


def plan(method: Any = None, order: str = "paper") -> Any:
    """Return a plan with the attributes that the dense path reads."""
    return SimpleNamespace(method=method or ToMe(), order=order)


PLAN = plan()

OPERATORS = [
    *(
        "attend",
        "attend_keep",
        "attend_back",
        "attend_packed",
        "attend_packed_back",
        "attention_received",
        "match",
        "merge",
    ),
    *("merge without sizes", "merge of half", "merge of strided", "merge_back", "merge_back without sizes"),
    *("merge_norm", "merge_norm, bare", "merge_norm of half", "merge_norm, learning", "norm", "norm_back"),
    *("norm_back, bare", "add_norm", "add_norm, bare", "add_norm, learning", "add_scaled"),
    *("norm_back of half", "add_norm of half, learning", "add_scaled, bare", "rotate", "rotate back"),
    *("merge_norm of tokens alone, learning", "best", "best under masks", "best_given", "settle", "settle numbers"),
    *(
        "place",
        "place by kind",
        "list_members",
        "first_members",
        "ranks",
        "pairs",
        "pairs, nearest",
        "best_members",
        "strongest_between",
    ),
]


def test_operators_pass_opcheck(interpreted: Interpreted) -> None:
    """Check schema, fake tensors, gradients, and all of them with dynamic shapes."""
    found = interpreted("ops")
    assert sorted(outcome.case for outcome in found) == sorted(OPERATORS)
    assert [outcome for outcome in found if not outcome.passed] == []


def test_every_operator_is_checked() -> None:
    registered = {name for name, value in vars(ops).items() if isinstance(value, ops.Operator)}
    assert {name.replace(",", " ").split()[0] for name in OPERATORS} == registered


@pytest.fixture
def gpu() -> Iterator[str]:
    """A CUDA device whose tensors have shapes and no values, as the compiler has them."""
    compiling = mock.patch.object(torch.compiler, "is_compiling", return_value=True)
    with FakeTensorMode(), compiling, mock.patch.object(kernels, "_HAS_TRITON", True):
        yield "cuda"


@contextmanager
def casting(device: str) -> Iterator[None]:
    """Autocast to bfloat16, also where the device is not there: ``torch.autocast`` would do nothing."""
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, torch.float16)


def shapes(*tensors: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matching_and_merging_without_values(gpu: str, dtype: torch.dtype) -> None:
    k = torch.empty(3, 2, 17, 16, device=gpu, dtype=dtype)
    step = kernels.match(k, 5, 1)
    assert isinstance(step, KernelAssignment)
    assert step.length == 12
    found = shapes(step.target, step.member, step.start)
    assert found == [((3, 17), torch.int64), ((3, 17), torch.int32), ((3, 13), torch.int32)]
    for size in (None, torch.empty(3, 17, device=gpu)):
        merged = step.merge_all(torch.empty(3, 17, 8, device=gpu, dtype=dtype), size)
        assert shapes(*merged) == [((3, 12, 8), dtype), ((3, 12), torch.float32), ((3, 12), torch.float32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("learns", [False, True])
def test_attention_without_values(gpu: str, dtype: torch.dtype, learns: bool) -> None:
    q = torch.empty(3, 2, 17, 16, device=gpu, dtype=dtype, requires_grad=learns)
    for size in (None, torch.empty(3, 17, device=gpu)):
        out = kernels.attention(q, q, q, size)
        assert shapes(out) == [((3, 17, 32), dtype)]
        assert out.requires_grad == learns


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("r", [0, 4])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense_block_without_values(
    gpu: str, learns: bool, r: int, scaled: bool, joint: bool, dtype: torch.dtype
) -> None:
    def linear(wide: int, high: int) -> nn.Linear:
        return nn.Linear(wide, high, device=gpu, dtype=dtype)

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(32, device=gpu, dtype=dtype)

    gamma = torch.empty(32, device=gpu, dtype=dtype) if scaled else None
    qkv = (linear(32, 96),) if joint else (linear(32, 32), linear(32, 32), linear(32, 32))
    mlp = DenseMlp(linear(32, 64), linear(64, 32), "none")
    form = DenseBlock(2, norm(), norm(), (gamma, gamma), qkv=qkv, proj=linear(32, 32), mlp=mlp)
    parts: Any = SimpleNamespace(head_shape=lambda block: (2, 16))
    x = torch.empty(3, 17, 32, device=gpu, dtype=dtype)
    state = MergeState((r, r, r), protected=1)
    with casting(gpu) if dtype == torch.float32 else nullcontext(), torch.set_grad_enabled(learns):
        for layer in range(3):
            assert serves(x, PLAN, state)
            x, state = dense_forward(parts, nn.Identity(), form, x, state, state.r, state.size, PLAN.method)
            assert shapes(x) == [((3, 17 - (layer + 1) * r, 32), dtype)]
    assert state.layer == 3
    if r:
        assert state.size is not None
        assert state.log2_size is not None
        assert state.assignment is not None
        kept = ((3, 5), torch.float32)
        assert shapes(state.size, state.log2_size) == [kept, kept]
        assert state.assignment.target.shape == (3, 17)


def test_dense_path_serves_half_precision_in_paper_order(gpu: str) -> None:
    x = torch.empty(1, 17, 32, device=gpu, dtype=torch.bfloat16)
    state = MergeState((2,))
    assert serves(x, PLAN, state)
    assert not serves(x.float(), PLAN, state)
    assert not serves(x, plan(order="original"), state)
    assert serves(x, plan(method=ToMe(features="values")), state)
    with mock.patch.object(torch.compiler, "is_compiling", return_value=False):
        assert serves(x, plan(method=Random()), state)
        assert not serves(x, plan(method=ToMe(features="tokens"), order="original"), state)
        assert not serves(x, plan(method=Random()), MergeState((2,), size=torch.ones(1, 17, requires_grad=True)))
    assert not serves(x, plan(method=Random()), state), "compilers fuse other methods by themselves"
    assert not serves(x, PLAN, MergeState((2,), protected=torch.zeros(1, 17, dtype=torch.bool)))
    with casting(gpu):
        assert serves(x, PLAN, state)
        assert serves(x.float(), PLAN, state)
        assert not serves(x.half(), PLAN, state)
    with kernels.reference():
        assert not serves(x, PLAN, state)


@pytest.mark.parametrize(("width", "served"), [(64, True), (128, True), (136, False)])
def test_dense_path_leaves_wide_heads_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, width: int, served: bool
) -> None:
    """Matching and attention of such heads go to the reference, which lists no members for the fused merge."""
    monkeypatch.setattr(kernels, "usable", lambda x: True)
    block = Block(2 * width, 2, qkv_bias=True).to(torch.bfloat16).eval()
    x = torch.empty(1, 17, 2 * width, dtype=torch.bfloat16)
    with torch.no_grad():
        assert (dense_block(BLOCK, block, x, PLAN, MergeState((2,))) is not None) == served


def test_kernels_serve_floating_point_on_gpus(gpu: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert kernels.usable(torch.empty(1, device=gpu, dtype=dtype))
        assert not kernels.usable(torch.empty(1, dtype=dtype))
    assert not kernels.usable(torch.empty(1, device=gpu, dtype=torch.float64))


def test_kernels_need_triton(gpu: str) -> None:
    with mock.patch.object(kernels, "_HAS_TRITON", False):
        assert not kernels.usable(torch.empty(1, device=gpu))
        assert kernels.describe() == {"kernels": "reference", "why": "Triton is not installed"}


def test_reference_holds_until_the_outermost_end(gpu: str) -> None:
    x = torch.empty(1, device=gpu)
    with kernels.reference():
        with pytest.raises(KeyError), kernels.reference():
            raise KeyError
        assert not kernels.usable(x)
        assert kernels.describe() == {"kernels": "reference", "why": "forced by vitrail.kernels.reference()"}
    assert kernels.usable(x)


def context(k: Tensor, protected: Any = 1) -> Context:
    x = torch.empty(k.shape[0], k.shape[2], 8, device=k.device, dtype=k.dtype)
    return Context(0, (1, 4, 4), x, protected=protected, project=lambda: (k, k, k))


def test_the_fused_matching_runs_only_where_it_does_the_same(gpu: str) -> None:
    k = torch.empty(1, 2, 17, 16, device=gpu)
    assert isinstance(reduced(ToMe(), context(k)), KernelAssignment)
    assert type(reduced(ToMe(), context(k), "original")) is Assignment
    assert isinstance(reduced(ToMe("values"), context(k)), KernelAssignment)
    assert type(reduced(ToMe("tokens"), context(k))) is Assignment
    assert type(reduced(Random(), context(k))) is Assignment
    assert type(reduced(ToMe(), context(k, torch.zeros(1, 17, dtype=torch.bool, device=gpu)))) is Assignment


def reduced(method: ToMe, shown: Context, order: Any = "paper", r: int = 2) -> Assignment:
    found = kernels.reduce(method, shown, r, order)
    assert found is not None
    return found.assignment


def test_any_assignment_lists_its_members() -> None:
    target = torch.tensor([[0, 2, 2, 0, 1], [1, 1, 1, 1, 0]])
    found = kernels.with_members(Assignment(target, 4))
    assert found.start.tolist() == [[0, 2, 3, 5, 5], [0, 1, 5, 5, 5]]
    assert found.member.tolist() == [[0, 3, 4, 1, 2], [4, 0, 1, 2, 3]]


def test_a_machine_without_a_gpu_uses_the_reference() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert kernels.describe()["kernels"] == "reference"
    assert kernels.describe()["why"] == ("no CUDA device" if find_spec("triton") else "Triton is not installed")
    k = torch.randn(2, 3, 17, 8, dtype=torch.float16)
    step = reduced(ToMe(), context(k), r=4)
    assert type(step) is Assignment
    assert torch.equal(step.target, match(k.float().mean(1), 4, 1).target)


@pytest.mark.parametrize("sized", [True, False])
def test_reference_attention_joins_the_heads(sized: bool) -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64)
    size = torch.randint(1, 5, (2, 9)).double() if sized else None
    out = kernels.attention(q, k, v, size, scale=0.3)
    expected = proportional_attention(q, k, v, size, scale=0.3)
    torch.testing.assert_close(out.view(2, 9, 4, 8), expected.transpose(1, 2))


def test_reference_attention_takes_masks() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64)
    mask = torch.rand(9, 9) < 0.7
    mask.fill_diagonal_(True)
    out = kernels.attention(q, k, v, None, mask=mask)
    torch.testing.assert_close(out.view(2, 9, 4, 8), proportional_attention(q, k, v, None, mask=mask).transpose(1, 2))
    assert not torch.allclose(out, kernels.attention(q, k, v, None, causal=True))


def test_kernel_assignment_is_an_assignment() -> None:
    plain = [match(torch.randn(2, length, 8), 4, 1) for length in (17, 13)]
    with_lists = [
        KernelAssignment(step.target, step.length, step.target.argsort(dim=1, stable=True), torch.empty(0))
        for step in plain
    ]
    x, size = torch.randn(2, 17, 5), torch.randint(1, 5, (2, 17)).float()
    expected = plain[0].then(plain[1])
    for first in (plain[0], with_lists[0]):
        for second in (plain[1], with_lists[1]):
            composed = first.then(second)
            assert type(composed) is Assignment
            assert torch.equal(composed.target, expected.target)
            assert composed.length == expected.length == 9
            assert torch.equal(composed.merge(x, size), expected.merge(x, size))
    assert torch.equal(with_lists[0].merge(x, size), plain[0].merge(x, size))
    assert torch.equal(with_lists[0].merge_sizes(size), plain[0].merge_sizes(size))
    merged = plain[0].merge(x, size)
    assert torch.equal(with_lists[0].unmerge(merged), plain[0].unmerge(merged))
