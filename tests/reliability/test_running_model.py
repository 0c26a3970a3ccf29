"""A model is not changed while it runs, and what a merged model cannot do is refused."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

import vitrail
from vitrail.errors import BrokenPass, UnsupportedInput


def own() -> nn.Module:
    return vitrail.create_model("vit_tiny_patch16", image_size=32, patch_size=8, width=32, depth=3, heads=2)


def of_timm() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2)


def of_torchvision() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 3, 2, 32, 64)


def of_transformers() -> nn.Module:
    options = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    return transformers.ViTModel(transformers.ViTConfig(**options, intermediate_size=64))


MODELS = [own, of_timm, of_torchvision, of_transformers]


def tensor(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.last_hidden_state


@pytest.mark.parametrize("make", MODELS)
def test_merging_is_not_removed_in_a_pass(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, images = make().eval(), torch.randn(2, 3, 32, 32)
    plain = tensor(model(images))
    merging = vitrail.merge(model, r=3)
    merged = tensor(model(images))
    hook = merging.found.blocks[1].register_forward_hook(lambda *_: merging.remove())
    with pytest.raises(BrokenPass, match="is running"):
        model(images)
    hook.remove()
    assert merging.is_active
    assert torch.equal(tensor(model(images)), merged)
    merging.remove()
    assert torch.equal(tensor(model(images)), plain)


def test_merging_is_not_removed_by_another_thread() -> None:
    model, images = own().eval(), torch.randn(1, 3, 32, 32)
    merging, inside, go_on, found = vitrail.merge(model, r=3), threading.Event(), threading.Event(), []
    merged = model(images)

    def wait(*_: Any) -> None:
        inside.set()
        assert go_on.wait(20)

    hook = merging.found.blocks[1].register_forward_hook(wait)
    runner = threading.Thread(target=lambda: found.append(model(images)))
    runner.start()
    assert inside.wait(20)
    with pytest.raises(BrokenPass):
        merging.remove()
    go_on.set()
    runner.join()
    hook.remove()
    assert torch.equal(found[0], merged)
    merging.remove()  # nothing runs any more


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of torch, unmerged
def test_vmap_is_refused_with_the_way_out() -> None:
    model, images = own().eval(), torch.randn(3, 1, 3, 32, 32)
    expected = model(images[:, 0])
    torch.testing.assert_close(torch.vmap(model)(images)[:, 0], expected)
    with vitrail.merge(model, r=3), pytest.raises(UnsupportedInput, match=r"torch\.vmap"):
        torch.vmap(model)(images)
