"""``vitrail.export.export``: a model goes in, a file that was checked comes out."""

from __future__ import annotations

import copy
import os
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.adapters import Found, find
from vitrail.errors import ExportError, InvalidOption, NotApplied, UnsupportedModel, VitrailError
from vitrail.export.base import INPUT, Batch, ExportResult, Format, Shape, Traced, first_line
from vitrail.export.checking import DRAWS, TOLERANCES, compare, count_tokens
from vitrail.export.files import publish, workshop
from vitrail.export.onnx import Onnx
from vitrail.export.program import Plain, heeding_interrupts, trace
from vitrail.export.pt2 import Pt2
from vitrail.surgery import Merging

FORMATS: dict[str, Format] = {kind.name: kind for kind in (Onnx(), Pt2())}
"""Formats by name."""


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
    """Write a model, merged or not, to a file that runs without Vitrail.

    The file is read back and compared with the model on random pictures, one at a time and several at once; a merged
    model's file must have as few tokens in each block as the model. If anything is wrong, no file is left, and one
    that was there before is untouched. The model itself is not changed.

    >>> vitrail.merge(model, r=16)          # doctest: +SKIP
    >>> export(model, "model.onnx")         # doctest: +SKIP

    Args:
        model: a model in eval mode that takes one tensor.
        path: the file; ``.onnx`` or ``.pt2``.
        format: ``"onnx"`` or ``"pt2"``, if not left to the file's name.
        example: an input (B, 3, H, W) of the size that the file is to take; the model's own size by default.
        batch: ``"dynamic"`` for any number of pictures at a time, or the only number.
        dtype: precision of the file; the model's own by default.
        opset: version of ONNX's operators, 20 by default.
        tolerance: largest error relative to the largest value of an output; by default 1e-4, in float16 1e-2 and in
            bfloat16 3e-2.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a torch.nn.Module; got {type(model).__name__}")
    path, kind = check_path(path, format)
    _check_batch(batch)
    model = _ready(model, dtype)
    precision = _precision(model, example)
    kind.check(precision, opset)
    limit = _tolerance(tolerance, precision)
    merging = _merging(model)
    _check_merging(merging, batch)
    images = _images(model, merging, example, precision, 2 if batch == "dynamic" else batch)

    plain = Plain(model)
    sizes = (1, 3) if batch == "dynamic" else (batch,)
    expected, outputs = _first_run(plain, merging, images)
    merges = expected is not None and len(set(expected)) > 1
    found = None if merging is None else merging.found
    free: Shape = (batch if isinstance(batch, int) else "batch",)

    with workshop(path) as folder, heeding_interrupts():
        program = trace(plain, torch.zeros_like(images), batch == "dynamic")
        draft = folder / path.name
        notes = _notes(merging, (*free, *images.shape[1:]), expected)
        kind.write(Traced(program, tuple(outputs), notes), draft, opset)
        written = kind.read(draft, tuple(outputs))
        tokens = None if found is None else count_tokens(written, _feeds(plain, found))
        if expected is not None and tokens != expected[1:]:
            raise ExportError(
                f"the exported model does not merge as the model does: {tokens} tokens leave its blocks, expected "
                f"{expected[1:]}. Nothing was written"
            )
        draws = DRAWS if merges else 1
        shape = images.shape[1:]
        comparisons = tuple(
            compare(partial(_run, plain), written, (size, *shape), precision, limit, draws) for size in sizes
        )
        reached = written.opset
        del written  # closes the file
        files = publish(folder, path)
    return ExportResult(
        path=path,
        files=files,
        format=kind.name,
        opset=reached,
        dtype=precision,
        batch=batch,
        input=(*free, *images.shape[1:]),
        outputs={name: (*free, *value.shape[1:]) for name, value in outputs.items()},
        tokens=tokens,
        comparisons=comparisons,
        tolerance=limit,
    )


def check_path(path: str | os.PathLike[str], format: str | None = None) -> tuple[Path, Format]:
    """Check where a file is to go, and find its format; quick, so that mistakes are found before a model is built."""
    path = Path(path)
    names = " or ".join(repr(name) for name in FORMATS)
    if format is not None and format not in FORMATS:
        raise InvalidOption(f"format is {names}; got {format!r}")
    by_suffix = next((kind for kind in FORMATS.values() if kind.suffix == path.suffix.lower()), None)
    if by_suffix is None or format not in (None, by_suffix.name):
        wanted = FORMATS[format].suffix if format else " or ".join(kind.suffix for kind in FORMATS.values())
        raise InvalidOption(f"{path}: expected a file name that ends in {wanted}")
    if path.is_dir():
        raise ExportError(f"{path} is a folder; expected the name of a file")
    if not path.parent.is_dir():
        raise ExportError(f"{path}: there is no folder {path.parent}; make it first, or choose another file")
    with workshop(path):  # raises where nothing can be written
        return path, by_suffix


def _check_batch(batch: Any) -> None:
    if batch != "dynamic" and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise InvalidOption(f"batch is 'dynamic', or a number of pictures of 1 or more; got {batch!r}")


def _ready(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Give a model on the CPU in the wanted precision: itself where that is what it is, else a copy."""
    if type(model).__name__ == "OptimizedModule":  # what torch.compile(model) gives; the model is inside
        model = model._orig_mod  # type: ignore[assignment]
    training = [name or type(model).__name__ for name, part in model.named_modules() if part.training]
    if training:
        raise ExportError(
            f"{len(training)} modules are in training mode ({training[0]}, for example), where dropout and the like "
            "differ from call to call; call model.eval() first"
        )
    if dtype is not None and dtype not in TOLERANCES:
        raise InvalidOption(f"dtype is one of {', '.join(map(str, TOLERANCES))}; got {dtype!r}")
    values = [*model.parameters(), *model.buffers()]
    if any(value.is_meta for value in values):
        raise UnsupportedModel("the model has values on the meta device; load its weights before exporting it")
    elsewhere = any(value.device.type != "cpu" for value in values)
    other = dtype is not None and any(value.is_floating_point() and value.dtype != dtype for value in values)
    return copy.deepcopy(model).to("cpu", dtype) if elsewhere or other else model


