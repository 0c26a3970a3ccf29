"""``vitrail.export.export``: trace a model, write it, verify it."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import vitrail
from vitrail._arguments import checked
from vitrail._atomic_files import rename_all
from vitrail._checks import as_path, is_int, is_number
from vitrail.adapters import Found, input_spec
from vitrail.adapters.registry import declared_spec
from vitrail.errors import ExportError, InvalidOption, NotApplied, UnsupportedModel
from vitrail.export._trace import PlainModel, explained, trace
from vitrail.export._verify import DRAWS, TOLERANCES, Comparison, check_tokens, compare
from vitrail.export.formats import INPUT, find_format
from vitrail.runtime.carry import planned
from vitrail.runtime.checks import refuse_meta
from vitrail.surgery import Merging

Batch = int | Literal["dynamic"]
Shape = tuple[int | str, ...]
"""A shape; free dimensions have names."""


@dataclass(frozen=True)
class ExportResult:
    """An exported file, and how it was verified.

    Attributes:
        path: the file to load.
        files: all files that belong to it; weights of 2 GB and more are in a second one.
        format: ``"onnx"`` or ``"pt2"``.
        opset: ONNX opset; None for other formats.
        dtype: dtype of weights and input.
        batch: ``"dynamic"``, or the fixed batch size.
        input: shape of the input ``images``.
        outputs: shapes of the outputs by name.
        tokens: tokens that leave each block, verified in the file (inside windows, that its MLP works on); None for an
            unmerged model.
        comparisons: distance from the model's outputs, for each batch size tried.
        tolerance: upper bound for ``max_rel``.
    """

    path: Path
    files: tuple[Path, ...]
    format: str
    opset: int | None
    dtype: torch.dtype
    batch: Batch
    input: Shape
    outputs: dict[str, Shape]
    tokens: list[int] | None
    comparisons: tuple[Comparison, ...]
    tolerance: float

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.stat().st_size for file in self.files)


@checked
@torch.no_grad()
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    example: Tensor | None = None,
    batch: Batch = "dynamic",
    dtype: torch.dtype | None = None,
    opset: int | None = None,
    tolerance: float | None = None,
) -> ExportResult:
    """Export a model, merged or not, to a file that runs without Vitrail.

    The file is loaded and compared with the model on random images, one at a time and several at once; the file of a
    merged model must have as few tokens in each block as the model. If anything fails, no file is left, and an
    existing one stays unchanged. The model itself is not changed.

    Heads of added tokens are further outputs, by the names of their tokens.

    >>> vitrail.merge(model, r=16)          # doctest: +SKIP
    >>> export(model, "model.onnx")         # doctest: +SKIP

    Args:
        model: a model in eval mode that takes one tensor.
        path: the file; ``.onnx`` or ``.pt2``.
        format: ``"onnx"`` or ``"pt2"``; by default from the file name.
        example: an input (B, 3, H, W) of the size to export for; by default the model's own size.
        batch: ``"dynamic"`` for any batch size, or a fixed one.
        dtype: dtype of the file; by default the model's own.
        opset: ONNX opset, 20 by default.
        tolerance: largest error relative to the largest value of an output; by default 1e-4, in float16 1e-2 and in
            bfloat16 3e-2.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a torch.nn.Module; got {type(model).__name__}")
    path = as_path("path", path)
    kind = find_format(path, format)
    if batch != "dynamic" and not is_int(batch, 1):
        raise InvalidOption(f"batch must be 'dynamic' or an integer of at least 1; got {batch!r}")
    model = _prepare(model, dtype)
    dtype = next((value.dtype for value in model.parameters() if value.is_floating_point()), torch.float32)
    kind.check(dtype, opset)
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    if not is_number(tolerance) or tolerance <= 0:
        raise InvalidOption(f"tolerance must be a relative error above 0; got {tolerance!r}")
    try:
        merging = Merging.of(model)
    except NotApplied:
        merging = None
    _check_protect({} if merging is None else merging.config, batch)
    images = _example(model, example, dtype, 2 if batch == "dynamic" else batch)
    image_shape, free = tuple(images.shape[1:]), "batch" if batch == "dynamic" else batch

    plain = PlainModel(model)
    tokens: list[int] | None = None
    fed: list[set[int]] = []
    with nullcontext() if merging is None else merging.track() as tracked:
        outputs = _run(plain, images)
    per_layer: tuple[int, ...] = ()
    if tracked is not None:
        plan, layout = tracked.plan, tracked.layout
        per_layer = planned(plan, layout)
        tokens, fed = plan.lengths(layout, per_layer), plan.fed(layout, per_layer)
    draws = DRAWS if any(per_layer) else 1
    with _staging(path) as directory:
        program = trace(plain, torch.zeros_like(images), batch == "dynamic")
        metadata = _metadata(plain, outputs, (free, *image_shape), dtype)
        if merging is not None:
            metadata |= {"merging": merging.config, "tokens": tokens}
        staged = directory / path.name
        kind.write(program, tuple(outputs), metadata, staged, opset)
        file = kind.load(staged, tuple(outputs))
        if merging is not None:
            check_tokens(file, _readers(plain, merging.found), fed, plain.added.tokens.counts() if plain.added else ())
        comparisons = tuple(
            compare(partial(_run, plain), file, (size, *image_shape), dtype, tolerance, draws)
            for size in ((1, 3) if batch == "dynamic" else (batch,))
        )
        reached = file.opset
        del file  # closes it
        written = sorted(directory.iterdir(), key=lambda one: one.name == path.name)  # ``path`` last
        targets = {one: path.with_name(one.name) for one in written}
        rename_all(targets)
    return ExportResult(
        path=path,
        files=tuple(reversed(targets.values())),
        format=kind.name,
        opset=reached,
        dtype=dtype,
        batch=batch,
        input=(free, *image_shape),
        outputs={name: (free, *value.shape[1:]) for name, value in outputs.items()},
        tokens=tokens,
        comparisons=comparisons,
        tolerance=float(tolerance),
    )


