"""Restorers on a model: fitting them to images, and the error of what is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail._checks import is_int, is_number
from vitrail.adapters import Found, image_model
from vitrail.data.batches import Batches, open_batches
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.merging import MergeState
from vitrail.merging.restoring import Copy, Exit, FitOptions, Restorer
from vitrail.merging.restoring.base import WholeResiduals
from vitrail.runtime.plan import Plan
from vitrail.runtime.trace import eagerly
from vitrail.surgery.recording import check_finite, evaluating, input_axes, read_batches, taking, to_model

WithoutMerging = Callable[[], AbstractContextManager[None]]
"""A context manager inside which the model runs without merging (``Merging.suspended``)."""


@dataclass(frozen=True)
class RestorationError:
    """How far restored patches are from those of the model without merging.

    Errors are relative: the norm of the difference over all patches of an image, divided by their norm.

    Attributes:
        restorer: label of the restorer.
        layers: error behind each block (images, layers).
        copies: the same for plain copies of the groups' tokens.
        bytes_per_token: bytes kept for each position until the end, on average.
    """

    restorer: str
    layers: Tensor
    copies: Tensor
    bytes_per_token: float

    @property
    def per_image(self) -> Tensor:
        """Error behind the last block (images,)."""
        return self.layers[:, -1]

    @property
    def mean(self) -> float:
        """Mean error behind the last block."""
        return float(self.per_image.mean())

    @property
    def mean_of_copies(self) -> float:
        """Mean error of plain copies behind the last block."""
        return float(self.copies[:, -1].mean())

    def to_dict(self) -> dict[str, Any]:
        """Return the means as plain values."""
        return {
            "restorer": self.restorer,
            "images": len(self.layers),
            "error": self.mean,
            "error_of_copies": self.mean_of_copies,
            "layers": self.layers.mean(0).tolist(),
            "layers_of_copies": self.copies.mean(0).tolist(),
            "bytes_per_token": self.bytes_per_token,
        }


def calibrate_restorer(
    model: nn.Module,
    found: Found,
    plan: Plan,
    suspended: WithoutMerging,
    images: Any,
    options: FitOptions,
    batch_size: int | None,
    limit: int,
) -> None:
    """Fit the restorer of a plan to images; leave it as it was if that fails. See ``Merging.calibrate_restorer``."""
    restorer = plan.restorer
    if restorer is None or type(restorer).fit is Restorer.fit:
        raise InvalidOption(
            f"restore={None if restorer is None else restorer.label!r} has nothing to fit; merge with "
            "restore='residual' or 'attention'"
        )
    if not is_int(options.steps, 0) or not is_number(options.learning_rate) or options.learning_rate <= 0:
        raise InvalidOption(
            f"steps is 0 or more and learning_rate above 0; got {options.steps!r} and {options.learning_rate!r}"
        )
    data = _open(found, images, limit)
    observe = partial(_observe, model, found, plan, suspended, data, batch_size)
    before = {name: value.clone() for name, value in restorer.state_dict().items()}
    try:
        restorer.fit(observe, options._replace(by_block=plan.method.scope == "block"))
    except BaseException:
        restorer.load_state_dict(before)
        raise


@torch.no_grad()
def restoration_error(
    model: nn.Module,
    found: Found,
    plan: Plan,
    suspended: WithoutMerging,
    images: Any,
    batch_size: int | None,
    limit: int | None,
) -> RestorationError:
    """Measure the error of restored patches; see ``Merging.restoration_error``."""
    data = _open(found, images, limit)
    layers, copies, kept, positions = [], [], 0, 0
    for batch in read_batches(found, data, batch_size):
        x = to_model(model, batch)
        with evaluating(model):
            with suspended():
                targets = _run(found, x)
            outputs = _run(found, x)
            with _restoring(plan, Copy()):
                copied = _run(found, x)
        layers.append(_errors(outputs, targets, plan))
        copies.append(_errors(copied, targets, plan))
        kept += sum(entry.numel() * entry.element_size() for entry in outputs[-1].state.kept.values())
        positions += targets[-1].tokens.shape[0] * targets[-1].tokens.shape[1]
    if not layers:
        raise UnsupportedInput("there are no images to measure the error on")
    label = f"method {plan.method.label}" if plan.restorer is None else plan.restorer.label
    return RestorationError(label, torch.cat(layers), torch.cat(copies), kept / positions)


def _errors(outputs: Sequence[_Output], targets: Sequence[_Output], plan: Plan) -> Tensor:
    """Return the relative error of the patches of each image behind each block (B, layers)."""
    patches = prod(outputs[0].state.grid)
    found = []
    for output, target in zip(outputs, targets, strict=True):
        restored = output.state.restore(output.tokens, plan.method)[:, -patches:].double()
        wanted = target.tokens[:, -patches:].double()
        found.append((restored - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1))
    return torch.stack(found, 1).cpu()


class _Output(NamedTuple):
    """Tokens as they leave one block, and their state; without merging an empty one."""

    tokens: Tensor
    state: MergeState


def _run(found: Found, images: Tensor) -> list[_Output]:
    """Run a model and return the tokens that leave each block, merged where they are."""
    outputs = []

    def take(_: nn.Module, __: Any, kwargs: dict[str, Any], output: Any) -> None:
        slot = kwargs.get("vitrail_slot")
        if slot is not None:
            outputs.append(_Output(slot.passed.tokens, slot.passed.carried.state))
        else:
            outputs.append(_Output(output[0] if isinstance(output, tuple) else output, MergeState(())))

    handles = [block.register_forward_hook(take, with_kwargs=True) for block in found.blocks]
    try:
        with eagerly(), taking(found, images):
            image_model(found.trunk)(images)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


class _Observer(WholeResiduals):
    """Keeps whole residuals, and what it is given to restore, by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, _Output] = {}

    def restore(self, x: Tensor, state: MergeState) -> Tensor:
        self.seen[state.layer - 1] = _Output(x, state)
        return super().restore(x, state)


@torch.no_grad()
def _observe(
    model: nn.Module,
    found: Found,
    plan: Plan,
    suspended: WithoutMerging,
    data: Batches,
    batch_size: int | None,
) -> Iterator[list[Exit]]:
    """Yield the exits of each batch."""
    for batch in read_batches(found, data, batch_size):
        x, observer = to_model(model, batch), _Observer()
        with evaluating(model):
            with suspended():
                targets = _run(found, x)
            check_finite(targets[-1].tokens, "tokens after the last block")
            with _restoring(plan, observer):
                outputs = dict(enumerate(_run(found, x)))
        if plan.method.scope == "block":
            outputs = observer.seen
        yield [Exit(layer, *outputs[layer], targets[layer].tokens) for layer in sorted(outputs)]


def _open(found: Found, images: Any, limit: int | None) -> Batches:
    if isinstance(images, Batches):
        return images.repeatable()
    return open_batches(images, limit=limit, with_labels=False, axes=input_axes(found)).repeatable()


@contextmanager
def _restoring(plan: Plan, restorer: Restorer) -> Iterator[None]:
    """Let a plan run with another restorer inside a ``with`` block."""
    own, plan.restorer = plan.restorer, restorer
    try:
        yield
    finally:
        plan.restorer = own
