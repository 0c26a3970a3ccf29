"""Shards on a Ray cluster: actors that each hold the model, in a pool of Ray Data's ``map_batches``.

A task is one shard: its actor opens the data itself, and writes the shard where the result will be, or returns what
adds up over shards. A task whose worker died runs again on another one; a shard that is complete by then is left as it
is, so that nothing is lost and nothing is there twice.
"""

from __future__ import annotations

import copy
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from vitrail._checks import check_int
from vitrail._distributed import cpu_count
from vitrail.data.dataset import Dataset
from vitrail.embedding.embedder import Core
from vitrail.embedding.output import Job
from vitrail.embedding.reading import Preparation, Reader
from vitrail.embedding.run import Plan, Progress, write_shards
from vitrail.errors import EmbeddingError, VitrailError

CORES = 2
"""Cores of an actor on a machine without GPUs."""


class Task(Protocol):
    """Work on shards, in a process of its own: made once for each actor, called with the number of a shard."""

    def __call__(self, shard: int) -> Any:
        """Compute a shard, and return what the driver needs of it, as plain data or tensors on the CPU."""


def map_shards(
    make: Callable[[], Task], shards: Sequence[int], *, address: str | None = None, actors: int | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield number and result of each shard, as they are done, each once.

    Args:
        make: makes the task in an actor; goes there once for each machine.
        address: a Ray cluster (``auto`` for the one of this machine); by default the one that this process is connected
            to, else a new one on this machine, which ends with the work.
        actors: number of actors; by default one for each GPU of the cluster, or for each two cores.
    """
    if actors is not None:
        check_int("actors", actors)
    if not shards:
        return
    with connected(address) as ray:
        data: Any = import_module("ray.data")
        context = data.DataContext.get_current()
        shown = context.enable_progress_bars
        context.enable_progress_bars = False
        present = ray.cluster_resources()
        gpus, cores = int(present.get("GPU", 0)), int(present.get("CPU", 1))
        count = min(actors or gpus or max(cores // CORES, 1), len(shards))
        stored = ray.put(make)  # kept alive until the end: actors that are started again read it
        each = {"num_gpus": 1} if gpus else {"num_cpus": min(CORES, max(cores // count, 1))}
        rows = data.from_items([{"shard": int(shard)} for shard in shards], override_num_blocks=len(shards))
        done = rows.map_batches(
            Actor,
            batch_size=1,
            compute=data.ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=1),
            fn_constructor_kwargs={"make": stored, "threads": None if gpus else each["num_cpus"]},
            **each,
        )
        try:
            for row in done.iter_rows():
                result = pickle.loads(row["result"])
                if isinstance(result, VitrailError):
                    raise result
                yield int(row["shard"]), result
        except ray.exceptions.RayError as error:
            raise EmbeddingError(
                f"the Ray cluster gave up ({' '.join(str(error).split())[:300]}); finished shards are kept: run the "
                "same command again"
            ) from error
        finally:
            context.enable_progress_bars = shown


class Actor:
    """A worker of the pool."""

    def __init__(self, make: Any, threads: int | None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        made = make if callable(make) else import_module("ray").get(make)
        self._task: Task = made()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Compute the shard of one row."""
        (shard,) = batch["shard"]
        try:
            result = self._task(int(shard))
        except VitrailError as error:  # for the driver to raise; anything else is Ray's to report
            result = error
        return {"shard": batch["shard"], "result": np.array([pickle.dumps(result)], dtype=object)}


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Yield the library, connected to a cluster; one that was started here is stopped at the end."""
    try:
        ray: Any = import_module("ray")
        import_module("ray.data")
    except ImportError as error:
        raise EmbeddingError("engine='ray' needs Ray; pip install vitrail[ray]") from error
    started = False
    if not ray.is_initialized():
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        if address is None:
            options |= {"include_dashboard": False, "num_cpus": cpu_count()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Ray, about its next version
                ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EmbeddingError(
                f"there is no Ray cluster at {address or 'this machine'} ({' '.join(str(error).split())[:200]}); start "
                "one with `ray start --head`, and name its address, such as auto or HOST:6379"
            ) from error
        started = True
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


def on_device(model: nn.Module) -> nn.Module:
    """Return a model on the GPU of this process, if it has one."""
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def portable(model: nn.Module) -> nn.Module:
    """Return a model that other processes can be given: on the CPU."""
    device = next(model.parameters()).device
    return model if device.type == "cpu" else copy.deepcopy(model).cpu()


@dataclass(frozen=True)
class ShardWriter:
    """Makes the task of embedding or predicting: it writes shards, and returns how many samples they have."""

    make: Callable[[nn.Module], Core]
    model: nn.Module
    dataset: Dataset
    prepare: Preparation
    batch: int
    job: Job
    workers: int | None

    def __call__(self) -> Task:
        model = on_device(self.model)
        gpu = next(model.parameters()).is_cuda
        core = self.make(model)
        reader = Reader(self.dataset, self.prepare, self.workers, processes=gpu, pin=gpu)
        plan = Plan(core, self.make, self.dataset, reader, self.batch, self.job.settings)

        def work(shard: int) -> Progress:
            states = [Progress(0, 0)]
            if self.job.marker(shard) is None:  # not written by a worker that died before it could say so
                write_shards(plan, self.job, [shard], states.append)
            return states[-1]

        return work


def run_shards(
    plan: Plan,
    job: Job,
    progress: Callable[[Progress], object] | None,
    address: str | None,
    actors: int | None,
) -> None:
    """Compute the pending shards of a job on a cluster; see `map_shards`."""
    pending = job.pending()
    state = Progress(
        job.total - sum(len(job.indices(shard)) for shard in pending), job.total, workers=plan.reader.workers or 1
    )
    make = ShardWriter(
        plan.make,
        portable(plan.core.model),
        plan.dataset.bare(),
        plan.reader.prepare,
        plan.batch,
        job,
        plan.reader.workers,
    )
    start = time.perf_counter()
    for shard, one in map_shards(make, pending, address=address, actors=actors):
        state = replace(
            state,
            done=state.done + len(job.indices(shard)),
            images=state.images + one.images,
            skipped=state.skipped + one.skipped,
            seconds=time.perf_counter() - start,
            decoding_seconds=state.decoding_seconds + one.decoding_seconds,
            model_seconds=state.model_seconds + one.model_seconds,
            waiting_seconds=state.waiting_seconds + one.waiting_seconds,
        )
        if progress is not None:
            progress(state)
