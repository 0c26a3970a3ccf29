"""``vitrail export``: a merged model as a file, and what was found when it was checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitrail.cli import console, options

if TYPE_CHECKING:
    from vitrail.cli._summary import Cost
    from vitrail.export import ExportResult

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
EXPORT_EPILOG = (
    "Examples:\n\n"
    "vitrail export timm:vit_base_patch16_224 --r 16 -o vit.onnx\n\n"
    "vitrail export timm:vit_small_patch14_reg4_dinov2 --keep 0.25 --size 518 --opset 18 -o dinov2.onnx\n\n"
    "vitrail export hf:facebook/deit-small-patch16-224 --gflops 2.5 --batch 8 -o deit.pt2\n\n"
    "vitrail export timm:vit_tiny_patch16_224 --r 8 --random-weights --dtype fp16 -o tiny.onnx"
)


def export(
    model: options.Model,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The file: .onnx or .pt2.")],
    r: options.R = None,
    keep: options.Keep = None,
    gflops: options.Gflops = None,
    format: Annotated[
        str | None,
        typer.Option(metavar="onnx|pt2", help="ONNX, or a program of torch.export; by default as the file is named."),
    ] = None,
    schedule: options.Schedule = "constant",
    order: options.OrderOf = options.Order.paper,
    proportional: options.Proportional = True,
    size: options.Size = None,
    batch: Annotated[
        str, typer.Option(metavar="N|dynamic", help="Pictures at a time: any number, or one fixed.")
    ] = "dynamic",
    dtype: Annotated[
        str | None, typer.Option(metavar="D", help="fp32, fp16 or bf16 (pt2 only); by default the model's own.")
    ] = None,
    opset: Annotated[
        int | None, typer.Option(metavar="N", help="Version of ONNX's operators, 18 to 22; by default 20.")
    ] = None,
    random_weights: options.RandomWeights = False,
) -> None:
    """Write a merged model to a file that runs without Vitrail, and check that it does the same.

    The file is read back (ONNX in ONNX Runtime), compared with the model on random pictures, and searched for the
    number of tokens in every block. If anything is wrong, no file is left.
    """
    settings = options.merge_options(r, keep, gflops, schedule, order, proportional)
    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not a precision. Expected one of {', '.join(DTYPES)}.")
    pixels, pictures = options.parse_size(size), parse_batch(batch)
    with console.user_errors(), console.notes():
        result, cost = run_export(
            model,
            out,
            format,
            settings,
            size=pixels,
            batch=pictures,
            dtype=dtype,
            opset=opset,
            random=random_weights,
        )
        report(model, result, cost)


def parse_batch(text: str) -> int | str:
    """Read a number of pictures, or ``dynamic``."""
    if text == "dynamic":
        return text
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise typer.BadParameter(
            f"{text!r} is not a number of pictures. Expected 1 or more, like --batch 8, or --batch dynamic."
        )
    return int(text)


def run_export(
    name: str,
    out: Path,
    format: str | None,
    options: dict[str, Any],
    *,
    size: tuple[int, ...] | None = None,
    batch: Any = "dynamic",
    dtype: str | None = None,
    opset: int | None = None,
    random: bool = False,
) -> tuple[ExportResult, Cost]:
    """Load a model on the CPU, merge it and export it."""
    import torch

    import vitrail
    from vitrail.cli._prediction import cost_of
    from vitrail.cli.model import load
    from vitrail.export.api import check_path, export

    precision = None if dtype is None else getattr(torch, DTYPES[dtype])
    path, kind = check_path(out, format)  # mistakes are found before the model is loaded
    kind.check(precision or torch.float32, opset)
    with console.err.status(f"Loading {name}"):
        loaded = load(name, random=random, size=size, device="cpu", shown=False)
    if random:
        console.note(f"{name} has random weights here: the file is good for trying things out, and nothing else.")
    with vitrail.merge(loaded.model, **options) as merging, console.err.status(f"Exporting {name}"):
        cost = cost_of(loaded, merging)
        example = torch.zeros(1, 3, *loaded.preprocessing.size)
        result = export(loaded.model, path, kind.name, example=example, batch=batch, dtype=precision, opset=opset)
    return result, cost


def report(name: str, result: ExportResult, cost: Cost) -> None:
    """Say what was written, what it costs, and how it was checked."""
    kind = f"ONNX, opset {result.opset}" if result.opset is not None else "torch.export program"
    console.say(f"{name} as {kind}, {str(result.dtype).removeprefix('torch.')}, {result.bytes / 1e6:.1f} MB")
    console.say(f"  input    images {_shape(result.input)}")
    for output, shape in result.outputs.items():
        console.say(f"  output   {output} {_shape(shape)}")
    tokens = " ".join(map(str, result.tokens or cost.tokens_after))
    console.say(f"  tokens   {tokens} leave the blocks of the exported model (unmerged: {cost.tokens_before[0]})")
    console.say(f"  GFLOPs   {cost.flops_after / 1e9:.3g} for one picture (unmerged: {cost.flops_before / 1e9:.3g})")
    for check in result.comparisons:
        again = f", drawn {check.draws} times" if check.draws > 1 else ""
        console.say(
            f"  checked  batch {check.batch}: largest error {check.max_abs:.2g}, relative {check.max_rel:.2g} "
            f"(allowed: {result.tolerance:g}){again}"
        )
    console.say(f"Written: {', '.join(str(file) for file in result.files)}", style="bold")


def _shape(shape: tuple[int | str, ...]) -> str:
    return " × ".join(map(str, shape))