def _readers(plain: PlainModel, found: Found) -> list[list[str]]:
    """Return, for each block, the names of modules that run on the tokens that leave it.

    They are its MLP, or the next block's attention where attention and MLP of a block read the same tokens.
    """
    names = {part: name for name, part in plain.named_modules()}
    pairs = list(zip(found.blocks, found.block_adapters, strict=True))
    following = [*(parts.attend_parts(block) for block, parts in pairs[1:]), ()]
    readers = [parts.feed_parts(block) or after for (block, parts), after in zip(pairs, following, strict=True)]
    return [[names[part] for part in one] for one in readers]


def _metadata(plain: PlainModel, outputs: dict[str, Tensor], shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Return what a user of the file needs to know: input, preprocessing, and the class names of each output."""
    found: dict[str, Any] = {
        "vitrail": vitrail.__version__,
        "input": INPUT,
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "classes": plain.class_names(outputs),
    }
    spec = declared_spec(plain.model)
    if spec is not None:
        found |= {"modality": spec.modality, "scale": spec.scale, "mean": spec.mean, "std": spec.std}
    return found


def _prepare(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return the model on the CPU in a dtype: itself if it already is, else a copy."""
    if type(model).__name__ == "OptimizedModule":  # from torch.compile(model)
        model = model._orig_mod  # type: ignore[assignment]
    training = [name or type(model).__name__ for name, part in model.named_modules() if part.training]
    if training:
        raise ExportError(
            f"{len(training)} modules are in training mode ({training[0]}, for example); call model.eval() first"
        )
    refuse_meta(model)
    values = [*model.parameters(), *model.buffers()]
    own = next((value.dtype for value in values if value.is_floating_point()), torch.float32)
    if (dtype or own) not in TOLERANCES:
        known = ", ".join(map(str, TOLERANCES))
        raise InvalidOption(f"dtype is {dtype or own}; expected one of {known}, such as dtype=torch.float32")
    elsewhere = any(value.device.type != "cpu" for value in values)
    other = dtype is not None and any(value.is_floating_point() and value.dtype != dtype for value in values)
    return copy.deepcopy(model).to("cpu", dtype) if elsewhere or other else model


def _check_protect(config: dict[str, Any], batch: Batch) -> None:
    protect = config.get("protect")
    if protect is None:
        return
    if config["order"] == "original":
        raise ExportError(
            "with protect= and order='original' the number of tokens depends on the images, and a file has fixed "
            "shapes; merge with order='paper' to export"
        )
    if len(protect) not in (1, batch):
        raise ExportError(
            f"protect= has masks for {len(protect)} images, but batch is {batch!r}; use one mask for all images, or "
            f"batch={len(protect)}"
        )


def _example(model: nn.Module, example: Tensor | None, dtype: torch.dtype, count: int) -> Tensor:
    """Return a batch of ``count`` inputs: those of the example, repeated, or random ones of the model's own size."""
    if example is None:
        try:
            shape = input_spec(model).shape
        except UnsupportedModel as error:
            raise ExportError(f"the input size of {type(model).__name__} is unknown; pass example=") from error
        return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if not isinstance(example, Tensor) or not example.is_floating_point() or example.dim() < 2 or not len(example):
        got = f"{example.dtype} of shape {tuple(example.shape)}" if isinstance(example, Tensor) else type(example)
        raise InvalidOption(f"example must be a floating-point batch (B, 3, H, W); got {got}")
    return example.detach().to("cpu", dtype)[torch.arange(count) % len(example)]


def _run(plain: PlainModel, images: Tensor) -> dict[str, Tensor]:
    shape = tuple(images.shape)
    with explained(f"the model itself fails for an input of shape {shape}", "; choose an input size that it accepts"):
        return plain.outputs(images)


@contextmanager
def _staging(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``path``, removed on exit; raise ``ExportError`` if nothing can be written."""
    if path.is_dir():
        raise ExportError(f"{path} is a directory; expected a file name")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent) as directory:
            yield Path(directory)
    except OSError as error:
        raise ExportError(
            f"{path} could not be written ({error.strerror or error}); choose a writable directory with enough space"
        ) from error
