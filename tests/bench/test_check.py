"""The comparison with the reference: what it counts, and that it sees a wrong kernel."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import vitrail.kernels
from tests.bench.models import quick, tiny
from vitrail.bench import check
from vitrail.bench.check import Seen, compare, equal_groups, kernels_used, relative_error
from vitrail.bench.models import build, random_batches


def seen(groups: list[list[int]], output: list[float] | None = None) -> Seen:
    return Seen(torch.tensor(output or [0.0]), torch.tensor(groups))


@pytest.mark.parametrize(
    ("one", "two", "share"),
    [
        ([[0, 0, 1, 1]], [[5, 5, 2, 2]], 1.0),  # other names, same groups
        ([[0, 0, 1, 2]], [[0, 0, 1, 1]], 0.5),  # {0, 1} is in both
        ([[0, 0, 1, 1]], [[0, 1, 1, 0]], 0.0),
        ([[0, 1], [0, 0]], [[0, 1], [0, 1]], 0.5),  # one picture the same, one not
    ],
)
def test_share_of_equal_groups(one: list[list[int]], two: list[list[int]], share: float) -> None:
    assert equal_groups(seen(one), seen(two)) == share


def test_relative_error() -> None:
    assert relative_error(seen([[0]], [3.0, 4.1]), seen([[0]], [3.0, 4.0])) == pytest.approx(0.02, rel=1e-5)
    assert relative_error(seen([[0]], [float("nan")]), seen([[0]], [1.0])) != pytest.approx(0)


@contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that holds something while the reference is asked for."""
    asked: list[bool] = []

    @contextmanager
    def reference() -> Iterator[None]:
        asked.append(True)
        yield
        asked.clear()

    monkeypatch.setattr(vitrail.kernels, "reference", reference, raising=False)
    return asked


def test_where_fast_and_reference_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitrail.kernels, "reference", nothing, raising=False)
    config = quick(batch=20, dtype="bf16")
    base = build(config, tiny())
    found = compare(base, random_batches(config, base.size, torch.device("cpu"))[0])
    assert found is not None
    assert (found.error, found.equal_groups) == (0.0, 1.0)
    assert found.error_precise == found.error_of_dtype
    assert 1e-4 < found.error_of_dtype < 0.2
    assert 0.5 < found.equal_groups_of_dtype <= 1.0
    assert (found.precise, found.pictures) == ("float32", check.PICTURES)
    assert next(base.module.parameters()).dtype == torch.bfloat16


def test_a_wrong_fast_path_is_seen(exact: list[bool]) -> None:
    """A fast path that disturbs the tokens, and a reference that does not."""

    def disturb(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output if exact else output + torch.randn_like(output)

    model: Any = tiny()
    model.patch_embed.register_forward_hook(disturb)
    config = quick(r=4)
    base = build(config, model)
    found = compare(base, random_batches(config, base.size, torch.device("cpu"))[0])
    assert found is not None
    assert found.error > 0.01
    assert found.error_precise > 0.01
    assert found.equal_groups < 1.0
    assert found.equal_groups_precise < 1.0
    assert found.error_of_dtype < 1e-5
    assert found.equal_groups_of_dtype == 1.0
    assert found.precise == "float64"
    assert found.gradient_error is None


def test_autocast_is_compared_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitrail.kernels, "reference", nothing, raising=False)
    config = quick(dtype="bf16", autocast=True)
    base = build(config, tiny())
    batch = random_batches(config, base.size, torch.device("cpu"))[0]
    found = compare(base, batch, autocast=torch.bfloat16)
    assert found is not None
    assert (found.error, found.precise) == (0.0, "float32")
    assert found.error_of_dtype > 1e-4


def test_training_is_compared_with_its_gradients(exact: list[bool]) -> None:
    """A fast path that is right forward, and doubles the gradients of the patch embedding on the way back."""

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
    found = compare(base, random_batches(config, base.size, torch.device("cpu"))[0], gradients=True)
    assert found is not None
    assert (found.error, found.equal_groups) == (0.0, 1.0)
    assert found.gradient_error is not None
    assert found.gradient_error > 0.01
    assert found.gradient_error_of_dtype is not None
    assert found.gradient_error_of_dtype < 1e-4
    assert all(parameter.grad is None for parameter in base.module.parameters())


def test_without_another_path_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    config = quick()
    base = build(config, tiny())
    assert compare(base, random_batches(config, base.size, torch.device("cpu"))[0]) is None
    assert kernels_used(torch.device("cpu")) == "reference functions in PyTorch"


def test_kernels_describe_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitrail.kernels, "describe", lambda: {"attention": "mine"}, raising=False)
    assert kernels_used(torch.device("cuda")) == {"attention": "mine"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels_used(torch.device("cuda")) == {"attention": "mine"}
    assert kernels_used(torch.device("cpu")) == {"kernels": "reference", "why": "on the CPU"}
