"""Agreement check: what it measures, and that it detects a wrong kernel."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import vitrail.kernels
from tests.bench.models import quick, tiny
from vitrail.bench._agreement import MAX_IMAGES, compare, equal_groups, kernels_used, relative_error
from vitrail.bench._variants import build, random_batches

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("one", "two", "share"),
    [
        ([[0, 0, 1, 1]], [[5, 5, 2, 2]], 1.0),  # other ids, same groups
        ([[0, 0, 1, 2]], [[0, 0, 1, 1]], 0.5),  # {0, 1} is in both
        ([[0, 0, 1, 1]], [[0, 1, 1, 0]], 0.0),
        ([[0, 1], [0, 0]], [[0, 1], [0, 1]], 0.5),  # one image equal, one not
    ],
)
def test_share_of_equal_groups(one: list[list[int]], two: list[list[int]], share: float) -> None:
    assert equal_groups(torch.tensor(one), torch.tensor(two)) == share


def test_relative_error() -> None:
    assert relative_error(torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0])) == pytest.approx(0.02, rel=1e-5)
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.tensor([1.0])))


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that is not empty while the reference functions are forced."""
    forced: list[bool] = []

    @contextmanager
    def reference() -> Iterator[None]:
        forced.append(True)
        yield
        forced.clear()

    monkeypatch.setattr(vitrail.kernels, "reference", reference)
    return forced


def test_fast_path_equal_to_reference() -> None:
    config = quick(batch=20, dtype="bf16")
    base = build(config, tiny())
    found = compare(base, random_batches(config, base.shape)[0])
    assert (found.error, found.equal_groups) == (0.0, 1.0)
    assert found.error_precise == found.error_of_dtype
    assert 1e-4 < found.error_of_dtype < 0.2
    assert 0.5 < found.equal_groups_of_dtype <= 1.0
    assert (found.precise, found.images) == ("float32", MAX_IMAGES)
    assert next(base.module.parameters()).dtype == torch.bfloat16


def test_wrong_fast_path(exact: list[bool]) -> None:

    def disturb(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output if exact else output + torch.randn_like(output)

    model: Any = tiny()
    model.patch_embed.register_forward_hook(disturb)
    config = quick(r=4)
    base = build(config, model)
    found = compare(base, random_batches(config, base.shape)[0])
    assert found.error > 0.01
    assert found.error_precise > 0.01
    assert found.equal_groups < 1.0
    assert found.equal_groups_precise < 1.0
    assert found.error_of_dtype < 1e-5
    assert found.equal_groups_of_dtype == 1.0
    assert found.precise == "float64"
    assert found.gradient_error is None


def test_autocast_is_compared_with_float32() -> None:
    config = quick(dtype="bf16", autocast=True)
    base = build(config, tiny())
    batch = random_batches(config, base.shape)[0]
    found = compare(base, batch, autocast=torch.bfloat16)
    assert (found.error, found.precise) == (0.0, "float32")
    assert found.error_of_dtype > 1e-4


def test_wrong_gradients(exact: list[bool]) -> None:
    """A fast path whose forward is right, and whose backward doubles the gradients of the patch embedding."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad

    def double(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output if exact else Doubled.apply(output)

    model: Any = tiny()
    model.patch_embed.register_forward_hook(double)
    config = quick(train=True)
    base = build(config, model)
    found = compare(base, random_batches(config, base.shape)[0], gradients=True)
    assert (found.error, found.equal_groups) == (0.0, 1.0)
    assert found.gradient_error is not None
    assert found.gradient_error > 0.01
    assert found.gradient_error_of_dtype is not None
    assert found.gradient_error_of_dtype < 1e-4
    assert all(parameter.grad is None for parameter in base.module.parameters())


def test_kernels_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitrail.kernels, "describe", lambda: {"kernels": "triton", "why": "a GPU"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels_used(torch.device("cuda"))["kernels"] == "triton"
    assert kernels_used(CPU) == {"kernels": "reference", "why": "on the CPU"}
