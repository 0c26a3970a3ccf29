"""The kernels on a CPU, with Triton's interpreter, against the reference functions in float64."""

from __future__ import annotations

from tests.kernels.cases import SAMPLE
from tests.kernels.conftest import Interpreted
from tests.kernels.whole import FEATURE_METHODS, SMALL


def test_no_case_hides_another() -> None:
    names = [str(case) for case in SAMPLE]
    assert len(names) == len(set(names))


def test_kernels_give_what_the_reference_gives(interpreted: Interpreted) -> None:
    found = interpreted("kernels")
    assert [outcome.case for outcome in found] == [str(case) for case in SAMPLE]
    assert [outcome for outcome in found if not outcome.passed] == []


def test_features_of_a_method_are_matched_by_the_kernel(interpreted: Interpreted) -> None:
    found = interpreted("features")
    assert [o.case for o in found] == [f"{name} {form}" for name in FEATURE_METHODS for form in ("float32", "float16")]
    assert [outcome for outcome in found if not outcome.passed] == []


def test_models_give_what_the_reference_gives(interpreted: Interpreted) -> None:
    found = interpreted("models")
    assert [outcome.case for outcome in found] == [
        f"{subject.name} {form} {part}"
        for subject in SMALL
        for form in ("fp32", "fp32 training", "fp16", "fp16 training")
        for part in ("output", "groups", *(["gradients"] if "training" in form else []))
    ]
    assert [outcome for outcome in found if not outcome.passed] == []
