"""Checkpoints, written atomically.

A checkpoint is a directory ``step-00001234`` with

    meta.json            plain values: step, running means, best score, data
    state.pt             tensors by name, or ``shards/`` in torch's format for sharded models
    config.json, …       the model, so that a checkpoint is a model directory too; not with shards
    complete.json        size and checksum of every file; written last

It is written under a hidden name, flushed to disk and renamed. Old checkpoints are removed only afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from vitrail._atomic_files import write_bytes
from vitrail._distributed import World
from vitrail.errors import TrainingError, VitrailWarning
from vitrail.models.saving import CONFIG
from vitrail.training.run_directory import LAST, SHARDS

META, STATE, COMPLETE = "meta.json", "state.pt", "complete.json"


class Checkpoints:
    """The checkpoints of a run: writes them, finds the newest complete one, keeps the last few."""

    def __init__(self, folder: Path, keep: int, world: World) -> None:
        self.folder = folder
        self._keep = keep
        self._world = world

    def steps(self) -> list[int]:
        names = [path.name.removeprefix("step-") for path in self.folder.glob("step-*") if path.is_dir()]
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        """Return the directory of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def save(
        self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], model: Callable[[Path], None] | None
    ) -> Path | None:
        """Write a checkpoint, then remove old ones; every rank must call it. ``model`` writes the model to a directory.

        If it cannot be written (a full disk), warn, keep the old ones and return None, so that training continues.
        """
        world, draft = self._world, self.folder / f".draft-{step:08d}"
        stages: list[Callable[[], object]] = [
            lambda: self._begin(draft) if world.is_main else None,
            lambda: self._write(draft, tensors, meta, model),
            lambda: self._finish(draft, step) if world.is_main else None,
        ]
        for stage in stages:  # all ranks stop at the first stage that fails on one
            problem = next(filter(None, world.all_gather(_fault_of(stage))), None)
            if problem is not None:
                break
        else:
            return self.path(step)
        if world.is_main:
            shutil.rmtree(draft, ignore_errors=True)
            have = self.steps()
            kept = f"the checkpoint of step {have[-1]} is kept" if have else "there is no checkpoint yet"
            warnings.warn(
                f"cannot write the checkpoint of step {step} to {self.folder} ({problem}); {kept}, and training "
                "continues. Free some disk space",
                VitrailWarning,
                stacklevel=3,
            )
        return None

    def _begin(self, draft: Path) -> None:
        self.clear()
        draft.mkdir(parents=True)

    def _write(
        self, draft: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], model: Callable[[Path], None] | None
    ) -> None:
        """Write the files of a draft; every rank writes its shards."""
        from torch.distributed.checkpoint.state_dict_saver import save

        sharded = any(isinstance(value, DTensor) for value in tensors.values())
        if sharded:
            save({name: value.detach() for name, value in tensors.items()}, checkpoint_id=draft / SHARDS)
        if not self._world.is_main:
            return
        if not sharded:
            with (draft / STATE).open("wb") as file:
                torch.save({name: value.detach().cpu() for name, value in tensors.items()}, file)
        (draft / META).write_text(json.dumps(dict(meta)), encoding="utf-8")
        if model is not None:
            model(draft)

    def _finish(self, draft: Path, step: int) -> None:
        """Flush, write checksums, rename the draft, and remove old checkpoints."""
        files = [path for path in sorted(draft.rglob("*")) if path.is_file()]
        listed = {str(path.relative_to(draft)): _fingerprint(path, flush=True) for path in files}
        write_bytes(draft / COMPLETE, json.dumps({"step": step, "files": listed}).encode())
        final = self.path(step)
        if final.exists():  # an incomplete one that was skipped
            final.rename(self.folder / f".draft-old-{step:08d}")
        draft.rename(final)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        past = [one for one in self.steps() if one <= step]
        for old in {*self.steps()} - {*past[-self._keep :]}:  # later ones were skipped too
            shutil.rmtree(self.path(old), ignore_errors=True)
        self.clear()

    def newest(self) -> tuple[int, list[str]]:
        """Return the step of the newest complete checkpoint, and why newer ones were skipped.

        Raises:
            TrainingError: there is none.
        """
        skipped: list[str] = []
        for step in reversed(self.steps()):
            problem = find_fault(self.path(step))
            if problem is None:
                return step, skipped
            skipped.append(f"the checkpoint of step {step} is incomplete ({problem})")
        why = f": {'; '.join(skipped)}" if skipped else ""
        last = self.folder.parent / LAST
        kept = f"; the run's last model, {last}, is complete and can be fine-tuned" if (last / CONFIG).is_file() else ""
        raise TrainingError(
            f"{self.folder} has no complete checkpoint to resume from{why}{kept}. Start over with overwrite=True "
            "(--overwrite)"
        )

    def meta(self, step: int) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.path(step) / META).read_text(encoding="utf-8"))
        return values

    @torch.no_grad()
    def load(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy a checkpoint into tensors in place; the world size may differ, the names must not."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        path = self.path(step)
        if (path / SHARDS).is_dir():
            _check_metadata(path / SHARDS / ".metadata")
            reader = FileSystemReader(path / SHARDS)
            _check_names(path / SHARDS, set(reader.read_metadata().state_dict_metadata), tensors)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*single process.*")
                targets = {name: value.detach() for name, value in tensors.items()}
                load(targets, storage_reader=reader, no_dist=not torch.distributed.is_initialized())
            return
        try:
            stored: dict[str, Tensor] = torch.load(path / STATE, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise TrainingError(f"cannot read {path / STATE}: {_reason(error)}") from error
        _check_names(path, set(stored), tensors)
        for name, value in tensors.items():
            source = stored[name]
            if source.shape != value.shape:
                raise TrainingError(f"{path}: {name} has shape {tuple(source.shape)}; expected {tuple(value.shape)}")
            if isinstance(value, DTensor):
                source = distribute_tensor(source.to(value.device), value.device_mesh, value.placements)
            value.copy_(source)

    def clear(self) -> None:
        for draft in self.folder.glob(".draft-*"):
            shutil.rmtree(draft, ignore_errors=True)


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if it is complete."""
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


_METADATA = "torch.distributed.checkpoint."
_PLAIN = {
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _MetadataReader(pickle.Unpickler):
    """Reads what torch writes into the metadata of shards, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.startswith(_METADATA):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:  # nothing that the module imports
                return found
        raise pickle.UnpicklingError(f"{module}.{name}")


def _check_metadata(path: Path) -> None:
    """Raise unless a file holds the metadata of shards alone: torch unpickles it, whatever it holds."""
    try:
        with path.open("rb") as file:
            _MetadataReader(file).load()
    except Exception as error:  # whatever unpickling raises
        raise TrainingError(f"{path} is not metadata of a sharded checkpoint: {_reason(error)}") from error


def _check_names(path: Path, stored: set[str], tensors: Mapping[str, Tensor]) -> None:
    differences = {"missing": set(tensors) - stored, "unexpected": stored - set(tensors)}
    if any(differences.values()):
        listed = "; ".join(f"{kind} {', '.join(sorted(names)[:5]) or 'nothing'}" for kind, names in differences.items())
        raise TrainingError(
            f"{path} is not a checkpoint of this run: {listed}. Resume with the options that the run was started with"
        )


def _fingerprint(path: Path, flush: bool = False) -> tuple[int, str]:
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _fault_of(work: Callable[[], object]) -> str | None:
    try:
        work()
    except Exception as error:  # torch raises RuntimeError and others for a full disk
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return " ".join((text or str(error) or type(error).__name__).split())[:200]
