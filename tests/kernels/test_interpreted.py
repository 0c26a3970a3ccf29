"""The kernels on a CPU, with Triton's interpreter, against the reference functions in float64."""

from __future__ import annotations

from tests.kernels.cases import SAMPLE
from tests.kernels.conftest import Interpreted
from tests.kernels.whole import METHODS, SMALL


def test_no_case_hides_another() -> None:
    names = [str(case) for case in SAMPLE]
    assert len(names) == len(set(names))


def test_kernels_give_what_the_reference_gives(interpreted: Interpreted) -> None:
    found = interpreted("kernels")
    assert [outcome.case for outcome in found] == [str(case) for case in SAMPLE]
    assert [outcome for outcome in found if not outcome.passed] == []


def test_methods_give_what_the_reference_gives(interpreted: Interpreted) -> None:
    found = interpreted("methods")
    assert [outcome.case for outcome in found] == [
        f"{name} {form} {part}"
        for name, method in METHODS.items()
        for form in ("float32", "float16")
        for part in ("output", *(["gradient"] if method.learns else []))
    ]
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


def test_autocast_gives_what_the_reference_gives_under_autocast(interpreted: Interpreted) -> None:
    found = interpreted("autocast")
    assert [outcome.case for outcome in found] == [
        f"{subject.name} autocast float16 {part}" for subject in SMALL for part in ("output", "gradient")
    ]
    assert [outcome for outcome in found if not outcome.passed] == []
