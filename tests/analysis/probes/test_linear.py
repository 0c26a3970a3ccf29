"""Linear probes: against scikit-learn, and on problems with a known answer."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from vitrail.analysis.probes.linear import (
    PENALTIES,
    LinearClassifier,
    Scaling,
    _hessian_product,
    _logistic_loss,
    fit_classifier,
    fit_regressor,
)
from vitrail.errors import InvalidOption, UnsupportedInput


def blobs(classes: int, each: int = 40, width: int = 6, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Overlapping clouds in channels of very different scale."""
    labels = torch.arange(classes).repeat_interleave(each)
    points = torch.randn(classes, width)[labels] + spread * torch.randn(classes * each, width)
    return points * torch.logspace(-1, 1, width) + 3, labels


def standardized(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0, correction=0)


class TestClassifier:
    @pytest.mark.parametrize("classes", [2, 3, 5])
    @pytest.mark.parametrize("penalty", [1e-3, 1e-1])
    def test_equals_scikit_learn(self, classes: int, penalty: float) -> None:
        linear_model = pytest.importorskip("sklearn.linear_model", reason="compares with scikit-learn")
        x, y = blobs(classes)
        x = x.double()
        ours = fit_classifier(x, y, penalties=[penalty])
        strength = (2 if classes == 2 else 1) / (penalty * len(x))
        theirs = linear_model.LogisticRegression(C=strength, tol=1e-10, max_iter=10_000)
        theirs.fit(standardized(x).numpy(), y.numpy())
        np.testing.assert_allclose(
            ours.scores(x).softmax(1).numpy(), theirs.predict_proba(standardized(x).numpy()), atol=2e-5
        )
        assert ours.converged
        assert (ours.predict(x).numpy() == theirs.predict(standardized(x).numpy())).all()

    @pytest.mark.parametrize("penalty", PENALTIES)
    def test_reaches_the_minimum_for_every_penalty_where_classes_are_separable(self, penalty: float) -> None:
        """More channels than rows need, in float32: the gradient is small long before the minimum."""
        linear_model = pytest.importorskip("sklearn.linear_model", reason="compares with scikit-learn")
        rows = torch.randn(160, 40, generator=torch.Generator().manual_seed(0))
        y = torch.arange(4).repeat(40)
        x = rows + torch.nn.functional.one_hot(y, 40) + 3 * rows[:, :1]
        new = x + 0.5 * torch.randn(160, 40, generator=torch.Generator().manual_seed(1))
        ours = fit_classifier(x, y, penalties=[penalty])
        theirs = linear_model.LogisticRegression(C=1 / (penalty * len(x)), tol=1e-8, max_iter=1000, solver="newton-cg")
        theirs.fit(ours.scaling(x).double().numpy(), y.numpy())
        expected = theirs.predict_proba(ours.scaling(new).double().numpy())
        found = ours.scores(new).double().softmax(1).numpy()
        assert ours.converged
        assert abs(found - expected).max() < 2e-3
        assert (found.argmax(1) == expected.argmax(1)).all()

    def test_hessian_is_the_derivative_of_the_gradient(self) -> None:
        x, y = blobs(3)
        x = x.double()
        params, direction = torch.randn(2, 7, 3, dtype=torch.float64)
        ahead, behind = (_logistic_loss(x, y, params + sign * 1e-5 * direction, 0.1)[1] for sign in (1, -1))
        found = _hessian_product(x, params, direction, 0.1)
        torch.testing.assert_close(found, (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-8)

    def test_gradient_is_the_derivative(self) -> None:
        x, y = blobs(3)
        x = x.double()
        params = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
        scores = x @ params[:-1] + params[-1]
        loss = torch.nn.functional.cross_entropy(scores, y) + 0.05 * params[:-1].square().sum()
        loss.backward()
        ours, gradient, _ = _logistic_loss(x, y, params.detach(), 0.1)
        torch.testing.assert_close(ours, loss.detach())
        torch.testing.assert_close(gradient, params.grad)

    def test_chunks_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, y = blobs(3)
        whole = fit_classifier(x.double(), y)
        monkeypatch.setattr("vitrail.analysis._inputs.CHUNK", 50)
        chunked = fit_classifier(x.double(), y)
        torch.testing.assert_close(whole.weight, chunked.weight, atol=1e-4, rtol=1e-4)
        assert (whole.predict(x) == chunked.predict(x)).all()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_any_precision(self, dtype: torch.dtype) -> None:
        x, y = blobs(3, spread=0.2)
        model = fit_classifier(x.to(dtype), y)
        assert model.weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (model.predict(x.to(dtype)) == y).float().mean() > 0.98

    def test_same_bits_each_time_and_no_global_random_state(self) -> None:
        x, y = blobs(4)
        state = torch.get_rng_state()
        first = fit_classifier(x, y, seed=1)
        assert torch.equal(state, torch.get_rng_state())
        torch.manual_seed(7)
        again = fit_classifier(x, y, seed=1)
        assert torch.equal(first.weight, again.weight)
        assert first.penalty == again.penalty

    def test_labels_keep_their_names(self) -> None:
        x, y = blobs(3, spread=0.1)
        model = fit_classifier(x, y * 10 + 5)
        assert model.classes.tolist() == [5, 15, 25]
        assert set(model.predict(x).tolist()) == {5, 15, 25}

    def test_noise_takes_a_strong_penalty_and_signal_a_weak_one(self) -> None:
        y = torch.arange(4).repeat(50)
        noise, signal = torch.randn(200, 60), torch.nn.functional.one_hot(y, 4).float()
        assert fit_classifier(noise, y).penalty > 10 * fit_classifier(signal, y).penalty

    def test_channels_that_do_not_vary_do_no_harm(self) -> None:
        x, y = blobs(3, spread=0.2)
        still = torch.tensor([0.0, 1e4, 0.1]).expand(len(x), 3)
        model = fit_classifier(torch.cat([x, still], 1), y)
        assert (model.predict(torch.cat([x, still], 1)) == y).float().mean() > 0.98
        assert model.weight.isfinite().all()

    def test_a_class_of_one_row(self) -> None:
        x, y = blobs(3, spread=0.1)
        x, y = torch.cat([x, torch.full((1, 6), 90.0)]), torch.cat([y, torch.tensor([3])])
        for seed in range(5):
            assert fit_classifier(x, y, seed=seed).classes.tolist() == [0, 1, 2, 3]

    def test_few_groups_take_the_middle_penalty(self) -> None:
        x, y = blobs(3)
        assert fit_classifier(x, y, groups=torch.arange(len(x)) % 4, penalties=[1.0, 1e-4, 1e-2]).penalty == 1e-2

    def test_in_inference_mode(self) -> None:
        x, y = blobs(3)
        outside = fit_classifier(x, y)
        with torch.inference_mode():
            inside = fit_classifier(x.clone(), y)
        assert torch.equal(outside.weight, inside.weight)
        fit_classifier(inside.scores(x), y)

    def test_numpy(self) -> None:
        x, y = blobs(3)
        array = x.numpy()
        array.flags.writeable = False
        assert isinstance(fit_classifier(array, y.numpy()), LinearClassifier)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda x, y: (x.index_fill(0, torch.tensor([3, 5]), math.nan), y),
                r"2 of 120 vectors in features are not finite",
            ),
            (lambda x, y: (x, torch.zeros_like(y)), r"all 120 labels are 0"),
            (lambda x, y: (x, y[:-1]), r"labels: shape .119,. given; expected .120."),
            (lambda x, y: (x, y.float()), r"integers"),
            (lambda x, y: (x[0], y), r"expected \(n, D\)"),
            (lambda x, y: (x[:0], y[:0]), r"not empty"),
            (lambda x, y: (x.long(), y), r"floating point"),
        ],
    )
    def test_errors(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], message: str) -> None:
        with pytest.raises(UnsupportedInput, match=message):
            fit_classifier(*change(*blobs(3)))

    def test_groups_of_another_length(self) -> None:
        with pytest.raises(UnsupportedInput, match=r"groups: shape .3,. given; expected .120."):
            fit_classifier(*blobs(3), groups=torch.arange(3))

    @pytest.mark.parametrize("penalties", [[], [-1.0], [math.nan], [math.inf]])
    def test_invalid_penalties(self, penalties: list[float]) -> None:
        with pytest.raises(InvalidOption, match="penalties"):
            fit_classifier(*blobs(3), penalties=penalties)


