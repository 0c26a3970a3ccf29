"""Whole merged models: fast path, reference functions, and reference functions in higher precision.

A short dtype alone takes a model some way from its exact output, and flips merges of tokens that are nearly equally
alike. The fast path is right where it is about as near to the exact model as the reference in the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import vitrail
from tests.kernels.cases import Outcome
from vitrail import kernels
from vitrail.adapters.outputs import output_tensor
from vitrail.bench import BenchConfig
from vitrail.bench._agreement import compare, relative_error
from vitrail.bench._modes import CapturedGraph
from vitrail.bench._variants import build
from vitrail.kernels import ops
from vitrail.merging import Method, ToMe, as_method
from vitrail.merging.methods.learned import DTEM
from vitrail.runtime import block_forward

IMAGES = 64
"""How many images a GPU compares in half precision, whatever a model's batch."""


@dataclass(frozen=True)
class Subject:
    """A model with random weights, the merges per layer, and the batch size."""

    name: str
    make: Callable[[], nn.Module]
    r: int
    images: int = 2


def timm_model(name: str, **options: Any) -> nn.Module:
    """A model of timm's without trained weights."""
    import timm

    return timm.create_model(name, num_classes=10, **options)


def small_vit() -> nn.Module:
    """A ViT that compiles in seconds."""
    return timm_model("vit_small_patch16_224", depth=4)


def registers(**options: Any) -> nn.Module:
    """DINOv2 with registers, of the transformers library."""
    import transformers as hf

    config = hf.Dinov2WithRegistersConfig(num_register_tokens=4, num_labels=10, **options)
    return hf.Dinov2WithRegistersForImageClassification(config)


_TINY = {"img_size": 64, "depth": 2, "embed_dim": 32, "num_heads": 2}
_TINY_HF = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

SMALL = (
    Subject("ViT", partial(timm_model, "vit_tiny_patch16_224", **_TINY), 4),
    Subject("DINOv2", partial(timm_model, "vit_small_patch14_reg4_dinov2", **{**_TINY, "img_size": 70}), 5),
    Subject("DINOv3", partial(timm_model, "vit_small_patch16_dinov3", **_TINY), 4),
    Subject("EVA-02", partial(timm_model, "eva02_small_patch14_224", **{**_TINY, "img_size": 70}), 5),
    Subject("registers", partial(registers, image_size=32, patch_size=8, **_TINY_HF), 4),
)
"""Models that the interpreter gets through in a second."""

LARGE = (
    Subject("ViT", partial(timm_model, "vit_base_patch16_224"), 16, 16),
    Subject("DINOv2", partial(timm_model, "vit_base_patch14_reg4_dinov2"), 50, 2),
    Subject("DINOv3", partial(timm_model, "vit_base_patch16_dinov3"), 16, 8),
    Subject("EVA-02", partial(timm_model, "eva02_small_patch14_224"), 16, 8),
    Subject("registers", partial(registers, image_size=224, patch_size=14), 16, 8),
)
"""Models as they are used."""


