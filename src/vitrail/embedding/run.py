"""``vitrail.embed`` and ``vitrail.predict``: a core over a whole dataset, in memory or shard by shard to a file."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from vitrail._arguments import checked
from vitrail._checks import check_choice, check_int
from vitrail.adapters import find
from vitrail.adapters.registry import SOURCE_ATTRIBUTE, sized
from vitrail.data.dataset import Dataset, open_dataset
from vitrail.data.media.modality import MODALITIES
from vitrail.data.spec import InputSpec
from vitrail.embedding.embedder import Core, Embedder
from vitrail.embedding.output import Job, Output, Skipped
from vitrail.embedding.predictor import Predictor
from vitrail.embedding.reading import Fit, Preparation, Reader
from vitrail.embedding.storage import split
from vitrail.embedding.table import Embeddings, arrow, make_table, read_embeddings
from vitrail.errors import EmbeddingError, ImageError, InvalidOption, UntrainedMethod
from vitrail.surgery.saving import collect, weights_hash
from vitrail.surgery.saving.changes import handles_of

FORMAT = 1
BATCH = {"cpu": 16, "cuda": 128}
"""Default batch sizes by device: more is not faster on a CPU, and takes memory."""

ENGINES = ("local", "ray")
PACKAGES = ("torch", "timm", "transformers", "torchvision", "open_clip_torch", "pillow")
"""Packages whose versions are kept with a result, besides Vitrail's."""


@dataclass(frozen=True)
class Progress:
    """How far a run is, and where its time goes.

    Attributes:
        done, total: samples, readable or not, those of earlier runs included.
        images: samples that this run computed.
        skipped: samples that could not be read so far.
        seconds: time since the first batch was asked for.
        decoding_seconds: time for reading and decoding, summed over workers.
        model_seconds: time in the model, with copies from and to its device.
        waiting_seconds: time that the model waited for decoding.
        workers: threads or processes that decode.
    """

    done: int
    total: int
    images: int = 0
    skipped: int = 0
    seconds: float = 0.0
    decoding_seconds: float = 0.0
    model_seconds: float = 0.0
    waiting_seconds: float = 0.0
    workers: int = 1

    @property
    def images_per_s(self) -> float:
        """Throughput of the run."""
        return self.images / self.seconds if self.seconds else 0.0

    @property
    def decoding_per_s(self) -> float:
        """Images/s that decoding reaches with all workers."""
        return self.images * max(self.workers, 1) / self.decoding_seconds if self.decoding_seconds else 0.0

    @property
    def model_per_s(self) -> float:
        """Images/s that the model reaches while it works."""
        return self.images / self.model_seconds if self.model_seconds else 0.0


@checked
def embed(
    model: nn.Module,
    data: Any,
    out: str | Path | None = None,
    *,
    tokens: str | Sequence[str] = (),
    dtype: str = "float16",
    precision: str | None = None,
    size: tuple[int, int] | None = None,
    fit: Fit = "crop",
    exact_decoding: bool = False,
    batch: int | None = None,
    workers: int | None = None,
    limit: int | None = None,
    overwrite: bool = False,
    name: str | None = None,
    progress: Callable[[Progress], object] | None = None,
    engine: str = "local",
    address: str | None = None,
    actors: int | None = None,
) -> Embeddings:
    """Compute features of every image of a dataset; return them as a table.

    >>> found = vitrail.embed(model, "photos/")                                  # doctest: +SKIP
    >>> found.to_numpy().shape                                                   # doctest: +SKIP
    (3669, 384)
    >>> vitrail.embed(model, "photos/", "features.parquet", tokens="class,mean") # doctest: +SKIP

    Args:
        model: a supported model, merged or not, on its device; it is set to eval mode.
        data: anything that `vitrail.data.open_dataset` opens, ``s3://`` and ``gs://`` included.
        out: file to write, shard by shard: ``.parquet``, ``.npy`` for one column, ``.lance``, or a directory (a name
            without an ending, or with ``/`` behind), which keeps the shards. A run that was interrupted is resumed. By
            default the result stays in memory.
        tokens: columns: ``class``, ``mean``, ``patches``, ``output``, or ``mean@5`` behind block 5; see `Embedder`.
        dtype: ``float16`` or ``float32``: how features are stored.
        precision: ``float32``, ``float16`` or ``bfloat16``: how the model computes; by default in its own.
        size: height and width of inputs; by default the model's.
        fit: ``crop`` the center of images to the input's shape, as in training, or ``stretch`` whole images to it.
        exact_decoding: decode JPEGs at full size. By default they are decoded at 1/2, 1/4 or 1/8 where at least three
            times the input's size is left.
        batch, workers: batch size, and threads (or processes, for a GPU) that decode; chosen by default.
        limit: most samples, spread evenly.
        overwrite: replace a result of other settings.
        name: name of the model for the metadata; by default the one that it was loaded by, or its class.
        progress: called with a `Progress` after each batch.
        engine: ``local``, or ``ray`` for actors of a Ray cluster, at ``address`` (by default a new one on this
            machine), with as many ``actors`` as there are GPUs, or else one for each two cores.

    Raises:
        EmbeddingError: the output cannot be written, or is one of other settings.
        ImageError: there is no image, or none could be read.
    """
    options = {"tokens": tokens, "dtype": dtype, "precision": precision}
    plan = Plan.of(Embedder, options, model, data, size, fit, exact_decoding, batch, workers, limit, name)
    return plan.run(out, overwrite=overwrite, progress=progress, engine=engine, address=address, actors=actors)


