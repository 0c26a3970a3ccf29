"""``vitrail demo``: predictions of a trained model on some images, merged more and more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image, ImageOps
from torch import Tensor

import vitrail
from vitrail.adapters.registry import split_name
from vitrail.adapters.saved import PREFIX, named
from vitrail.analysis.attention import ALIKE, alike_maps, token_maps
from vitrail.cli._shared import console, options
from vitrail.cli._shared.media import check_any, find_readable, skip
from vitrail.cli._shared.model import Loaded, load
from vitrail.cli._shared.output import Names, make_directory, write_image
from vitrail.cli._shared.prediction import compare_merged, cost_of, predict
from vitrail.cli._shared.ranks import command
from vitrail.cli._shared.summary import Cost, Guesses, Result, Summary, markdown_table, write_summary
from vitrail.data import Dataset, open_dataset, read_image
from vitrail.data.sample_files import drawings
from vitrail.drawing.colors import colors
from vitrail.drawing.predictions import WIDE, Column, prediction_sheet
from vitrail.errors import ImageError, InvalidOption
from vitrail.report.sections.attention import MAX_TOKENS
from vitrail.tokens import token_names
from vitrail.training.run_directory import model_of

EXAMPLES = ("vitrail demo -o demo", "vitrail demo --model runs/student --images photos/ -o student")

Costs = dict[str, tuple[Cost, dict[str, Any]]]

STRENGTHS = {f"keep {100 * share:.0f} %": share for share in (0.5, 0.25, 0.1)}
"""Share of patches that remain, by name."""

MOST = 12
"""Most images that are shown."""

DARKEST = 0.75
"""Brightness of a map over black pixels: little is lost, so that colors stay readable."""

LEGEND = "Bars: the most likely classes; red where merging put another class first."
MAPS = " Maps: attention of a special token, mean over heads, from 0 (violet) to its largest weight (yellow)."
ALIKE_NOTE = f" Tokens with alike maps (cosine {ALIKE} or more) share one."
DRAWN = "The images are drawings, since photographs of the model's classes may not be redistributed."


def demo(
    model: Annotated[str, typer.Option(metavar="RUN", help="Run directory of a trained model.")] = "vitrail:tiny",
    images: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="Images, or a directory, instead of the samples.")
    ] = None,
    out: options.Folder = Path("demo"),
    pictures: Annotated[list[Path] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Write for each image a sheet with the predictions, the stained glass and the attention of special tokens.

    Also writes a report on the model, and a summary. Unreadable images are skipped and named; the exit code is then 1.
    """
    torch.set_num_threads(1)  # enough for a small model, and much faster than several on a busy machine
    with command():
        if pictures:
            console.note("--pictures is deprecated and will be removed in 0.4; use --images.")
        runs = run_demo(out, model, [*(images or ()), *(pictures or ())] or None)
    if any(run.skipped for run in runs):
        raise typer.Exit(1)


def run_demo(out: Path, model: str, images: Sequence[Path] | None) -> list[Summary]:
    """Show a model on images from any source, by default drawings of its classes; return the results by strength."""
    given = open_dataset(images) if images else None
    skipped: list[dict[str, str]] = []
    if given is not None:
        readable = find_readable(given)
        readable.note()
        given, skipped = given.select(readable.indices), readable.skipped
    loaded = _load(model)
    folder = make_directory(out)
    if given is None:
        drawn = {make_directory(folder / "pictures") / f"{name}.png": source for name, source in drawings().items()}
        for path, source in drawn.items():
            write_image(path, read_image(source))
        given = open_dataset([*drawn])
    if len(given) > MOST:
        console.note(f"Only the first {MOST} of {len(given)} images are shown.")
        given = given.select(range(MOST))
    runs = _show(loaded, given, folder, skipped, by_stem=not images)
    with console.status("Writing report.html"):
        report = vitrail.inspect(loaded.model, given, probes=False, name=loaded.name)
        assert report is not None  # one process
        report.save(folder / "report.html")
    _conclude(loaded, runs, folder, [] if images else [DRAWN])
    return list(runs.values())


