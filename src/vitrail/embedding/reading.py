"""Read and decode samples ahead of the model: by threads on a CPU, by worker processes for a GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from vitrail._checks import check_choice, check_int
from vitrail._distributed import cpu_count
from vitrail.data.dataset import Dataset
from vitrail.data.decode import as_image, center_crop, scaled_decoding
from vitrail.data.media.recording import Recording
from vitrail.data.sample import Sample
from vitrail.data.spec import InputSpec
from vitrail.errors import EmbeddingError, ImageError, UnsupportedInput

Fit = Literal["crop", "stretch"]
FITS = ("crop", "stretch")
MOST_WORKERS = 32
AHEAD = 2
"""Batches that are read ahead, of each worker process; of threads altogether."""


@dataclass(frozen=True)
class Preparation:
    """How samples become inputs: part of the settings of a result.

    Attributes:
        spec: what the model takes.
        fit: ``crop``: the largest centered part of an image that has the input's aspect ratio, as in training and
            evaluation; ``stretch``: the whole image.
        exact: whether JPEGs are decoded at full size even where a part of it would do.
    """

    spec: InputSpec
    fit: Fit = "crop"
    exact: bool = False

    def __post_init__(self) -> None:
        check_choice("fit", self.fit, FITS)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides about the inputs, as plain data."""
        spec = self.spec
        about = {"modality": spec.modality, "size": list(spec.size), "mean": list(spec.mean), "std": list(spec.std)}
        if spec.modality != "image":
            return about
        return {**about, "fit": self.fit, "decoding": "exact" if self.exact else "scaled"}

    def __call__(self, read: Callable[[], Sample]) -> Tensor:
        """Decode a sample: an image as (3, H, W) in bytes, anything else normalized in float32."""
        spec = self.spec
        if spec.modality != "image":
            sample = read()
            if isinstance(sample.image, Recording):
                return sample.image.tensor(spec)
            if not isinstance(sample.image, Tensor) or len(sample.image) != len(spec.mean):
                raise UnsupportedInput(f"{sample.name}: the model takes {spec.modality} of {len(spec.mean)} channels")
            return spec.normalize(sample.image[None])[0]
        height, width = spec.size
        with scaled_decoding(None if self.exact else (height, width)):
            sample = read()
        if isinstance(sample.image, Recording):
            raise UnsupportedInput(f"{sample.name} is a {sample.image.noun}, and the model takes images")
        image = sample.image if isinstance(sample.image, Image.Image) else as_image(sample.image, sample.name)
        if self.fit == "crop":
            image = center_crop(image, (height, width))
        else:
            image = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class Decoded(NamedTuple):
    """A batch in memory.

    Attributes:
        images: inputs (b, …); None if no sample of the batch could be read.
        indices: their positions in the dataset.
        faults: position and reason of each sample that could not be read.
        seconds: time that reading and decoding took, summed over threads.
    """

    images: Tensor | None
    indices: tuple[int, ...]
    faults: tuple[tuple[int, str], ...]
    seconds: float


@dataclass(eq=False)
class Reader:
    """Reads batches of a dataset in order, some ahead.

    Attributes:
        workers: number of threads or processes that decode; by default one for each core, at most 32.
        processes: whether they are processes: Python's lock allows threads a few thousand images/s.
        pin: whether batches are in pinned memory, from which a GPU copies while it computes.
    """

    dataset: Dataset
    prepare: Preparation
    workers: int | None = None
    processes: bool = False
    pin: bool = False

    def __post_init__(self) -> None:
        if self.workers is None:
            self.workers = min(cpu_count(), MOST_WORKERS)
        check_int("workers", self.workers, 0)

    def batches(self, parts: Sequence[Sequence[int]]) -> Generator[Decoded, None, None]:
        """Yield the samples with these indices, batch by batch."""
        if not self.workers:
            return (self._read(indices) for indices in parts)
        return self._by_processes(parts) if self.processes else self._by_threads(parts)

    def _read(self, indices: Sequence[int]) -> Decoded:
        return _Worker(self.dataset, self.prepare)[indices]

    def _by_threads(self, parts: Sequence[Sequence[int]]) -> Generator[Decoded, None, None]:
        with ExitStack() as stack:
            pool = ThreadPoolExecutor(self.workers, "decode")
            stack.callback(pool.shutdown, cancel_futures=True)
            waiting: deque[tuple[Sequence[int], list[Future[Any]]]] = deque()
            ahead = iter(parts)

            def submit() -> None:
                indices = next(ahead, None)
                if indices is not None:
                    waiting.append((indices, [pool.submit(*self._task(index)) for index in indices]))

            for _ in range(AHEAD):
                submit()
            while waiting:
                indices, futures = waiting.popleft()
                results = [future.result() for future in futures]
                submit()
                yield _collate(indices, results)

    def _task(self, index: int) -> tuple[Any, ...]:
        """Read the bytes of a sample; return what a thread has to do."""
        start = time.perf_counter()
        try:
            read = self.dataset.fetch_sample(index)
        except ImageError as error:
            return _failed, str(error), time.perf_counter() - start
        return copy_context().run, _decode, self.prepare, read, time.perf_counter() - start

    def _by_processes(self, parts: Sequence[Sequence[int]]) -> Generator[Decoded, None, None]:
        clean = "forkserver" if "forkserver" in torch.multiprocessing.get_all_start_methods() else "spawn"
        loader: Any = DataLoader(
            _Worker(self.dataset.bare(), self.prepare),  # type: ignore[arg-type]
            batch_size=None,
            sampler=parts,
            num_workers=self.workers or 0,
            prefetch_factor=AHEAD,
            multiprocessing_context=clean,
            pin_memory=self.pin,
        )
        try:
            yield from loader
        except (RuntimeError, EOFError, OSError) as error:
            raise EmbeddingError(
                f"a worker that decodes ended ({' '.join(str(error).split())[:200] or type(error).__name__}); if "
                "memory is short, use fewer workers or a smaller batch"
            ) from error


@dataclass(frozen=True)
class _Worker:
    """Reads and decodes one batch after the other; runs in a worker process."""

    dataset: Dataset
    prepare: Preparation

    def __getitem__(self, indices: Sequence[int]) -> Decoded:
        results = []
        for index in indices:
            start = time.perf_counter()
            try:
                read = self.dataset.fetch_sample(index)
            except ImageError as error:
                results.append(_failed(str(error), time.perf_counter() - start))
                continue
            results.append(_decode(self.prepare, read, time.perf_counter() - start))
        return _collate(indices, results)


_Result = tuple[Tensor | str, float]
"""An input, or the reason why there is none, and the seconds that it took."""


def _failed(reason: str, seconds: float) -> _Result:
    return reason, seconds


def _decode(prepare: Preparation, read: Callable[[], Sample], seconds: float) -> _Result:
    start = time.perf_counter()
    try:
        found: Tensor | str = prepare(read)
    except ImageError as error:
        found = str(error)
    return found, seconds + time.perf_counter() - start


def _collate(indices: Sequence[int], results: Sequence[_Result]) -> Decoded:
    pairs = list(zip(indices, (one for one, _ in results), strict=True))
    good = [(index, one) for index, one in pairs if isinstance(one, Tensor)]
    faults = tuple((index, one) for index, one in pairs if isinstance(one, str))
    images = torch.stack([one for _, one in good]) if good else None
    return Decoded(images, tuple(index for index, _ in good), faults, sum(seconds for _, seconds in results))