@checked
def predict(
    model: nn.Module,
    data: Any,
    out: str | Path | None = None,
    *,
    top: int = 5,
    classes: Sequence[str] | None = None,
    precision: str | None = None,
    size: tuple[int, int] | None = None,
    fit: Fit = "crop",
    exact_decoding: bool = False,
    batch: int | None = None,
    workers: int | None = None,
    limit: int | None = None,
    overwrite: bool = False,
    name: str | None = None,
    progress: Callable[[Progress], object] | None = None,
    engine: str = "local",
    address: str | None = None,
    actors: int | None = None,
) -> Embeddings:
    """Predict the most likely classes of every image of a dataset; return them as a table.

    >>> vitrail.predict(model, "photos/", "labels.csv", top=3)                   # doctest: +SKIP

    Args:
        model: a classifier, merged or not; see `Predictor`.
        out: ``.parquet``, ``.csv`` or a directory; as for `embed`, with the other arguments.
        top: number of classes to name.
        classes: names of the classes, in the order of the model's outputs; by default its own.
    """
    options = {"top": top, "classes": classes, "precision": precision}
    plan = Plan.of(Predictor, options, model, data, size, fit, exact_decoding, batch, workers, limit, name)
    return plan.run(out, overwrite=overwrite, progress=progress, engine=engine, address=address, actors=actors)


