"""Bundle a trained model with the package: half-precision weights, labels, and a model card.

    python tools/embed.py runs/tiny --name tiny --about "Imagenette (fastai): ten classes of ImageNet, …"

Writes ``src/vitrail/weights/NAME/``, which `vitrail:NAME` loads (``EMBEDDED`` in ``vitrail/adapters/saved.py``).
To keep the package small, models of more than 6 million parameters or 12 MiB are rejected. The card is generated from
the run; you only describe the dataset and its license. Nothing is written until everything is checked, including the
outputs in half precision.

To put accuracies into the card, evaluate the bundled model and run the tool again, here with two more seeds:

    vitrail evaluate vitrail:tiny val.parquet -o 0.json
    python tools/embed.py runs/tiny --name tiny --about "…" --evaluation 0.json 1.json 2.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vitrail
from vitrail._atomic_files import write_bytes
from vitrail.adapters.saved import EMBEDDED, load_saved, model_folder, read_labels
from vitrail.errors import InvalidOption, VitrailError
from vitrail.models import ViT
from vitrail.models.saving import WEIGHTS, write_folder
from vitrail.training.config import read_yaml
from vitrail.training.run_directory import BEST, LOG, SETTINGS, Labels, load_trained

MOST_BYTES, MOST_PARAMETERS = 12 * 2**20, 6_000_000
CLOSE = 0.02
"""Largest allowed change of a probability by half precision."""

LICENSE = "Apache-2.0, as Vitrail itself"
CARD = "CARD.md"
PLACES = ("data", "validation", "teacher", "model")
"""Settings that may be paths; the card shows their last part only."""

MACHINE_SETTINGS = ("out", "device", "workers", "keep", "keep_data", "log_every", "save_every", "tensorboard", "shard")


def embed(
    run: Path,
    out: Path,
    about: str,
    license: str = LICENSE,
    *,
    evaluations: Sequence[Path] = (),
    notes: Sequence[str] = (),
) -> Path:
    """Write the directory of a bundled model from a run directory.

    Args:
        run: a run directory, or one of its models (``RUN/best``, the default, or ``RUN/last``).
        out: the directory to write; existing files are replaced.
        about: description of the dataset: what it is, its source, its license.
        license: license of the weights.
        evaluations: files from ``vitrail evaluate -o``: of this model first, then of other seeds.
        notes: further sentences for the card.
    """
    if not about.strip():
        raise InvalidOption("about is empty; describe the training data and its license")
    folder = model_folder(run)
    model, labels = load_trained(folder)
    settings = _settings(folder)
    if not isinstance(model, ViT) or not labels.classes:
        raise InvalidOption(f"{folder} has no Vitrail model with class names; expected one from vitrail train")
    states = {name: value.half() if value.is_floating_point() else value for name, value in model.state_dict().items()}
    size = _check_size(model, states)
    difference = _check_outputs(model, states)
    found = [_read(file) for file in evaluations]
    evaluated = _evaluation(found) if found else _evaluation_of_run(labels)
    remarks = [f"Half precision changes no probability by more than {difference:.1e} (16 random images).", *notes]
    log = _of_run(folder, LOG)
    if log is not None:
        remarks.append(f"The training log is {LOG}, next to this card.")
    card = _card(out.name, model, labels, settings, size, about, license, remarks, evaluated)
    write_folder(out, model.config.to_dict(), states, read_labels(folder))
    if log is not None:
        write_bytes(out / LOG, log.read_bytes())
    write_bytes(out / CARD, card.encode())
    load_saved(out)
    return out


def _of_run(folder: Path, name: str) -> Path | None:
    """Return a file of the run that a model directory belongs to, or None."""
    return next((place / name for place in (folder, folder.parent) if (place / name).is_file()), None)


def _settings(folder: Path) -> dict[str, Any]:
    """Return the run's settings without those of the machine, and with paths shortened."""
    file = _of_run(folder, SETTINGS)
    if file is None:
        raise InvalidOption(f"{folder} is not in a run directory: there is no {SETTINGS} above it")
    values = {name: value for name, value in read_yaml(file).items() if name not in MACHINE_SETTINGS}
    paths = {name: Path(values[name]).name for name in PLACES if isinstance(values.get(name), str)}
    return {**values, **paths}


def _check_size(model: ViT, states: dict[str, Tensor]) -> int:
    parameters = sum(value.numel() for value in model.parameters())
    size = sum(value.numel() * value.element_size() for value in states.values())
    if parameters > MOST_PARAMETERS or size > MOST_BYTES:
        raise InvalidOption(
            f"the model has {parameters:,} parameters and {size / 2**20:.1f} MiB of weights; expected at most "
            f"{MOST_PARAMETERS:,} and {MOST_BYTES / 2**20:.0f} MiB. Train a smaller one"
        )
    return size


