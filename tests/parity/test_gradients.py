"""Gradients of every parameter with merging active, against the oracle's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitrail
from tests.oracle import describe, run
from tests.parity.checks import mask
from tests.parity.models import timm_beit, timm_eva, timm_vit, transformers_vit
from tests.parity.models.cases import Case, outputs_of

CASES: list[tuple[str, Case]] = [
    ("vit", timm_vit.CASES["registers"]),
    ("vit", timm_vit.CASES["qk-norm"]),
    ("vit", timm_vit.CASES["siglip-tower"]),
    ("eva", timm_eva.CASES["dinov3"]),
    ("eva", timm_eva.CASES["grouped-heads"]),
    ("eva", timm_eva.CASES["mixed-xy"]),
    ("beit", timm_beit.CASES["both"]),
    ("transformers", transformers_vit.CASES["dinov2-head"]),
    ("transformers", transformers_vit.CASES["deit-teacher"]),
]


def loss_of(outputs: dict[str, Tensor]) -> Tensor:
    """Return a scalar that depends on every entry of every output, with different weights."""
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs.values():
        weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
        total = total + (weights * output).sum() + (output**2).mean()
    return total


def gradients(model: nn.Module, outputs: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Return the gradient of every parameter; None where it is unused."""
    model.zero_grad(set_to_none=True)
    loss_of(outputs).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("protect", ["none", "each"])
@pytest.mark.parametrize(("library", "case"), CASES, ids=[f"{kind}-{case.name}" for kind, case in CASES])
def test_gradients_are_the_oracles(library: str, case: Case, protect: str) -> None:
    model, images = case.model(), case.images()
    recipe = describe(model, images, **case.call)
    patches = recipe.tokens.shape[1] - recipe.prefix
    options = {"r": [3, 2, 1], "protect": mask(protect, len(images), patches)}
    expected = gradients(model, run(recipe, **options).outputs)
    vitrail.merge(model, **options)
    actual = gradients(model, outputs_of(model(images, **case.call)))
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        if wanted is None:
            assert actual[name] is None or not actual[name].any(), name
            continue
        scale = max(1.0, wanted.abs().max().item())
        assert (actual[name] - wanted).abs().max().item() < 10 * case.tolerance * scale, name
        # The softmax does not see what is added to all of a query's logits alike.
        assert name.endswith(("k_proj.bias", "key.bias", "k_norm.bias")) or wanted.abs().max().item() > 1e-6, (
            f"{name} plays no part"
        )
