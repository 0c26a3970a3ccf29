"""The kernels on a CPU, with Triton's interpreter, against the reference functions in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kernels.cases import SAMPLE, Case, Outcome
from tests.kernels.whole import SMALL

Interpreted = Callable[[str], dict[str, Outcome]]


def test_no_case_hides_another() -> None:
    names = [str(case) for case in SAMPLE]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_kernel_gives_what_the_reference_gives(case: Case, interpreted: Interpreted) -> None:
    outcome = interpreted("kernels")[str(case)]
    assert outcome.passed, outcome


@pytest.mark.parametrize("form", ["fp32", "fp32 training", "fp16", "fp16 training"])
@pytest.mark.parametrize("name", [subject.name for subject in SMALL])
def test_model_gives_what_the_reference_gives(name: str, form: str, interpreted: Interpreted) -> None:
    found = interpreted("models")
    parts = ["output", "groups", *(["gradients"] if "training" in form else [])]
    wrong = [found[f"{name} {form} {part}"] for part in parts if not found[f"{name} {form} {part}"].passed]
    assert not wrong