@torch.no_grad()
def _check_outputs(model: ViT, states: dict[str, Tensor]) -> float:
    """Return the largest change of a probability by half precision, on random images."""
    overflowing = [name for name, value in states.items() if not value.isfinite().all()]
    if overflowing:
        raise InvalidOption(f"{', '.join(overflowing[:3])}: weights overflow in half precision")
    rounded = ViT(model.config).eval()
    rounded.load_state_dict(states)
    images = torch.randn(16, model.config.in_chans, *_sides(model), generator=torch.Generator().manual_seed(0))
    before, after = model.forward_output(images), rounded.forward_output(images)
    pairs = [(before.by_role[name].softmax(-1), after.by_role[name].softmax(-1)) for name in before.by_role]
    difference = max(float((first - second).abs().max()) for first, second in pairs)
    if difference > CLOSE:
        raise InvalidOption(f"half precision changes a probability by {difference:.3f}; expected at most {CLOSE}")
    return difference


def _sides(model: ViT) -> tuple[int, int]:
    _, height, width = model.config.grid
    return height * model.config.patch[-2], width * model.config.patch[-1]


def _card(
    name: str,
    model: ViT,
    labels: Labels,
    settings: dict[str, Any],
    size: int,
    about: str,
    license: str,
    notes: Sequence[str],
    evaluated: Sequence[str],
) -> str:
    """Return the model card."""
    import yaml

    config, (height, width) = model.config, _sides(model)
    parameters = sum(value.numel() for value in model.parameters())
    tokens = ", ".join(f"{spec.name} ({spec.role.value} × {spec.count})" for spec in config.tokens) or "none"
    classes = "; ".join(f"{column}: {', '.join(names)}" for column, names in labels.classes.items())
    lines = [
        f"# vitrail:{name}",
        "",
        f"A ViT of Vitrail {vitrail.__version__}: {width} × {height} pixels, patches of {config.patch[-2]} × "
        f"{config.patch[-1]}, width {config.width}, {config.depth} blocks, {config.heads} heads; {parameters:,} "
        f"parameters, {size / 2**20:.1f} MiB in half precision. It computes in float32.",
        "",
        f"- Special tokens: {tokens}.",
        f"- Classes, {classes}.",
        f"- Data: {about.strip()}",
        f"- Trained for {labels.trained.get('epochs', 0):g} epochs; weights: {labels.trained.get('weights', 'last')}.",
        *(f"- {note}" for note in notes),
        f"- License of the weights: {license}.",
        "",
        "## Accuracy",
        "",
        *evaluated,
        "",
        "## Training",
        "",
        f"`vitrail train --config {name}.yaml -o runs/{name}`, with this file:",
        "",
        "```yaml",
        yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return {name: found[name] for name in ("count", "dtype", "accuracy")}
    except (OSError, ValueError, KeyError) as error:
        raise InvalidOption(f"{file} is not from vitrail evaluate -o ({error})") from error


def _evaluation_of_run(labels: Labels) -> list[str]:
    """Return the accuracy from the last evaluation during training."""
    found = labels.trained.get("evaluation")
    if not found:
        return ["It was not evaluated."]
    chosen = labels.folder.name == BEST
    best = " It is the best of the run's evaluations on these images, so slightly optimistic." if chosen else ""
    return _evaluation([found], f", before rounding to half precision, by head.{best}")


def _evaluation(found: Sequence[Mapping[str, Any]], ending: str = ", by head.") -> list[str]:
    """Return the accuracy of this model, which comes first, and the mean over all seeds if there are several."""
    first, several = found[0], len(found) > 1
    heading = f" of {len(found)} seeds, mean ± standard deviation |" if several else ""
    lines = [
        f"Accuracy on {first['count']:,} held-out images, in {first['dtype']}{ending}",
        "",
        f"| answer | accuracy |{heading}",
        f"| --- | ---: |{' ---: |' if several else ''}",
    ]
    for head, share in first["accuracy"].items():
        cell = ""
        if several:
            values = [100 * one["accuracy"][head] for one in found]
            cell = f" {statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} % |"
        lines.append(f"| {head} | {100 * share:.2f} % |{cell}")
    return lines


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory, or one of its models")
    parser.add_argument("--name", required=True, choices=sorted(EMBEDDED), help="name of the bundled model")
    parser.add_argument("--about", required=True, help="description of the dataset, with its license")
    parser.add_argument("--license", "--licence", default=LICENSE, help="license of the weights")
    parser.add_argument(
        "--evaluation",
        type=Path,
        nargs="+",
        default=(),
        help="JSON files from vitrail evaluate: this model, then other seeds",
    )
    parser.add_argument("--note", nargs="+", default=(), help="further sentences for the card")
    given = parser.parse_args()
    try:
        folder = embed(
            given.run, EMBEDDED[given.name], given.about, given.license, evaluations=given.evaluation, notes=given.note
        )
    except VitrailError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{folder}: {(folder / WEIGHTS).stat().st_size / 2**20:.1f} MiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