def outcomes(subject: Subject, dtype: str, device: str, train: bool = False) -> list[Outcome]:
    """Compare a model's three paths, in inference or for the gradients of all weights.

    In half precision one merge that rounding turns changes all that follows: the reference alone is off by 2 to 9·10⁻³
    from one pair of images to the next. Means over eight images fail by chance in a draw out of twenty; over 64,
    as that spread says, they are more than four standard deviations inside the limit, so every model sees that many.
    """
    config = BenchConfig(subject.name, r=subject.r, batch=subject.images, dtype=dtype, device=device)
    base = build(config, lively(subject.make()))
    seeds = range(1 if dtype == "fp32" or device == "cpu" else IMAGES // subject.images)
    batches = [random_images(subject.images, base.shape[-2:], device, seed).to(config.weight_dtype) for seed in seeds]
    checks = [compare(base, batch, gradients=train) for batch in batches]

    def mean(name: str) -> float:
        return sum(getattr(check, name) for check in checks) / len(checks)

    label = f"{subject.name} {dtype}{' training' if train else ''}"
    if dtype == "fp32":
        found = [("output", mean("error"), 1e-4), ("groups", 1 - mean("equal_groups"), 1e-3)]
    else:
        others, others_of_dtype = 1 - mean("equal_groups_precise"), 1 - mean("equal_groups_of_dtype")
        found = [
            ("output", mean("error_precise"), 1.5 * mean("error_of_dtype") + 1e-3),
            ("groups", others, 1.5 * others_of_dtype + 0.01),
        ]
    if train:
        limit = 1e-3 if dtype == "fp32" else 2.5 * mean("gradient_error_of_dtype")
        found.append(("gradients", mean("gradient_error"), limit))
    return [Outcome("model", f"{label} {what}", error, limit) for what, error, limit in found]


def graph_outcome(subject: Subject, dtype: torch.dtype) -> Outcome:
    """Compare a CUDA graph of a merged model with the model, on images that the graph was not recorded with."""
    model = lively(subject.make()).to("cuda", dtype).eval()
    size = vitrail.adapters.input_spec(model).size
    vitrail.merge(model, r=subject.r)
    one, two = (random_images(subject.images, size, "cuda", seed).to(dtype) for seed in (0, 1))
    with torch.inference_mode():
        graph = CapturedGraph(lambda batch: output_tensor(model(batch)))
        graph(one)
        error = relative_error(graph(two).clone(), output_tensor(model(two)))
    # what runs is the same, but libraries may choose other algorithms while a graph is recorded
    return Outcome(
        "model", f"{subject.name} {_name(dtype)} CUDA graph", error, 1e-5 if dtype == torch.float32 else 2e-2
    )


def streams_outcome(subject: Subject, dtype: torch.dtype, rounds: int = 20) -> Outcome:
    """Count the batches for which matching on a side stream gives other bits than matching before attention."""
    model = lively(subject.make()).to("cuda", dtype).eval()
    size = vitrail.adapters.input_spec(model).size
    batch = random_images(subject.images, size, "cuda").to(dtype)
    vitrail.merge(model, r=subject.r)
    others = 0
    with torch.inference_mode():
        for turn in range(rounds):
            given = batch.roll(7 * turn, -1)
            concurrent = output_tensor(model(given))
            with mock.patch.object(kernels, "SIDE_STREAM_BATCH", 0):
                others += not torch.equal(concurrent, output_tensor(model(given)))
    return Outcome("model", f"{subject.name} {_name(dtype)} streams", others, 0)


def compiled_outcome(subject: Subject, dtype: torch.dtype, device: str) -> Outcome:
    """Compare a merged model compiled as one graph with the eager model, and that with the exact one."""
    model = lively(subject.make()).to(device, dtype).eval()
    size = vitrail.adapters.input_spec(model).size
    batch = random_images(subject.images, size, device).to(dtype)
    vitrail.merge(model, r=subject.r)
    with torch.inference_mode():
        eager = output_tensor(model(batch))
        compiled = output_tensor(torch.compile(model, fullgraph=True, dynamic=False)(batch))
        with kernels.reference():
            exact = output_tensor(model.double()(batch.double()))
    limit = 1e-3 if dtype == torch.float32 else 1.5 * relative_error(eager, exact) + 1e-3
    return Outcome("model", f"{subject.name} {_name(dtype)} compiled", relative_error(compiled, exact), limit)


def method_outcomes(subject: Subject, name: str, dtype: torch.dtype, device: str) -> list[Outcome]:
    """Compare a model that merges by a method: kernels, reference in the same dtype, and reference in float64.

    In half precision every block must take the dense path. Some methods also compare gradients.
    """
    method = METHODS[name]
    model = lively(subject.make()).to(device, dtype).eval()
    batch = random_images(subject.images, vitrail.adapters.input_spec(model).size, device)
    batch[0, :, : batch.shape[2] // 2] = 0.3  # some patches are equal
    batch = batch.to(dtype)
    vitrail.merge(model, r=method.r or subject.r, method=method.make())
    blocks = mock.Mock(side_effect=block_forward.dense_forward)
    matches = mock.Mock(side_effect=ops.match)
    here = nullcontext() if device == "cuda" else kernels_everywhere()
    with here, mock.patch.object(block_forward, "dense_forward", blocks), mock.patch.object(ops, "match", matches):
        found = _output_and_gradient(model, batch, method.learns)
    with kernels.reference():
        reference = _output_and_gradient(model, batch, method.learns)
        exact = _output_and_gradient(model.double(), batch.double(), method.learns)
    depth = len(vitrail.adapters.find(model).blocks)
    dense, why = blocks.call_count, ""
    if dense != (depth if dtype != torch.float32 else 0):
        why = f"the dense path ran {dense} times in {depth} blocks"
    elif method.matches and matches.call_count != depth:
        why = f"the fused matching ran {matches.call_count} times in {depth} blocks"
    outcomes = []
    for what, mine, other, truth in zip(("output", "gradient"), found, reference, exact, strict=False):
        limit = 1.5 * relative_error(other, truth) + (1e-4 if dtype == torch.float32 else 1e-3)
        outcomes.append(Outcome("method", f"{name} {_name(dtype)} {what}", relative_error(mine, truth), limit, why))
    return outcomes


def autocast_outcomes(subject: Subject, short: torch.dtype, device: str, train: bool) -> list[Outcome]:
    """Compare a float32 model under autocast: kernels, reference functions, and float64; every block must be dense."""
    model = lively(subject.make()).to(device)
    batch = random_images(subject.images, vitrail.adapters.input_spec(model).size, device)
    vitrail.merge(model, r=subject.r)
    blocks = mock.Mock(side_effect=block_forward.dense_forward)
    here = nullcontext() if device == "cuda" else kernels_everywhere()
    autocast = torch.autocast(device, short)
    with here, autocast, mock.patch.object(block_forward, "dense_forward", blocks):
        found = _output_and_gradient(model, batch, train)
    with kernels.reference():
        with autocast:
            reference = _output_and_gradient(model, batch, train)
        exact = _output_and_gradient(model.double(), batch.double(), train)
    depth = len(vitrail.adapters.find(model).blocks)
    why = "" if blocks.call_count == depth else f"the dense path ran {blocks.call_count} times in {depth} blocks"
    outcomes = []
    for what, mine, other, truth in zip(("output", "gradient"), found, reference, exact, strict=False):
        limit = 1.5 * relative_error(other, truth) + 1e-3
        label = f"{subject.name} autocast {_name(short)} {what}"
        outcomes.append(Outcome("model", label, relative_error(mine, truth), limit, why))
    return outcomes


def _output_and_gradient(model: nn.Module, batch: Tensor, learns: bool) -> tuple[Tensor, ...]:
    """Return a model's output; with ``learns`` also the gradients of all its weights, in one row."""
    torch.manual_seed(0)  # some methods draw
    with torch.set_grad_enabled(learns):
        output = output_tensor(model(batch))
    if not learns:
        return (output,)
    model.zero_grad()
    output.float().square().sum().backward()
    found = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return output.detach(), torch.cat(found)


def _trained_dtem() -> Method:
    method = DTEM()
    method.passes.fill_(1)
    return method


@dataclass(frozen=True)
class Merges:
    """A method to try in whole models: how it is made, what merges, and whether gradients are compared.

    ``matches``: whether every block runs the fused matching of ToMe.
    """

    make: Callable[[], Method]
    r: int | tuple[int, ...] | None = None
    learns: bool = False
    matches: bool = False


def _named(**options: Any) -> Callable[[], Method]:
    return partial(as_method, options)


METHODS: dict[str, Merges] = {
    "dtem": Merges(_trained_dtem, matches=True),
    "values": Merges(partial(ToMe, features="values"), learns=True, matches=True),
    "tokens": Merges(_named(name="tome", features="tokens"), learns=True, matches=True),
    "energy": Merges(_named(name="energy"), learns=True),
    "mctf": Merges(_named(name="mctf"), learns=True),
    "mlerp": Merges(_named(name="mlerp"), learns=True),
    "mutual": Merges(_named(name="mutual")),
    "grid": Merges(_named(name="grid")),
    "kmeans": Merges(_named(name="kmeans")),
    "dpc_knn": Merges(_named(name="dpc_knn")),
    "evit": Merges(_named(name="evit"), learns=True),
    "evit, mean": Merges(_named(name="evit", fuse="mean"), learns=True),
    "evit, drop": Merges(_named(name="evit", fuse="drop")),
    "ats": Merges(_named(name="ats")),
    "threshold": Merges(_named(name="threshold", threshold=0.2), learns=True),
    "threshold, bucket": Merges(_named(name="threshold", threshold=0.2, bucket=8)),
    "entropy": Merges(_named(name="entropy", strength=1.0)),
    "identical": Merges(_named(name="identical")),
    "salient": Merges(_named(name="salient", keep=0.3)),
    "vid_tldr": Merges(_named(name="vid_tldr")),
    "edges": Merges(_named(name="edges")),
    "prune": Merges(_named(name="prune"), learns=True, matches=True),
    "prune by energy": Merges(_named(name="prune", matcher="energy")),
}


def random_images(count: int, size: tuple[int, int], device: str, seed: int = 0) -> Tensor:
    """Return random images (B, 3, H, W) of large shapes and fine grain: some patches are more similar than others."""
    source = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 5, 5, generator=source)
    shapes = nn.functional.interpolate(coarse, size, mode="bicubic", align_corners=False)
    return (shapes + 0.3 * torch.randn(count, 3, *size, generator=source)).to(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def lively(model: nn.Module) -> nn.Module:
    """Draw all weights so that each of them matters: with default weights, outputs hardly depend on the image."""
    source = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        part = name.rpartition(".")[2]
        drawn = torch.randn(weight.shape, generator=source)
        if part.startswith(("gamma", "lambda")):
            weight.copy_(0.2 + 0.1 * drawn)
        elif weight.dim() == 1:
            weight.add_(0.1 * drawn)
        else:  # matrices that keep the variance, and tokens and positions
            weight.copy_(drawn * (weight[0].numel() ** -0.5 if part == "weight" else 0.3))
    return model.eval()


@contextmanager
def kernels_everywhere() -> Iterator[None]:
    """Let the kernels serve every device: Triton's interpreter does."""

    def usable(x: Tensor) -> bool:
        return x.dtype in (torch.float32, torch.float16, torch.int64) and not kernels._switch.forced

    # streams are a GPU's
    with mock.patch.object(kernels, "usable", usable), mock.patch.object(kernels, "SIDE_STREAM_BATCH", 0):
        yield
