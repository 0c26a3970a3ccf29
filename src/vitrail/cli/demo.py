"""The work of ``vitrail demo``: what a trained model says about some pictures, merged more and more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich import box
from rich.table import Table

import vitrail
from vitrail.adapters.registry import split_name
from vitrail.adapters.saved import PREFIX, named
from vitrail.analysis.attention import token_maps
from vitrail.cli import console
from vitrail.cli.asking import ask, cost_of, paint
from vitrail.cli.demo_sheet import Column, draw_sheet
from vitrail.cli.files import Names, make_folder, write_picture
from vitrail.cli.merge import readable
from vitrail.cli.model import Loaded, load
from vitrail.cli.summary import Cost, Guesses, Result, Summary, as_data, markdown, markdown_row, write_summary
from vitrail.data import find_images, read_image, samples, to_tensor
from vitrail.data.drawn_samples import drawings
from vitrail.errors import InvalidOption
from vitrail.report.sections.attention import MAX_TOKENS
from vitrail.tokens import token_names

MODEL = "vitrail:tiny"
"""The model that comes with the package."""

STRENGTHS = {"gentle": 0.5, "medium": 0.25, "strong": 0.1}
"""The share of patches that is left, by what to call it."""

MOST = 12
"""Most pictures of a folder that are shown."""

UNMERGED = "unmerged"
DRAWN = (
    "The golf ball, the parachute and the church are drawn by code. Whatever a picture shows, the model answers with "
    "one of its own classes, and what it says is shown as it is."
)


def run_demo(out: Path, model: str | None = None, pictures: Sequence[Path] = ()) -> list[Summary]:
    """Show a trained model: a sheet for each picture, a report, and a summary with what it says before and after.

    Args:
        out: the folder for them.
        model: a folder of a run or of a trained model, or its name; by default the one that comes with the package.
        pictures: files and folders; by default the samples, and three drawings.
    """
    given_paths = readable(find_images(pictures))[0] if pictures else []
    loaded = _load(model or MODEL)
    folder = make_folder(out)
    paths = given_paths[:MOST] or _default_pictures(folder)
    if len(given_paths) > MOST:
        console.note(f"Only the first {MOST} of {len(given_paths)} pictures are shown.")
    with one_thread():
        runs = _show_pictures(loaded, paths, folder)
        with console.err.status("Writing report.html"):
            report = vitrail.inspect(loaded.model, list(map(str, paths)), probes=False, name=loaded.name)
            assert report is not None  # one process
            report.save(folder / "report.html")
    _conclude(loaded, runs, folder, [] if pictures else [DRAWN])
    return list(runs.values())


def _load(name: str) -> Loaded:
    """Load a trained model; others are refused before anything is fetched for them."""
    from vitrail.training.run_directory import model_of

    library, _ = split_name(name)
    if library is not None and not name.startswith(PREFIX):
        raise InvalidOption(
            f"{name}: the demo shows models that vitrail train saved, as these know the names of their classes. Give "
            f"the folder of a run; for models of {library.package} there are vitrail merge and vitrail inspect."
        )
    model_of(named(name))  # says what is wrong with a folder that has no model
    with console.err.status(f"Loading {name}"):
        loaded = load(name, random=False, device="cpu")
    if not loaded.questions:
        raise InvalidOption(
            f"{name} does not know the names of its classes; expected a model that vitrail train saved, with "
            "labels.json beside it. For other models there is vitrail merge."
        )
    return loaded


def _default_pictures(folder: Path) -> list[Path]:
    """Draw what is drawn into a folder beside the results, and add the samples."""
    place = make_folder(folder / "pictures")
    paths = []
    for name, draw in drawings().items():
        paths.append(place / f"{name}.png")
        write_picture(paths[-1], draw())
    return [*paths, *samples().values()]


def _show_pictures(loaded: Loaded, paths: Sequence[Path], folder: Path) -> dict[str, Summary]:
    """Write a sheet for each picture; give what was found by strength."""
    names = Names(folder, ("sheet",), paths)
    costs = _costs(loaded)
    results: dict[str, list[Result]] = {strength: [] for strength in costs}
    ask(loaded, read_image(paths[0]))  # the first pass of all takes longer
    with console.progress() as bar:
        task = bar.add_task("Merging", total=len(paths))
        for path in paths:
            file = names.for_picture(path)["sheet"]
            sheet, found = _one_picture(loaded, path, {name: cost for name, (cost, _) in costs.items()})
            write_picture(file, sheet)
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
    """Give what one picture costs with each strength that the model has enough layers for, and the settings."""
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


def _one_picture(loaded: Loaded, path: Path, costs: Mapping[str, Cost]) -> tuple[Image.Image, dict[str, Result]]:
    """Ask about one picture with every strength: the sheet, and what was found by strength."""
    picture = read_image(path)
    before = ask(loaded, picture)
    cost = next(iter(costs.values()))
    columns = [_column(loaded, picture, picture, UNMERGED, (cost.tokens_before[-1], cost.flops_before), before.guesses)]
    found = {}
    for strength, spent in costs.items():
        with vitrail.merge(loaded.model, keep=STRENGTHS[strength]) as merging:
            glass, found[strength] = paint(loaded, merging, picture, f"{path.stem}, {strength}", before)
            after = spent.tokens_after[-1], spent.flops_after
            columns.append(_column(loaded, picture, glass, strength, after, found[strength].guesses_after))
    height, width = loaded.preprocessing.size
    special = loaded.layout.num_special
    detail = f"{loaded.name}, {width} x {height} pixels, {loaded.layout.num_patches} patches and {special} special "
    return draw_sheet(path.stem, f"{detail}{'token' if special == 1 else 'tokens'}", columns), found


def _column(
    loaded: Loaded, picture: Image.Image, shown: Image.Image, name: str, spent: tuple[int, int], guesses: Guesses
) -> Column:
    tokens, flops = spent
    return Column(shown, name, f"{tokens} tokens, {flops / 1e9:.3g} GFLOPs", guesses, attention_maps(loaded, picture))


def attention_maps(loaded: Loaded, picture: Image.Image) -> dict[str, NDArray[Any]]:
    """Give what each special token looks at in the last layer (h, w): the mean over heads, which sums to one."""
    if not loaded.layout.num_special:
        return {}
    batch = to_tensor([picture], loaded.preprocessing).to(loaded.device)
    seen = vitrail.record(loaded.model, batch, "attention", layers=-1)
    rows = seen.attention[seen.layers[-1]]
    maps = token_maps(rows, seen.layout)[0].mean(0)[:MAX_TOKENS].flatten(1, 2).double().cpu().numpy()
    names = token_names(seen.layout.special)
    return {names[query]: np.asarray(values) for query, values in zip(seen.queries, maps, strict=False)}


def _conclude(loaded: Loaded, runs: Mapping[str, Summary], folder: Path, remarks: Sequence[str]) -> None:
    """Write the summary, and print the short table and where to look."""
    agreement = {strength: _agreement(run) for strength, run in runs.items()}
    classes = {question.name: question.classes for question in loaded.questions}
    data = {"model": loaded.name, "classes": classes, "agreement": agreement, "notes": list(remarks)}
    head, rows = _rows(runs)
    short = [markdown_row(row) for row in (head, ["---"] * len(head), *rows)]
    text = markdown(list(runs.values()), f"Vitrail's demo, {loaded.name}", [*remarks, "\n".join(short)])
    write_summary(folder, {**data, "runs": [as_data(run) for run in runs.values()]}, text)

    table = Table(
        *head, title=f"{loaded.name}: its answers", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for number, row in enumerate(rows):
        table.add_row(*row, end_section=number == len(rows) - 4)
    for remark in remarks:
        console.note(remark)
    console.out.print(table)
    sheets = ", ".join(result.files["sheet"] for result in next(iter(runs.values())).pictures)
    console.say(f"Look at {sheets}, report.html and summary.md in {folder}", style="bold")


def _rows(runs: Mapping[str, Summary]) -> tuple[list[str], list[list[str]]]:
    """Make the short table: the answers, a line for each picture, and below what they cost."""
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
        ["same answer", "", *(f"{_agreement(run):.0%}" for run in runs.values())],
        ["tokens", str(cost.tokens_before[-1]), *(str(run.cost.tokens_after[-1]) for run in runs.values())],
        ["GFLOPs", f"{cost.flops_before / 1e9:.3g}", *(f"{run.cost.flops_after / 1e9:.3g}" for run in runs.values())],
    ]
    return ["picture", UNMERGED, *runs], answers + spent


def _agreement(run: Summary) -> float:
    """Give the share of pictures whose most likely class stays the same."""
    return sum(bool(result.same_top1) for result in run.pictures) / len(run.pictures)


def _words(guesses: Guesses) -> str:
    return ", ".join(f"{best[0].name} {best[0].probability:.0%}" for best in guesses.values())


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core: enough for a small model, and several are much slower where others want them too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
