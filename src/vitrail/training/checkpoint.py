"""Checkpoints: everything to go on from, whole or not at all.

A checkpoint is a folder ``step-00001234`` with

    meta.json            plain values: the step, what was summed up so far, the best score, how it was trained
    state.pt             tensors by name, or, where processes hold parts of them, ``shards/`` by torch's own format
    config.json, …       the model as it is used, so that a checkpoint is a model folder, too; not beside shards
    complete.json        written last: the size and checksum of every file

It is written under a hidden name, flushed to the disk and renamed. So what has its name is complete, unless the disk
lost a part of it later, which the checksums tell. The previous one is removed only when the next one is there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from vitrail._distributed import Crew
from vitrail.errors import TrainingError, VitrailWarning
from vitrail.models.saving import CONFIG
from vitrail.training.run_directory import LAST, SHARDS

META, STATE, COMPLETE = "meta.json", "state.pt", "complete.json"


class Checkpoints:
    """The checkpoints of one run: writing them, finding the newest good one, keeping the last few."""

    def __init__(self, folder: Path, keep: int, crew: Crew) -> None:
        self.folder = folder
        self._keep = keep
        self._crew = crew

    def steps(self) -> list[int]:
        """Give the steps of all checkpoints that have their name, in order."""
        if not self.folder.is_dir():
            return []
        names = [path.name.removeprefix("step-") for path in self.folder.glob("step-*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        """Say where the checkpoint of a step is."""
        return self.folder / f"step-{step:08d}"

    def save(
        self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], model: Callable[[Path], None] | None
    ) -> Path | None:
        """Write a checkpoint, then remove old ones; all processes call it. ``model`` writes the model into a folder.

        Where it cannot be written (a full disk), a warning says so, nothing that was there is touched, and None is
        given: training can go on and try again later.
        """
        draft = self.folder / f".draft-{step:08d}"
        problem = None
        if self._crew.first:
            try:
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
            except OSError as error:
                problem = _reason(error)
        problem = self._crew.share(problem)
        if problem is None:
            found = self._crew.gather(self._write(draft, tensors, meta, model))
            problem = next((one for one in found if one is not None), None)
        if problem is None and self._crew.first:
            problem = self._finish(draft, step)
        problem = self._crew.share(problem)
        if problem:
            if self._crew.first:
                shutil.rmtree(draft, ignore_errors=True)
                have = self.steps()
                kept = f"the one of step {have[-1]} is untouched" if have else "there is none yet"
                warnings.warn(
                    f"the checkpoint of step {step} could not be written to {self.folder} ({problem}); {kept}, and "
                    "training goes on. Make room there",
                    VitrailWarning,
                    stacklevel=3,
                )
            return None
        return self.path(step)

    def _write(
        self, draft: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], model: Callable[[Path], None] | None
    ) -> str | None:
        """Write the files of a draft; every process writes its own part where tensors are sharded."""
        sharded = any(isinstance(value, DTensor) for value in tensors.values())
        try:
            if sharded:
                _save_shards(draft / SHARDS, tensors)
            if self._crew.first:
                if not sharded:
                    with (draft / STATE).open("wb") as file:
                        torch.save({name: value.detach().cpu() for name, value in tensors.items()}, file)
                (draft / META).write_text(json.dumps(dict(meta)), encoding="utf-8")
                if model is not None:
                    model(draft)
        except Exception as error:  # torch's writers raise RuntimeError and their own kinds for a full disk
            return _reason(error)
        return None

    def _finish(self, draft: Path, step: int) -> str | None:
        """Flush, list what there is, give the folder its name, and remove what is no longer kept."""
        try:
            files = [path for path in sorted(draft.rglob("*")) if path.is_file()]
            listed = {str(path.relative_to(draft)): _fingerprint(path, flush=True) for path in files}
            with (draft / COMPLETE).open("w", encoding="utf-8") as file:
                json.dump({"step": step, "files": listed}, file)
                file.flush()
                os.fsync(file.fileno())
            final = self.path(step)
            if final.exists():  # a damaged one that was passed over
                final.rename(self.folder / f".draft-old-{step:08d}")
            draft.rename(final)
            _flush_folder(self.folder)
        except OSError as error:
            return _reason(error)
        past = [one for one in self.steps() if one <= step]
        for old in {*self.steps()} - {*past[-self._keep :]}:  # later ones were passed over, too
            shutil.rmtree(self.path(old), ignore_errors=True)
        self.clear()
        return None

    def newest(self) -> tuple[int, list[str]]:
        """Find the newest complete checkpoint; give its step and why newer ones were passed over.

        Raises:
            TrainingError: there is none.
        """
        passed: list[str] = []
        for step in reversed(self.steps()):
            problem = fault(self.path(step))
            if problem is None:
                return step, passed
            passed.append(f"the checkpoint of step {step} is not complete ({problem})")
        why = f": {'; '.join(passed)}" if passed else ""
        last, kept = self.folder.parent / LAST, ""
        if (last / CONFIG).is_file():
            kept = f"; the run's last model is complete, in {last}, and another run can begin from it"
        raise TrainingError(
            f"{self.folder} has no complete checkpoint to go on from{why}{kept}. Start anew by overwrite=True "
            "(--overwrite)"
        )

    def meta(self, step: int) -> dict[str, Any]:
        """Read the plain values of a checkpoint."""
        values: dict[str, Any] = json.loads((self.path(step) / META).read_text(encoding="utf-8"))
        return values

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place with those of a checkpoint, however many processes wrote it; names must agree."""
        load_tensors(self.path(step), tensors)

    def clear(self) -> None:
        """Remove drafts that a crash left behind."""
        for draft in self.folder.glob(".draft-*"):
            shutil.rmtree(draft, ignore_errors=True)


