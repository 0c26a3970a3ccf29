"""False alarms and power of the artifact detector; writes the tables of ``docs/detector.md``.

    python benchmarks/detector.py              # all tables; norms of the models are computed once, in a few minutes
    python benchmarks/detector.py --draws 20   # coarser rates

Untrained and trained models run on images of two datasets and on canvases without content: any alarm is false. Then
norms are drawn, from families of distributions and from such a model, and a share of the tokens gets a multiple of its
norm; or rectangles of tokens, objects, get a common one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detector_norms import IMAGE_SETS, LAYER_SCALE, SEEDS, TRAINED, UNTRAINED, Array, Build, Norms, cached

import vitrail.analysis.norms as detector
from vitrail.analysis.norms.threshold import MULTIPLES, SHARES

DOCS = Path(__file__).parent.parent / "docs" / "detector.md"
Draw = Callable[[np.random.Generator, int], tuple[Array, Array]]
"""Draws norms of some images on a grid of patches: entering the model and after a layer, (B, h, w) each."""
SIDE = 14


def judge(norms: Norms) -> detector.Norms:
    """Return the verdict of the detector on all layers."""
    counted = detector.NormAccumulator(len(norms.layers))
    return counted.add(norms.layers, entry=norms.entry, grid=norms.grid).result()


def independent(noise: Callable[[np.random.Generator, tuple[int, ...]], Array]) -> Draw:
    """Return draws of independent norms, of tokens that entered the model with equal norms."""

    def draw(rng: np.random.Generator, images: int) -> tuple[Array, Array]:
        shape = images, SIDE, SIDE
        return np.ones(shape), noise(rng, shape)

    return draw


def lognormal(width: float) -> Draw:
    """Return draws of lognormal norms."""
    return independent(lambda rng, shape: np.exp(width * rng.standard_normal(shape)))


def of_model(norms: Norms, layer: int) -> Draw:
    """Return draws of images of a model."""
    _, height, width = norms.grid
    maps = [one.double().numpy().reshape(-1, height, width) for one in (norms.entry, norms.layers[layer])]

    def draw(rng: np.random.Generator, images: int) -> tuple[Array, Array]:
        rows = rng.permutation(len(maps[0]))[:images]
        return maps[0][rows], maps[1][rows].copy()

    return draw


def plant(rng: np.random.Generator, norms: Array, share: float, multiple: float) -> None:
    """Multiply the norms of a share of the tokens."""
    norms.reshape(-1)[rng.permutation(norms.size)[: round(share * norms.size)]] *= multiple


def add_objects(rng: np.random.Generator, norms: Array, spread: float) -> None:
    """Multiply a rectangle of 9 to 49 patches in each image by 1.6 and a lognormal factor."""
    for image in norms:
        height, width = rng.integers(3, 8, 2)
        top, left = rng.integers(0, image.shape[0] + 1 - height), rng.integers(0, image.shape[1] + 1 - width)
        image[top : top + height, left : left + width] *= 1.6 * math.exp(spread * rng.standard_normal())


def rates(draw: Draw, images: int, draws: int, change: Callable[[np.random.Generator, Array], None]) -> Counter[str]:
    """Count the verdicts over draws that are changed."""
    counts: Counter[str] = Counter()
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        entry, norms = draw(rng, images)
        change(rng, norms)
        flat = [torch.from_numpy(one.reshape(images, -1)) for one in (entry, norms)]
        counts[judge(Norms(flat[0], flat[1][None], (1, *norms.shape[1:]))).verdict] += 1
    return counts


def interval(hits: int, draws: int) -> str:
    """Return a share in percent with its 95 % Wilson interval."""
    z, share = 1.96, hits / draws
    middle, half = share + z**2 / (2 * draws), z * math.sqrt(share * (1 - share) / draws + z**2 / (4 * draws**2))
    low, high = ((middle + sign * half) / (1 + z**2 / draws) for sign in (-1, 1))
    return f"{100 * share:.0f} ({100 * max(low, 0):.0f}–{100 * min(high, 1):.0f})"


def table(head: list[str], rows: list[list[Any]]) -> str:
    """Return a table as markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def clean_models(number: int) -> str:
    """Return verdicts on models without artifacts, with those on their norms alone in brackets."""
    groups: dict[str, dict[str, Build]] = {"untrained": UNTRAINED, "LayerScale": LAYER_SCALE, "trained": TRAINED}
    rows: list[list[Any]] = []
    alarms = alone = layers = runs = 0
    for models in groups.values():
        for name, build in models.items():
            cells = []
            for images in IMAGE_SETS:
                norms = cached(name, images, number, build)
                found, by_norm = judge(norms), detector.find_threshold(norms.layers[-1])
                runs += 1
                alarms += found.verdict == "artifacts"
                alone += by_norm.verdict == "artifacts"
                layers += sum(layer.verdict == "artifacts" for layer in found.per_layer)
                cells.append(f"{found.verdict} ({by_norm.verdict})")
            rows.append([name, *cells])
            sys.stdout.write(f"{rows[-1]}\n")
    text = table(["model", *IMAGE_SETS], rows)
    return (
        f"{text}\n\n{runs} runs: {alarms} alarms after the last layer, {layers} in any layer; {alone} by norms alone."
    )


