"""The methods under comparison, and how each is set to a budget.

Budgets are shares of the unmerged model's multiply-adds, so that all methods are compared at the same cost. Static
methods solve their schedule for a budget. Methods whose number of tokens depends on the image are set on images that
the model was not trained on: by ``Merging.calibrate`` where they have thresholds to measure, otherwise by bisection of
one setting (a dial).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import vitrail
from vitrail.adapters import find
from vitrail.errors import InvalidOption, SaturatedWarning, VitrailWarning
from vitrail.merging import Method, as_method
from vitrail.merging.method import METHODS
from vitrail.merging.methods.dynamic import Calibrated
from vitrail.merging.schedule import spread

STEPS = 9
"""Steps of the bisection of a dial."""

FIRST_SHARE = 0.6
"""Budget that is measured and timed before all others."""

TOLERANCE = 0.03
"""Largest relative deviation from the budget, on the images that a method is set on."""

Dial = Callable[[float, int, int], dict[str, Any]]
"""Arguments of `vitrail.merge` for a position from 0 (least merging) to 1 (most), and numbers of layers and patches."""


@dataclass(frozen=True)
class Variant:
    """A method with its options.

    Attributes:
        name: its name in rows and tables.
        method: as for `vitrail.merge`.
        dial: how a method is set that depends on the image and cannot be calibrated.
        trains: what training changes: ``"method"`` (its own parameters), ``"model"`` (all weights), or nothing.
        needs: the kinds of input that it is for; all by default.
        slow: whether a pass takes so long that one seed must suffice.
        restore: how full length is restored, if not by the method's own way.
        control: whether training runs without merging, to tell what training alone changes.
    """

    name: str
    method: Any
    dial: Dial | None = None
    trains: str | None = None
    needs: tuple[str, ...] = ("images", "clips", "sounds")
    slow: bool = False
    restore: str | None = None
    control: bool = False

    @property
    def base(self) -> str:
        """Registered name of the method."""
        return str(self.method["name"] if isinstance(self.method, Mapping) else self.method)


def _most(layers: int, patches: int) -> int:
    """Return how many merges a dial plans at most in all layers together; late layers may have too few tokens left."""
    return min(3 * patches, layers * patches // 2)


def _ats(position: float, layers: int, patches: int) -> dict[str, Any]:
    """Plan in the layers after the first quarter; a single layer that samples already drops many tokens."""
    late = [float(layer >= layers // 4) for layer in range(layers)]
    planned = round(_most(layers, patches) * position**3)
    return {"method": "ats", "r": spread(planned, [share / sum(late) for share in late])}


def _mutual(position: float, layers: int, patches: int) -> dict[str, Any]:
    return {"method": "mutual", "r": spread(round(_most(layers, patches) * position), [1 / layers] * layers)}


def _avit(position: float, layers: int, patches: int) -> dict[str, Any]:
    return {"method": "avit"}


def lower_halting(method: Method, position: float) -> None:
    """Let tokens of A-ViT halt earlier: at position 0 they never do."""
    shift = method.get_parameter("halting.shift")
    with torch.no_grad():
        shift.fill_(20.0 - 24.0 * position)


def _local_global(position: float, layers: int, patches: int) -> dict[str, Any]:
    options = {"threshold": 1.0 - 1.2 * position, "deviations": 3.0 - 6.0 * position}
    return {"method": {"name": "local_global", **options}}


def _identical(position: float, layers: int, patches: int) -> dict[str, Any]:
    return {"method": {"name": "identical", "tolerance": 4.0 * position**2}}


DIALS: dict[str, Dial] = {
    "ats": _ats,
    "avit": _avit,
    "mutual": _mutual,
    "local_global": _local_global,
    "identical": _identical,
}
"""How methods are set that depend on the image and have nothing to calibrate."""

ADJUSTS: dict[str, Callable[[Method, float], None]] = {"avit": lower_halting}
"""Learned methods whose own parameters are set by the position of their dial."""

TRAINS = {"dtem": "method", "gumbel": "method", "diffrate": "method", "dynamicvit": "method", "avit": "model"}
"""Learned methods: what their training changes."""

SLOW = ("agglomerative",)

OPTIONS = (
    Variant("tome, tokens", {"name": "tome", "features": "tokens"}),
    Variant("tome, values", {"name": "tome", "features": "values"}),
    Variant("prune by energy", {"name": "prune", "matcher": "energy"}),
    Variant("entropy of the input", {"name": "entropy", "source": "input"}, needs=("images",)),
    Variant("salient, class attention", {"name": "salient", "importance": "class_attention"}),
    Variant("salient, motion", {"name": "salient", "importance": "motion"}, needs=("clips",)),
    Variant("tome, queries", {"name": "tome", "features": "queries"}),
    Variant("dtem, reconstruction", {"name": "dtem", "reconstruction": 0.1}, trains="method"),
    Variant("tome, fine-tuned", "tome", trains="model"),
    Variant("evit, fine-tuned", "evit", trains="model"),
    Variant("dynamicvit, fine-tuned", "dynamicvit", trains="model"),
    Variant("ats, fine-tuned", "ats", _ats, trains="model"),
    Variant("tome, fine-tuned unmerged", "tome", trains="model", control=True),
)
"""Methods with other options than their defaults, and trained with all weights of the model; the last is a control."""

FEW = ("tome", "random", "prune", "energy", "mctf", "salient", "salient, motion", "threshold", "kmeans")
"""Methods for clips and sounds."""

DENSE_METHODS = (
    "tome", "tome, tokens", "energy", "mctf", "kmeans", "salient", "threshold", "edges", "grid", "local_global",
    "mutual", "prune", "random",
)  # fmt: skip
"""Methods for dense outputs, restored by copies."""

DENSE_OPTIONS = (
    Variant("edges, never across", {"name": "edges", "penalty": 2.0}),
    Variant("tome, transport", "tome", restore="transport"),
    Variant("edges, transport", "edges", restore="transport"),
    Variant("grid, transport", "grid", restore="transport"),
    Variant("local_global, transport", "local_global", _local_global, restore="transport"),
    Variant("prune, transport", "prune", restore="transport"),
    Variant("tome, residual", "tome", restore="residual"),
    Variant("tome, attention", "tome", restore="attention"),
)
"""More variants for dense outputs: boundaries that no merge crosses before all others, and other restorers."""

FITTED = ("residual", "attention")
"""Restorers that are fitted to training images."""


def all_variants() -> list[Variant]:
    """Return every registered method with its defaults, then those with other options; ToMe is first."""
    own = [
        Variant(name, name, DIALS.get(name), TRAINS.get(name), slow=name in SLOW)
        for name in sorted(vitrail.list_methods(), key=lambda name: (name != "tome", name))
    ]
    return own + [variant for variant in OPTIONS if variant.base in METHODS]


def ordered(variants: Sequence[Variant], shares: Callable[[Variant], Sequence[float]]) -> list[tuple[Variant, float]]:
    """Return all variants at one budget, then at the others: an early end leaves a comparison. Slow ones are last."""
    pairs = [(variant, share) for variant in variants for share in shares(variant)]
    return sorted(pairs, key=lambda pair: (pair[0].slow, abs(pair[1] - FIRST_SHARE)))


def dense_variants() -> list[Variant]:
    """Return the variants for dense outputs; ToMe is first."""
    known = {variant.name: variant for variant in all_variants()}
    return [known[name] for name in DENSE_METHODS] + list(DENSE_OPTIONS)


def adjust(merging: vitrail.Merging, position: float | None) -> None:
    """Set the parameters of a trained method to a position of its dial, if that is how it is set."""
    if position is not None and merging.method.name in ADJUSTS:
        ADJUSTS[merging.method.name](merging.method, position)


class Unreachable(InvalidOption):
    """The method cannot reach the budget on this model."""


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore reports of saturated and missed budgets: the rows hold what was reached."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturatedWarning)
        warnings.simplefilter("ignore", VitrailWarning)
        yield


@dataclass
class Budget:
    """A budget for one model, and the images that methods are set on.

    Attributes:
        gflops: multiply-adds of one input, in 10⁹.
        images: preprocessed inputs.
        batch: batch size.
        position: of the dial, if the method has one.
    """

    gflops: float
    images: Tensor
    batch: int
    position: float | None = None

    def merge(self, model: nn.Module, variant: Variant, method: Method | None = None) -> vitrail.Merging:
        """Merge a model by a method within the budget; ``method`` is a trained one.

        Raises:
            VitrailError: the budget cannot be reached, or the method cannot serve the model.
        """
        made = as_method(variant.method) if method is None else method
        if made.decides:
            return self._scaled(model, made)
        if made.static:
            return vitrail.merge(model, gflops=self.gflops, method=made, restore=variant.restore)
        if isinstance(made, Calibrated):
            return self._calibrated(model, made, variant.restore)
        if variant.dial is None:
            raise Unreachable(f"there is no rule that sets {variant.name} to a budget; add one to DIALS")
        return self._dialed(model, variant.dial, method, variant.restore)

    def _scaled(self, model: nn.Module, method: Method) -> vitrail.Merging:
        """Merge by the numbers per layer that a method has learned, scaled to the budget."""
        with vitrail.merge(model, method=method) as merging:
            counts, high = list(merging.r), merging.layout.num_patches
        if not any(counts):
            raise Unreachable(f"{method.label} has learned to merge nothing")
        shares = [count / sum(counts) for count in counts]
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            with vitrail.merge(model, spread(middle, shares)) as merging:
                low, high = (low, middle) if merging.flops() <= self.gflops * 1e9 else (middle, high)
        merging = vitrail.merge(model, spread(high, shares))
        try:
            self._check(merging.flops() / 1e9, method.label)
        except BaseException:
            merging.remove()
            raise
        return merging

    def _calibrated(self, model: nn.Module, method: Calibrated, restore: str | None) -> vitrail.Merging:
        merging = vitrail.merge(model, gflops=self.gflops, method=method, restore=restore)
        try:
            merging.calibrate(self.images, gflops=self.gflops, batch_size=self.batch, limit=len(self.images))
            self._check(mean_gflops(model, merging, self.images, self.batch), method.label)
        except BaseException:
            merging.remove()
            raise
        return merging

    def _dialed(self, model: nn.Module, dial: Dial, method: Method | None, restore: str | None) -> vitrail.Merging:
        """Set a method by bisection: the cost falls as the dial rises."""
        found_model = find(model)
        size = len(found_model.blocks), found_model.adapter.layout(found_model.trunk).num_patches
        low, high, position = 0.0, 1.0, 1.0
        best: tuple[float, float] | None = None
        for _ in range(STEPS):
            options = dial(position, *size) | ({} if method is None else {"method": method})
            with vitrail.merge(model, **options) as merging:
                adjust(merging, position)
                found = mean_gflops(model, merging, self.images, self.batch)
            error = abs(found / self.gflops - 1)
            if best is None or error < best[0]:
                best = error, position
            if error <= TOLERANCE / 10 or (position == 1.0 and found > self.gflops):
                break
            low, high = (position, high) if found > self.gflops else (low, position)
            position = (low + high) / 2
        assert best is not None
        self.position = best[1]
        options = dial(best[1], *size) | ({} if method is None else {"method": method})
        merging = vitrail.merge(model, **options, restore=restore)
        adjust(merging, best[1])
        try:
            self._check(self.gflops * (1 + best[0]), merging.method.label)
        except BaseException:
            merging.remove()
            raise
        return merging

    def _check(self, reached: float, name: str) -> None:
        if abs(reached / self.gflops - 1) > TOLERANCE:
            raise Unreachable(f"{name} misses {self.gflops:.3g} GFLOPs on this model by more than {TOLERANCE:.0%}")


def mean_gflops(model: nn.Module, merging: vitrail.Merging, images: Tensor, batch: int) -> float:
    """Return the mean cost of images under a merging."""
    return sum(flops_of(model, merging, images, batch)) / len(images) / 1e9


@torch.inference_mode()
def flops_of(model: nn.Module, merging: vitrail.Merging, images: Tensor, batch: int) -> list[int]:
    """Return the multiply-adds of each image."""
    if merging.method.static:
        return [merging.flops(tuple(images.shape[-2:]) if images.dim() == 4 else None)] * len(images)
    found: list[int] = []
    for part in images.split(batch):
        with merging.track() as trace:
            model(part)
        found += trace.flops.tolist()
    return found