def _load(name: str) -> Loaded:
    """Load a trained model; others are refused before anything is downloaded."""
    refused = InvalidOption(
        f"{name}: the demo shows models that vitrail train saved, with class names in labels.json; name a run "
        "directory. For other models use vitrail merge and vitrail inspect"
    )
    if split_name(name)[0] is not None and not name.startswith(PREFIX):
        raise refused
    model_of(named(name))  # raises for a directory without a model
    with console.status(f"Loading {name}"):
        loaded = load(name, "demo", device="cpu")
    if not any(question.kind == "classification" for question in loaded.questions):
        raise refused
    return loaded


def _show(
    loaded: Loaded, dataset: Dataset, folder: Path, skipped: list[dict[str, str]], *, by_stem: bool
) -> dict[str, Summary]:
    """Write a sheet for each image; return the results by strength. What cannot be read joins ``skipped``."""
    names, costs = Names(folder, dataset, by_stem=by_stem), _costs(loaded)
    results: dict[str, list[Result]] = {strength: [] for strength in costs}
    shown: list[int] = []
    with console.progress() as bar:
        for index in bar.track(range(len(dataset)), description="Merging"):
            try:
                sample = dataset.read(index).image
            except ImageError as error:
                skipped.append(skip(dataset, index, error))
                continue
            if not shown:
                predict(loaded, loaded.medium.batch(sample, loaded.spec))  # the first pass is slower
            file = names.of(index, ["sheet"])["sheet"]
            write_image(file, _one_sample(loaded, sample, file, costs, results))
            shown.append(index)
    check_any(shown, dataset)
    size, device = loaded.spec.size, loaded.device.type
    return {
        strength: Summary(loaded.name, "trained", device, size, config, cost, results[strength], skipped)
        for strength, (cost, config) in costs.items()
    }


def _costs(loaded: Loaded) -> Costs:
    """Return cost and settings of each strength that the model has enough layers for."""
    costs: Costs = {}
    for strength, keep in STRENGTHS.items():
        try:
            with vitrail.merge(loaded.model, keep=keep) as merging:
                costs[strength] = cost_of(loaded, merging), merging.config
        except InvalidOption as error:
            if not costs:
                raise
            console.note(f"{strength} is left out: {error}")
    return costs


def _one_sample(
    loaded: Loaded, sample: Any, file: Path, costs: Costs, results: Mapping[str, list[Result]]
) -> Image.Image:
    """Run one sample at every strength, and add the results; return the sheet."""
    title, batch = file.stem.removesuffix("-sheet"), loaded.medium.batch(sample, loaded.spec)
    before, small = predict(loaded, batch), ImageOps.contain(sample, (WIDE, WIDE))
    columns: list[Column] = []
    shared: dict[str, str] = {}

    def add_column(shown: Image.Image, name: str, tokens: int, flops: int, guesses: Guesses) -> None:
        detail = f"{tokens} tokens, {flops / 1e9:.3g} GFLOPs"
        pairs = {question: [(one.name, one.probability) for one in best] for question, best in guesses.items()}
        found = attention_maps(loaded, batch)
        if not columns:
            shared.update(distinct(found))
        maps = {title: over(small, found[token]) for token, title in shared.items()}
        columns.append(Column(shown, name, detail, pairs, maps))

    cost, _ = next(iter(costs.values()))
    add_column(sample, "unmerged", cost.tokens_before[-1], cost.flops_before, before.guesses)
    for strength in costs:
        with vitrail.merge(loaded.model, keep=STRENGTHS[strength]) as merging:
            drawings, result, cost = compare_merged(loaded, merging, sample, f"{title}, {strength}", before)
            glass = next(iter(drawings.values()))
            assert isinstance(glass, Image.Image)
            add_column(glass, strength, cost.tokens_after[-1], cost.flops_after, result.guesses_after)
        result.files["sheet"] = file.name
        results[strength].append(result)
    size, special = " x ".join(map(str, loaded.spec.size)), loaded.layout.num_special
    detail = f"{loaded.name}, input {size}, {loaded.layout.num_patches} patches and {special} special tokens"
    alike = ALIKE_NOTE if len(shared) < special else ""
    return prediction_sheet(title, detail, columns, LEGEND + (MAPS + alike if special else ""))