def seeds(number: int) -> str:
    """Return verdicts on untrained ViT-Ti whose norms follow the patch embedding, by seed."""
    rows = []
    for name, build in SEEDS.items():
        norms = cached(name, "Imagenette", number, build)
        found, alone = judge(norms), detector.find_threshold(norms.layers[-1])
        entry, last = norms.entry.double().flatten(), norms.layers[-1].double().flatten()
        correlation = float(torch.corrcoef(torch.stack([entry, last]))[0, 1])
        rows.append([name, f"{correlation:.2f}", alone.verdict, found.verdict, f"{found.confidence:.2f}"])
    return table(["ViT-Ti", "correlation with the entry", "by norms alone", "verdict", "confidence"], rows)


def sources(number: int) -> dict[str, Draw]:
    """Return draws of norms to plant artifacts in."""
    follows = cached("64 pixels, patch 8, seed 0", "Imagenette", number, SEEDS["64 pixels, patch 8, seed 0"])
    tiny = cached("vitrail:tiny (shipped)", "Imagenette", 100, TRAINED["vitrail:tiny (shipped)"])
    return {
        "untrained ViT-Ti, 64 patches": of_model(follows, -1),
        "vitrail:tiny, 256 patches": of_model(tiny, -1),
        "lognormal, width 0.1, 196 patches": lognormal(0.1),
        "lognormal, width 0.3, 196 patches": lognormal(0.3),
    }


def power(draws: int, number: int) -> str:
    """Return how often planted artifacts are found."""
    rows: list[list[Any]] = []
    for name, draw in sources(number).items():
        for images in (10, 100):
            for share in SHARES:
                cells: list[Any] = [name, images, f"{share:.1%}"]
                for multiple in MULTIPLES:
                    found = rates(draw, images, draws, partial(plant, share=share, multiple=multiple))
                    cells.append(interval(found["artifacts"], draws))
                rows.append(cells)
                sys.stdout.write(f"{rows[-1]}\n")
    return table(["norms", "images", "share", *(f"{multiple:g}×" for multiple in MULTIPLES)], rows)


def objects(draws: int) -> str:
    """Return how often objects whose patches move together raise an alarm."""
    rows = []
    for width in (0.1, 0.2):
        for images in (20, 100):
            for spread in (0.2, 0.4, 0.6, 0.8):
                found = rates(lognormal(width), images, draws, partial(add_objects, spread=spread))
                rows.append([width, images, spread, interval(found["artifacts"], draws), dict(found.most_common())])
    return table(["width", "images", "spread of objects", "alarms, %", "verdicts"], rows)


HEAVY: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "lognormal, width 0.5": lambda rng, shape: np.exp(0.5 * rng.standard_normal(shape)),
    "gamma, shape 2": lambda rng, shape: rng.gamma(2, size=shape),
    "exponential": lambda rng, shape: rng.exponential(size=shape),
    "norm of 8 Student-t, 3 degrees": lambda rng, shape: np.sqrt(
        rng.chisquare(8, shape) / (rng.chisquare(3, shape) / 3)
    ),
    "one plus Cauchy": lambda rng, shape: 1 + np.abs(rng.standard_cauchy(shape)),
    "Pareto, index 1.5": lambda rng, shape: 1 + rng.pareto(1.5, shape),
    "log norm Student-t, 3 degrees, width 0.15": lambda rng, shape: np.exp(0.15 * rng.standard_t(3, shape)),
    "5 % of the tokens six times as spread": lambda rng, shape: np.exp(
        np.where(rng.random(shape) < 0.05, 0.6, 0.1) * rng.standard_normal(shape)
    ),
    "images of different norm, width 0.3": lambda rng, shape: np.exp(
        0.3 * rng.standard_normal((shape[0], 1, 1)) + 0.15 * rng.standard_normal(shape)
    ),
}


def heavy_tails(draws: int) -> str:
    """Return the verdicts on clean norms with heavy tails."""
    rows: list[list[Any]] = []
    for name, noise in HEAVY.items():
        for images in (3, 10, 100):
            found = rates(independent(noise), images, draws, lambda rng, norms: None)
            cells = [interval(found[verdict], draws) for verdict in ("artifacts", "uncertain", "none", "content")]
            rows.append([name, images, *cells])
    return table(["clean norms", "images", "alarms, %", "uncertain, %", "none, %", "content, %"], rows)


def write(name: str, text: str) -> None:
    """Replace a marked part of the page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = DOCS.read_text(encoding="utf-8").split(begin)
    DOCS.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def main() -> int:
    """Write the tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100, help="draws per rate (default: 100)")
    parser.add_argument("--images", type=int, default=100, help="images of each set (default: 100)")
    parser.add_argument("--only", choices=("models", "seeds", "power", "objects", "heavy"), help="one table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables: dict[str, Callable[[], str]] = {
        "models": lambda: clean_models(options.images),
        "seeds": lambda: seeds(2 * options.images),
        "objects": lambda: objects(options.draws),
        "power": lambda: power(options.draws, 2 * options.images),
        "heavy": lambda: heavy_tails(options.draws),
    }
    for name, compute in tables.items():
        if options.only in (None, name):
            write(name, compute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