def fault(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; None where it is complete."""
    try:
        listed = json.loads((path / COMPLETE).read_text(encoding="utf-8"))["files"]
        for name, (size, digest) in listed.items():
            if (path / name).stat().st_size != size:
                return f"{name} has {(path / name).stat().st_size} bytes, expected {size}"
            if _fingerprint(path / name)[1] != digest:
                return f"{name} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return _reason(error)
    return None


def load_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors in place from a checkpoint's folder."""
    if (path / SHARDS).is_dir():
        _load_shards(path / SHARDS, tensors)
        return
    try:
        stored: dict[str, Tensor] = torch.load(path / STATE, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise TrainingError(f"{path / STATE} could not be read: {_reason(error)}") from error
    _check_names(path, set(stored), tensors)
    with torch.no_grad():
        for name, value in tensors.items():
            source = stored[name]
            if source.shape != value.shape:
                raise TrainingError(f"{path}: {name} is {tuple(source.shape)}; this run has {tuple(value.shape)}")
            if isinstance(value, DTensor):
                source = distribute_tensor(source.to(value.device), value.device_mesh, value.placements)
            value.copy_(source)


def _save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({name: value.detach() for name, value in tensors.items()}, checkpoint_id=folder)


def _load_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    _check_names(folder, set(reader.read_metadata().state_dict_metadata), tensors)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")  # that is what is asked for
        targets = {name: value.detach() for name, value in tensors.items()}
        load(targets, storage_reader=reader, no_dist=not dist.is_initialized())


def _check_names(path: Path, stored: set[str], tensors: Mapping[str, Tensor]) -> None:
    missing, extra = sorted(set(tensors) - stored), sorted(stored - set(tensors))
    if missing or extra:
        raise TrainingError(
            f"{path} is of another run: missing there {', '.join(missing[:5]) or 'nothing'}"
            f"{' …' if len(missing) > 5 else ''}; not known here {', '.join(extra[:5]) or 'nothing'}"
            f"{' …' if len(extra) > 5 else ''}. Resume with the options that it was started with"
        )


def _fingerprint(path: Path, flush: bool = False) -> tuple[int, str]:
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: Exception) -> str:
    told = error.strerror if isinstance(error, OSError) else None
    return " ".join((told or str(error) or type(error).__name__).split())[:200]
