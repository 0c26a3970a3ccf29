"""``vitrail merge``: every sample through a model, without and with merging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

import vitrail
from vitrail.cli._shared import console, options
from vitrail.cli._shared.media import MEDIA, check_any, find_readable, open_for, skip
from vitrail.cli._shared.model import load
from vitrail.cli._shared.output import Names, make_directory, write_drawing
from vitrail.cli._shared.prediction import compare_merged, mean_cost, predict
from vitrail.cli._shared.ranks import command
from vitrail.cli._shared.summary import Cost, Result, Summary, markdown, markdown_table, write_summary
from vitrail.data import open_dataset
from vitrail.errors import ImageError
from vitrail.surgery.saving.changes import merge_arguments

COLUMNS = ("panes", "tokens", "GFLOPs", "cosine", "top-1", "ms")
LEGEND = (
    "Panes: groups of patches in the image. Tokens: output of the last block, without → with merging. GFLOPs: 10⁹ "
    "multiply-adds for one image. Cosine: between the model's outputs without and with merging. Top-1: whether the "
    "most likely class stays the same. Ms: latency of a single pass each, so a rough figure."
)
EXAMPLES = (
    "vitrail merge timm:vit_base_patch16_224 photos/ -r 16 -o glass",
    "vitrail merge timm:vit_small_patch14_dinov2 cat.jpg --keep 0.25 --image-size 518",
    "vitrail merge hf:facebook/deit-small-patch16-224 cat.jpg --gflops 2.5 --schedule decreasing",
    "vitrail merge timm:vit_tiny_patch16_224 cat.jpg -r 16 --random-weights",
    "vitrail merge vitrail:audio -r 8",
    "vitrail merge vitrail:video clips/ -r 12",
    "vitrail merge hf:MCG-NJU/videomae-base-finetuned-kinetics clips/ -r 64",
    "vitrail merge hf:MIT/ast-finetuned-audioset-10-10-0.4593 'sounds/*.wav' -r 32",
)


def merge(
    ctx: typer.Context,
    model: options.Model,
    images: options.Samples = None,
    r: options.R = None,
    keep: options.Keep = None,
    gflops: options.Gflops = None,
    merge: options.Merge = None,
    out: options.Folder = Path("glass"),
    schedule: options.Schedule = None,
    order: options.Order = "paper",
    proportional: options.Proportional = True,
    method: options.Method = "tome",
    size: options.Size = None,
    random_weights: options.RandomWeights = False,
    device: options.Device = None,
    limit: options.Limit = 0,
) -> None:
    """Write for each image the stained glass (one pane per remaining token) and a side-by-side view.

    Clips become a filmstrip and a film, sounds a spectrogram, each with the groups of patches as stained glass. Also
    writes a summary with tokens per layer, FLOPs, and how close the merged model's output is to the unmerged
    one's.
    """
    with command():
        chosen = options.merge_options(ctx.params)
        given: dict[str, Any] = {"labels": None, "limit": limit or None}
        source = images or None
        dataset = open_dataset(source, **given)
        readable = find_readable(dataset)  # before loading the model, which may take long
        with console.status(f"Loading {model}"):
            loaded = load(model, "merge", random=random_weights, size=size, device=device)
        fitting = open_for(dataset, source, loaded.spec, **given)
        if fitting is not dataset:
            dataset, readable = fitting, find_readable(fitting)
        readable.note()
        good, skipped = readable.indices, readable.skipped
        settings = merge_arguments(chosen, loaded.model)
        with vitrail.merge(loaded.model, **settings) as merging:  # wrong options are found before anything is written
            config = merging.config
        folder = make_directory(out)
        if random_weights:
            console.note(f"{model} has random weights here: its groups and outputs say nothing about trained ones.")
        names = Names(folder, dataset)
        results: list[Result] = []
        costs: list[Cost] = []
        interrupted: KeyboardInterrupt | None = None
        with console.progress() as bar:
            try:
                for index in bar.track(good, description="Merging"):
                    try:
                        sample = dataset.read(index).image
                        batch = loaded.medium.batch(sample, loaded.spec)  # decodes clips and sounds
                    except ImageError as error:
                        skipped.append(skip(dataset, index, error))
                        continue
                    if not results:
                        predict(loaded, batch)  # the first pass is slower, and would count as the one without merging
                    before = predict(loaded, batch)
                    with vitrail.merge(loaded.model, **settings) as merging:
                        drawings, result, cost = compare_merged(loaded, merging, sample, dataset.name(index), before)
                    suffixes = {ending: getattr(drawing, "suffix", ".png") for ending, drawing in drawings.items()}
                    for ending, file in names.of(index, suffixes).items():
                        write_drawing(file, drawings[ending])
                        result.files[ending] = file.name
                    results.append(result)
                    costs.append(cost)
            except KeyboardInterrupt as stop:
                interrupted = stop
        if interrupted is None or results:
            check_any(results, dataset)
            input_size, kind = loaded.spec.size, loaded.device.type
            summary = Summary(model, loaded.weights, kind, input_size, config, mean_cost(costs), results, skipped)
            _conclude(summary, costs, folder, MEDIA[dataset.modality].noun)
        if interrupted is not None:
            console.note(f"Stopped after {len(results)} of {len(good)} images.")
            raise interrupted
    if skipped:
        raise typer.Exit(1)


def _conclude(summary: Summary, costs: Sequence[Cost], folder: Path, noun: str) -> None:
    """Write the summary, and print its table, with the cost of each sample; ``noun`` is what samples are called."""
    tokens = " ".join(map(str, summary.cost.tokens_after))
    if any(cost != costs[0] for cost in costs):
        tokens += f", mean over the {noun}"
    rows = [
        (
            result.picture,
            str(result.panes),
            f"{cost.tokens_before[-1]} → {cost.tokens_after[-1]}",
            f"{cost.flops_before / 1e9:.3g} → {cost.flops_after / 1e9:.3g}",
            "–" if result.cosine is None else f"{result.cosine:.4f}",
            result.top1,
            f"{result.seconds_before * 1e3:.0f} → {result.seconds_after * 1e3:.0f}",
        )
        for result, cost in zip(summary.pictures, costs, strict=True)
    ]
    columns = (noun.removesuffix("s"), *COLUMNS)
    size, config = " × ".join(map(str, summary.input_size)), summary.merging
    model = f"{summary.model} ({summary.weights} weights, {summary.device})"
    settings = ", ".join(f"{name}={value}" for name, value in config.items())
    details = f"- {model}, input {size}, merged with {settings}: {tokens} tokens after each block, instead of "
    lines = [f"# {markdown(summary.model)}, merged", "", *markdown_table(columns, rows), "", LEGEND, ""]
    lines += [
        f"{markdown(details)}{summary.cost.tokens_before[-1]}.",
        *(f"- Skipped: {markdown(one['reason'])}" for one in summary.skipped),
    ]
    values = write_summary(folder, asdict(summary), "\n".join(lines))

    table = console.table(*columns, title=model)
    for row in rows:
        table.add_row(*row)
    console.show(table)
    console.say(f"Tokens after each block: {tokens} (unmerged: {summary.cost.tokens_before[-1]})")
    broken = [result.picture for result in summary.pictures if not result.finite]
    if broken:
        console.error(
            f"The model's output is NaN or infinite for {len(broken)} of {len(summary.pictures)} images, such as "
            f"{broken[0]}: check the model's weights and dtype."
        )
    if summary.skipped:
        total = len(summary.pictures) + len(summary.skipped)
        console.error(f"{len(summary.skipped)} of {total} {noun} could not be read and were skipped, see above.")
    console.say(f"Drawings and summary.md are in {folder}", style="bold")
    console.answer(values)
