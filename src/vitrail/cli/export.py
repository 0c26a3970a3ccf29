"""``vitrail export``: write a merged model to a file and verify it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

import vitrail
from vitrail.analysis.result import plain
from vitrail.bench.config import DTYPES
from vitrail.cli._shared import console, options
from vitrail.cli._shared.model import load
from vitrail.cli._shared.output import check_writable
from vitrail.cli._shared.prediction import cost_of
from vitrail.cli._shared.ranks import command
from vitrail.cli._shared.summary import Cost
from vitrail.data.media.modality import MODALITIES, Modality
from vitrail.export import ExportResult
from vitrail.export import export as export_model
from vitrail.export.formats import find_format
from vitrail.export.script import write_script
from vitrail.surgery.saving.changes import merge_arguments

EXAMPLES = (
    "vitrail export timm:vit_base_patch16_224 --r 16 -o vit.onnx",
    "vitrail export timm:vit_small_patch14_reg4_dinov2 --keep 0.25 --image-size 518 --opset 18 -o dinov2.onnx",
    "vitrail export hf:facebook/deit-small-patch16-224 --gflops 2.5 --batch-size 8 -o deit.pt2",
    "vitrail export timm:vit_tiny_patch16_224 --r 8 --random-weights --dtype fp16 -o tiny.onnx",
)


BATCHES = "A fixed batch size, or any with dynamic."


def parse_batch(text: str) -> int | str:
    """Parse a batch size, or ``dynamic``."""
    if text == "dynamic":
        return text
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise typer.BadParameter(f"--batch-size {text!r} is not a batch size. Expected 1 or more, or dynamic.")
    return int(text)


def export(
    ctx: typer.Context,
    model: options.Model,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Output file: .onnx or .pt2.")],
    r: options.R = None,
    keep: options.Keep = None,
    gflops: options.Gflops = None,
    merge: options.Merge = None,
    format: Annotated[
        str | None,
        typer.Option(metavar="onnx|pt2", help="ONNX, or a torch.export program; from the file name by default."),
    ] = None,
    schedule: options.Schedule = None,
    order: options.Order = "paper",
    proportional: options.Proportional = True,
    method: options.Method = "tome",
    size: options.Size = None,
    batch: Annotated[
        Any, typer.Option("--batch-size", metavar="N|dynamic", parser=parse_batch, help=BATCHES)
    ] = "dynamic",
    dtype: Annotated[
        Literal["fp32", "fp16", "bf16"] | None, typer.Option(help="bf16 for pt2 only; the model's own by default.")
    ] = None,
    opset: Annotated[int | None, typer.Option(metavar="N", help="ONNX opset, 18 to 22; 20 by default.")] = None,
    random_weights: options.RandomWeights = False,
) -> None:
    """Load the written file (ONNX in ONNX Runtime), and compare it with the model on random images.

    The number of tokens in every block must be the merged model's, too. If anything fails, no file is left.
    """
    torch_dtype = None if dtype is None else DTYPES[dtype]
    with command():
        chosen = options.merge_options(ctx.params)
        find_format(out, format).check(torch_dtype or torch.float32, opset)  # before the model is loaded
        check_writable(out, "-o")
        with console.status(f"Loading {model}"):
            loaded = load(model, "export", random=random_weights, size=size, device="cpu")
        if random_weights:
            console.note(f"{model} has random weights: use the file for trying things out only.")
        example = torch.zeros(1, *loaded.spec.shape)
        settings = merge_arguments(chosen, loaded.model)
        with vitrail.merge(loaded.model, **settings) as merging, console.status(f"Exporting {model}"):
            result = export_model(
                loaded.model, out, format, example=example, batch=batch, dtype=torch_dtype, opset=opset
            )
            cost = cost_of(loaded, merging)
        script = write_script(result)
        _report(model, result, cost, script, MODALITIES[loaded.spec.modality])
        console.answer(_values(model, result, cost, script))


def _values(name: str, result: ExportResult, cost: Cost, script: Path | None) -> dict[str, Any]:
    """Return what was written, and how it was verified, as JSON values."""
    values = asdict(result) | {"dtype": str(result.dtype).removeprefix("torch."), "path": str(result.path)}
    files = [str(file) for file in (*result.files, *([] if script is None else [script]))]
    return plain({"model": name, **values, "files": files, "cost": asdict(cost)})


def _report(name: str, result: ExportResult, cost: Cost, script: Path | None, samples: Modality) -> None:
    kind = f"ONNX, opset {result.opset}" if result.opset is not None else "torch.export program"
    console.say(f"{name} as {kind}, {str(result.dtype).removeprefix('torch.')}, {result.bytes / 1e6:.1f} MB")
    outputs = [(f"output   {name}", shape) for name, shape in result.outputs.items()]
    for what, shape in ((f"input    {samples.plural}", result.input), *outputs):
        console.say(f"  {what} {' × '.join(map(str, shape))}")
    counts = " ".join(map(str, result.tokens or cost.tokens_after))
    console.say(f"  tokens   {counts} leave the blocks of the exported model (unmerged: {cost.tokens_before[-1]})")
    console.say(f"  GFLOPs   {cost.flops_after / 1e9:.3g} per {samples.noun} (unmerged: {cost.flops_before / 1e9:.3g})")
    for check in result.comparisons:
        draws = f", drawn {check.draws} times" if check.draws > 1 else ""
        console.say(
            f"  checked  batch {check.batch}: largest error {check.max_abs:.2g}, relative {check.max_rel:.2g} "
            f"(allowed: {result.tolerance:g}){draws}"
        )
    written = [*result.files, *([] if script is None else [script])]
    console.say(f"Written: {', '.join(map(str, written))}", style="bold")
    if script is not None:
        console.say(f"Use it without Vitrail: python {script} cat.jpg")
