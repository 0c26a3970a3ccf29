"""One dataset for every source: images or arrays with labels, masks and boxes, decoded on demand.

dataset = open_dataset("photos/")            # or parquet files, shards, hf:OWNER/NAME, tensors, a torch dataset
dataset.classes, dataset.labels              # {"label": ("cat", "dog")}, (N, 1)
dataset[3].image                             # one sample
rest, held_out = dataset.split(0.1, seed=0)
for batch in dataset.batches(spec, 32): ...  # preprocessed for a model
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail._arguments import checked
from vitrail._checks import as_tuple, check_int, check_rank, check_share, is_int
from vitrail._deprecation import renamed_property
from vitrail._wording import counted
from vitrail.data.decode import as_image, center_crop, center_square
from vitrail.data.labels.columns import likely_kind, read_classes, read_kinds, read_several, read_values
from vitrail.data.labels.masks import DepthReader, MaskReader
from vitrail.data.labels.targets import (
    CLASSES,
    MASK_CLASSES,
    PIXEL_BYTES,
    PIXEL_COLUMNS,
    Kind,
    Targets,
    TargetSpec,
    is_known,
    spans,
)
from vitrail.data.loading.order import generator
from vitrail.data.media.modality import MODALITIES
from vitrail.data.media.recording import Recording
from vitrail.data.sample import UNKNOWN, Batch, Sample, TensorSpec
from vitrail.data.sample_files import samples
from vitrail.data.sources import Labels, Source, open_source
from vitrail.data.sources.base import LABEL
from vitrail.data.sources.decoded import DecodedSource
from vitrail.data.spec import InputSpec, to_tensor
from vitrail.errors import ImageError, InvalidOption, UnsupportedInput

FINGERPRINT_SAMPLES = 8
"""Number of arrays whose values go into a fingerprint."""

MEASURED = 64
"""Number of depth maps whose depths have the mean and standard deviation that outputs are scaled by."""

MAX_FILES, FILES_READ, BYTES_READ = 10_000, 32, 2**18
"""Of how many files the sizes go into a fingerprint, of how many among these the bytes, and how many bytes."""

Decode = Callable[[], Tensor]


class Dataset:
    """Samples of a source, or some of them, with their labels. Images are decoded when they are read.

    Attributes:
        labels: (N, W): a class number for each label column, in int64, -1 for none. With other targets than classes it
            is float32, and a column may take several places: see `vitrail.data.labels.targets`.
        classes: names of the classes by label column, in the order of ``labels``; of a regression, the column itself.
        targets: what label columns hold, for those that hold no classes.
        num_unlabeled: how many samples of the source were left out because they have no label.
    """

    def __init__(
        self,
        source: Source,
        rows: Sequence[int] | None = None,
        labels: Tensor | None = None,
        classes: Mapping[str, Sequence[str]] | None = None,
        *,
        targets: Targets | None = None,
        num_unlabeled: int = 0,
        size: tuple[int, ...] | None = None,
        cache: dict[int, dict[int, Tensor | str]] | None = None,
    ) -> None:
        self._source = source
        self._rows = range(len(source)) if rows is None else rows
        self._size = size
        self._cache = cache
        self._skipped: dict[int, str] = {}
        self.labels = torch.zeros(len(self._rows), 0, dtype=torch.int64) if labels is None else labels
        self.classes = {column: tuple(names) for column, names in (classes or {}).items()}
        self.targets = dict(targets or {})
        self.num_unlabeled = num_unlabeled

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        kinds = {name: self.targets[name].kind if name in self.targets else "" for name in self.classes}
        columns = [
            f"{name}: {kinds[name] if kinds[name] == 'regression' else f'{len(names)} classes'}"
            for name, names in self.classes.items()
        ]
        return f"Dataset({', '.join([str(len(self)), *columns])})"

    def __getitem__(self, index: int) -> Sample:
        return self.read(index)

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each sample."""
        return tuple(self._source.names[row] for row in self._rows)

    def name(self, index: int) -> str:
        """Return the name of one sample."""
        return self._source.names[self._rows[index]]

    @property
    def paths(self) -> tuple[Path, ...] | None:
        """File of each sample; None if samples have no files of their own."""
        return None if self._source.paths is None else tuple(self._source.paths[row] for row in self._rows)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes in the first label column; None where classes are numbers without names."""
        if next(iter(self.classes), None) in self.targets:
            return None
        names = next(iter(self.classes.values()), None)
        return None if names == tuple(map(str, range(len(names or ())))) else names

    @property
    def class_counts(self) -> dict[str, list[int]]:
        """Number of samples of each class, by label column of classes."""
        found = {}
        for column, (names, where) in self._columns().items():
            values, kind = self.labels[:, where], self.targets.get(column, CLASSES).kind
            if kind == "classification":
                found[column] = values[values >= 0].long().bincount(minlength=len(names)).tolist()
            elif kind == "multilabel":
                found[column] = values.nansum(0).long().tolist()
        return found

    @property
    def scaled_targets(self) -> dict[str, TargetSpec]:
        """The targets, of a regression with mean and standard deviation of the samples' values."""
        found = {}
        for column, (_, where) in self._columns().items():
            target = self.targets.get(column)
            if target is not None and target.kind in ("regression", "depth"):
                values = self._depths() if target.kind == "depth" else self.labels[:, where].double()
                values = values[~values.isnan()]
                std = float(values.std(correction=0)) if len(values) else 1.0
                target = replace(target, mean=float(values.mean()) if len(values) else 0.0, std=std or 1.0)
            if target is not None:
                found[column] = target
        return found

    def _depths(self) -> Tensor:
        """Return the depths of some samples, evenly spaced, that can be read."""
        found = [torch.zeros(0, dtype=torch.float64)]
        for row in self._rows[:: max(1, len(self) // MEASURED)]:
            try:
                mask = self._source.read(row).mask
            except ImageError:
                continue
            if mask is not None:
                found.append(torch.from_numpy(mask).flatten().double())
        return torch.cat(found)

    @property
    def pixel_bytes(self) -> int:
        """Channels of bytes with what is true of each pixel, which :meth:`tensor` reads behind those of the image."""
        return sum(target.pixel_bytes for target in self.targets.values())

    def _columns(self) -> dict[str, tuple[tuple[str, ...], slice]]:
        """Return the classes of each label column, and its place in the table of labels."""
        places = spans(self.classes, self.targets)
        return {column: (names, places[column]) for column, names in self.classes.items()}

    @property
    def has_masks(self) -> bool:
        """Whether the source has masks; single samples may lack one."""
        return self._source.has_masks

    @property
    def has_boxes(self) -> bool:
        """Whether the source has boxes; single samples may lack them."""
        return self._source.has_boxes

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """Names of the samples that :meth:`batches` could not read so far, each with the reason."""
        return [(self.name(index), reason) for index, reason in sorted(self._skipped.items())]

    @property
    def tensor_spec(self) -> TensorSpec | None:
        """Shape and dtype of arrays; None for images, which are resized to what a model takes."""
        return self._source.tensor_spec

    @property
    def noun(self) -> str:
        """What samples are called: images, video clips, sounds or arrays."""
        return MODALITIES[self.modality].plural

    @property
    def modality(self) -> str:
        """What samples are: ``image``, ``video``, ``audio`` or ``array``."""
        return self._source.modality

    def decoded(self, spec: InputSpec, *, measure: bool = False) -> Dataset:
        """Return clips as frames in bytes and sounds as spectrograms, of the size and sampling of a specification.

        With ``measure`` their :meth:`statistics` have the normalization of these samples, not that of the
        specification. Images and arrays stay as they are.
        """
        if MODALITIES[self.modality].sampling is None or self.tensor_spec is not None:
            return self
        if spec.modality != self.modality or not spec.size:
            raise UnsupportedInput(
                f"the data is {self.modality}, and the model takes {spec.modality}; use a model for {self.modality}"
            )
        return self._with(source=DecodedSource(self._source, spec, measure))

    def statistics(self) -> InputSpec | None:
        """Return the input specification of a model trained on this dataset; None for images: the model has its own."""
        return self._source.statistics(self._rows)

    def read(self, index: int) -> Sample:
        """Read one sample; raise ``ImageError`` if it, its mask or its boxes cannot be read."""
        sample = self._source.read(self._rows[index])
        labels = self._labels_of(index)
        first = next(iter(self.classes), "")
        return sample._replace(label=None if first in self.targets else labels.get(first), labels=labels)

    def _labels_of(self, index: int) -> dict[str, Any]:
        """Return the labels of a sample by column: a class number, a value, or several class numbers."""
        found: dict[str, Any] = {}
        for column, (_, where) in self._columns().items():
            values, kind = self.labels[index, where], self.targets.get(column, CLASSES).kind
            if kind in PIXEL_BYTES or not is_known(values[None], kind):
                continue
            if kind == "multilabel":
                found[column] = tuple(values.nonzero()[:, 0].tolist())
            else:
                found[column] = float(values[0]) if kind == "regression" else int(values[0])
        return found

    def fetch_sample(self, index: int) -> Callable[[], Sample]:
        """Read the bytes of one sample and return a function that decodes it, without mask, boxes and labels.

        Called by one thread, fastest in rising order; any thread may call the returned function.
        """
        return self._source.fetch(self._rows[index], annotations=False)

    def tensor(self, index: int, size: int) -> Tensor:
        """Read a sample as a tensor: an array as it is, the largest centered square of an image as (3, size, size).

        With masks as a target it is (4, size, size), the last channel being the mask; with depth maps (7, size, size),
        the last four being the bytes of depths in float32.
        """
        return self.fetch(index, size)()

    def fetch(self, index: int, size: int) -> Decode:
        """Read the bytes of one sample and return a function that decodes them, which any thread may call."""
        row = self._rows[index]
        found = {} if self._cache is None else self._cache.setdefault(size, {})
        known = found.get(row)
        if isinstance(known, str):
            raise ImageError(known)
        if known is not None:
            return lambda: known
        dense = bool(self.pixel_bytes)
        read = self._source.fetch(row, annotations=dense)

        def decode() -> Tensor:
            try:
                sample = read()
                image = sample.image
                made = image if isinstance(image, Tensor) else center_square(image, size)
                if dense:
                    made = torch.cat([made, _square_mask(sample, size)])
                found[row] = made
            except ImageError as error:
                found[row] = str(error)
                raise
            return made

        return decode

    def spec_at(self, size: int) -> TensorSpec:
        """Return shape and dtype of what :meth:`tensor` reads at a size."""
        return self.tensor_spec or TensorSpec((3 + self.pixel_bytes, size, size), torch.uint8)

    def batches(
        self,
        spec: InputSpec,
        batch_size: int,
        *,
        indices: Sequence[int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        on_skip: Callable[[str, str], object] | None = None,
    ) -> Iterator[Batch]:
        """Yield samples as batches preprocessed for a model, with masks and boxes resized alike.

        Samples that cannot be read are skipped, listed in :attr:`skipped`, and passed to ``on_skip`` with the reason.
        Of ``indices`` (by default all), a rank reads every ``world_size``-th, in this order.

        Raises:
            ImageError: none could be read, and there is no other rank that could have read some.
        """
        check_int("batch_size", batch_size)
        check_rank(rank, world_size)
        spec = spec if self._size is None else replace(spec, size=(*spec.size[: -len(self._size)], *self._size))
        indices = (range(len(self)) if indices is None else indices)[rank::world_size]
        ready: list[Batch] = []
        reason, any_read = "", False
        for index in indices:
            try:
                ready.append(self._prepare(index, spec))
            except ImageError as error:
                self._skipped[index] = str(error)
                reason = reason or str(error)
                if on_skip is not None:
                    on_skip(self.name(index), str(error))
                continue
            any_read = True
            if len(ready) == batch_size:
                yield _collate(ready)
                ready = []
        if ready:
            yield _collate(ready)
        if not any_read and world_size == 1:
            number = counted(len(indices), self.noun.removesuffix("s"))
            raise ImageError(f"none of the {number} could be read. The first: {reason}")

    def _prepare(self, index: int, spec: InputSpec) -> Batch:
        """Read one sample as a batch, preprocessed; the original, which may be large, is gone."""
        sample = self.read(index)
        first = next(iter(self.classes), None)
        labels = None if first is None or first in self.targets else self.labels[[index], 0].long()
        if isinstance(sample.image, Recording):
            return Batch(sample.image.tensor(spec)[None], (index,), (sample.name,), labels)
        if spec.is_array:
            if not isinstance(sample.image, Tensor) or len(sample.image) != len(spec.mean):
                raise UnsupportedInput(
                    f"{sample.name}: the model takes {MODALITIES[spec.modality].plural} of {len(spec.mean)} channels; "
                    "pass such files, or Arrays of their values"
                )
            return Batch(spec.normalize(sample.image[None]), (index,), (sample.name,), labels)
        image, (height, width) = _image(sample), spec.size
        masks = boxes = None
        if self.has_masks:
            unknown = np.float32("nan") if self.pixel_bytes > 1 else np.uint8(UNKNOWN)
            mask = np.full((height, width), unknown) if sample.mask is None else sample.mask
            resized = Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST)
            masks = torch.from_numpy(np.array(resized))[None]
        if self.has_boxes:
            across, down = width / image.width, height / image.height
            given = sample.boxes or ()
            boxes = [tuple((x0 * across, y0 * down, x1 * across, y1 * down) for x0, y0, x1, y1 in given)]
        return Batch(to_tensor([image], spec), (index,), (sample.name,), labels, masks, boxes)

    def cached(self) -> Dataset:
        """Return the same dataset, which keeps decoded images in host memory for as long as it exists.

        Images decoded once at a size are there for the next run, and for the parts that :meth:`split` and :meth:`take`
        return. That holds for data loaders that keep images in memory; worker processes read files each time.
        """
        if self.modality == "array" or self._cache is not None:
            return self
        return self._with(cache={})

    kept = renamed_property("kept", "cached")

    def bare(self) -> Dataset:
        """Return the same samples without labels and cache: what a worker process needs."""
        return Dataset(
            self._source, self._rows, targets={name: one for name, one in self.targets.items() if one.kind == "dense"}
        )

    def select(self, indices: Iterable[int]) -> Dataset:
        """Return the samples with these indices, in this order, numbered from 0."""
        places = torch.tensor(list(indices), dtype=torch.int64)
        rows = [self._rows[index] for index in places.tolist()]
        return self._with(rows=rows, labels=self.labels[places])

    def split(self, share: float, seed: int) -> tuple[Dataset, Dataset]:
        """Hold out a share of the samples, stratified by class: (the rest, the held-out set).

        Classes are those of the first label column. The same seed holds out the same samples.
        """
        check_share("share", share, zero=False, one=False)
        count = round(share * len(self))
        if not 0 < count < len(self):
            raise InvalidOption(
                f"a share of {share} of {counted(len(self), 'sample')} cannot be held out; expected one that "
                "leaves at least one sample on either side"
            )
        held = self._stratified(count, seed)
        return self.select(sorted({*range(len(self))} - {*held})), self.select(held)

    def take(self, share: float, seed: int) -> Dataset:
        """Return a share of the samples, stratified by class; the same seed takes the same ones."""
        check_share("share", share, zero=False)
        return self if share == 1 else self.select(self._stratified(max(round(share * len(self)), 1), seed))

    def fingerprint(self) -> dict[str, Any]:
        """Return class counts and digests of all labels in order, of the files, and of a few arrays' values.

        A resumed run compares it. Names and paths are left out: data may move. Of files, the sizes and the bytes of a
        few count, not what they decode to: decoders differ in single bits from machine to machine.
        """
        found: dict[str, Any] = {"counts": self.class_counts, "labels": _digest([self.labels])}
        if self.modality == "array":
            indices = torch.linspace(0, len(self) - 1, FINGERPRINT_SAMPLES).long().unique()
            found["values"] = _digest(self.tensor(index, 1) for index in indices.tolist())
        files = _spread(self._source.files(self._rows), MAX_FILES)
        if files:
            found["files"] = _digest_files(files)
        return found

    def stamp(self) -> dict[Path, tuple[int, int]]:
        """Return size and time of change of the files, or of many of them, for `changed_since`."""
        return {path: _stamp(path) for path in _spread(self._source.files(self._rows), MAX_FILES)}

    def changed_since(self, stamp: Mapping[Path, tuple[int, int]]) -> list[str]:
        """Return the names of the files that were changed or removed since `stamp`."""
        return [path.name for path, known in stamp.items() if _stamp(path) != known]

    def _stratified(self, count: int, seed: int) -> list[int]:
        """Choose indices at equal distances from a list of all samples, sorted by class and shuffled within."""
        total = len(self)
        order = torch.randperm(total, generator=generator("cpu", seed, total))
        if self.labels.shape[1]:
            order = order[self.labels[order, 0].argsort(stable=True)]
        places = (torch.arange(count) * 2 + 1) * total // (2 * count)
        return sorted(order[places].tolist())

    def _with(self, **changes: Any) -> Dataset:
        kept = {"num_unlabeled": self.num_unlabeled, "size": self._size, "cache": self._cache}
        table = {"labels": self.labels, "classes": self.classes, "targets": self.targets}
        given = {"rows": self._rows, **table, **kept, **changes}
        return Dataset(**{"source": self._source, **given})

    def _values(self, column: str) -> list[Any]:
        """Return the values of a column of the source as they are."""
        found = self._source.values(column)
        return [found[row] for row in self._rows]

    def _likely_kind(self, column: str) -> Kind | None:
        """Return what a column of the source holds that holds no classes; None if there is no such column."""
        try:
            return likely_kind(self._source.values(column))
        except InvalidOption:
            return None

    def _has_column(self, column: str) -> bool:
        """Return whether the source has a column of labels of this name."""
        for read in (self._source.labels, self._source.values):
            try:
                read(column)
                return True
            except InvalidOption:
                continue
        return False

    def _column(self, column: str | None) -> Labels:
        """Return a label column of the dataset, or of its source while it has none; None for the default one."""
        if not self.classes:
            found = self._source.labels(column)
            return found._replace(numbers=[found.numbers[row] for row in self._rows])
        if column is None and len(self.classes) == 1:
            (column,) = self.classes
        if column not in self.classes:
            raise InvalidOption(
                f"labels={column!r}: this dataset was opened with {', '.join(self.classes)}; open it "
                "with the columns you need"
            )
        return Labels(self.labels[:, self._columns()[column][1]][:, 0].long().tolist(), self.classes[column])


@checked
def open_dataset(
    source: Any = None,
    *,
    labels: str | Sequence[str] | None = (),
    classes: Mapping[str, Sequence[str]] | None = None,
    labeled: bool = False,
    limit: int | None = None,
    size: tuple[int, ...] | None = None,
    modality: str | None = None,
    kind: str | Mapping[str, str] | None = None,
    masks: Any = None,
    mask_classes: Sequence[str] | int | None = None,
) -> Dataset:
    """Open a dataset without decoding it yet.

    Args:
        source: one of

            - an image file, several of these or a glob pattern; a folder of images, or of class folders; the same for
              video clips and sounds;
            - a label file: CSV, TSV or parquet, with a column of paths relative to it (``path``, ``file_name`` …), any
              columns of labels, and maybe one of mask files (``mask``);
            - parquet files as Hugging Face writes them, or a folder of these;
            - WebDataset shards: ``*.tar`` files or a folder of these, or ``wds:PATH/name-{000..012}.tar``;
            - ``hf:OWNER/NAME[:SPLIT]``, or a dataset of the ``datasets`` library;
            - ``torchvision:NAME:ROOT[:SPLIT]``, one of its datasets, already downloaded;
            - a map-style torch dataset of images, (image, label) or (image, labels); a list of images;
            - a tensor or array (N, C, H, W) or (N, C, T, H, W), or `Arrays` with labels;
            - a `Source` of your own, or a dataset opened before, of which only its label columns are known;
            - by default, the samples of the package: images, or those of ``modality``.
        labels: label columns, one for each task. By default the column that is most likely the class, called
            ``label`` then. None: no labels.
        classes: names of the classes as a checkpoint knows them; class numbers follow these.
        labeled: whether to leave out samples without a label, and to raise where there are none with one.
        limit: most samples, spread evenly.
        kind: what the label columns hold, one for all or a mapping: ``classification``, ``regression`` (numbers),
            ``multilabel`` (lists of classes, or text such as ``"cat;small"``), ``dense`` (masks, the column
            ``"mask"``) or ``depth`` (depth maps, the column ``"depth"``). By default floating point numbers are a
            regression, lists are multi-label, and everything else is classes.
        masks: for a folder of images, a folder with the masks, or depth maps: files of the same names in the same
            subfolders.
        mask_classes: names or number of the classes whose numbers are the values of masks, 255 for unknown pixels. By
            default values above 0 are foreground, and a column ``trimap`` has 1 for foreground, 2 for background.
        size: height and width to resize images to, instead of the model's own.
        modality: what files hold, ``image``, ``video`` or ``audio``; by default what their endings say. A GIF is
            an image unless this is ``video``.

    Raises:
        ImageError: there are no images, or with ``labeled`` none with a label.
        InvalidOption: a label column does not exist, or its classes are not those that are known.

    Example:
        >>> open_dataset().names
        ('astronaut.jpg', 'chelsea.jpg', 'coffee.jpg')
    """
    if limit is not None:
        check_int("limit", limit)
    columns = None if labels is None else as_tuple(labels)
    source = list(samples(modality or "image").values()) if source is None else source
    if columns == () and isinstance(kind, str) and kind in PIXEL_COLUMNS:
        columns = (PIXEL_COLUMNS[kind],)
    kinds = read_kinds(kind, columns or tuple(classes or ()))
    names = _mask_names(mask_classes)
    reader = DepthReader() if "depth" in kinds.values() else MaskReader(None if mask_classes is None else len(names))
    is_folder = isinstance(source, str | os.PathLike) and os.path.isdir(source)  # noqa: PTH112  (False for odd paths)
    where = f"{source} is an unlabeled folder: " if is_folder else ""
    if not isinstance(source, Dataset):
        opened = open_source(source, columns or (), modality, masks, reader)
        source = Dataset(opened)
    dataset: Dataset = source
    if columns is None:
        dataset = dataset._with(labels=dataset.labels[:, :0], classes={}, targets={})
    else:
        dataset = _labeled(dataset, columns, dict(classes or {}), labeled, kinds, names, where)
    if limit is not None and limit < len(dataset):
        dataset = dataset.select(number * len(dataset) // limit for number in range(limit))
    return dataset._with(size=size) if size is not None else dataset


def fingerprint_difference(
    before: Mapping[str, Any], now: Mapping[str, Any], classes: Mapping[str, Sequence[str]]
) -> str | None:
    """Describe how two fingerprints of datasets with the same classes differ; None if they are equal."""
    for column, names in classes.items():
        if column not in before["counts"] or column not in now["counts"]:
            continue
        counts = (one["counts"][column] for one in (before, now))
        for name, was, is_now in zip(names, *counts, strict=True):
            if was != is_now:
                return f"{column} had {was} samples of {name!r}, and now has {is_now}"
    if before["labels"] != now["labels"]:
        return "the samples have other classes than before, or another order"
    if before.get("values") != now.get("values"):
        return "the samples have other values than before"
    if "files" in before and before["files"] != now.get("files"):
        return "the files have other contents than before"
    return None


def _labeled(
    dataset: Dataset,
    columns: tuple[str, ...],
    known: dict[str, Sequence[str]],
    required: bool,
    kinds: Mapping[str, Kind],
    mask_names: tuple[str, ...],
    where: str = "",
) -> Dataset:
    """Return a dataset with these label columns, or with the one that is most likely the class.

    ``where`` names an unlabeled folder in the error.
    """
    if columns and known and set(columns) != set(known):
        raise InvalidOption(f"labels={','.join(columns)}: the known classes are those of {','.join(known)}")
    if len(set(columns)) < len(columns):
        raise InvalidOption(f"labels={','.join(columns)}: a column is named twice")
    chosen = tuple(known or columns or dataset.classes) or (LABEL,)
    only = chosen == (LABEL,) if not dataset.classes else len(chosen) == len(dataset.classes) == 1
    found: dict[str, tuple[str, ...]] = {}
    targets: dict[str, TargetSpec] = {}
    parts, complete = [], torch.ones(len(dataset), dtype=torch.bool)
    try:
        for column in chosen:
            name = None if only and not columns and column not in kinds and column not in dataset.targets else column
            target, found[column], values = _read_column(
                dataset, column, name, kinds.get(column), known.get(column), mask_names
            )
            if target != CLASSES:
                targets[column] = target
            parts.append(values)
            complete &= is_known(values, target.kind)
    except InvalidOption:
        if required or columns or known:
            raise
        return dataset  # without labels: what is there is no class
    table = torch.cat([part.float() for part in parts] if targets else parts, 1)
    dataset_with = dataset._with(labels=table, classes=found, targets=targets)
    if dataset_with.pixel_bytes != dataset.pixel_bytes and dataset._cache is not None:
        dataset_with = dataset_with._with(cache={})  # what is kept has no masks, or has them
    rows = complete.nonzero()[:, 0]
    if not required:
        return dataset_with if targets or (table >= 0).any() else dataset
    if not len(rows):
        part, recipe = ("val", "") if known else ("train", "; a recipe that needs no labels takes labels='none'")
        raise ImageError(
            f"{where}none of the {counted(len(table), 'sample')} has a label ({', '.join(chosen)}). Expected a folder "
            f"that holds two or more class folders and nothing else (name PATH/{part} if they are there), or a label "
            f"column{recipe}"
        )
    missing = len(table) - len(rows) + dataset.num_unlabeled
    return dataset_with.select(rows.tolist())._with(num_unlabeled=missing)


def _read_column(
    dataset: Dataset,
    column: str,
    name: str | None,
    kind: Kind | None,
    known: Sequence[str] | None,
    mask_names: tuple[str, ...],
) -> tuple[TargetSpec, tuple[str, ...], Tensor]:
    """Return what a label column holds, the names of its classes, and its part of the table of labels."""
    if column in dataset.targets and kind in (None, dataset.targets[column].kind):
        names, where = dataset._columns()[column]
        if known is None or tuple(known) == names:
            return dataset.targets[column], names, dataset.labels[:, where]
        if set(known) == set(names):
            return dataset.targets[column], tuple(known), dataset.labels[:, where][:, [names.index(n) for n in known]]
        raise InvalidOption(f"{column}: its classes are {', '.join(names[:5])}; expected those of the model")
    if kind is None and column == PIXEL_COLUMNS["dense"] and dataset.has_masks and not dataset._has_column(column):
        kind = "dense"
    if kind in PIXEL_COLUMNS:
        own = PIXEL_COLUMNS[kind]
        if not dataset.has_masks:
            raise InvalidOption(
                f"{column}: there are no {own}s; expected a column {own!r} of a label file or a parquet file, or a "
                f"folder of {own}s beside a folder of images, masks="
            )
        names = (column,) if kind == "depth" else tuple(known or mask_names)
        return TargetSpec(kind), names, torch.zeros(len(dataset), 0)
    if kind in (None, "classification"):
        try:
            return CLASSES, *read_classes(column, dataset._column(name), known)
        except InvalidOption:
            if kind is not None or name is None:
                raise
            kind = dataset._likely_kind(name)
            if kind is None:
                raise
    if name is None:
        raise InvalidOption(f"kind={kind!r} needs a label column; name it, labels=")
    values, names = dataset._values(name), dataset.names
    if kind == "regression":
        return TargetSpec("regression"), (column,), read_values(column, values, names)
    return TargetSpec("multilabel"), *read_several(column, values, names, known)


def _mask_names(given: Sequence[str] | int | None) -> tuple[str, ...]:
    """Return the names of the classes of masks."""
    if given is None:
        return MASK_CLASSES
    names: Any = tuple(map(str, range(given))) if isinstance(given, int) and is_int(given, 2, UNKNOWN) else given
    good = isinstance(names, list | tuple) and 2 <= len(names) < UNKNOWN and len(set(names)) == len(names)
    if not good or not all(isinstance(name, str) and name for name in names):
        raise InvalidOption(f"mask_classes={given!r}: expected a number from 2, or two or more different names")
    return tuple(names)


def _square_mask(sample: Sample, size: int) -> Tensor:
    """Return what is true of the pixels that `center_square` keeps, as bytes (1 or 4, size, size)."""
    if sample.mask is None:
        raise ImageError(f"{sample.name}: the sample has no mask; give it one, or leave it out")
    image = center_crop(Image.fromarray(sample.mask), (size, size), Image.Resampling.NEAREST)
    return torch.from_numpy(np.array(image)).unsqueeze(2).view(torch.uint8).permute(2, 0, 1)


def _collate(parts: Sequence[Batch]) -> Batch:
    """Join batches that all have labels, masks and boxes, or none of them."""
    images, indices, names, labels, masks, boxes = zip(*parts, strict=True)
    joined = [None if one[0] is None else torch.cat(one) for one in (labels, masks)]
    objects = None if boxes[0] is None else [*chain(*boxes)]
    return Batch(torch.cat(images), tuple(chain(*indices)), tuple(chain(*names)), joined[0], joined[1], objects)


def _image(sample: Sample) -> Image.Image:
    """Return a sample as an image; arrays are images if they are (3, H, W) or (1, H, W) in bytes."""
    if not isinstance(sample.image, Tensor):
        return sample.image
    if sample.image.dtype != torch.uint8 or sample.image.dim() != 3 or sample.image.shape[0] not in (1, 3):
        raise UnsupportedInput(
            f"{sample.name}: an array of {tuple(sample.image.shape)} in {sample.image.dtype} is not an image; expected "
            "(3, H, W) in uint8. Pass other arrays as a normalized tensor (B, C, H, W)"
        )
    return as_image(sample.image, sample.name)


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def _spread(files: Sequence[Path], most: int) -> list[Path]:
    """Return files at equal distances, at most so many."""
    if len(files) <= most:
        return list(files)
    return [files[number * len(files) // most] for number in range(most)]


def _stamp(path: Path) -> tuple[int, int]:
    """Return size and time of change of a file; of none where it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _digest_files(files: Sequence[Path]) -> str:
    """Digest the sizes of files, and the first bytes of some of them."""
    found = hashlib.sha256(",".join(str(_stamp(path)[0]) for path in files).encode())
    for path in _spread(files, FILES_READ):
        with suppress(OSError), path.open("rb") as file:
            found.update(file.read(BYTES_READ))
    return found.hexdigest()[:16]
