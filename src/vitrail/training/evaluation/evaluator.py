"""``evaluate``: a trained model on a dataset, and ``evaluate_model``: a model in memory on batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail._arguments import checked
from vitrail._checks import check_choice, is_int, shown
from vitrail._distributed import distributed
from vitrail.adapters import head_outputs
from vitrail.adapters.registry import declared_spec
from vitrail.data.dataset import Dataset, open_dataset
from vitrail.data.labels.columns import plain_name
from vitrail.data.labels.targets import MASK_CLASSES, TargetSpec
from vitrail.data.loading.loader import Keep, make_loader
from vitrail.data.media.modality import MODALITIES
from vitrail.data.sources.base import LABEL
from vitrail.data.spec import InputSpec
from vitrail.errors import InvalidOption, NotApplied, UnsupportedInput
from vitrail.surgery import Merging
from vitrail.surgery import merge as apply_merge
from vitrail.surgery.merging.trained_methods import load_method, method_file
from vitrail.surgery.recording import evaluating
from vitrail.surgery.saving import Settings, read_settings
from vitrail.surgery.saving.changes import merge_arguments
from vitrail.training.data import expected_of, prepares, split_pixels, unlabeled_note
from vitrail.training.evaluation.diagnostics import autocast, diagnose_tokens, throughput
from vitrail.training.evaluation.metrics import Metrics, make_metrics
from vitrail.training.evaluation.outputs import forward_output
from vitrail.training.evaluation.result import Evaluation
from vitrail.training.run_directory import Labels, load_classifier

DTYPES = {"fp32": None, "bf16": torch.bfloat16}
LONGEST = 3600.0
"""Most seconds for measuring throughput."""
TIMED_ON_CPU = 32
"""Largest batch for throughput on a CPU; larger ones are not faster and take long."""


@checked
def evaluate(
    model: str | Path | nn.Module | tuple[nn.Module, Labels],
    data: Any,
    *,
    labels: Sequence[str] = (),
    class_map: str | Path | Mapping[str, str] | None = None,
    masks: str | Path | None = None,
    merge: str | Path | Mapping[str, Any] | Settings | None = None,
    size: int | None = None,
    batch: int = 256,
    device: str | None = None,
    dtype: str = "fp32",
    keep_data: Keep = "auto",
    workers: int | None = None,
    max_unreadable: float = 0.01,
    progress: Callable[[str, int, int], None] | None = None,
    look: int = 256,
    seconds: float = 1.0,
    engine: str = "local",
    address: str | None = None,
    actors: int | None = None,
) -> Evaluation:
    """Evaluate a trained model: accuracy of each head and fused, calibration, confusion, throughput.

    >>> evaluate("runs/pets", "pets-test.parquet", merge={"r": 8}).accuracy["fused"]  # doctest: +SKIP

    Args:
        model: run or model directory, a model of a library by name (``timm:NAME``, ``hf:NAME``), the result of
            `load_trained`, or a model, which then takes its class names from the data.
        data: labeled images or arrays, as for training. Classes are matched by name; case, blanks and ``_`` do not
            matter.
        labels: columns of labels, among those that the model was trained with; all of them by default.
        class_map: the model's name of each class of the data that has another one, as a dict, or a JSON file of one.
        masks: for a folder of images and a model of masks or depth maps, the folder of these.
        merge: options of `vitrail.merge`, text such as ``"r=8"``, the JSON of ``vitrail.tune``, or a directory of
            ``merging.save``; ``{"r": 0}`` disables merging. A model trained with a learned method is merged by that
            one, unless ``method`` names another.
        size: input size in pixels; by default the model's. A model trained on crops is often better at a larger size.
        batch, device, dtype: how to run the model; ``bf16`` uses autocast.
        keep_data, workers, max_unreadable: how to read images, as for training.
        progress: called with stage, done and total.
        look: number of images for token diagnostics; 0 disables them.
        seconds: time spent on measuring throughput; 0 disables it.
        engine: ``local``, or ``ray`` for actors of a Ray cluster at ``address``, as for `vitrail.embed`; counts of all
            shards are added up. Diagnostics of tokens and throughput are left out there.
    """
    check_choice("engine", engine, ("local", "ray"))
    if not 0 <= seconds <= LONGEST:
        raise InvalidOption(f"seconds={shown(seconds)}: expected 0 to {LONGEST:g}, for measuring throughput")
    if dtype not in DTYPES:
        raise InvalidOption(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    chosen = None if merge is None else read_settings(merge)
    with distributed(device) as world:
        loaded = load_classifier(model) if isinstance(model, str | Path) else model
        net, known = (loaded, None) if isinstance(loaded, nn.Module) else loaded
        options = _with_trained_method(None if chosen is None else merge_arguments(chosen, net), known)
        columns, targets = tuple(labels), {} if known is None else known.targets
        if known is not None and known.classes and not columns and list(known.classes) != [LABEL]:
            columns = tuple(known.classes)
        takes = (known and known.preprocessing) or declared_spec(net)
        modality = takes.modality if takes is not None and MODALITIES[takes.modality].sampling else None
        classes = rename_classes(_known_classes(known, columns), class_map)
        dense = [names for name, names in (classes or {}).items() if name in targets and targets[name].kind == "dense"]
        dataset = open_dataset(
            data,
            labels=columns,
            classes=classes,
            labeled=True,
            modality=modality,
            kind={name: target.kind for name, target in targets.items() if name in (classes or {})} or None,
            masks=masks,
            mask_classes=dense[0] if dense and dense[0] != MASK_CLASSES else None,
        )
        if modality is not None:
            assert takes is not None
            dataset = dataset.decoded(takes)
        count = len(dataset)
        expects = expected_of(dataset, takes, type(net).__name__)
        expects = _resize(expects, size, net)

        def report(stage: str, done: int, total: int) -> None:
            if progress is not None and world.is_main:
                progress(stage, min(done, total), total)

        notes = [*_notes(known, options), f"input size {size} × {size} pixels" if size else ""]
        notes.append(unlabeled_note("data", dataset))
        several = known.classes if known is not None and len(known.classes) > 1 else None
        targets = {**dataset.scaled_targets, **targets}
        if engine == "ray":
            from vitrail.training.evaluation.sharded import evaluate_shards

            done = evaluate_shards(
                net, dataset, expects, several, targets, options, batch, DTYPES[dtype], max_unreadable,
                lambda done: report("evaluating", done, count), address, actors,
            )  # fmt: skip
            return _completed(done, notes, dataset)
        loader = make_loader(
            dataset, image_size=expects.size[0] if expects.size else 1, device=world.device,
            rank=world.rank, world_size=world.world_size, keep=keep_data, workers=workers,
            max_unreadable=max_unreadable, progress=lambda done, total: report("reading", done, total),
        )  # fmt: skip
        try:
            found = evaluate_model(
                net.to(world.device), loader, known=several, targets=targets,
                prepare=prepares(expects).plain, merge=options, batch=batch,
                dtype=DTYPES[dtype], look=look, seconds=seconds,
                progress=lambda done: report("evaluating", done * world.world_size, count),
            )  # fmt: skip
        finally:
            loader.close()
        return _completed(found, notes, dataset)


def _completed(found: Evaluation, notes: Iterable[str], dataset: Dataset) -> Evaluation:
    """Return an evaluation with the remarks about its data, and with what its samples are."""
    texts = tuple(text for text in (*notes, *found.notes) if text)
    return replace(found, notes=texts, modality=dataset.modality)


def evaluate_model(
    model: nn.Module,
    data: Any,
    *,
    classes: Mapping[str, Sequence[str]] | None = None,
    known: Mapping[str, Sequence[str]] | None = None,
    targets: Mapping[str, TargetSpec] | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    merge: Mapping[str, Any] | None = None,
    batch: int = 256,
    dtype: torch.dtype | None = None,
    look: int = 256,
    seconds: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Evaluate a model in memory; its mode and its merging are restored.

    With torch.distributed, each rank brings its part of the data, and every rank gets the total.

    Args:
        model: any classifier, merged or not, on any device.
        data: a data loader whose ``sweep`` yields every sample once, or batches of (images, labels).
        classes: class names by column of labels; a data loader has its own.
        known: the same for everything that the model predicts, if the data has labels for only some of it.
        targets: what columns hold that hold no classes.
        prepare: turns images of a data loader, and integer images, into model inputs; others are taken as prepared.
        merge, batch, look, seconds: as for `evaluate`; without ``merge`` the model's own merging stays.
        dtype: autocast dtype; the model's own by default.
        progress: called with the number of samples done.
    """
    names = classes if classes is not None else getattr(data, "classes", None)
    if names is None:
        raise InvalidOption("batches of (images, labels) need classes, such as {'label': ['cat', 'dog']}")
    weight = next(model.parameters())
    metrics = make_metrics(model, names, weight.device, known, targets)
    kept: list[Tensor] = []
    with ExitStack() as stack:
        settings = stack.enter_context(merged_as(model, merge))
        stack.enter_context(evaluating(model))
        for images in count_predictions(model, metrics, data, batch=batch, prepare=prepare, dtype=dtype):
            if not kept or sum(map(len, kept)) < look:
                kept.append(images)
            if progress is not None:
                progress(metrics.seen)
        metrics.reduce()
        tokens = diagnose_tokens(model, torch.cat(kept)[:look]) if look and kept else {}
        timed = kept[0][: None if weight.is_cuda else TIMED_ON_CPU] if kept else weight[:0]
        speed = throughput(model, timed, seconds, dtype) if seconds > 0 and kept else None
    return Evaluation(
        **{**metrics.results(), **tokens, "notes": (*metrics.notes, *tokens.get("notes", ()))},
        images_per_s=speed,
        batch=len(timed),
        device=str(weight.device),
        dtype=str(dtype or weight.dtype).removeprefix("torch."),
        merge=settings,
    )