class TestRegressor:
    @pytest.mark.parametrize("penalty", [1e-3, 1.0])
    @pytest.mark.parametrize("rows", [100, 5])
    def test_equals_scikit_learn(self, penalty: float, rows: int) -> None:
        linear_model = pytest.importorskip("sklearn.linear_model", reason="compares with scikit-learn")
        x = (torch.randn(rows, 8) * torch.logspace(-2, 2, 8) + 5).double()
        y = x @ torch.randn(8, 3).double() + torch.randn(rows, 3) + 7
        ours = fit_regressor(x, y, penalties=[penalty])
        theirs = linear_model.Ridge(alpha=penalty * rows).fit(standardized(x).numpy(), y.numpy())
        np.testing.assert_allclose(ours.scores(x).numpy(), theirs.predict(standardized(x).numpy()), atol=1e-6)

    def test_no_penalty_is_least_squares(self) -> None:
        x, y = torch.randn(50, 4).double(), torch.randn(50, 2).double()
        found = fit_regressor(x, y, penalties=[0.0]).scores(x)
        design = torch.cat([x, torch.ones(50, 1).double()], 1)
        torch.testing.assert_close(found, design @ torch.linalg.lstsq(design, y).solution)

    def test_no_penalty_with_channels_twice(self) -> None:
        x = torch.randn(50, 4).double()
        y = x.sum(1, keepdim=True)
        model = fit_regressor(torch.cat([x, x], 1), y, penalties=[0.0])
        torch.testing.assert_close(model.scores(torch.cat([x, x], 1)), y)
        assert model.weight.abs().max() < 10

    def test_chooses_the_penalty_on_the_held_out_part(self) -> None:
        x = torch.randn(80, 60)
        assert fit_regressor(x, torch.randn(80, 2)).penalty >= 10
        assert fit_regressor(x, x[:, :2] * 3).penalty <= 1e-2

    def test_chunks_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.randn(90, 5)
        y = x[:, :2] + torch.randn(90, 2)
        whole = fit_regressor(x, y)
        monkeypatch.setattr("vitrail.analysis._inputs.CHUNK", 35)
        chunked = fit_regressor(x, y)
        assert whole.penalty == chunked.penalty
        torch.testing.assert_close(whole.weight, chunked.weight)

    def test_errors(self) -> None:
        with pytest.raises(UnsupportedInput, match="1 of 4 vectors in targets"):
            fit_regressor(torch.randn(4, 2), torch.tensor([[1.0], [math.inf], [0.0], [0.0]]))
        with pytest.raises(UnsupportedInput, match=r"targets: shape .3, 1. given; expected .4, K."):
            fit_regressor(torch.randn(4, 2), torch.randn(3, 1))


def test_scaling_of_large_offsets_is_exact() -> None:
    x = torch.randn(1000, 2).double() * torch.tensor([1e-3, 1.0]) + 1e5
    scaled = Scaling.of(x, torch.float64)(x)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.ones(2).double())
