"""The page on one merge, and the step by step view: recomputed from the weights in float64 by plain loops."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import vitrail
from tests.web.models import views_of
from vitrail.data import read_image, samples
from vitrail.web.model_views import Setting

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "merge-step.md"
SPECIAL, MERGES, HEADS = 6, 16, 3


class Merged(NamedTuple):
    """One merge: what enters, the best partner of each source, and where each token goes."""

    keys: np.ndarray
    values: np.ndarray
    sizes: np.ndarray
    best: dict[int, tuple[float, int]]
    merging: list[int]
    target: list[int]


def embedded(weights: dict[str, torch.Tensor], image: torch.Tensor) -> np.ndarray:
    """Return the tokens (262, 192) before the first block: halving convolutions, positions, special tokens."""
    x = image.double()
    for layer in (0, 3, 6):
        x = F.conv2d(x, weights[f"patch_embed.stem.{layer}.weight"], stride=2, padding=1)
        norm = [
            weights[f"patch_embed.stem.{layer + 1}.{name}"]
            for name in ("running_mean", "running_var", "weight", "bias")
        ]
        x = F.batch_norm(x, *norm).relu()
    x = F.conv2d(x, weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"])
    patches = x[0].flatten(1).T
    special = torch.cat([weights[f"tokens.{name}"][0] for name in ("cls", "distillation", "registers")])
    positions = weights["pos_embed"][0]
    count = len(positions) - len(patches)
    special[:count] += positions[:count]
    return torch.cat([special, patches + positions[count:]]).numpy()


def normed(x: np.ndarray, weights: dict[str, torch.Tensor], name: str) -> np.ndarray:
    centered = x - x.mean(1, keepdims=True)
    scaled = centered / np.sqrt((centered**2).mean(1, keepdims=True) + 1e-6)
    return scaled * weights[f"{name}.weight"].numpy() + weights[f"{name}.bias"].numpy()


def linear(x: np.ndarray, weights: dict[str, torch.Tensor], name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].numpy().T + weights[f"{name}.bias"].numpy()


def block(
    x: np.ndarray, sizes: np.ndarray, weights: dict[str, torch.Tensor], name: str
) -> tuple[Merged, np.ndarray, np.ndarray]:
    """Return a merge, and the tokens and sizes behind the block."""
    q, k, v = (
        linear(normed(x, weights, f"{name}.norm1"), weights, f"{name}.attn.qkv")
        .reshape(len(x), 3, HEADS, -1)
        .swapaxes(0, 1)
    )
    heads = []
    for head in range(HEADS):
        scores = q[:, head] @ k[:, head].T / math.sqrt(q.shape[-1]) + np.log(sizes)  # a token of size s counts s times
        shares = np.exp(scores - scores.max(1, keepdims=True))
        heads.append(shares / shares.sum(1, keepdims=True) @ v[:, head])
    x = x + linear(np.concatenate(heads, 1), weights, f"{name}.attn.proj")
    merged = merge(k.mean(1), x, sizes)
    left = max(merged.target) + 1
    tokens, total = np.zeros((left, x.shape[1])), np.zeros(left)
    for token, goes in enumerate(merged.target):
        tokens[goes] += sizes[token] * x[token]
        total[goes] += sizes[token]
    tokens /= total[:, None]
    hidden = torch.from_numpy(linear(normed(tokens, weights, f"{name}.norm2"), weights, f"{name}.mlp.fc1"))
    return merged, tokens + linear(F.gelu(hidden).numpy(), weights, f"{name}.mlp.fc2"), total


def merge(keys: np.ndarray, values: np.ndarray, sizes: np.ndarray) -> Merged:
    """Merge the most similar pairs of a token at an even position and one at an odd position."""
    count, best = len(keys), {}
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    for a in range(SPECIAL, count, 2):
        best[a] = max((float(unit[a] @ unit[b]), b) for b in range(SPECIAL + 1, count, 2))
    merging = sorted(best, key=lambda a: -best[a][0])[:MERGES]
    order = [*range(SPECIAL), *(a for a in best if a not in merging), *range(SPECIAL + 1, count, 2)]
    place = {token: at for at, token in enumerate(order)}
    target = [place[best[token][1]] if token in merging else place[token] for token in range(count)]
    return Merged(keys, values, sizes, best, merging, target)


def cat() -> Image.Image:
    """Return the photograph of the page: the centered square of chelsea."""
    source = read_image(samples()["chelsea"])
    left = (source.width - source.height) // 2
    return source.crop((left, 0, left + source.height, source.height))


@pytest.fixture(scope="module")
def steps() -> list[Merged]:
    """Return the merges of the first three layers on the photograph of the page."""
    model = vitrail.load_model("vitrail:tiny").eval()
    weights = {name: value.double() for name, value in model.state_dict().items()}
    x = embedded(weights, views_of(model).batch(cat()))
    sizes, found = np.ones(len(x)), []
    for layer in range(3):
        merged, x, sizes = block(x, sizes, weights, f"blocks.{layer}")
        found.append(merged)
    return found


def test_the_table_of_pairs(steps: list[Merged]) -> None:
    rows = re.findall(
        r"^\| (\d) \| (\d+) \(row (\d+), column (\d+)\) \| (\d+) \(row (\d+), column (\d+)\) \| ([\d.]+) \|$",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == 3
    for rank, a, row, column, b, to_row, to_column, cosine in rows:
        source = steps[0].merging[int(rank) - 1]
        assert (int(a), int(b)) == (source, steps[0].best[source][1])
        assert (int(row), int(column)) == divmod(source - SPECIAL, 16)
        assert (int(to_row), int(to_column)) == divmod(int(b) - SPECIAL, 16)
        assert float(cosine) == pytest.approx(steps[0].best[source][0], abs=1e-4)


def test_what_the_page_says_of_the_sizes(steps: list[Merged]) -> None:
    """Groups of two and three, and 240 patches are left."""
    sizes = np.bincount(steps[0].target)
    assert set(sizes) == {1, 2, 3}
    assert len(sizes) - SPECIAL == 240


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_step_by_step_view(steps: list[Merged], layer: int) -> None:
    views = views_of(vitrail.load_model("vitrail:tiny").eval())
    shown: dict[str, Any] = views.step("cat", views.batch(cat()), Setting("tome", "r", MERGES), layer)
    expected = steps[layer]
    assert shown["tokens"] == 262 - MERGES * layer
    assert shown["sizes"] == expected.sizes.tolist()
    np.testing.assert_allclose(shown["keys"], expected.keys, atol=2e-3)
    np.testing.assert_allclose(shown["values"], expected.values[:, :4], atol=2e-3)
    for pair in shown["pairs"]:
        assert pair["cosine"] == pytest.approx(expected.best[pair["a"]][0], abs=1e-4)
    merging = [pair["a"] for pair in shown["pairs"] if pair["merges"]]
    assert set(merging) == set(expected.merging)
    assert shown["target"] == expected.target