def count_predictions(
    model: nn.Module,
    metrics: Metrics,
    data: Any,
    *,
    batch: int,
    prepare: Callable[[Tensor], Tensor] | None,
    dtype: torch.dtype | None,
) -> Iterator[Tensor]:
    """Run a model on data, count its predictions, and yield the inputs of each batch; as for `evaluate_model`."""
    weight = next(model.parameters())
    pixel_bytes = getattr(getattr(data, "dataset", None), "pixel_bytes", 0)
    with head_outputs(model) as by_token:
        for images, labels in _batches(data, batch, prepare, weight.device, pixel_bytes):
            images = images if dtype is not None else images.to(weight.dtype)
            with torch.no_grad(), autocast(weight.device, dtype):
                output = forward_output(model, images)
            metrics.add(output, labels, by_token)
            yield images


@contextmanager
def merged_as(model: nn.Module, merge: Mapping[str, Any] | None) -> Iterator[dict[str, Any] | None]:
    """Replace a model's merging temporarily; yield the settings in place.

    Handles of the model's own merging stay valid. None keeps the model as it is.
    """
    try:
        present = Merging.of(model)
    except NotApplied:
        present = None
    if merge is None:
        yield None if present is None else present.config
        return
    with ExitStack() as stack:
        if present is not None:
            stack.enter_context(present.suspended())
        yield stack.enter_context(apply_merge(model, **merge)).config


