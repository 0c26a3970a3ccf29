"""Bundle a trained model with the package: half-precision weights, labels, and a model card.

    python tools/embed.py runs/tiny --name tiny --about "Imagenette (fastai): ten classes of ImageNet, …"

Writes ``src/vitrail/weights/NAME/``, which `vitrail:NAME` loads (``EMBEDDED`` in ``vitrail/adapters/saved.py``).
To keep the package small, models of more than 6 million parameters or 12 MiB are rejected. The card is generated from
the run; you only describe the dataset and its license. Nothing is written until everything is checked, including the
outputs in half precision.

To put accuracies into the card, evaluate the bundled model, merged too if you like, and run the tool again, here with
two more seeds:

    vitrail evaluate vitrail:tiny val.parquet --merge r=0,8,16 -o 0.json
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
from vitrail.analysis.statistics import wilson
from vitrail.data import InputSpec, Spectrogram
from vitrail.data.media.modality import MODALITIES
from vitrail.errors import InvalidOption, VitrailError
from vitrail.models import ViT
from vitrail.models.saving import WEIGHTS, write_folder
from vitrail.surgery.saving import read_settings
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
    noun = MODALITIES[labels.preprocessing.modality].noun
    found = [_read(file) for file in evaluations]
    evaluated = _evaluation([one[0][1] for one in found], noun) if found else _evaluation_of_run(labels, noun)
    if found and len(found[0]) > 1:
        evaluated += _merged(model, found[0])
    remarks = [f"Half precision changes no probability by more than {difference:.1e} (16 random inputs).", *notes]
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
    """Return the largest change of a probability by half precision, on random inputs."""
    overflowing = [name for name, value in states.items() if not value.isfinite().all()]
    if overflowing:
        raise InvalidOption(f"{', '.join(overflowing[:3])}: weights overflow in half precision")
    rounded = ViT(model.config).eval()
    rounded.load_state_dict(states)
    inputs = torch.randn(16, model.config.in_chans, *_sides(model), generator=torch.Generator().manual_seed(0))
    before, after = model.forward_output(inputs), rounded.forward_output(inputs)
    pairs = [(before.by_role[name].softmax(-1), after.by_role[name].softmax(-1)) for name in before.by_role]
    difference = max(float((first - second).abs().max()) for first, second in pairs)
    if difference > CLOSE:
        raise InvalidOption(f"half precision changes a probability by {difference:.3f}; expected at most {CLOSE}")
    return difference


def _sides(model: ViT) -> tuple[int, ...]:
    """Return the input size: height and width, frames before them for clips, bands and frames for sounds."""
    patch = model.config.patch
    return tuple(cells * side for cells, side in zip(model.config.grid[-len(patch) :], patch, strict=True))


def _input(model: ViT, spec: InputSpec) -> str:
    """Return what one input is, and its patches."""
    sizes, patch = (" × ".join(map(str, each)) for each in (_sides(model), model.config.patch))
    if isinstance(spec.sampling, Spectrogram):
        bands, frames = spec.size
        seconds = spec.sampling.samples(frames) / spec.sampling.rate
        what = (
            f"{bands} mel bands × {frames} frames ({seconds:.1f} seconds of sound at {spec.sampling.rate:,} samples/s)"
        )
    elif spec.modality == "video":
        what = f"{sizes} (frames of a clip, height, width)"
    else:
        what = f"{sizes} pixels"
    return f"{what}, patches of {patch}"


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

    config = model.config
    parameters = sum(value.numel() for value in model.parameters())
    tokens = ", ".join(f"{spec.name} ({spec.role.value} × {spec.count})" for spec in config.tokens) or "none"
    classes = "; ".join(f"{column}: {', '.join(names)}" for column, names in labels.classes.items())
    lines = [
        f"# vitrail:{name}",
        "",
        f"A ViT of Vitrail {vitrail.__version__}: {_input(model, labels.preprocessing)}, width {config.width}, "
        f"{config.depth} blocks, {config.heads} heads; {parameters:,} parameters, {size / 2**20:.1f} MiB in half "
        "precision. It computes in float32.",
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


def _read(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Read the evaluations in a file, one or those of a sweep, by setting; the unmerged one is first."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        several = found if "unmerged" in found else {"unmerged": found}
        return [
            (setting, {"count": one["count"], "dtype": one["dtype"], "accuracy": _distinct(one["accuracy"])})
            for setting, one in several.items()
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidOption(f"{file} is not from vitrail evaluate -o ({error})") from error


def _distinct(accuracy: Mapping[str, float]) -> dict[str, float]:
    """Leave out the only head of a task that a class token answers: it repeats the task."""
    heads = [name for name in accuracy if name.count(".") == 2]
    single = {name for name in heads if sum(one.rpartition(".")[0] == name.rpartition(".")[0] for one in heads) == 1}
    return {name: share for name, share in accuracy.items() if name not in single}


def _evaluation_of_run(labels: Labels, noun: str) -> list[str]:
    """Return the accuracy from the last evaluation during training."""
    found = labels.trained.get("evaluation")
    if not found:
        return ["It was not evaluated."]
    chosen = labels.folder.name == BEST
    best = f" It is the best of the run's evaluations on these {noun}s, so slightly optimistic." if chosen else ""
    return _evaluation([found], noun, f", before rounding to half precision, by head.{best}")


def _evaluation(found: Sequence[Mapping[str, Any]], noun: str, ending: str = ", by head.") -> list[str]:
    """Return the accuracy of this model, which comes first, and the mean over all seeds if there are several."""
    first, several = found[0], len(found) > 1
    heading = f" of {len(found)} seeds, mean ± standard deviation |" if several else ""
    lines = [
        f"Accuracy on {first['count']:,} held-out {noun}s, in {first['dtype']}{ending} In brackets: 95 % confidence "
        "interval (Wilson).",
        "",
        f"| answer | accuracy |{heading}",
        f"| --- | ---: |{' ---: |' if several else ''}",
    ]
    for head, share in first["accuracy"].items():
        cell = ""
        if several:
            values = [100 * one["accuracy"][head] for one in found]
            cell = f" {statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} % |"
        lines.append(f"| {head} | {_share(share, first['count'])} |{cell}")
    return lines


def _merged(model: ViT, found: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Return the accuracy of the model merged off the shelf, with its tokens and FLOPs."""
    heads = list(found[0][1]["accuracy"])
    lines = [
        "",
        "Merged by ToMe without training for it, on the same data:",
        "",
        f"| merging | tokens after the last block | M multiply-adds | {' | '.join(heads)} |",
        f"| --- | ---: | ---: |{' ---: |' * len(heads)}",
    ]
    for setting, one in found:
        with vitrail.merge(
            model, **read_settings("r=0" if setting == "unmerged" else setting).changes["merge"]
        ) as merging:
            tokens, flops = merging.tokens_per_layer()[-1], merging.flops() / 1e6
        shares = " | ".join(f"{100 * one['accuracy'][head]:.2f} %" for head in heads)
        lines.append(f"| {setting} | {tokens} | {flops:.1f} | {shares} |")
    return lines


def _share(share: float, count: int) -> str:
    interval = wilson(share * count, count)
    assert interval is not None, "an evaluation has samples"
    return f"{100 * share:.2f} % ({100 * interval[0]:.1f}–{100 * interval[1]:.1f})"


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
