"""The demo where no trained model is installed: the sample pictures through a small model with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import vitrail
from vitrail.cli import console
from vitrail.cli.asking import ask, cost_of, paint
from vitrail.cli.demo import STRENGTHS, one_thread
from vitrail.cli.files import make_folder, write_picture
from vitrail.cli.model import Loaded, load
from vitrail.cli.summary import Summary, as_data, markdown, table, write_summary
from vitrail.pictures import contact_sheet, read_picture, samples

MODEL = "timm:vit_tiny_patch16_224"
PATCH = 16
SEED = 2  # any seed will do; with this one the astronaut's face stays apart from the wall behind it
HONESTY = (
    "The weights are random: the model has learnt nothing, its groups show only which patches have similar "
    "colours and lie near each other, and how close its outputs stay says nothing about a trained model. "
    "Two things were set by hand: the patch projection has a random bias (without one, light and dark of a "
    "colour look alike to the model), and the position embedding is a smooth ramp, as in trained "
    "models, instead of noise."
)


def run_random_demo(
    out: Path,
    *,
    model: str = MODEL,
    longest: int = 512,
    strengths: Mapping[str, float] = STRENGTHS,
    pictures: Mapping[str, Path] | None = None,
) -> list[Summary]:
    """Write one sheet per sample picture (the original and its stained glass), and a summary.

    Args:
        out: the folder for them.
        model: a plain timm ViT with patches of 16 pixels.
        longest: input size along the longer side; the other follows, so that patches are
            square on the picture.
        strengths: the share of patches that is left, by what to call it.
        pictures: other pictures than the samples, by name.
    """
    chosen = samples() if pictures is None else pictures
    folder = make_folder(out)
    console.note(HONESTY)
    runs: list[Summary] = []
    with console.progress() as bar, one_thread():
        task = bar.add_task("Merging", total=len(chosen) * len(strengths))
        for name, path in chosen.items():
            picture = read_picture(path)
            loaded = _load(model, _input_size(picture, longest))
            ask(loaded, picture)  # the first pass of all takes longer
            before = ask(loaded, picture)
            panels, captions = [picture], ["original"]
            for strength, keep in strengths.items():
                with vitrail.merge(loaded.model, keep=keep) as merging:
                    glass, result = paint(loaded, merging, picture, f"{name}, {strength}", before)
                    cost, config, r = cost_of(loaded, merging), merging.config, max(merging.r)
                panels.append(glass)
                captions.append(f"{strength}: r = {r}, {result.panes} panes")
                result.files["sheet"] = f"{name}.png"
                size = loaded.preprocessing.size
                runs.append(Summary(model, "random", loaded.device.type, size, config, cost, [result]))
                bar.advance(task)
            write_picture(folder / f"{name}.png", contact_sheet(panels, captions, columns=2))
    data: dict[str, Any] = {"note": HONESTY, "runs": [as_data(run) for run in runs]}
    write_summary(folder, data, markdown(runs, "Vitrail's demo", [HONESTY]))
    console.out.print(table(runs, f"{model} (random weights, {runs[0].device})"))
    shown = ", ".join(f"{name}.png" for name in chosen)
    console.say(f"Look at {shown} and summary.md in {folder}", style="bold")
    return runs


def _load(name: str, size: tuple[int, int]) -> Loaded:
    """Build the model with random weights, and with what :data:`HONESTY` says."""
    loaded = load(name, random=True, size=size, device="cpu", seed=SEED)
    model: Any = loaded.model
    generator = torch.Generator().manual_seed(SEED)
    _, height, width = loaded.layout.grid
    rows, columns = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
    ramp = torch.cartesian_prod(rows, columns) @ torch.empty(2, model.embed_dim).normal_(std=0.5, generator=generator)
    with torch.no_grad():
        model.patch_embed.proj.bias.normal_(std=0.8, generator=generator)
        model.pos_embed[:, -height * width :] = ramp
    return loaded


def _input_size(picture: Image.Image, longest: int) -> tuple[int, int]:
    """Give the input size in whole patches that is nearest to the picture's own shape."""
    scale = longest / max(picture.size) / PATCH
    width, height = (max(round(side * scale), 1) * PATCH for side in picture.size)
    return height, width