def _batches(
    data: Any, batch: int, prepare: Callable[[Tensor], Tensor] | None, device: torch.device, pixel_bytes: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield prepared images and labels (B, T) on the device."""
    if batch < 1:
        raise InvalidOption(f"batch={batch}: expected at least 1")
    is_loader = hasattr(data, "sweep")
    if not is_loader and not isinstance(data, Iterable):
        raise UnsupportedInput(f"expected a data loader, or batches of (images, labels); got {type(data).__name__}")
    for images, labels, *_ in data.sweep(batch) if is_loader else data:
        x = images.to(device, non_blocking=True)
        if not x.is_floating_point() or (is_loader and prepare is not None):
            if prepare is None:
                raise InvalidOption(f"images are {x.dtype}; give prepare, which turns them into model inputs")
            x = prepare(x)
        yield split_pixels(x, labels.to(device, non_blocking=True).reshape(len(labels), -1), pixel_bytes)


def _known_classes(known: Labels | None, columns: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """Return the model's class names by column of the data."""
    if known is None or not known.classes:
        return None
    if len(columns) == len(known.classes) == 1 and not known.targets:
        return {columns[0]: next(iter(known.classes.values()))}
    if unknown := [name for name in columns if name not in known.classes]:
        raise InvalidOption(
            f"labels: {known.folder} was not trained with the column {unknown[0]!r}, only with "
            f"{', '.join(known.classes)}"
        )
    return {name: known.classes[name] for name in columns or known.classes}


def rename_classes(
    known: dict[str, tuple[str, ...]] | None, class_map: str | Path | Mapping[str, str] | None
) -> dict[str, tuple[str, ...]] | None:
    """Return a model's class names as the data calls them; ``class_map`` has the model's name of each of these."""
    if class_map is None:
        return known
    given: Any = class_map
    if isinstance(class_map, str | Path):
        try:
            given = json.loads(Path(class_map).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidOption(f"class_map: {class_map} could not be read as JSON ({error})") from error
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for pair in given.items() for name in pair):
        raise InvalidOption('class_map: expected a JSON object such as {"chainsaw": "chain saw, chainsaw"}')
    if known is None:
        raise InvalidOption("class_map: the model has no class names to map to; leave it out")
    renamed = {plain_name(own): name for name, own in given.items()}
    present = {plain_name(name) for names in known.values() for name in names}
    if unknown := sorted(own for own in given.values() if plain_name(own) not in present):
        raise InvalidOption(f"class_map: {unknown[0]!r} is no class of the model")
    if len(renamed) < len(given):
        raise InvalidOption("class_map: two names stand for the same class of the model; each class has one name")
    return {column: tuple(renamed.get(plain_name(name), name) for name in names) for column, names in known.items()}


def _resize(expects: InputSpec, size: int | None, net: nn.Module) -> InputSpec:
    """Return the preprocessing for another input size; raise if the model does not accept it."""
    if size is None:
        return expects
    if expects.is_array:
        raise InvalidOption(f"size={size} is for images; arrays keep their size")
    if not is_int(size, 1):
        raise InvalidOption(f"size={size!r}: expected a number of pixels of at least 1")
    weight = next(net.parameters(), torch.zeros(()))
    try:
        with torch.no_grad(), evaluating(net):
            net(torch.zeros(1, 3, size, size, device=weight.device, dtype=weight.dtype))
    except Exception as error:
        why = " ".join(str(error).split())
        raise InvalidOption(f"size={size}: {type(net).__name__} does not accept this input size ({why})") from error
    return replace(expects, size=(size, size))


def _with_trained_method(merge: Mapping[str, Any] | None, known: Labels | None) -> Mapping[str, Any] | None:
    """Return the options of a merge, with the learned method of the model's run unless they name another one."""
    if merge is None or known is None or method_file(known.folder) is None:
        return merge
    method = merge.get("method")
    trained = load_method(known.folder)
    same = method in (None, trained.name) or (isinstance(method, Mapping) and method.get("name") == trained.name)
    same = same and not (trained.decides and method is None and merge)
    return {**merge, "method": trained} if same else merge


def _notes(known: Labels | None, merge: Mapping[str, Any] | None) -> list[str]:
    """Return notes on which model of a run was evaluated, and whether it was trained with merging."""
    if known is None:
        return []
    notes = [f"evaluated: {known.folder}"]
    if not known.classes:
        notes[0] += "; it has no class names, so its outputs are matched to the data's classes in order"
    trained: Mapping[str, Any] = known.trained.get("merge") or {}
    if trained and merge is None:
        names = ("r", "keep", "gflops", "schedule", "method")
        settings = ", ".join(f"{name}={trained[name]}" for name in names if trained.get(name) is not None)
        notes.append(f"trained with merging ({settings}), evaluated without; give merge= (--merge) to merge")
    return notes