def attention_maps(loaded: Loaded, batch: Tensor) -> dict[str, np.ndarray]:
    """Return the attention (h, w) of each special token in the last layer: the mean over heads, which sums to one."""
    if not loaded.layout.num_special:
        return {}
    seen = vitrail.record(loaded.model, batch.to(loaded.device), "attention", layers=-1)
    rows = seen.attention[seen.layers[-1]]
    maps = token_maps(rows, seen.layout)[0].mean(0)[:MAX_TOKENS].flatten(1, 2).double().cpu().numpy()
    names = token_names(seen.layout.special)
    return {names[query]: values for query, values in zip(seen.queries, maps, strict=False)}


def distinct(maps: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the tokens whose maps differ, with titles that count the tokens whose maps are alike."""
    groups = alike_maps({token: torch.from_numpy(values) for token, values in maps.items()})
    return {token: f"{token}, {len(alike)} alike" if alike else token for token, alike in groups.items()}


def over(image: Image.Image, values: np.ndarray) -> Image.Image:
    """Overlay an image with a map (h, w), from zero (violet) to its largest value (yellow)."""
    shades = Image.fromarray(colors(values / max(float(values.max()), 1e-12)))
    heat = np.asarray(shades.resize(image.size, Image.Resampling.NEAREST), dtype=np.float64)
    light = np.asarray(image.convert("L"), dtype=np.float64)[..., None] / 255
    return Image.fromarray(np.rint(heat * (DARKEST + (1 - DARKEST) * light)).astype(np.uint8))


def _conclude(loaded: Loaded, runs: Mapping[str, Summary], folder: Path, remarks: Sequence[str]) -> None:
    """Write the summary, and print its table and the names of the files."""
    agreement = {
        strength: sum(bool(result.same_top1) for result in run.pictures) / len(run.pictures)
        for strength, run in runs.items()
    }
    first, costs = next(iter(runs.values())), [run.cost for run in runs.values()]
    head = ["image", "unmerged", *runs]
    rows = [
        [
            result.picture.rpartition(", ")[0],
            _words(result.guesses_before),
            *(_words(run.pictures[number].guesses_after) for run in runs.values()),
        ]
        for number, result in enumerate(first.pictures)
    ]
    tokens = [first.cost.tokens_before[-1], *(cost.tokens_after[-1] for cost in costs)]
    flops = [first.cost.flops_before, *(cost.flops_after for cost in costs)]
    rows += [
        ["same prediction", "", *(f"{share:.0%}" for share in agreement.values())],
        ["tokens", *map(str, tokens)],
        ["GFLOPs", *(f"{count / 1e9:.3g}" for count in flops)],
    ]
    classes = {question.name: question.classes for question in loaded.questions}
    data = {"model": loaded.name, "classes": classes, "agreement": agreement, "notes": remarks}
    text = "\n".join([f"# Vitrail's demo, {loaded.name}", "", *remarks, "", *markdown_table(head, rows)])
    values = write_summary(folder, {**data, "runs": [asdict(run) for run in runs.values()]}, text)

    table = console.table(*head, left=len(head), title=f"{loaded.name}: predictions")
    for number, row in enumerate(rows):
        table.add_row(*row, end_section=number == len(rows) - 4)
    for remark in remarks:
        console.note(remark)
    console.show(table)
    if first.skipped:
        total = len(first.pictures) + len(first.skipped)
        console.error(f"{len(first.skipped)} of {total} images could not be read and were skipped, see above.")
    sheets = ", ".join(result.files["sheet"] for result in first.pictures)
    console.say(f"{sheets}, report.html and summary.md are in {folder}", style="bold")
    console.answer(values)


def _words(guesses: Guesses) -> str:
    return ", ".join(f"{best[0].name} {best[0].probability:.0%}" for best in guesses.values())
