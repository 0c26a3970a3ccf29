"""Arguments are checked by the annotations of a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vitrail._arguments import checked, fitting
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel


@checked
def function(
    count: int = 1,
    share: float = 0.5,
    name: str | None = None,
    flag: bool = False,
    where: str | Path = ".",
    r: int | Sequence[int] = 0,
    kind: Literal["a", "b"] = "a",
    on: Callable[[int], object] | None = None,
    options: Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    device: torch.device | str | None = None,
    x: Tensor | None = None,
    size: int | tuple[int, int] | None = None,
    anything: Any = None,
) -> str:
    """Return that it ran."""
    return "ran"


GOOD = {
    "count": [0, -3, np.int64(3)],
    "share": [0, 1.5, float("inf"), np.float32(0.5)],
    "name": ["x", None, ""],
    "flag": [True, np.True_],
    "where": ["a", Path("a/b")],
    "r": [3, [1, 2], (0,), range(3), np.array([1, 2]), torch.tensor([1, 2]), []],
    "kind": ["a", "b"],
    "on": [print, None],
    "options": [{"a": 1}, {}],
    "device": ["cpu", torch.device("cpu"), None],
    "x": [torch.zeros(2)],
    "size": [3, (3, 4), None],
    "anything": [object(), {1}, float("nan")],
}
BAD = {
    "count": [True, 1.0, "1", None, 2**63, 10**5000, [1]],
    "share": [float("nan"), "0.5", True, 10**400, None],
    "name": [3, b"x", ["x"]],
    "flag": [1, "yes", None],
    "where": ["a\0b", "x" * 300, 5, None],
    "r": [{1, 2}, [True], torch.tensor([True]), memoryview(b"ab"), b"ab", "12", [1.5], {1: 2}, [2**70]],
    "size": [torch.tensor(1.0), np.array(3), (3,), "3"],
    "kind": ["c", 1, ["a"]],
    "on": [5, "print"],
    "options": [{1: 2}, [("a", 1)], 5],
    "device": ["abc", "cuda:7", 5.0, "meta"],
    "x": [[1.0], np.zeros(2)],
}


def test_right_arguments_pass_and_wrong_ones_are_named() -> None:
    for name, values in GOOD.items():
        for value in values:
            assert function(**{name: value}) == "ran", name
    for name, values in BAD.items():
        for value in values:
            with pytest.raises(InvalidOption, match=f"^{name}=") as caught:
                function(**{name: value})
            assert "expected" in str(caught.value)
            assert len(str(caught.value)) < 400
    with pytest.raises(TypeError, match="unexpected keyword"):
        function(unknown=3)  # type: ignore[call-arg]
    assert function.__doc__ == "Return that it ran."


def test_a_model_must_be_one() -> None:
    @checked
    def on_model(model: nn.Module) -> None: ...

    with pytest.raises(UnsupportedModel, match="got int"):
        on_model(5)  # type: ignore[arg-type]


def test_tensors_that_do_not_fit_are_listed() -> None:
    @fitting
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    assert product(torch.ones(2, 3), torch.ones(3)).tolist() == [3, 3]
    with pytest.raises(UnsupportedInput, match=r"product: .*a=\(2, 3\) in float32, b=\(2,\)"):
        product(torch.ones(2, 3), torch.ones(2))
    with pytest.raises(InvalidOption, match=r"^a="):
        product(5, torch.ones(2))  # type: ignore[arg-type]
