"""The work of ``vitrail demo``: predictions of a trained model on some images, merged more and more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import vitrail
from vitrail.adapters.registry import split_name
from vitrail.adapters.saved import PREFIX, named
from vitrail.analysis.attention import token_maps
from vitrail.cli._shared import console
from vitrail.cli._shared.demo_sheet import Column, draw_sheet
from vitrail.cli._shared.model import Loaded, load
from vitrail.cli._shared.output import Names, make_directory, write_image
from vitrail.cli._shared.prediction import cost_of, paint, predict
from vitrail.cli._shared.summary import Cost, Guesses, Result, Summary, markdown, markdown_row, write_summary
from vitrail.cli.merge import check_images, file_names
from vitrail.data import Dataset, open_dataset, read_image, samples, to_tensor
from vitrail.data.decode import EXTENSIONS
from vitrail.data.sample_images import drawings
from vitrail.errors import InvalidOption
from vitrail.report.sections.attention import MAX_TOKENS
from vitrail.tokens import token_names

MODEL = "vitrail:tiny"
"""The model that comes with the package."""

STRENGTHS = {"gentle": 0.5, "medium": 0.25, "strong": 0.1}
"""Share of patches that remain, by name."""

MOST = 12
"""Most images that are shown."""

UNMERGED = "unmerged"
DRAWN = (
    "The golf ball, the parachute and the church are drawings. Whatever an image shows, the model predicts one of "
    "its own classes; predictions are shown as they are."
)


def run_demo(out: Path, model: str | None = None, images: Sequence[Path] = ()) -> list[Summary]:
    """Show a trained model: a sheet for each image, a report, and a summary of predictions before and after.

    Args:
        out: folder for the results.
        model: run directory, model folder or name; by default the model that comes with the package.
        images: any source of images; by default the samples, and three drawings.
    """
    given = open_dataset(images) if images else None
    if given is not None:
        given = given.select(check_images(given)[0])
    loaded = _load(model or MODEL)
    folder = make_directory(out)
    if given is None:
        drawn = {make_directory(folder / "pictures") / f"{name}.png": source for name, source in drawings().items()}
        for path, source in drawn.items():
            write_image(path, read_image(source))
        given = open_dataset([*drawn, *samples().values()])
    dataset = given
    if len(dataset) > MOST:
        console.note(f"Only the first {MOST} of {len(dataset)} images are shown.")
        dataset = dataset.select(range(MOST))
    with one_thread():
        runs = _show(loaded, dataset, folder)
        with console.err.status("Writing report.html"):
            report = vitrail.inspect(loaded.model, dataset, probes=False, name=loaded.name)
            assert report is not None  # one process
            report.save(folder / "report.html")
    _conclude(loaded, runs, folder, [] if images else [DRAWN])
    return list(runs.values())


def _load(name: str) -> Loaded:
    """Load a trained model; others are refused before anything is downloaded."""
    from vitrail.training.run_directory import model_of

    library, _ = split_name(name)
    if library is not None and not name.startswith(PREFIX):
        raise InvalidOption(
            f"{name}: the demo shows models that vitrail train saved, which have class names; name a run directory. "
            f"For models of {library.package} use vitrail merge and vitrail inspect"
        )
    model_of(named(name))  # raises for a folder without a model
    with console.err.status(f"Loading {name}"):
        loaded = load(name, random=False, device="cpu")
    if not loaded.questions:
        raise InvalidOption(
            f"{name} has no class names; expected a model that vitrail train saved, with labels.json beside it. For "
            "other models use vitrail merge"
        )
    return loaded


def _show(loaded: Loaded, dataset: Dataset, folder: Path) -> dict[str, Summary]:
    """Write a sheet for each image; return the results by strength."""
    paths = file_names(dataset)
    names = Names(folder, ("sheet",), paths)
    costs = _costs(loaded)
    results: dict[str, list[Result]] = {strength: [] for strength in costs}
    predict(loaded, dataset.read(0).image)  # the first pass is slower
    with console.progress() as bar:
        task = bar.add_task("Merging", total=len(dataset))
        for index, path in enumerate(paths):
            file = names.for_image(path)["sheet"]
            sample = dataset.read(index)
            name = Path(sample.name)
            title = name.stem if name.suffix.lower() in EXTENSIONS else sample.name
            sheet, found = _one_image(loaded, sample.image, title, {name: cost for name, (cost, _) in costs.items()})
            write_image(file, sheet)
            for strength, result in found.items():
                result.files["sheet"] = file.name
                results[strength].append(result)
            bar.advance(task)
    size, device = loaded.preprocessing.size, loaded.device.type
    return {
        strength: Summary(loaded.name, "trained", device, size, config, cost, results[strength])
        for strength, (cost, config) in costs.items()
    }


def _costs(loaded: Loaded) -> dict[str, tuple[Cost, dict[str, Any]]]:
    """Return cost and settings of each strength that the model has enough layers for."""
    costs: dict[str, tuple[Cost, dict[str, Any]]] = {}
    for strength, keep in STRENGTHS.items():
        try:
            with vitrail.merge(loaded.model, keep=keep) as merging:
                costs[strength] = cost_of(loaded, merging), merging.config
        except InvalidOption as error:
            if not costs:
                raise
            console.note(f"{strength} is left out: {error}")
    return costs


def _one_image(
    loaded: Loaded, image: Image.Image, title: str, costs: Mapping[str, Cost]
) -> tuple[Image.Image, dict[str, Result]]:
    """Run one image at every strength; return the sheet, and the results by strength."""
    before = predict(loaded, image)
    cost = next(iter(costs.values()))
    columns: list[Column] = []
    found = {}

    def add_column(shown: Image.Image, name: str, tokens: int, flops: int, guesses: Guesses) -> None:
        detail = f"{tokens} tokens, {flops / 1e9:.3g} GFLOPs"
        columns.append(Column(shown, name, detail, guesses, attention_maps(loaded, image)))

    add_column(image, UNMERGED, cost.tokens_before[-1], cost.flops_before, before.guesses)
    for strength, spent in costs.items():
        with vitrail.merge(loaded.model, keep=STRENGTHS[strength]) as merging:
            glass, found[strength] = paint(loaded, merging, image, f"{title}, {strength}", before)
            add_column(glass, strength, spent.tokens_after[-1], spent.flops_after, found[strength].guesses_after)
    height, width = loaded.preprocessing.size
    special = loaded.layout.num_special
    detail = f"{loaded.name}, {width} x {height} pixels, {loaded.layout.num_patches} patches and {special} special "
    return draw_sheet(title, f"{detail}{'token' if special == 1 else 'tokens'}", columns), found


def attention_maps(loaded: Loaded, image: Image.Image) -> dict[str, NDArray[Any]]:
    """Return the attention (h, w) of each special token in the last layer: the mean over heads, which sums to one."""
    if not loaded.layout.num_special:
        return {}
    batch = to_tensor([image], loaded.preprocessing).to(loaded.device)
    seen = vitrail.record(loaded.model, batch, "attention", layers=-1)
    rows = seen.attention[seen.layers[-1]]
    maps = token_maps(rows, seen.layout)[0].mean(0)[:MAX_TOKENS].flatten(1, 2).double().cpu().numpy()
    names = token_names(seen.layout.special)
    return {names[query]: np.asarray(values) for query, values in zip(seen.queries, maps, strict=False)}


def _conclude(loaded: Loaded, runs: Mapping[str, Summary], folder: Path, remarks: Sequence[str]) -> None:
    """Write the summary, and print the short table and the names of the files."""
    agreement = {strength: _agreement(run) for strength, run in runs.items()}
    classes = {question.name: question.classes for question in loaded.questions}
    data = {"model": loaded.name, "classes": classes, "agreement": agreement, "notes": list(remarks)}
    head, rows = _rows(runs)
    short = [markdown_row(row) for row in (head, ["---"] * len(head), *rows)]
    text = markdown(list(runs.values()), f"Vitrail's demo, {loaded.name}", [*remarks, "\n".join(short)])
    write_summary(folder, {**data, "runs": [asdict(run) for run in runs.values()]}, text)

    table = console.table(*head, left=len(head), title=f"{loaded.name}: predictions")
    for number, row in enumerate(rows):
        table.add_row(*row, end_section=number == len(rows) - 4)
    for remark in remarks:
        console.note(remark)
    console.out.print(table)
    sheets = ", ".join(result.files["sheet"] for result in next(iter(runs.values())).pictures)
    console.say(f"{sheets}, report.html and summary.md are in {folder}", style="bold")


def _rows(runs: Mapping[str, Summary]) -> tuple[list[str], list[list[str]]]:
    """Return the short table: predictions, a row for each image, and their cost."""
    first = next(iter(runs.values()))
    answers = [
        [
            result.picture.rpartition(", ")[0],
            _words(result.guesses_before),
            *(_words(run.pictures[number].guesses_after) for run in runs.values()),
        ]
        for number, result in enumerate(first.pictures)
    ]
    cost = first.cost
    spent = [
        ["same prediction", "", *(f"{_agreement(run):.0%}" for run in runs.values())],
        ["tokens", str(cost.tokens_before[-1]), *(str(run.cost.tokens_after[-1]) for run in runs.values())],
        ["GFLOPs", f"{cost.flops_before / 1e9:.3g}", *(f"{run.cost.flops_after / 1e9:.3g}" for run in runs.values())],
    ]
    return ["image", UNMERGED, *runs], answers + spent


def _agreement(run: Summary) -> float:
    """Return the share of images whose most likely class stays the same."""
    return sum(bool(result.same_top1) for result in run.pictures) / len(run.pictures)


def _words(guesses: Guesses) -> str:
    return ", ".join(f"{best[0].name} {best[0].probability:.0%}" for best in guesses.values())


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core: enough for a small model, and much faster than several on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
