"""Every combination of roles merges: tokens that enter late, are invisible, or enter at class attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vitrail
from tests.models.mixes import COMPILED, MIXES, SINGLE, built, random_images
from tests.models.test_mixes import answers
from vitrail.models import ViT, ViTConfig
from vitrail.tokens import Role

every = pytest.mark.parametrize("name", MIXES)
single = pytest.mark.parametrize("name", SINGLE)


def outputs(model: ViT, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        output = model.forward_output(x)
    return [output.features, *answers(output)]


def close(some: list[Tensor], others: list[Tensor], within: float = 1e-10) -> bool:
    return all(float((a - b).abs().max()) <= within * float(b.abs().max()) for a, b in zip(some, others, strict=True))


@every
def test_r_of_zero_changes_nothing_and_removal_restores(name: str) -> None:
    model = built(MIXES[name])
    x = random_images(model.config)
    before = outputs(model, x)
    with vitrail.merge(model, r=0):
        assert close(outputs(model, x), before, 1e-12)
    with vitrail.merge(model, r=3) as merging:
        after = outputs(model, x)
        one_by_one = [torch.cat(parts) for parts in zip(outputs(model, x[:1]), outputs(model, x[1:]), strict=True)]
        assert merging.tokens_per_layer()[-1] == model.layout(layer=model.config.depth - 1).num_tokens - 6
    assert close(one_by_one, after)
    assert not close(after, before, 1e-3)
    assert [part.shape for part in after] == [part.shape for part in before]
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, x), before, strict=True))


@every
def test_merging_equal_patches_changes_nothing(name: str) -> None:
    """Patches without positions come in equal pairs: a pair equals one token of size 2."""
    config = replace(MIXES[name], position="none")
    model = built(config)
    cells = torch.randn(2, 3, 4, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = cells.repeat_interleave(4, 2).repeat_interleave(8, 3)
    before = outputs(model, x)
    with vitrail.merge(model, r=[5, 0]) as merging, merging.track() as trace:
        assert close(outputs(model, x), before)
    assert trace.sizes.amax(1).tolist() == [2, 2]


@single
def test_recording_follows_the_layout(name: str) -> None:
    config = MIXES[name]
    model = built(config)
    x = random_images(config)
    inside = [spec for spec in config.tokens if not config.gathers(spec)]
    for merges in (0, 3):
        with vitrail.merge(model, r=merges):
            seen = vitrail.record(model, x, ("tokens", "attention"), queries=range(len(seen_tokens(config))))
        assert [span.name for span in seen.layout.special] == [spec.name for spec in inside]
        for layer in range(config.depth):
            late = [
                place for spec in inside if spec.enters > layer for place in seen.layout.indices(spec.role, spec.name)
            ]
            here = [place for place in range(seen.layout.num_tokens) if place not in late]
            assert seen.tokens[layer][:, late].abs().sum() == 0
            assert seen.tokens[layer][:, here].abs().amax(-1).min() > 0
            if not config.talking_heads:  # whose weights need not sum to one
                sums = seen.attention[layer].sum(-1)
                torch.testing.assert_close(sums[:, :, here], torch.ones_like(sums[:, :, here]))
            hidden = [
                place for spec in inside if not spec.visible for place in seen.layout.indices(spec.role, spec.name)
            ]
            patch = seen.layout.num_tokens - 1
            assert seen.attention[layer][:, :, patch][..., hidden].abs().sum() == 0


def seen_tokens(config: ViTConfig) -> range:
    inside = sum(spec.count for spec in config.tokens if not config.gathers(spec))
    return range(inside + config.grid[1] * config.grid[2])


@single
def test_gradients_of_a_merged_mix_are_finite_and_reach_the_tokens(name: str) -> None:
    model = built(MIXES[name])
    config = model.config
    with vitrail.merge(model, r=3):
        output = model.forward_output(random_images(config))
        torch.stack([part.square().sum() for part in answers(output)]).sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
    for spec in config.tokens:
        learns = spec.outputs(config.num_classes) > 0 and (config.pool == "token" or spec.role is not Role.CLASS)
        assert not learns or model.tokens[spec.name].grad.abs().sum() > 0


@single
def test_a_merged_mix_saves_and_loads(name: str, tmp_path: Path) -> None:
    model = built(MIXES[name])
    x = random_images(model.config)
    with vitrail.merge(model, r=3) as merging:
        expected, settings = outputs(model, x), merging.config
        model.save_pretrained(tmp_path)
    again = ViT.from_pretrained(tmp_path)
    with vitrail.merge(again, **settings):
        assert all(torch.equal(a, b) for a, b in zip(outputs(again, x), expected, strict=True))


@pytest.mark.parametrize("name", COMPILED)
def test_a_merged_mix_compiles(name: str) -> None:
    model = built(MIXES[name])
    x = random_images(model.config)
    with vitrail.merge(model, r=3), torch.no_grad():
        expected = outputs(model, x)
        compiled = torch.compile(model.forward_output, fullgraph=True, backend="aot_eager")(x)
    torch.compiler.reset()
    assert close([compiled.features, *answers(compiled)], expected)