@dataclass
class Plan:
    """A core, the data and how it is read: everything about a run but where its result goes."""

    core: Core
    make: Callable[[nn.Module], Core]
    dataset: Dataset
    reader: Reader
    batch: int
    settings: dict[str, Any]

    @classmethod
    def of(
        cls,
        kind: type[Any],
        options: dict[str, Any],
        model: nn.Module,
        data: Any,
        size: tuple[int, int] | None,
        fit: Fit,
        exact: bool,
        batch: int | None,
        workers: int | None,
        limit: int | None,
        name: str | None,
    ) -> Plan:
        """Check everything, and open the data; nothing is read or computed but one example."""
        arrow()
        name = name or vars(model).get(SOURCE_ATTRIBUTE) or type(model).__name__
        found = find(model)
        spec: InputSpec = found.adapter.input_spec(found.trunk)
        if size is not None:
            spec = replace(spec, size=sized(found, size, name)[0].size)
        if batch is not None:
            check_int("batch", batch)
        preparation = Preparation(spec, fit, exact)
        modality = spec.modality if MODALITIES[spec.modality].sampling else None
        dataset = data if isinstance(data, Dataset) else open_dataset(data, labels=None, limit=limit, modality=modality)
        if isinstance(data, Dataset) and limit is not None:
            dataset = open_dataset(data, labels=None, limit=limit)
        device = next(model.parameters()).device.type
        batch = batch or BATCH.get(device, 16)
        graph = {"batch": batch} if kind is Embedder else {}
        make = Factory(kind, {**options, "spec": spec, **graph})
        core = make(model)
        reader = Reader(dataset, preparation, workers, processes=device == "cuda", pin=device == "cuda")
        settings = describe(core, preparation, dataset, batch, str(name))
        return cls(core, make, dataset, reader, batch, settings)

    def run(
        self,
        out: str | Path | None,
        *,
        overwrite: bool = False,
        progress: Callable[[Progress], object] | None = None,
        engine: str = "local",
        address: str | None = None,
        actors: int | None = None,
    ) -> Embeddings:
        """Compute the result, in memory or to a file; see `embed`."""
        check_choice("engine", engine, ENGINES)
        if out is None:
            if engine != "local":
                raise EmbeddingError("engine='ray' writes shards that workers of any machine can reach; pass out=")
            return self._in_memory(progress)
        _, skipped = self.write(
            out, overwrite=overwrite, progress=progress, engine=engine, address=address, actors=actors
        )
        return self._read_csv(str(out), skipped) if str(out).endswith(".csv") else read_embeddings(str(out))

    def write(
        self,
        out: str | Path,
        *,
        overwrite: bool = False,
        progress: Callable[[Progress], object] | None = None,
        engine: str = "local",
        address: str | None = None,
        actors: int | None = None,
    ) -> tuple[int, tuple[Skipped, ...]]:
        """Write the result; return its number of rows, and the samples that could not be read."""
        job = self.job(out)
        with ExitStack() as stack:
            if job.start(overwrite=overwrite):
                return job.result()
            stack.enter_context(job.output.work.lock())
            if engine == "ray":
                from vitrail.embedding.ray_engine import run_shards

                run_shards(self, job, progress, address, actors)
            else:
                pending = job.pending()
                left = sum(len(job.indices(shard)) for shard in pending)
                write_shards(self, job, pending, progress, done=job.total - left)
            rows, skipped = job.finish()
        if not rows:
            raise none_readable(self.dataset, skipped)
        return rows, skipped

    def job(self, out: str | Path) -> Job:
        """Return the job of an output."""
        return Job(Output.of(out), self.settings, self.core.columns, len(self.dataset))

    def _read_csv(self, out: str, skipped: tuple[Skipped, ...]) -> Embeddings:
        """Return the table of a CSV file that this plan wrote; it has no settings of its own."""
        module: Any = import_module("pyarrow.csv")
        storage, name = split(out)
        return Embeddings(module.read_csv(arrow().BufferReader(storage.read(name) or b"")), self.settings, skipped)

    def _in_memory(self, progress: Callable[[Progress], object] | None) -> Embeddings:
        rows = max(self.batch, 1)
        total = len(self.dataset)
        parts = [range(start, min(start + rows, total)) for start in range(0, total, rows)]
        tables, skipped = [], []
        for one in compute(self, parts, progress, 0):
            tables.append(one.table)
            skipped += one.skipped
        table = arrow().concat_tables(tables).combine_chunks()
        if not table.num_rows:
            raise none_readable(self.dataset, skipped)
        return Embeddings(table, self.settings, tuple(skipped))


@dataclass(frozen=True)
class Factory:
    """Makes a core for a model; goes to other processes."""

    kind: type[Any]
    options: dict[str, Any]

    def __call__(self, model: nn.Module) -> Core:
        made: Core = self.kind(model, **self.options)
        return made


@dataclass(frozen=True)
class Computed:
    """Rows of one batch, and the samples of it that could not be read."""

    table: Any
    skipped: list[Skipped]


