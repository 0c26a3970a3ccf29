"""Promises that every family keeps, besides those of every model: checkpointing, compilation, costs, export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from tests.adapters.families import FAMILIES
from tests.adapters.models_table import PAGE, read
from tests.surgery.models import distance, main_output, run
from vitrail.export import export

every_family = pytest.mark.parametrize("family", FAMILIES)
every_kind = pytest.mark.parametrize("family", [name for name, one in FAMILIES.items() if one.compiled])


@every_family
def test_checkpointing_gives_the_same_gradients(family: str) -> None:
    case = FAMILIES[family].case
    model, images = case.model().train(), case.images()
    vitrail.merge(model, r=2)
    found = []
    for enabled in (False, True):
        if enabled and getattr(model, "supports_gradient_checkpointing", False):
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        elif enabled and hasattr(model, "set_grad_checkpointing"):
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        model.zero_grad()
        torch.manual_seed(5)  # coordinates of DINOv3 are shifted at random
        run(model, images, case).square().mean().backward()
        found.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, plain in found[0].items():
        torch.testing.assert_close(found[1][name], plain, rtol=1e-9, atol=1e-9, msg=name)


def counted(model: nn.Module, images: Tensor, **call: object) -> float:
    """Return the multiply-adds that run for one image, as PyTorch counts them."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as mode:
        model(images[:1], **call)
    return mode.get_total_flops() / 2


@every_family
def test_costs_are_those_that_run(family: str) -> None:
    case = FAMILIES[family].case
    model, images = case.model(torch.float32), case.images(torch.float32)
    assert vitrail.count(model, images).flops == pytest.approx(counted(model, images, **case.call), rel=0.03)
    plain = vitrail.count(model, images).flops
    vitrail.merge(model, r=3)
    assert vitrail.count(model, images).flops < plain


@pytest.mark.slow
@every_kind
def test_compiles_as_one_graph(family: str) -> None:
    case = FAMILIES[family].case
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2)
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = run(model, images, case)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert distance(run(compiled, images, case), wanted) < 1e-5


@pytest.mark.slow
@every_kind
def test_exports(family: str, tmp_path: Path) -> None:
    if read(PAGE.read_text(encoding="utf-8"))[family]["export"] != "yes":
        pytest.skip("docs/models.md says why not")
    case = FAMILIES[family].case
    model, images = case.model(torch.float32), case.images(torch.float32)
    vitrail.merge(model, r=2)
    path = export(model, tmp_path / "model.pt2", example=images).path
    with torch.no_grad():
        wanted = run(model, images, case)
        made = torch.export.load(path).module()(images)
    assert distance(main_output(made), wanted) < 1e-5
