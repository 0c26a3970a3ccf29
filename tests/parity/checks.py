"""Checks that every model must pass; the test files list the models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import vitrail
from tests.oracle import Result, describe, run
from tests.parity.models.cases import Case, outputs_of
from vitrail.errors import SaturatedWarning


@dataclass(frozen=True)
class Setting:
    """One way to merge.  `protect` names the kind of mask over the patches to draw, if any."""

    r: int | tuple[int, ...]
    order: str = "paper"
    proportional: bool = True
    protect: str = "none"

    def counts(self, depth: int) -> list[int]:
        """Number of merges requested in each layer."""
        return [self.r] * depth if isinstance(self.r, int) else [self.r[i % len(self.r)] for i in range(depth)]

    def options(self, depth: int, batch: int, patches: int) -> dict[str, Any]:
        """Arguments that the oracle and the library share."""
        return {
            "r": self.r if isinstance(self.r, int) else self.counts(depth),
            "order": self.order,
            "proportional": self.proportional,
            "protect": mask(self.protect, batch, patches),
        }


SETTINGS = {
    "steady": Setting(3),
    "steady-original": Setting(3, order="original"),
    "per-layer": Setting((4, 0, 2)),
    "unweighted": Setting((1, 3), proportional=False),
    "unweighted-original": Setting(4, order="original", proportional=False),
    "beyond": Setting(1000),
    "beyond-original": Setting(1000, order="original"),
    "shared-mask": Setting(2, protect="shared"),
    "mask-per-image": Setting((3, 2), protect="each"),
    "mask-per-image-original": Setting((2, 1), order="original", protect="each"),
    "mask-per-image-beyond": Setting(1000, protect="each"),
    "mask-before-any-merge": Setting((0, 4, 1), protect="each"),
}


def mask(kind: str, batch: int, patches: int) -> Tensor | None:
    """Patches that must not merge: about a third of them, drawn once for all images or for each."""
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(11)
    shape = (patches,) if kind == "shared" else (batch, patches)
    return torch.rand(shape, generator=generator) < 0.35


@contextmanager
def saturation(expected: bool) -> Iterator[None]:
    """Expect one warning if more merges are requested than possible, and no other warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    kinds = [warning.category for warning in caught]
    assert kinds == ([SaturatedWarning] if expected else []), [str(w.message) for w in caught]


def ask_oracle(model: nn.Module, case: Case, images: Tensor, setting: Setting) -> tuple[Result, dict[str, Any]]:
    """Return the oracle's result, and the arguments with which the library must compute the same."""
    with torch.no_grad():
        recipe = describe(model, images, **case.call)
        options = setting.options(len(recipe.blocks), len(images), recipe.tokens.shape[1] - recipe.prefix)
        return run(recipe, **options), options


def saturates(result: Result, tokens: int, counts: Sequence[int]) -> bool:
    """Whether some layer merged fewer pairs than requested."""
    before = [tokens, *result.lengths[:-1]]
    return any(b - a != n for b, a, n in zip(before, result.lengths, counts, strict=True))


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference between outputs of the same names and shapes."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].shape == expected[name].shape, name
    return max((actual[name] - expected[name]).abs().max().item() for name in expected)


def check_against_oracle(case: Case, setting: Setting) -> None:
    """Outputs, groups, sizes and lengths are the oracle's."""
    model, images = case.model(), case.images()
    expected, options = ask_oracle(model, case, images, setting)
    tokens = expected.features.shape[1]
    counts = setting.counts(len(expected.lengths))
    with saturation(saturates(expected, tokens, counts)), torch.no_grad():
        merging = vitrail.merge(model, **options)
        with merging.track() as trace:
            actual = outputs_of(model(images, **case.call))
    assert trace.groups.dtype == torch.int64
    assert trace.groups.tolist() == expected.groups
    assert trace.sizes.tolist() == expected.sizes
    assert distance(actual, expected.outputs) < case.tolerance
    assert torch.allclose(trace.unmerge(expected.merged), expected.hidden[-1], rtol=0, atol=0)
    if setting.order == "paper" or setting.protect == "none":
        assert merging.tokens_per_layer(case.size) == expected.lengths


def check_nothing_merged(case: Case) -> None:
    """With r=0 the patched model computes what the model does, to the bit where attention is fused."""
    model, images = case.model(torch.float32), case.images(torch.float32)
    with torch.no_grad():
        before = outputs_of(model(images, **case.call))
        merging = vitrail.merge(model, r=0)
        with merging.track() as trace:
            after = outputs_of(model(images, **case.call))
    if case.bit_equal:
        assert distance(after, before) == 0.0
    else:
        assert distance(after, before) <= 5e-6 * max(1.0, *(v.abs().max().item() for v in before.values()))
    special = merging.layout.num_special
    patches = merging.layout.num_patches if trace.groups is None else trace.groups.shape[1]
    assert trace.groups.tolist() == [list(range(special, special + patches))] * len(images)
    assert trace.sizes.tolist() == [[1] * (special + patches)] * len(images)


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model's structure that patching could leave behind."""
    return {
        name: (type(module), sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    }


def check_removal(case: Case) -> None:
    """Merging keeps the state dict; removing restores classes, attributes and outputs exactly."""
    model, images = case.model(torch.float32), case.images(torch.float32)
    with torch.no_grad():
        output = outputs_of(model(images, **case.call))
        make_up, state = fingerprint(model), {k: v.clone() for k, v in model.state_dict().items()}
        merging = vitrail.merge(model, r=2)
        assert list(model.state_dict()) == list(state)
        assert distance(outputs_of(model(images, **case.call)), output) > 1e-3
        merging.remove()
        assert_restored(model, make_up, state)
        assert distance(outputs_of(model(images, **case.call)), output) == 0.0
        with vitrail.merge(model, r=2, order="original"):
            assert distance(outputs_of(model(images, **case.call)), output) > 1e-3
        assert_restored(model, make_up, state)
        assert distance(outputs_of(model(images, **case.call)), output) == 0.0


def assert_restored(model: nn.Module, make_up: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Assert that the model has its former structure and values."""
    assert fingerprint(model) == make_up
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def check_layers_before_the_first_merge(case: Case) -> None:
    """No shortcut: a timm model that merges in its last layer only still runs its first layers to the bit."""
    model, images = case.model(torch.float32), case.images(torch.float32)
    ask = {"output_fmt": "NLC", "intermediates_only": True}
    with torch.no_grad():
        before = model.forward_intermediates(images, **ask)  # type: ignore[operator]
        with vitrail.merge(model, r=[0] * (len(before) - 1) + [2]):
            after = model.forward_intermediates(images, **ask)  # type: ignore[operator]
    for own, patched in zip(before[:-1], after[:-1], strict=True):
        assert torch.equal(patched, own) if case.bit_equal else torch.allclose(patched, own, atol=5e-5)
    assert (after[-1] - before[-1]).abs().max() > 1e-3