def compute(
    plan: Plan, parts: Sequence[Sequence[int]], progress: Callable[[Progress], object] | None, done: int
) -> Generator[Computed, None, None]:
    """Yield the rows of each batch of indices, in order; on a GPU, a batch is copied back while the next one runs."""
    core, dataset, reader = plan.core, plan.dataset, plan.reader
    lag = 1 if core.device.type == "cuda" else 0
    report = Progress(done, len(dataset), workers=reader.workers or 1)
    start = time.perf_counter()
    waiting: list[tuple[Any, Any]] = []

    def conclude() -> Computed:
        nonlocal report
        decoded, found = waiting.pop(0)
        begin = time.perf_counter()
        values = {} if found is None else core.finish(found)
        if found is None:
            values = {one.name: np.empty((0, *one.shape), _numpy_kind(one.dtype)) for one in core.columns}
        names = [dataset.name(index) for index in decoded.indices]
        table = make_table(core.columns, decoded.indices, names, values)
        skipped = [(index, dataset.name(index), reason) for index, reason in decoded.faults]
        now = time.perf_counter()
        count = len(decoded.indices) + len(decoded.faults)
        report = replace(
            report,
            done=report.done + count,
            images=report.images + len(decoded.indices),
            skipped=report.skipped + len(decoded.faults),
            seconds=now - start,
            decoding_seconds=report.decoding_seconds + decoded.seconds,
            model_seconds=report.model_seconds + now - begin,
        )
        if progress is not None:
            progress(report)
        return Computed(table, skipped)

    with closing(reader.batches(parts)) as stream:
        while True:
            begin = time.perf_counter()
            decoded = next(stream, None)
            ready = time.perf_counter()
            report = replace(report, waiting_seconds=report.waiting_seconds + ready - begin)
            if decoded is None:
                break
            found = None if decoded.images is None else core.run(core.prepare(decoded.images))
            report = replace(report, model_seconds=report.model_seconds + time.perf_counter() - ready)
            waiting.append((decoded, found))
            if len(waiting) > lag:
                yield conclude()
        while waiting:
            yield conclude()


def write_shards(
    plan: Plan, job: Job, shards: Sequence[int], progress: Callable[[Progress], object] | None = None, done: int = 0
) -> None:
    """Compute some shards and write each when it is complete; files are written while the next one is computed."""
    sizes = [-(-len(job.indices(shard)) // plan.batch) for shard in shards]
    parts = [
        job.indices(shard)[start : start + plan.batch]
        for shard in shards
        for start in range(0, len(job.indices(shard)), plan.batch)
    ]
    with ThreadPoolExecutor(1, "write") as pool, closing(compute(plan, parts, progress, done)) as stream:
        writing: Future[None] | None = None
        for shard, size in zip(shards, sizes, strict=True):
            batches = [next(stream) for _ in range(size)]
            table = arrow().concat_tables([one.table for one in batches]).combine_chunks()
            if writing is not None:
                writing.result()
            writing = pool.submit(job.write, shard, table, [entry for one in batches for entry in one.skipped])
        if writing is not None:
            writing.result()


def describe(core: Core, preparation: Preparation, dataset: Dataset, batch: int, name: str) -> dict[str, Any]:
    """Return the settings of a result: what its values depend on, and the versions that computed them."""
    from vitrail import __version__

    versions = {"vitrail": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "format": FORMAT,
        "kind": core.kind,
        "model": name,
        "weights": weights_hash(core.model),
        "changes": describe_changes(core.model),
        **core.settings,
        "input": preparation.settings,
        "columns": {one.name: {"shape": list(one.shape), "dtype": one.dtype} for one in core.columns},
        "data": {
            "samples": len(dataset),
            "names": hashlib.sha256("\n".join(dataset.names).encode()).hexdigest()[:16],
            "batch": batch,
            "device": core.device.type,
        },
        "versions": versions,
    }


def describe_changes(model: nn.Module) -> dict[str, Any]:
    """Return the changes of a model as plain data; in words where a method of the user's own has no name."""
    try:
        return collect(model, weights=False).label
    except (InvalidOption, UntrainedMethod):
        return {name: repr(handle) for name, handle in handles_of(model).items()}


def none_readable(dataset: Dataset, skipped: Sequence[Skipped]) -> ImageError:
    """Return the error for data of which nothing could be read."""
    return ImageError(f"none of the {len(dataset)} samples could be read. The first: {skipped[0][2]}")


def _numpy_kind(dtype: str) -> Any:
    return object if dtype == "string" else dtype
