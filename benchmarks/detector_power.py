"""Power and false alarms of the artifact token detector.

python benchmarks/detector_power.py --images pets-test.parquet

Outliers are planted into norms of real features (timm's ViT-S/16 with random weights, which has no artifacts of its
own, on real images) and into synthetic bulks: a random share of the tokens gets a multiple of its own norm. Clean
distributions with heavy tails show the false alarms. The tables are written between the markers in docs/detector.md.
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
"""Draw the norms (B, 196) of B images."""

PATCHES = 196
NUM_IMAGES = (3, 10, 100)
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
    "norm of 8 Student-t, 3 degrees": lambda rng, b: np.sqrt(
        rng.chisquare(8, (b, PATCHES)) / (rng.chisquare(3, (b, PATCHES)) / 3)
    ),
    "one plus Cauchy": lambda rng, b: 1 + np.abs(rng.standard_cauchy((b, PATCHES))),
    "Pareto, index 1.5": lambda rng, b: 1 + rng.pareto(1.5, (b, PATCHES)),
    "log norm Student-t, 3 degrees, width 0.15": lambda rng, b: np.exp(0.15 * rng.standard_t(3, (b, PATCHES))),
    "5 % of the tokens six times as spread": lambda rng, b: np.exp(
        np.where(rng.random((b, PATCHES)) < 0.05, 0.6, 0.1) * rng.standard_normal((b, PATCHES))
    ),
    "images of different norm, width 0.3": lambda rng, b: np.exp(
        0.3 * rng.standard_normal((b, 1)) + 0.15 * rng.standard_normal((b, PATCHES))
    ),
}


def verdict(norms: Array) -> str:
    """Return the verdict on one layer (B, 196)."""
    return NormAccumulator(1).add(torch.from_numpy(norms)[None]).result().verdict


def plant(rng: np.random.Generator, norms: Array, share: float, ratio: float) -> Array:
    """Return norms with a share of them multiplied by a ratio."""
    chosen = rng.permutation(norms.size)[: round(share * norms.size)]
    flat = norms.reshape(-1).copy()
    flat[chosen] *= ratio
    return flat.reshape(norms.shape)


def rates(draw: Draw, images: int, draws: int, planted: tuple[float, float] | None = None) -> Counter[str]:
    """Count the verdicts over draws."""
    rng = np.random.default_rng(0)
    clean = (draw(rng, images) for _ in range(draws))
    return Counter(verdict(norms if planted is None else plant(rng, norms, *planted)) for norms in clean)


def real_features(parquet: Path | None, number: int = 200) -> tuple[str, dict[str, Draw]]:
    """Return the source of the images, and draws of a ViT's norms on them by layer."""
    import timm
    from PIL import Image

    from vitrail.data import InputSpec, read_image, samples, to_tensor

    if parquet is None:
        whole = [read_image(path) for path in samples().values()]
        images: list[Any] = [
            image.crop((image.width * x // 12, image.height * y // 12, image.width, image.height))
            for image in whole
            for x in range(6)
            for y in range(6)
        ]
        source = "crops of the sample images"
    else:
        import pyarrow.parquet as pq

        rows = pq.read_table(parquet, columns=["image"]).slice(0, number)["image"].to_pylist()
        images = [Image.open(io.BytesIO(row["bytes"])).convert("RGB") for row in rows]
        source = f"{len(images)} images of {parquet.name}"
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224").eval()
    layers: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for start in range(0, len(images), 20):
            batch = to_tensor(images[start : start + 20], InputSpec((224, 224)))
            tokens = model.forward_intermediates(batch, norm=False, output_fmt="NLC", intermediates_only=True)
            layers.append([layer.norm(dim=-1) for layer in tokens])
    found: dict[str, Draw] = {}
    for layer in (0, 5, 11):
        norms = torch.cat([norms[layer] for norms in layers]).double().numpy()
        name = f"ViT-S/16, after block {layer + 1}, width {np.log(norms).std():.2f}"
        found[name] = lambda rng, b, norms=norms: norms[rng.permutation(len(norms))[:b]]  # type: ignore[misc]
    return source, found


def tables(sources: dict[str, Draw], heavy: dict[str, Draw], draws: int) -> str:
    """Return both tables as markdown."""
    combinations = [(share, ratio) for share in SHARES for ratio in RATIOS]
    lines = [
        '| norms | images | clean: false alarms / "none" | '
        + " | ".join(f"{share:.1%} at {ratio}×" for share, ratio in combinations)
        + " |",
        "| --- " * (3 + len(combinations)) + "|",
    ]
    for name, draw in sources.items():
        for images in NUM_IMAGES:
            clean = rates(draw, images, draws)
            hits = [rates(draw, images, draws, both)["artifacts"] for both in combinations]
            cells = [f"{clean['artifacts'] / draws:.1%} / {clean['none'] / draws:.0%}"]
            cells += [f"{hit / draws:.0%}" for hit in hits]
            lines.append(f"| {name} | {images} | " + " | ".join(cells) + " |")
            sys.stdout.write(f"{lines[-1]}\n")
    lines += ["", '| clean, with heavy tails | images | false alarms | "uncertain" | "none" |', "| --- " * 5 + "|"]
    for name, draw in heavy.items():
        for images in NUM_IMAGES:
            clean = rates(draw, images, 2 * draws)
            cells = [f"{clean[key] / (2 * draws):.1%}" for key in ("artifacts", "uncertain", "none")]
            lines.append(f"| {name} | {images} | " + " | ".join(cells) + " |")
            sys.stdout.write(f"{lines[-1]}\n")
    return "\n".join(lines)


def main() -> int:
    """Print the tables and write them into the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="parquet file with an image column (default: the sample images)")
    parser.add_argument("--pictures", type=Path, dest="images", help=argparse.SUPPRESS)
    parser.add_argument("--draws", type=int, default=100, help="draws per number (default: 100)")
    parser.add_argument("--docs", type=Path, default=DOCS, help="page to write to (default: docs/detector.md)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source, features = real_features(options.images)
    text = tables({**features, **BULKS}, HEAVY, options.draws)
    note = (
        f"ViT-S/16 with random weights on {source}; "
        f"{options.draws} draws per number, {2 * options.draws} for heavy tails."
    )
    page = options.docs.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    options.docs.write_text(f"{before}{BEGIN}\n{note}\n\n{text}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
