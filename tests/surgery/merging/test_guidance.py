"""Guidance by other layers: first passes, and networks that foresee attention."""

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor, nn

import vitrail
from tests.surgery.models import ALL, FEW, distance, run
from vitrail.adapters import find
from vitrail.errors import InvalidOption, UnsupportedInput, UnsupportedModel, UntrainedMethod
from vitrail.merging import Context, Method, Reduction
from vitrail.merging.foresight import Foresight, as_foresight


class LeastAhead(Method):
    """Merge the r + 1 patches where the map "ahead" is lowest into one; remembers the maps that it read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[int, Tensor]] = []

    def reduce(self, context: Context, r: int | Tensor) -> Reduction:
        assert isinstance(r, int)
        ahead = context.guide["ahead"]
        if not torch.compiler.is_compiling():
            self.read.append((context.layer, ahead))
        return Reduction(merge_lowest(ahead.masked_fill(~context.mergeable, torch.inf), r))


def merge_lowest(values: Tensor, r: int) -> vitrail.Assignment:
    length = values.shape[1]
    joined = torch.zeros_like(values, dtype=torch.bool).scatter(1, values.argsort(dim=1, stable=True)[:, : r + 1], True)
    first = joined & (joined.cumsum(1) == 1)
    place = ((~joined | first).cumsum(1) - 1).masked_fill(joined, 0)
    group = ((~joined | first).cumsum(1) - 1).masked_fill(~first, 0).sum(1, keepdim=True)
    return vitrail.Assignment(torch.where(joined, group, place), length - r)


def vit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "depth": 3, "num_heads": 2, "num_classes": 5}
    return VisionTransformer(**settings | {"init_values": 1.0} | options).eval()


def attention_by_hand(model: nn.Module, images: Tensor, layer: int) -> Tensor:
    """Return the attention (B, H, N, N) of a layer of a timm model."""
    found = []
    handle = model.blocks[layer].attn.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.no_grad():
        model(images)
    handle.remove()
    part = model.blocks[layer].attn
    q, k, _ = part.qkv(found[0]).unflatten(2, (3, part.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return (q @ k.mT * part.scale).softmax(-1).detach()


def share(values: Tensor) -> Tensor:
    return values / values.sum(1, keepdim=True)


@pytest.mark.parametrize("by", ["class_attention", "received_attention"])
def test_full_passes_return_the_attention_of_later_layers(by: Any) -> None:
    model, images = vit().double(), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    wanted = []
    for layer in (1, 2):
        attention = attention_by_hand(model, images, layer).mean(1)
        wanted.append(share((attention[:, 0] if by == "class_attention" else attention.mean(1))[:, 1:]))
    maps = vitrail.look_ahead(model, images, by=by, layers=[1, -1], batch_size=2)
    assert torch.allclose(maps.double(), (wanted[0] + wanted[1]) / 2, atol=1e-6)
    with vitrail.merge(model, r=3):
        assert torch.allclose(vitrail.look_ahead(model, images, by=by, layers=[1, 2]), maps, atol=1e-7)
    assert torch.allclose(vitrail.look_ahead(model, images, by=by).double(), wanted[1], atol=1e-6)


def test_coarse_passes_enlarge_the_maps_of_smaller_images() -> None:
    model, images = vit(dynamic_img_size=True), torch.randn(2, 3, 32, 48)
    small = F.interpolate(images, (16, 24), mode="bilinear", antialias=True)
    coarse = attention_by_hand(model, small, 2).mean(1)[:, 0, 1:].reshape(2, 1, 2, 3)
    wanted = share(F.interpolate(share(coarse.flatten(1)).view(2, 1, 2, 3), (4, 6), mode="bilinear").flatten(1))
    assert torch.allclose(vitrail.look_ahead(model, images, first="coarse"), wanted, atol=1e-6)
    with pytest.raises(UnsupportedModel, match="other sizes"):
        vitrail.look_ahead(vit(), images[..., :32], first="coarse")


def test_merged_passes_share_the_attention_of_a_group() -> None:
    model, images = vit(), torch.randn(2, 3, 32, 32)
    before = [type(part) for part in model.modules()]
    maps = vitrail.look_ahead(model, images, first="merged", keep=0.25)
    assert [type(part) for part in model.modules()] == before
    with vitrail.merge(model, keep=0.25) as merging, merging.track() as trace:
        rows = vitrail.record(model, images, ["attention"], layers=-1, queries="class").attention[2]
        assert trace.sizes.shape[1] == 5
    assert torch.allclose(maps, share(rows.mean((1, 2))[:, 1:]), atol=1e-6)
    assert all(len(image.unique()) <= 16 - 8 for image in maps)  # merged before the last layer


@pytest.mark.parametrize("name", FEW)
def test_every_kind_of_model_looks_ahead(name: str) -> None:
    case = ALL[name]
    model, images = case.model(torch.float32), case.images(torch.float32)
    before, keys = run(model, images, case), list(model.state_dict())
    found = find(model)
    patches = found.adapter.layout(found.trunk).num_patches
    for first in ("full", "merged"):
        maps = vitrail.look_ahead(model, images, by="received_attention", first=first)
        assert maps.shape == (2, patches)
        assert torch.allclose(maps.sum(1), torch.ones(2))
    assert torch.equal(run(model, images, case), before)
    assert list(model.state_dict()) == keys
    with vitrail.merge(model, r=2, method=LeastAhead(), foresight={"hidden": 4}) as merging:
        merging.train_foresight(images, by="received_attention", steps=3, learning_rate=0.1)
        assert distance(run(model, images, case), before) > 1e-5
    with vitrail.merge(model, r=2, method=LeastAhead()) as merging:
        with merging.guided(by="received_attention", first="merged"):
            twice = run(model, images, case)
        with merging.guided(images, by="received_attention", first="merged"):
            assert distance(run(model, images, case), twice) < 1e-6
    assert torch.equal(run(model, images, case), before)


def test_guided_calls_run_two_passes_and_keep_other_guides() -> None:
    model, images = vit(), torch.randn(3, 3, 32, 32)
    maps = vitrail.look_ahead(model, images, by="received_attention")
    method = LeastAhead()
    with vitrail.merge(model, r=2, method=method) as merging:
        with merging.guide(ahead=maps):
            wanted = model(images)
        with pytest.raises(KeyError, match="ahead"):
            model(images)
        with merging.guide(other=torch.ones(16)), merging.guided(by="received_attention", first="full"):
            method.read.clear()
            assert torch.equal(model(images), wanted)
            assert torch.allclose(method.read[0][1][:, 1:], maps, atol=1e-7)
            assert torch.equal(method.read[0][1][:, 0], torch.zeros(3))
            model.train()
            assert model(images[:2]).requires_grad
            model.eval()
        with merging.guided(images, by="received_attention", first="full"):
            assert torch.equal(model(images), wanted)
        with pytest.raises(KeyError, match="ahead"):
            model(images)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_salient_reads_guides_of_every_source() -> None:
    model, images = vit(), torch.randn(8, 3, 32, 32)
    salient = {"name": "salient", "importance": "ahead", "strength": 5.0}
    maps = vitrail.look_ahead(model, images)
    with vitrail.merge(model, r=3, method=salient) as merging:
        with merging.guide(ahead=maps):
            wanted = model(images)
        with merging.guided(images, first="full"):
            assert torch.equal(model(images), wanted)
        with merging.guided(first="full"):
            assert torch.equal(model(images), wanted)
        with pytest.raises(InvalidOption, match="ahead"):
            model(images)
    with vitrail.merge(model, r=3, method=salient, foresight={"hidden": 4}) as merging:
        merging.train_foresight(images, steps=5, learning_rate=0.1)
        assert distance(model(images), wanted) > 1e-5


def test_a_failed_call_leaves_no_guide() -> None:
    model, images = vit(), torch.randn(2, 3, 32, 32)

    def fail(*_: object) -> None:
        raise RuntimeError("stop")

    with vitrail.merge(model, r=2, method=LeastAhead()) as merging:
        with merging.guided(first="full"):
            handle = model.head.register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="stop"):
                model(images)
            handle.remove()
            model(images)
        with pytest.raises(KeyError, match="ahead"):
            model(images)


def test_guided_calls_of_two_threads_share_nothing() -> None:
    model = vit()
    batches = [torch.randn(2, 3, 32, 32) for _ in range(4)]
    with vitrail.merge(model, r=3, method=LeastAhead()) as merging, merging.guided(first="full"), torch.no_grad():
        wanted = [model(batch) for batch in batches]
        found: dict[int, Tensor] = {}

        def call(number: int) -> None:
            with torch.no_grad():
                for _ in range(3):
                    found[number] = model(batches[number])

        threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(found[number], wanted[number]) for number in range(4))


def foreseeing(model: nn.Module, images: Tensor, **options: Any) -> tuple[vitrail.Merging, Any]:
    merging = vitrail.merge(model, r=2, method=LeastAhead(), foresight={"hidden": 8, **options})
    fit = merging.train_foresight(images, steps=150, learning_rate=1e-2, layers=[1, 2], batch_size=8)
    return merging, fit


@pytest.mark.parametrize("hidden", [0, 8])
def test_networks_foresee_later_attention(hidden: int) -> None:
    model, images = vit().double(), torch.randn(32, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():  # attention that depends on the content of a patch
        for block in model.blocks:
            block.attn.qkv.weight.mul_(4)
    plain = model(images[:4])
    merging, fit = foreseeing(model, images, hidden=hidden)
    assert fit.images == 8
    assert fit.divergence < 0.8 * fit.divergence_of_uniform
    assert fit.divergence < fit.divergence_of_mean
    method = merging.method
    method.read.clear()
    model(images[:4])
    seen = method.read[0][1]
    maps = vitrail.look_ahead(model, images[:4], layers=[1, 2])
    tokens = model.patch_embed(images[:4]) + model.pos_embed[:, 1:]
    normed = F.layer_norm(tokens, (12,))
    scores = merging.foresight.network(torch.cat([normed, normed.mean(1, keepdim=True).expand_as(normed)], 2))
    assert torch.allclose(seen[:, 1:].double(), scores.squeeze(2).softmax(1), atol=1e-6)
    assert float(F.kl_div(seen[:, 1:].log(), maps, reduction="batchmean")) < fit.divergence_of_uniform
    assert [layer for layer, _ in method.read] == [0, 1, 2]
    alone = torch.cat([model(image[None]) for image in images[:4]])
    assert distance(alone, model(images[:4])) < 1e-9
    keys = {key.split(".")[0] for key in model.state_dict()}
    assert "vitrail_foresight" in keys
    merging.remove()
    assert torch.equal(model(images[:4]), plain)
    assert not any("vitrail" in key for key in model.state_dict())


def test_foresight_is_saved_copied_and_compiled() -> None:
    model, images = vit(), torch.randn(8, 3, 32, 32)
    merging, _ = foreseeing(model, images, layer=1)
    with pytest.raises(KeyError, match="ahead"):
        model(images)  # the method merges before layer 1
    merging.r = [0, 3, 3]
    wanted, config, state = model(images), merging.config, copy.deepcopy(model.state_dict())
    assert config["foresight"] == {"layer": 1, "hidden": 8, "name": "ahead"}
    assert torch.equal(copy.deepcopy(model)(images), wanted)
    fresh = vit()
    vitrail.merge(fresh, **config)
    with pytest.raises(UntrainedMethod, match="train_foresight"):
        fresh(images)
    fresh.load_state_dict(state)
    assert torch.equal(fresh(images), wanted)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(fresh, fullgraph=True, backend="aot_eager")
        assert distance(compiled(images), wanted) < 1e-5
    fresh.train()(images).sum().backward()
    assert not any(p.requires_grad for name, p in fresh.named_parameters() if "vitrail_foresight" in name)
    assert all(p.grad is not None for name, p in fresh.named_parameters() if "vitrail_foresight" not in name)


def test_wrong_options() -> None:
    model, images = vit(), torch.randn(4, 3, 32, 32)
    before = model(images)
    for options, words in (
        ({"by": "norm"}, "'class_attention'"),
        ({"first": "third"}, "'full'"),
        ({"scale": 0}, "scale is a share"),
        ({"first": "merged", "keep": 2}, "keep is a share"),
        ({"layers": 3}, "layers are integers"),
    ):
        with pytest.raises(InvalidOption, match=words):
            vitrail.look_ahead(model, images, **options)
    with pytest.raises(UnsupportedInput, match="no images"):
        vitrail.look_ahead(model, [])
    with pytest.raises(UnsupportedModel, match="needs a class token"):
        vitrail.look_ahead(vit(class_token=False, global_pool="avg"), images)
    for foresight, words in (
        ("mlp", "foresight"),
        ({"depth": 3}, "does not take these"),
        ({"layer": -1}, "0 or more"),
        ({"name": ""}, "name is that of a guide"),
        ({"layer": 3}, "this model has 3"),
    ):
        with pytest.raises(InvalidOption, match=words):
            vitrail.merge(model, r=2, foresight=foresight)
    with vitrail.merge(model, r=2) as merging, pytest.raises(InvalidOption, match="no network to train"):
        merging.train_foresight(images)
    with vitrail.merge(model, r=2, foresight={"layer": 1}) as merging:
        with pytest.raises(InvalidOption, match="or later ones"):
            merging.train_foresight(images, layers=0)
        with pytest.raises(InvalidOption, match="steps is 1 or more"):
            merging.train_foresight(images, steps=0)
        with pytest.raises(UnsupportedInput, match="two images"):
            merging.train_foresight(images[:1])
    assert as_foresight(None) is None
    own = Foresight()
    assert as_foresight(own) is own
    assert torch.equal(model(images), before)


def test_untrained_networks_do_not_disturb_models_that_do_not_merge() -> None:
    model, images = vit(), torch.randn(2, 3, 32, 32)
    plain = model(images)
    with vitrail.merge(model, r=0, foresight={}):
        assert torch.equal(model(images), plain)
