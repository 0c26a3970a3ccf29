"""Training of learned methods on a trained model, and fine-tuning of a model with a method."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import vitrail
from experiments.methods.measure import state_file
from experiments.methods.subjects import KINDS, SHIPPED, Size, model_folder, parts, read_inputs
from experiments.methods.variants import Variant, quiet
from vitrail._distributed import choose_device
from vitrail.errors import InvalidOption
from vitrail.merging import as_method
from vitrail.models.layers import DropPath
from vitrail.training import load_trained

SHARE = 0.6
"""Budget of the training, as a share of the unmerged model's multiply-adds; the result is used at all budgets."""

RATES = {"method": 1e-3, "model": 3e-5}
"""Peak learning rate, for the method's parameters alone and for all weights."""

DIFFRATE_RATE = 1e-2
"""Peak learning rate of DiffRate's logits, as published."""

SHIFT = 8
"""Largest shift of an image in pixels."""


def learn(
    kind: str, seed: int, variant: Variant, out: Path, size: Size, device: str | None = None
) -> tuple[Path, float]:
    """Train a variant on one model; return the file with its weights and the seconds that it took.

    The method's parameters learn from the unmerged model's outputs (KL divergence) and the method's own loss, with the
    model's weights frozen. Where all weights are trained, the labels count as much as the unmerged model's outputs.
    """
    file = state_file(out / "learned", kind, seed, variant)
    if file.is_file():
        return file, 0.0
    began = time.monotonic()
    place = choose_device(device)
    model, teacher, inputs, targets = _load(kind, seed, out, size, place)
    whole = variant.trains == "model"
    for weight in model.parameters():
        weight.requires_grad_(whole)
    model.train()
    with vitrail.merge(model, r=0) as merging:
        budget = SHARE * merging.flops(merged=False) / 1e9
    with quiet():
        method = as_method(variant.method)
        given = {"r": 0} if variant.control else {"gflops": None if method.decides else budget}
        merging = vitrail.merge(model, method=method, **given)
    for part in model.modules():
        if isinstance(part, DropPath):
            part.eval()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    rates = RATES | ({"method": DIFFRATE_RATE} if variant.base == "diffrate" else {})
    own = {id(weight) for weight in merging.method.parameters()}
    groups = [
        {"params": [weight for weight in trained if (id(weight) in own) == method], "lr": rates[name]}
        for name, method in (("method", True), ("model", False))
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise InvalidOption(f"{variant.name} has no parameters to train")
    _fit(model, merging, teacher, inputs, targets, groups, size, whole)
    states = {f"method.{name}": value for name, value in merging.method.state_dict().items() if own}
    merging.remove()
    if whole:
        states |= {f"model.{name}": value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().cpu().contiguous() for name, value in states.items()}, file)
    return file, time.monotonic() - began


def _load(
    kind: str, seed: int, out: Path, size: Size, place: torch.device
) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Return a model in float32, its unmerged copy, and the training inputs with their classes."""
    folder = SHIPPED if KINDS[kind].options is None else model_folder(out, kind, seed) / "last"
    pair = [load_trained(folder) for _ in range(2)]
    model, teacher = (one.float().to(place) for one, _ in pair)
    spec = pair[0][1].preprocessing
    assert spec is not None
    inputs, targets = read_inputs(model, spec, parts(kind, size)[0], 4 * size.batch if size.reduced else 0)
    return model, teacher.eval().requires_grad_(False), inputs, targets


def _fit(
    model: nn.Module,
    merging: vitrail.Merging,
    teacher: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    groups: list[dict[str, object]],
    size: Size,
    whole: bool,
) -> None:
    """Train with AdamW, a cosine schedule after a tenth of warm-up, flips and shifts."""
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0 if not whole else 0.05)
    steps, warm = size.steps, max(1, size.steps // 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, 1.0, warm),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warm)),
        ],
        [warm],
    )
    generator = torch.Generator(inputs.device).manual_seed(0)
    half = inputs.is_cuda
    for _ in range(steps):
        rows = torch.randint(len(inputs), (size.learn_batch,), generator=generator, device=inputs.device)
        x = _augment(inputs[rows], generator)
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=half):
            with torch.no_grad():
                wanted = teacher(x).float().softmax(1)
            logits = model(x).float()
        loss = F.cross_entropy(logits, wanted) + merging.loss().float()
        if whole:
            loss = loss + F.cross_entropy(logits, targets[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], 1.0)
        optimizer.step()
        schedule.step()


def _augment(x: Tensor, generator: torch.Generator) -> Tensor:
    """Flip images at random, each on its own, and shift the batch by a few pixels; other inputs stay."""
    if x.dim() != 4 or x.shape[1] != 3:
        return x
    flip = torch.rand(len(x), 1, 1, 1, generator=generator, device=x.device) < 0.5
    shift = torch.randint(-SHIFT, SHIFT + 1, (2,), generator=generator, device=x.device).tolist()
    return torch.where(flip, x.flip(3), x).roll(shift, (2, 3))
