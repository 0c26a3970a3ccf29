"""Checks of options: what each accepts, and what its error says."""

import math
from typing import Any

import numpy as np
import pytest

from vitrail._checks import check_choice, check_int, check_rank, check_share
from vitrail.errors import InvalidOption


@pytest.mark.parametrize("value", [1, 7, np.int64(3)])
def test_whole_numbers(value: Any) -> None:
    check_int("r", value)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, math.nan])
def test_other_values_are_no_whole_numbers(value: Any) -> None:
    with pytest.raises(InvalidOption, match="expected a whole number, 1 or more"):
        check_int("r", value)


def test_shares() -> None:
    for value in (0, 0.5, 1, np.float32(0.25)):
        check_share("share", value)
    for value in (-0.1, 1.1, math.nan, "x", None, True):
        with pytest.raises(InvalidOption, match=r"share=.* expected a number from 0, up to 1"):
            check_share("share", value)
    with pytest.raises(InvalidOption, match="above 0, below 1"):
        check_share("share", 0, zero=False, one=False)
    with pytest.raises(InvalidOption, match="from 0, below 1"):
        check_share("share", 1, one=False)


def test_choices_and_ranks() -> None:
    check_choice("keep", "auto", ("auto", "device"))
    check_rank(1, 2)
    for value in ("disk", None, ["auto"]):
        with pytest.raises(InvalidOption, match=r"keep=.* expected one of auto, device"):
            check_choice("keep", value, ("auto", "device"))
    for rank in (-1, 2):
        with pytest.raises(InvalidOption, match=f"rank={rank}, world_size=2"):
            check_rank(rank, 2)


def test_a_tensor_without_axes_is_one_value() -> None:
    import torch

    from vitrail._checks import as_tuple

    single = torch.tensor(2.0)
    assert as_tuple(single) == (single,)
    assert as_tuple(torch.tensor([1, 2])) == (1, 2)
    assert as_tuple("ab") == ("ab",)
