"""Sinks of constructed heads, and of random ones against loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitrail.analysis.sinks import count_sinks, find_sinks
from vitrail.errors import UnsupportedInput
from vitrail.tokens import Role, TokenLayout

LAYOUT = TokenLayout.of(Role.CLASS, (Role.REGISTER, 1), grid=(1, 2, 2))


def heads() -> tuple[torch.Tensor, torch.Tensor]:
    """Four heads of one image: without a sink, with a no-op, a broadcast sink, and one that is neither."""
    generator = torch.Generator().manual_seed(0)
    attention, values = torch.full((1, 4, 5, 6), 1 / 6), torch.randn(1, 4, 6, 8, generator=generator)
    attention[0, 1] = torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.1])
    values[0, 1, 0] *= 1e-3
    attention[0, 2] = torch.tensor([0.0, 1.0, 0, 0, 0, 0])
    attention[0, 3] = torch.eye(6)[:5] * 0.6 + torch.tensor([0, 0, 0, 0.4, 0, 0])
    return attention, values


def test_kinds_of_sinks() -> None:
    found = count_sinks([find_sinks(*heads())], LAYOUT)
    assert (found.heads, found.no_op, found.broadcast, found.other) == (4, 1, 1, 1)
    assert found.roles == {"class": 1, "register": 1, "patch": 1}
    assert (found.count, found.share) == (3, 0.75)


def test_no_sinks() -> None:
    attention, values = heads()
    found = count_sinks([find_sinks(attention[:, :1], values[:, :1])], LAYOUT)
    assert (found.count, found.roles, found.value_norm, found.rank_one) == (0, {}, None, None)


def test_measures_equal_loops_in_float64() -> None:
    generator = torch.Generator().manual_seed(1)
    attention = torch.randn(2, 3, 5, 7, generator=generator).mul(2).softmax(-1)
    values = torch.randn(2, 3, 7, 4, generator=generator)
    found = find_sinks(attention, values)
    for image in range(2):
        for head in range(3):
            rows, v = attention[image, head].double().numpy(), values[image, head].double().numpy()
            received = [np.mean([row[token] for row in rows]) for token in range(7)]
            sink = int(np.argmax(received))
            norms = [float(np.sqrt((one * one).sum())) for one in v]
            others = sorted(norm for token, norm in enumerate(norms) if token != sink)
            gram = (rows @ v).T @ (rows @ v)
            powers = np.linalg.eigvalsh(gram)
            assert found.token[image, head] == sink
            assert found.attention[image, head] == pytest.approx(received[sink], rel=1e-10)
            assert found.value_norm[image, head] == pytest.approx(norms[sink] / others[2], rel=1e-10)
            assert found.rank_one[image, head] == pytest.approx(powers[-1] / powers.sum(), rel=1e-9)


def test_all_parts_count() -> None:
    both = count_sinks([find_sinks(*heads()), find_sinks(*heads())], LAYOUT)
    assert (both.heads, both.count) == (8, 6)
    assert both.value_norm == pytest.approx(count_sinks([find_sinks(*heads())], LAYOUT).value_norm)


def test_values_that_do_not_fit_are_refused() -> None:
    attention, values = heads()
    with pytest.raises(UnsupportedInput, match="values"):
        find_sinks(attention, values[:, :2])
    with pytest.raises(UnsupportedInput, match="finite"):
        find_sinks(attention * torch.nan, values)
