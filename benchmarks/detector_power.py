"""How often the detector of artifacts finds planted ones, and how often it is wrong about clean norms.

python benchmarks/detector_power.py --pictures pets-test.parquet

Outliers are planted into norms of real features (a ViT-S/16 of timm with random weights, which has no artifacts of its
own, on real pictures) and into synthetic bulks: a random share of the tokens gets a multiple of its own norm. Clean
distributions with heavy tails show the false alarms. The tables go between the markers in docs/detector.md.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vitrail.analysis.norms import NormAccumulator

Array = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Array]
"""Norms of so many pictures, (B, 196)."""

PATCHES = 196
NUM_PICTURES = (3, 10, 100)
SHARES, RATIOS = (0.005, 0.02, 0.05), (3, 5, 10)
DOCS = Path(__file__).resolve().parents[1] / "docs" / "detector.md"
BEGIN, END = "<!-- power: begin -->", "<!-- power: end -->"

BULKS: dict[str, Draw] = {
    "lognormal, width 0.1": lambda rng, b: np.exp(0.1 * rng.standard_normal((b, PATCHES))),
    "lognormal, width 0.2": lambda rng, b: np.exp(0.2 * rng.standard_normal((b, PATCHES))),
    "lognormal, width 0.3": lambda rng, b: np.exp(0.3 * rng.standard_normal((b, PATCHES))),
    "gamma, shape 20": lambda rng, b: rng.gamma(20, size=(b, PATCHES)),
    "two bulks, 1× and 1.6×": lambda rng, b: (
        np.exp(0.12 * rng.standard_normal((b, PATCHES))) * np.where(rng.random((b, PATCHES)) < 0.4, 1.6, 1.0)
    ),
}
HEAVY: dict[str, Draw] = {
    "lognormal, width 0.5": lambda rng, b: np.exp(0.5 * rng.standard_normal((b, PATCHES))),
    "gamma, shape 2": lambda rng, b: rng.gamma(2, size=(b, PATCHES)),
    "exponential": lambda rng, b: rng.exponential(size=(b, PATCHES)),
    "length of 8 Student-t, 3 degrees": lambda rng, b: np.sqrt(
        rng.chisquare(8, (b, PATCHES)) / (rng.chisquare(3, (b, PATCHES)) / 3)
    ),
    "one plus Cauchy": lambda rng, b: 1 + np.abs(rng.standard_cauchy((b, PATCHES))),
    "Pareto, index 1.5": lambda rng, b: 1 + rng.pareto(1.5, (b, PATCHES)),
    "log norm Student-t, 3 degrees, width 0.15": lambda rng, b: np.exp(0.15 * rng.standard_t(3, (b, PATCHES))),
    "5 % of the tokens six times as spread": lambda rng, b: np.exp(
        np.where(rng.random((b, PATCHES)) < 0.05, 0.6, 0.1) * rng.standard_normal((b, PATCHES))
    ),
    "pictures of different norm, width 0.3": lambda rng, b: np.exp(
        0.3 * rng.standard_normal((b, 1)) + 0.15 * rng.standard_normal((b, PATCHES))
    ),
}


def verdict(norms: Array) -> str:
    """Ask the detector about one layer of several pictures."""
    return NormAccumulator(1).add(torch.from_numpy(norms)[None]).result().verdict


def plant(rng: np.random.Generator, norms: Array, share: float, ratio: float) -> Array:
    """Multiply the norms of a share of the tokens."""
    chosen = rng.permutation(norms.size)[: round(share * norms.size)]
    flat = norms.reshape(-1).copy()
    flat[chosen] *= ratio
    return flat.reshape(norms.shape)


def rates(draw: Draw, pictures: int, draws: int, planted: tuple[float, float] | None = None) -> Counter[str]:
    """Count the verdicts over draws."""
    rng = np.random.default_rng(0)
    clean = (draw(rng, pictures) for _ in range(draws))
    return Counter(verdict(norms if planted is None else plant(rng, norms, *planted)) for norms in clean)


def real_features(parquet: Path | None, number: int = 200) -> tuple[str, dict[str, Draw]]:
    """Norms of a ViT's patch tokens on real pictures, by layer, as draws of pictures; and where they are from."""
    import timm
    from PIL import Image

    from vitrail.data import Preprocessing, read_image, samples, to_tensor

    if parquet is None:
        whole = [read_image(path) for path in samples().values()]
        pictures: list[Any] = [
            picture.crop((picture.width * x // 12, picture.height * y // 12, picture.width, picture.height))
            for picture in whole
            for x in range(6)
            for y in range(6)
        ]
        source = "crops of the sample pictures"
    else:
        import pyarrow.parquet as pq

        rows = pq.read_table(parquet, columns=["image"]).slice(0, number)["image"].to_pylist()
        pictures = [Image.open(io.BytesIO(row["bytes"])).convert("RGB") for row in rows]
        source = f"{len(pictures)} pictures of {parquet.name}"
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224").eval()
    layers: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for start in range(0, len(pictures), 20):
            images = to_tensor(pictures[start : start + 20], Preprocessing((224, 224)))
            tokens = model.forward_intermediates(images, norm=False, output_fmt="NLC", intermediates_only=True)
            layers.append([layer.norm(dim=-1) for layer in tokens])
    found: dict[str, Draw] = {}
    for layer in (0, 5, 11):
        norms = torch.cat([batch[layer] for batch in layers]).double().numpy()
        name = f"ViT-S/16, after block {layer + 1}, width {np.log(norms).std():.2f}"
        found[name] = lambda rng, b, norms=norms: norms[rng.permutation(len(norms))[:b]]  # type: ignore[misc]
    return source, found


def tables(sources: dict[str, Draw], heavy: dict[str, Draw], draws: int) -> str:
    """Both tables, as markdown."""
    combinations = [(share, ratio) for share in SHARES for ratio in RATIOS]
    lines = [
        '| norms | pictures | clean: false alarms / "none" | '
        + " | ".join(f"{share:.1%} at {ratio}×" for share, ratio in combinations)
        + " |",
        "| --- " * (3 + len(combinations)) + "|",
    ]
    for name, draw in sources.items():
        for pictures in NUM_PICTURES:
            clean = rates(draw, pictures, draws)
            hits = [rates(draw, pictures, draws, both)["artifacts"] for both in combinations]
            cells = [f"{clean['artifacts'] / draws:.1%} / {clean['none'] / draws:.0%}"]
            cells += [f"{hit / draws:.0%}" for hit in hits]
            lines.append(f"| {name} | {pictures} | " + " | ".join(cells) + " |")
            say(lines[-1])
    lines += ["", '| clean, with heavy tails | pictures | false alarms | "uncertain" | "none" |', "| --- " * 5 + "|"]
    for name, draw in heavy.items():
        for pictures in NUM_PICTURES:
            clean = rates(draw, pictures, 2 * draws)
            cells = [f"{clean[key] / (2 * draws):.1%}" for key in ("artifacts", "uncertain", "none")]
            lines.append(f"| {name} | {pictures} | " + " | ".join(cells) + " |")
            say(lines[-1])
    return "\n".join(lines)


def say(text: str) -> None:
    """Tell how far it is."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Measure, print, and write the tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="parquet file with an image column; the samples by default")
    parser.add_argument("--draws", type=int, default=100, help="draws for each figure (100)")
    parser.add_argument("--docs", type=Path, default=DOCS, help="page to write the tables into (docs/detector.md)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source, features = real_features(options.pictures)
    text = tables({**features, **BULKS}, HEAVY, options.draws)
    note = (
        f"ViT-S/16 with random weights on {source}; {options.draws} draws for each figure, twice that for heavy tails."
    )
    page = options.docs.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    options.docs.write_text(f"{before}{BEGIN}\n{note}\n\n{text}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
