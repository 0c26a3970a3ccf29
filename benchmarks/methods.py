"""Time merging methods at one budget: how much of the saved work does each method turn into speed?

    python benchmarks/methods.py --models vit_s               ViT-S/16 at 160 pixels, batch 256, 60 % of the FLOPs
    python benchmarks/methods.py --models vit_b --seconds 40  ViT-B/16 at 224 pixels
    python benchmarks/methods.py --methods "tome|energy"      methods whose name matches
    python benchmarks/methods.py --quick                      without compiling the unmerged model
    python benchmarks/methods.py --models tiny --batch 4      a small model, to try the script on a CPU

All methods share one model's weights and are timed interleaved, in bfloat16, each in the mode that suits it: static
methods as CUDA graphs, methods that depend on the image eagerly, since their lengths are not known in advance. On a CPU
everything is eager. The speed-up is over the unmerged model in its best mode: as a CUDA graph, plain or with compiled
blocks. `kernels` merges nothing, so its speed-up is that of the kernels alone. *Launches* counts the kernels of one
eager pass; each costs a few microseconds, which bounds the speed of methods with many.

The budget is solved (`gflops=`) for static methods, and calibrated on the same images for `threshold` and `entropy`;
`mutual` merges all pairs that it has where it cannot meet a budget. Images are random shapes with noise: at equal FLOPs
their content matters only where images keep different numbers of tokens. The last line is the table as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import vitrail
from vitrail.bench import copy_model, time_models
from vitrail.bench.machine import describe_machine
from vitrail.errors import InvalidOption, VitrailError
from vitrail.merging import as_method

MODELS: dict[str, dict[str, Any]] = {
    "vit_s": {"model_name": "vit_small_patch16_224", "img_size": 160},
    "vit_b": {"model_name": "vit_base_patch16_224", "img_size": 224},
    "tiny": {"model_name": "vit_tiny_patch16_224", "img_size": 96, "depth": 4, "embed_dim": 64, "num_heads": 2},
}

METHODS: dict[str, str | dict[str, Any]] = {
    "tome": "tome",
    "tome, values": {"name": "tome", "features": "values"},
    "tome, tokens": {"name": "tome", "features": "tokens"},
    **{name: name for name in ("energy", "mlerp", "mctf", "mutual", "salient", "edges", "evit", "prune", "random")},
    **{name: name for name in ("grid", "kmeans", "dpc_knn", "threshold", "entropy")},
}

UNMERGED, KERNELS = "unmerged", "kernels"


@dataclass
class Row:
    """What was measured of a method: times in ms, and the launches of one pass; or why it failed."""

    name: str
    mode: str = ""
    ms: float | None = None
    spread: float | None = None
    speedup: float | None = None
    launches: int | None = None
    why: str = ""


def images_of(batch: int, size: int, device: str, dtype: torch.dtype) -> Tensor:
    """Return random images (B, 3, size, size) of large shapes and fine grain."""
    source = torch.Generator().manual_seed(0)
    shapes = nn.functional.interpolate(torch.randn(batch, 3, 5, 5, generator=source), (size, size), mode="bicubic")
    contrast = torch.rand(batch, 1, 1, 1, generator=source)
    return (shapes + contrast * torch.randn(batch, 3, size, size, generator=source)).to(device, dtype)


def merged(model: nn.Module, method: str | dict[str, Any], gflops: float, images: Tensor) -> tuple[nn.Module, bool]:
    """Return a copy of the model that merges by a method at a budget, and whether the method is static."""
    copy = copy_model(model, share=True)
    made = as_method(method)
    try:
        merging = vitrail.merge(copy, method=made, gflops=gflops)
    except InvalidOption:
        if made.static:
            raise
        merging = vitrail.merge(copy, method=made)
    if getattr(made, "calibrated", ()):
        merging.calibrate(images, gflops=gflops)
    return copy, made.static


def launches(model: nn.Module, images: Tensor) -> int | None:
    """Return how many kernels one eager pass launches on a GPU; None on a CPU."""
    if not images.is_cuda:
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode():
        model(images)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            model(images)
            torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in found.events())


def measure(name: str, options: argparse.Namespace, wanted: Mapping[str, str | dict[str, Any]]) -> list[Row]:
    """Time the wanted methods on one model."""
    import timm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model = timm.create_model(**MODELS[name]).to(device, dtype).eval()
    images = images_of(options.batch, MODELS[name]["img_size"], device, dtype)
    kernels = copy_model(model, share=True)
    full = vitrail.merge(kernels, r=0).flops(merged=False) / 1e9
    graph = ("graph",) if device == "cuda" else ("eager",)
    unmerged = graph if options.quick or device == "cpu" else (*graph, "blocks-graph")
    models: dict[str, nn.Module] = {UNMERGED: model, KERNELS: kernels}
    modes: dict[str, tuple[str, ...]] = {UNMERGED: unmerged, KERNELS: graph}
    rows = {row: Row(row) for row in (UNMERGED, KERNELS, *wanted)}
    for row, method in wanted.items():
        try:
            models[row], static = merged(model, method, options.share * full, images)
            modes[row] = graph if static else ("eager",)
        except VitrailError as error:
            rows[row].why = str(error)
    for row, one in models.items():
        rows[row].launches = launches(one, images)
    times = time_models(models, images, modes=modes, seconds=options.seconds)
    for row, found in times.items():
        rows[row].why = "; ".join(f"{mode}: {reason}" for mode, reason in found.failed.items())
        if found.modes:
            mode = min(found.modes, key=lambda one: found.modes[one].seconds)
            timed = found.modes[mode]
            rows[row].mode, rows[row].ms, rows[row].spread = mode, timed.seconds * 1e3, timed.spread
    base = rows[UNMERGED].ms
    for one_row in rows.values():
        one_row.speedup = base / one_row.ms if base and one_row.ms else None
    return list(rows.values())


def table(rows: Sequence[Row]) -> str:
    """Return one line per method."""
    lines = [f"    {'method':14} {'mode':13} {'ms':>9} {'±':>6} {'speed-up':>9} {'launches':>9}"]
    for row in rows:
        timed = f"{row.ms:9.3f} {row.spread:6.1%} {row.speedup or 0:9.2f}" if row.ms else " " * 26
        count = "–" if row.launches is None else row.launches
        lines.append(f"    {row.name:14} {row.mode:13} {timed} {count:>9} {row.why[:300]}".rstrip())
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Measure the wanted models and methods, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["vit_s", "vit_b"])
    parser.add_argument("--methods", default="", metavar="REGEX", help="methods whose name matches; all by default")
    parser.add_argument("--share", type=float, default=0.6, help="share of the FLOPs to keep (0.6)")
    parser.add_argument("--batch", type=int, default=256, help="images in a batch (256)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time to measure each model (20)")
    parser.add_argument("--quick", action="store_true", help="do not compile the unmerged model")
    options = parser.parse_args(arguments)
    wanted = {name: method for name, method in METHODS.items() if re.search(options.methods, name)}
    if not wanted:
        parser.error(f"--methods {options.methods!r} matches none of {', '.join(METHODS)}")
    warnings.simplefilter("ignore", vitrail.errors.VitrailWarning)
    data: dict[str, Any] = {"share": options.share, "batch": options.batch, "models": {}}
    for name in options.models:
        rows = measure(name, options, wanted)
        say(f"{name}, batch {options.batch}, {options.share:.0%} of the FLOPs\n{table(rows)}")
        data["models"][name] = [vars(row) for row in rows]
    machine = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    say(json.dumps({**data, "machine": machine}, default=str))
    return int(any(row["why"] for rows in data["models"].values() for row in rows))


def say(text: str) -> None:
    """Print and flush."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
