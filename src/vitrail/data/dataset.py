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
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail._checks import as_tuple, check_int, check_rank, check_share
from vitrail._deprecation import renamed_property
from vitrail._wording import counted
from vitrail.data.decode import as_image, center_square
from vitrail.data.loading.order import generator
from vitrail.data.recording import Recording
from vitrail.data.sample import UNKNOWN, UNLABELED, Batch, Sample, TensorSpec
from vitrail.data.sample_images import samples
from vitrail.data.sampling import DEFAULTS
from vitrail.data.sources import Labels, Source, open_source
from vitrail.data.sources.base import LABEL, MAX_CLASSES
from vitrail.data.sources.decoded import DecodedSource
from vitrail.data.spec import InputSpec, to_tensor
from vitrail.errors import ImageError, InvalidOption, UnsupportedInput

TAKES = {"video": "video clips", "audio": "sounds", "array": "arrays"}
"""What a model of a modality takes, for messages."""

FINGERPRINT_SAMPLES = 8
"""Number of arrays whose values go into a fingerprint."""

Decode = Callable[[], Tensor]


class Dataset:
    """Samples of a source, or some of them, with their labels. Images are decoded when they are read.

    Attributes:
        labels: (N, T) in int64: class number in each label column, -1 for none.
        classes: names of the classes by label column, in the order of ``labels``.
        num_unlabeled: how many samples of the source were left out because they have no label.
    """

    def __init__(
        self,
        source: Source,
        rows: Sequence[int] | None = None,
        labels: Tensor | None = None,
        classes: Mapping[str, Sequence[str]] | None = None,
        *,
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
        self.num_unlabeled = num_unlabeled

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        columns = [f"{name}: {len(names)} classes" for name, names in self.classes.items()]
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
        names = next(iter(self.classes.values()), None)
        return None if names == tuple(map(str, range(len(names or ())))) else names

    @property
    def class_counts(self) -> dict[str, list[int]]:
        """Number of samples of each class, by label column."""
        columns = zip(self.classes.items(), self.labels.T, strict=True)
        return {name: labels[labels >= 0].bincount(minlength=len(names)).tolist() for (name, names), labels in columns}

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
    def modality(self) -> str:
        """What samples are: ``image``, ``video``, ``audio`` or ``array``."""
        return self._source.modality

    def decoded(self, spec: InputSpec, *, measure: bool = False) -> Dataset:
        """Return clips as frames in bytes and sounds as spectrograms, of the size and sampling of a specification.

        With ``measure`` their :meth:`statistics` have the normalization of these samples, not that of the
        specification. Images and arrays stay as they are.
        """
        if self.modality not in DEFAULTS or self.tensor_spec is not None:
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
        numbers = zip(self.classes, self.labels[index].tolist(), strict=True)
        labels = {column: number for column, number in numbers if number >= 0}
        return sample._replace(label=labels.get(next(iter(self.classes), "")), labels=labels)

    def fetch_sample(self, index: int) -> Callable[[], Sample]:
        """Read the bytes of one sample and return a function that decodes it, without mask, boxes and labels.

        Called by one thread, fastest in rising order; any thread may call the returned function.
        """
        return self._source.fetch(self._rows[index], annotations=False)

    def tensor(self, index: int, size: int) -> Tensor:
        """Read a sample as a tensor: an array as it is, the largest centered square of an image as (3, size, size)."""
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
        read = self._source.fetch(row, annotations=False)

        def decode() -> Tensor:
            try:
                image = read().image
                found[row] = made = image if isinstance(image, Tensor) else center_square(image, size)
            except ImageError as error:
                found[row] = str(error)
                raise
            return made

        return decode

    def spec_at(self, size: int) -> TensorSpec:
        """Return shape and dtype of what :meth:`tensor` reads at a size."""
        return self.tensor_spec or TensorSpec((3, size, size), torch.uint8)

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
            raise ImageError(f"none of the {counted(len(indices), 'image')} could be read. The first: {reason}")

    def _prepare(self, index: int, spec: InputSpec) -> Batch:
        """Read one sample as a batch, preprocessed; the original, which may be large, is gone."""
        sample = self.read(index)
        labels = self.labels[[index], 0] if self.classes else None
        if isinstance(sample.image, Recording):
            return Batch(sample.image.tensor(spec)[None], (index,), (sample.name,), labels)
        if spec.is_array:
            if not isinstance(sample.image, Tensor) or len(sample.image) != len(spec.mean):
                raise UnsupportedInput(
                    f"{sample.name}: the model takes {TAKES[spec.modality]} of {len(spec.mean)} channels; pass such "
                    f"files, or Arrays of their values"
                )
            return Batch(spec.normalize(sample.image[None]), (index,), (sample.name,), labels)
        image, (height, width) = _image(sample), spec.size
        masks = boxes = None
        if self.has_masks:
            masks = torch.full((1, height, width), UNKNOWN, dtype=torch.uint8)
            if sample.mask is not None:
                resized = Image.fromarray(sample.mask).resize((width, height), Image.Resampling.NEAREST)
                masks[0] = torch.from_numpy(np.array(resized))
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
        return Dataset(self._source, self._rows)

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
        """Return class counts and a digest of all labels in order; for arrays, of a few samples' values as well.

        A resumed run compares it. Names and paths are left out: data may move. Images, clips and sounds are left out,
        too: seeking in some files is slow, and decoders differ in single bits from machine to machine.
        """
        found: dict[str, Any] = {"counts": self.class_counts, "labels": _digest([self.labels])}
        if self.modality == "array":
            indices = torch.linspace(0, len(self) - 1, FINGERPRINT_SAMPLES).long().unique()
            found["values"] = _digest(self.tensor(index, 1) for index in indices.tolist())
        return found

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
        given = {"rows": self._rows, "labels": self.labels, "classes": self.classes, **kept, **changes}
        return Dataset(**{"source": self._source, **given})

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
        return Labels(self.labels[:, list(self.classes).index(column)].tolist(), self.classes[column])


def open_dataset(
    source: Any = None,
    *,
    labels: str | Sequence[str] | None = (),
    classes: Mapping[str, Sequence[str]] | None = None,
    labeled: bool = False,
    limit: int | None = None,
    size: tuple[int, ...] | None = None,
    modality: str | None = None,
) -> Dataset:
    """Open a dataset without decoding it yet.

    Args:
        source: one of

            - an image file, several of these or a glob pattern; a folder of images, or of class folders; the same for
              video clips and sounds;
            - parquet files as Hugging Face writes them, or a folder of these;
            - WebDataset shards: ``*.tar`` files or a folder of these, or ``wds:PATH/name-{000..012}.tar``;
            - ``hf:OWNER/NAME[:SPLIT]``, or a dataset of the ``datasets`` library;
            - ``torchvision:NAME:ROOT[:SPLIT]``, one of its datasets, already downloaded;
            - a map-style torch dataset of images, (image, label) or (image, labels); a list of images;
            - a tensor or array (N, C, H, W) or (N, C, T, H, W), or `Arrays` with labels;
            - a `Source` of your own, or a dataset opened before, of which only its label columns are known;
            - by default, the sample images.
        labels: label columns, one for each task. By default the column that is most likely the class, called
            ``label`` then. None: no labels.
        classes: names of the classes as a checkpoint knows them; class numbers follow these.
        labeled: whether to leave out samples without a label, and to raise where there are none with one.
        limit: most samples, spread evenly.
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
    source = list(samples().values()) if source is None else source
    dataset = source if isinstance(source, Dataset) else Dataset(open_source(source, columns or (), modality))
    if columns is None:
        dataset = dataset._with(labels=dataset.labels[:, :0], classes={})
    else:
        is_folder = isinstance(source, str | os.PathLike) and Path(source).is_dir()
        where = f"{source} is an unlabeled folder: " if is_folder else ""
        dataset = _labeled(dataset, columns, dict(classes or {}), labeled, where)
    if limit is not None and limit < len(dataset):
        dataset = dataset.select(number * len(dataset) // limit for number in range(limit))
    return dataset._with(size=size) if size is not None else dataset


def fingerprint_difference(
    before: Mapping[str, Any], now: Mapping[str, Any], classes: Mapping[str, Sequence[str]]
) -> str | None:
    """Describe how two fingerprints of datasets with the same classes differ; None if they are equal."""
    for column, names in classes.items():
        counts = (one["counts"][column] for one in (before, now))
        for name, was, is_now in zip(names, *counts, strict=True):
            if was != is_now:
                return f"{column} had {was} samples of {name!r}, and now has {is_now}"
    if before["labels"] != now["labels"]:
        return "the samples have other classes than before, or another order"
    if before.get("values") != now.get("values"):
        return "the samples have other values than before"
    return None


def _labeled(
    dataset: Dataset, columns: tuple[str, ...], known: dict[str, Sequence[str]], required: bool, where: str = ""
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
    numbers = []
    try:
        for column in chosen:
            name = None if only and not columns else column
            found[column], values = _number(column, dataset._column(name), known.get(column))
            numbers.append(values)
    except InvalidOption:
        if required or columns or known:
            raise
        return dataset  # without labels: what is there is no class
    table = torch.stack(numbers, 1)
    rows = (table >= 0).all(1).nonzero()[:, 0]
    if not required:
        return dataset._with(labels=table, classes=found) if (table >= 0).any() else dataset
    if not len(rows):
        part, recipe = ("val", "") if known else ("train", "; a recipe that needs no labels takes labels='none'")
        raise ImageError(
            f"{where}none of the {counted(len(table), 'sample')} has a label ({', '.join(chosen)}). Expected a folder "
            f"that holds two or more class folders and nothing else (name PATH/{part} if they are there), or a label "
            f"column{recipe}"
        )
    missing = len(table) - len(rows) + dataset.num_unlabeled
    return dataset._with(labels=table, classes=found).select(rows.tolist())._with(num_unlabeled=missing)


def _number(column: str, given: Labels, known: Sequence[str] | None) -> tuple[tuple[str, ...], Tensor]:
    """Return names and numbers (N,) of a label column's classes, -1 for none; numbered as known classes are."""
    numbers = torch.tensor([UNLABELED if value is None else value for value in given.numbers], dtype=torch.int64)
    top = int(numbers.max()) + 1 if len(numbers) else 0
    if top > MAX_CLASSES:
        raise InvalidOption(f"{column}: a class has the number {top - 1}; expected class numbers from 0")
    names = tuple(given.names or ())
    if names and top > len(names):
        raise InvalidOption(f"{column}: a class has the number {top - 1}, and only {len(names)} classes have names")
    if known is None:
        return names or tuple(str(number) for number in range(top)), numbers
    known = tuple(known)
    if not names and top and known != tuple(map(str, range(len(known)))):
        raise InvalidOption(
            f"{column}: the classes here are numbers without names, and the known classes have names "
            f"({_shortened(known)}); expected class folders, or a column of names"
        )
    if not names and top > len(known):
        raise InvalidOption(f"{column}: a class has the number {top - 1}, and {len(known)} classes are known")
    if not names or names == known:
        return known, numbers
    places = _places(known, names)
    unknown = [names[number] for number in numbers[numbers >= 0].unique().tolist() if names[number] not in places]
    if unknown or len(set(known)) < len(known):
        shown = f"{_shortened(unknown)} {'is' if len(unknown) == 1 else 'are'}" if unknown else "a repeated name is"
        raise InvalidOption(f"{column}: {shown} not among the {len(known)} known classes ({_shortened(known)})")
    table = torch.tensor([places.get(name, UNLABELED) for name in names] + [UNLABELED])
    return known, table[numbers]  # the last entry is for -1


def _places(known: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Return the place of known classes, by their own names and by the given names that differ only in spelling."""
    places = {name: number for number, name in enumerate(known)}
    spelled: dict[str, list[int]] = {}
    for number, name in enumerate(known):
        spelled.setdefault(plain_name(name), []).append(number)
    for name in names:
        alike = spelled.get(plain_name(name), [])
        if name not in places and len(alike) == 1:
            places[name] = alike[0]
    return places


def plain_name(name: str) -> str:
    """Return the name of a class without case, and with single blanks for ``_`` and other blanks.

    >>> plain_name("English_springer ") == plain_name("english  springer")
    True
    """
    return " ".join(name.replace("_", " ").casefold().split())


def _shortened(names: Sequence[str]) -> str:
    return ", ".join([repr(name) for name in names[:5]] + ["..."] * (len(names) > 5))


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
