"""Dynamic and content-aware methods in every precision, in training, with broken images, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

import vitrail
from tests.models.mixes import SMALL, built, random_images
from vitrail import Method, kernels
from vitrail.merging.methods import content, dynamic
from vitrail.models import ViTConfig

METHODS: dict[str, Callable[[], Method]] = {
    "threshold": lambda: dynamic.Threshold(0.3, size_aware=True),
    "entropy": lambda: dynamic.Entropy(strength=0.2),
    "pixel-entropy": lambda: dynamic.Entropy("input", center=0.8, spread=0.2),
    "local_global": lambda: dynamic.LocalGlobal(0.2, global_layer=1),
    "identical": lambda: dynamic.Identical(tolerance=3.0),
    "salient": lambda: content.Salient(keep=0.2),
    "class-attention": lambda: content.Salient("class_attention"),
    "vid_tldr": content.VidTLDR,
    "edges": content.Edges,
}
CONFIG = ViTConfig(**{**SMALL, "image_size": 24, "depth": 3})
every_method = pytest.mark.parametrize("name", METHODS)


@every_method
@pytest.mark.parametrize("mode", ["bfloat16", "float16", "autocast"])
def test_half_precision(name: str, mode: str) -> None:
    dtype = torch.float32 if mode == "autocast" else getattr(torch, mode)
    model, x = built(CONFIG).to(dtype), random_images(CONFIG, batch=3).to(dtype)
    casting = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext()
    with torch.no_grad(), casting, vitrail.merge(model, r=4, method=METHODS[name]()) as m, m.track() as trace:
        found = model(x)
    assert found.isfinite().all()
    assert found.dtype == (torch.bfloat16 if mode == "autocast" else dtype)
    assert trace.sizes.shape[1] < 37
    if name != "vid_tldr":  # whose background adds nothing
        assert trace.sizes.sum(1).tolist() == [37] * 3


@every_method
def test_gradients_equal_those_of_the_images_alone(name: str) -> None:
    model, x = built(CONFIG), random_images(CONFIG, batch=3)
    model.requires_grad_(False)
    with vitrail.merge(model, r=4, method=METHODS[name]()):
        together = x.clone().requires_grad_()
        model(together).square().sum().backward()
        for image in range(3):
            one = x[image : image + 1].clone().requires_grad_()
            model(one).square().sum().backward()
            assert one.grad.abs().sum() > 0
            torch.testing.assert_close(together.grad[image], one.grad[0], rtol=1e-8, atol=1e-12)


@every_method
def test_a_broken_image_leaves_the_others_as_they_are(name: str) -> None:
    model, x = built(CONFIG), random_images(CONFIG, batch=3)
    broken = x.clone()
    broken[1, :, :9] = torch.nan
    with torch.no_grad(), vitrail.merge(model, r=4, method=METHODS[name]()):
        found, wanted = model(broken), model(x)
    torch.testing.assert_close(found[[0, 2]], wanted[[0, 2]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method().static])
def test_static_methods_export(name: str) -> None:
    model, x = built(CONFIG).float(), random_images(CONFIG, batch=2).float()
    with torch.no_grad(), vitrail.merge(model, r=4, method=METHODS[name]()):
        program = torch.export.export(model, (x,))
        torch.testing.assert_close(program.module()(x.flip(0)), model(x.flip(0)), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_method
def test_on_a_gpu(name: str) -> None:
    model, x = built(CONFIG), random_images(CONFIG, batch=3)
    with torch.no_grad(), vitrail.merge(model, r=4, method=METHODS[name]()) as merging:
        with merging.track() as trace:
            wanted = model(x)
        model.cuda()
        with merging.track() as double:
            torch.testing.assert_close(model(x.cuda()).cpu(), wanted, rtol=0, atol=1e-9)
        assert torch.equal(double.groups.cpu(), trace.groups)
        if not merging.method.static:
            assert kernels.bucket_of(merging.method, x.cuda()) == 16
            assert double.sizes.shape[1] in (16, 32, 37)
        model.to(torch.float32)
        torch.testing.assert_close(model(x.cuda().float()).cpu().double(), wanted, rtol=0, atol=1e-2)
        model.to(torch.bfloat16)
        assert model(x.cuda().bfloat16()).isfinite().all()
