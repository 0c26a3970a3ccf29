"""A model by name, and what it answers with and without merging."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

import vitrail
from vitrail.adapters import find
from vitrail.cli.summary import Cost, Result
from vitrail.errors import InvalidOption, ModelLoadError, UnsupportedInput
from vitrail.pictures import Preprocessing, stained_glass, to_tensor


@dataclass(frozen=True)
class Loaded:
    """A model that is ready for pictures."""

    name: str
    model: nn.Module
    preprocessing: Preprocessing
    layout: vitrail.TokenLayout
    device: torch.device
    random: bool

    @property
    def weights(self) -> str:
        """Where the weights are from, in a word."""
        return "random" if self.random else "pretrained"


@dataclass(frozen=True)
class Answer:
    """A model's output as one vector, whether it scores classes, and how long it took."""

    values: Tensor
    is_classes: bool
    seconds: float


def load(
    name: str, *, random: bool, size: tuple[int, int] | None = None, device: str | None = None, seed: int = 0
) -> Loaded:
    """Load a model by name for inputs of a size; random weights are always the same ones."""
    place = _device(device)
    options: dict[str, Any] = {} if size is None or not name.startswith("timm:") else {"img_size": size}
    torch.manual_seed(seed)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # each retry would be announced
    try:
        model = vitrail.load_model(name, pretrained=not random, **options)
    except ModelLoadError as error:
        if random or not _lacks_weights(name, error):
            raise
        raise ModelLoadError(f"{error}. On the command line, --random-weights goes on without trained ones.") from error
    found = find(model)
    expected = found.adapter.preprocessing(found.trunk)
    if size is not None:
        expected = replace(expected, size=size)
    try:
        layout = found.adapter.layout(found.trunk, expected.size)
    except ValueError as error:
        raise _wrong_size(name, expected.size) from error
    if size is not None and (size[0] % layout.grid[1] or size[1] % layout.grid[2]):
        raise _wrong_size(name, size)
    return Loaded(name, model.to(place), expected, layout, place, random)


def cost_of(loaded: Loaded, merging: vitrail.Merging) -> Cost:
    """Count tokens and FLOPs for one picture."""
    size = loaded.preprocessing.size
    after = merging.tokens_per_layer(size)
    before = [loaded.layout.num_tokens] * len(after)
    return Cost(before, after, merging.flops(size, merged=False), merging.flops(size))


@torch.inference_mode()
def ask(loaded: Loaded, picture: Image.Image) -> Answer:
    """Run the model, merged or not, on one picture."""
    batch = to_tensor([picture], loaded.preprocessing).to(loaded.device)
    start = _now(loaded.device)
    try:
        output = loaded.model(batch)
    except (AssertionError, ValueError) as error:  # how the libraries refuse a size
        height, width = loaded.preprocessing.size
        raise UnsupportedInput(
            f"{loaded.name} does not take pictures of {height} × {width} pixels ({error}). Leave --size out."
        ) from error
    seconds = _now(loaded.device) - start
    values, is_classes = _values(loaded.model, output)
    return Answer(values.flatten().double().cpu(), is_classes, seconds)


def paint(
    loaded: Loaded, merging: vitrail.Merging, picture: Image.Image, name: str, before: Answer
) -> tuple[Image.Image, Result]:
    """Run the merged model on one picture, paint its groups, and compare its answer with the unmerged one."""
    with merging.track() as trace:
        after = ask(loaded, picture)
    groups = trace.groups[0].reshape(trace.layout.grid[1:]).cpu().numpy()
    same = bool(before.values.argmax() == after.values.argmax()) if before.is_classes else None
    panes = int(trace.groups[0].unique().numel())
    result = Result(name, panes, _cosine(before, after), same, before.seconds, after.seconds)
    return stained_glass(picture, groups), result


def _cosine(before: Answer, after: Answer) -> float | None:
    """Cosine of two answers; None where one has no direction."""
    lengths = float(before.values.norm() * after.values.norm())
    cosine = float(before.values @ after.values) / lengths if lengths > 0 else float("nan")
    return min(max(cosine, -1.0), 1.0) if cosine == cosine else None


def _values(model: nn.Module, output: Any) -> tuple[Tensor, bool]:
    """Find what a model says about the whole picture: class scores, else pooled features, else all tokens."""
    if isinstance(output, Tensor):
        return output, output.dim() == 2 and int(getattr(model, "num_classes", 0) or 0) > 0
    for name in ("logits", "pooler_output", "last_hidden_state"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value, name == "logits"
    raise UnsupportedInput(
        f"The model gave a {type(output).__name__}. Expected a tensor, or an output with logits, "
        "pooler_output or last_hidden_state. Use vitrail.merge from Python for this model."
    )


def _lacks_weights(name: str, error: ModelLoadError) -> bool:
    """Whether the model is known and only its weights could not be had, so that random ones are a way on."""
    library, _, rest = name.partition(":")
    failed_inside = error.__cause__ is not None and not isinstance(error.__cause__, ImportError)
    return failed_inside and (library == "timm" or Path(rest).is_dir())


def _wrong_size(name: str, size: tuple[int, int]) -> InvalidOption:
    return InvalidOption(
        f"--size {size[0]}x{size[1]} is not a whole number of patches of {name}. Expected a multiple of "
        "its patch size (often 16 or 14) in each direction. Choose such a size, or leave --size out."
    )


def _device(name: str | None) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InvalidOption("--device cuda: no CUDA device can be used here. Expected cpu. Leave --device out.")
    return torch.device(name or ("cuda" if available else "cpu"))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