def _precision(model: nn.Module, example: Tensor | None) -> torch.dtype:
    precision = next((value.dtype for value in model.parameters() if value.is_floating_point()), None)
    if precision is None:
        precision = example.dtype if isinstance(example, Tensor) and example.is_floating_point() else torch.float32
    if precision not in TOLERANCES:
        known = ", ".join(map(str, TOLERANCES))
        raise ExportError(f"the model's weights are {precision}; expected one of {known}. Give dtype=torch.float32")
    return precision


def _tolerance(tolerance: Any, precision: torch.dtype) -> float:
    if tolerance is None:
        return TOLERANCES[precision]
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not tolerance > 0:
        raise InvalidOption(f"tolerance is a relative error above 0; got {tolerance!r}")
    return float(tolerance)


def _merging(model: nn.Module) -> Merging | None:
    try:
        return Merging.of(model)
    except NotApplied:
        return None


def _check_merging(merging: Merging | None, batch: Batch) -> None:
    config = {} if merging is None else merging.config
    protect = config.get("protect")
    if protect is None:
        return
    if config["order"] == "original":
        raise ExportError(
            "protect= with order='original' leaves a number of tokens that depends on the pictures, which a program of "
            "fixed shapes cannot do; merge with order='paper' to export"
        )
    if len(protect) not in (1, batch):
        raise ExportError(
            f"protect= has masks for {len(protect)} pictures, and batch={batch!r} was asked for; give one mask for all "
            f"pictures, or batch={len(protect)}"
        )


def _images(
    model: nn.Module, merging: Merging | None, example: Tensor | None, precision: torch.dtype, count: int
) -> Tensor:
    """Give an input with ``count`` pictures: the example's, again and again, or any of the model's own size."""
    if example is None:
        try:
            found = find(model) if merging is None else merging.found
        except UnsupportedModel as error:
            raise ExportError(f"which input {type(model).__name__} takes is not known; give example=") from error
        height, width = found.adapter.preprocessing(found.trunk).size
        return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0)).to(precision)
    if not isinstance(example, Tensor) or not example.is_floating_point() or example.dim() < 2 or not len(example):
        what = f"{example.dtype} of shape {tuple(example.shape)}" if isinstance(example, Tensor) else type(example)
        raise InvalidOption(f"example is one batch of prepared pictures, floating-point (B, 3, H, W); got {what}")
    return example.detach().to("cpu", precision)[torch.arange(count) % len(example)]


def _first_run(plain: Plain, merging: Merging | None, images: Tensor) -> tuple[list[int] | None, dict[str, Tensor]]:
    """Run the model itself: how many tokens enter the first block and leave each, and the outputs."""
    if merging is None:
        return None, _run(plain, images)
    with merging.track() as tracked:
        outputs = _run(plain, images)
    steps = (-merges for merges in tracked.latest.state.per_layer)
    return list(accumulate(steps, initial=tracked.layout.num_tokens)), outputs


def _run(plain: Plain, images: Tensor) -> dict[str, Tensor]:
    try:
        return plain.outputs(images)
    except VitrailError:
        raise
    except Exception as error:
        raise ExportError(
            f"the model itself fails for an input of shape {tuple(images.shape)} ({first_line(error)}); choose an "
            "input size that it takes"
        ) from error


def _feeds(plain: Plain, found: Found) -> list[list[str]]:
    """Name, for each block, the modules that feed."""
    names = {part: name for name, part in plain.named_modules()}
    pairs = zip(found.blocks, found.block_adapters, strict=True)
    return [[names[part] for part in parts.feed_parts(block)] for block, parts in pairs]


def _notes(merging: Merging | None, shape: Shape, expected: list[int] | None) -> dict[str, object]:
    """Collect what is written inside the file: the settings, and how a picture is prepared for it."""
    from vitrail import __version__

    notes: dict[str, object] = {"vitrail": __version__, "input": INPUT, "shape": shape}
    if merging is not None and expected is not None:
        pictures = merging.found.adapter.preprocessing(merging.found.trunk)
        notes |= {"mean": pictures.mean, "std": pictures.std, "merging": merging.config, "tokens": expected[1:]}
    return notes
