"""Test-time registers: planted neurons are found, their artifacts move, and removal restores the model."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import vitrail
from tests.surgery.models import ALL, FEW, distance, run
from vitrail.errors import AlreadyApplied, InvalidOption, UnsupportedInput
from vitrail.surgery import TestTimeRegisters, find_register_neurons, test_time_registers

LAYER, NEURONS, SPOTS = 1, (7, 40), (5, 10)
"""Planted artifacts: a block, two of its neurons, and two patches of a 4 × 4 grid."""


@torch.no_grad()
def planted() -> tuple[nn.Module, Tensor]:
    """Return a ViT in which two neurons respond to bright patches and give them a huge norm."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, embed_dim=32, num_heads=2, num_classes=3)
    model.eval().double()
    for weight in model.parameters():  # versions of timm draw them in different orders
        if weight.dim() > 1:
            weight.copy_(0.02 * torch.randn(weight.shape))
    model.pos_embed.copy_(0.3 * torch.randn(model.pos_embed.shape).double())
    model.pos_embed[..., 0] = 0
    model.patch_embed.proj.weight[0] = 1 / 256  # channel 0: brightness
    model.patch_embed.proj.weight[1:] *= 0.1
    mlp = model.blocks[LAYER].mlp
    for sign, neuron in enumerate(NEURONS):
        mlp.fc1.weight[neuron] = 0
        mlp.fc1.weight[neuron, 0] = 2.0
        mlp.fc1.bias[neuron] = -6.0 - sign
        mlp.fc2.weight[:, neuron] = 40 * torch.randn(32, generator=torch.Generator().manual_seed(neuron)).double()
    images = 0.05 * torch.randn(6, 3, 64, 64, generator=torch.Generator().manual_seed(1)).double()
    for spot, bright in zip(SPOTS, (1.0, 0.5), strict=True):  # one of them is above three deviations
        row, column = divmod(spot, 4)
        images[:, :, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16] += bright
    return model, images


def norms(model: nn.Module, images: Tensor) -> Tensor:
    """Return the norms (L, B, P) of the patches after each block."""
    found = vitrail.record(model, images, "norms")
    return torch.stack([found.norms[layer] for layer in found.layers])[:, :, found.layout.num_special :]


def artifacts(model: nn.Module, images: Tensor) -> Tensor:
    """Return which patches (B, P) have five times the median norm or more after the last block."""
    last = norms(model, images)[-1]
    return last > 5 * last.median()


def untouched(model: nn.Module) -> bool:
    return not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_plant_makes_artifacts() -> None:
    model, images = planted()
    assert all(artifacts(model, images)[image].nonzero().flatten().tolist() == list(SPOTS) for image in range(6))


def test_planted_neurons_are_found() -> None:
    model, images = planted()
    found = find_register_neurons(model, images, 2, threshold=float(5 * norms(model, images)[-1].median()))
    assert {layer: set(some) for layer, some in found.by_layer.items()} == {LAYER: set(NEURONS)}
    assert found.onset == LAYER
    assert found.outlier_share == pytest.approx(2 / 16)
    assert found.images == 6
    assert found.count == 2
    assert all(score > 1 for score in found.scores[LAYER])
    batches = find_register_neurons(model, images.split(4), 2, threshold=found.threshold)
    assert batches.by_layer == found.by_layer
    assert batches.onset == found.onset


class Shuffled:
    """A shuffling data loader that counts its epochs and the batches alive at once."""

    def __init__(self, images: Tensor) -> None:
        self.images, self.walks, self.most = images, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.walks += 1
        alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        for index in torch.randperm(len(self.images), generator=torch.Generator().manual_seed(self.walks)).split(2):
            batch = self.images[index]
            alive.add(batch)
            self.most = max(self.most, len(alive))
            yield batch
            del batch


def test_order_does_not_matter_and_batches_are_not_held() -> None:
    model, images = planted()
    expected = find_register_neurons(model, images, 2)
    loader = Shuffled(images)
    found = find_register_neurons(model, loader, 2)
    assert loader.walks == 3
    assert loader.most <= 2  # the next one is made while the last one is let go
    assert found.by_layer == expected.by_layer
    assert found.threshold == pytest.approx(expected.threshold)
    assert found.scores[LAYER] == pytest.approx(expected.scores[LAYER])
    find_register_neurons(model, loader, 2, threshold=found.threshold)
    assert loader.walks == 5
    assert find_register_neurons(model, iter(images.split(4)), 2).by_layer == expected.by_layer


def test_threshold_is_three_deviations_above_the_mean() -> None:
    model, images = planted()
    last = norms(model, images)[-1]
    found = find_register_neurons(model, images.split(4), 2)
    assert found.threshold == pytest.approx(float(last.mean() + 3 * last.std(correction=0)))
    assert found.outlier_share == float((last > found.threshold).double().mean())


def test_neurons_are_found_in_a_directory(tmp_path: Path) -> None:
    model, images = planted()
    for number, image in enumerate(images):
        pixels = (255 * (image * 0.5 + 0.5)).clamp(0, 255).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    found = find_register_neurons(model, tmp_path, 2)
    assert {layer: set(some) for layer, some in found.by_layer.items()} == {LAYER: set(NEURONS)}
    with test_time_registers(model, str(tmp_path), neurons=2) as handle:
        assert {layer: set(some) for layer, some in handle.by_layer.items()} == {LAYER: set(NEURONS)}


def test_strongest() -> None:
    model, images = planted()
    found = find_register_neurons(model, images, 30)
    for count in (1, 2, 7, 30):
        few, expected = found.strongest(count), find_register_neurons(model, images, count)
        assert {layer: set(some) for layer, some in few.by_layer.items()} == {
            layer: set(some) for layer, some in expected.by_layer.items()
        }
        assert few.count == count


@pytest.mark.parametrize("registers", [1, 2, 3])
def test_artifacts_move_to_the_registers(registers: int) -> None:
    model, images = planted()
    with test_time_registers(model, neurons={LAYER: NEURONS}, registers=registers) as handle:
        assert not artifacts(model, images).any()
        recording = vitrail.record(model, images, ("norms", "attention"))
        places = recording.layout.indices("register", "test-time")
        assert len(places) == registers
        patches = recording.norms[3][:, recording.layout.patches]
        used = min(registers, len(NEURONS))
        assert (recording.norms[3][:, list(places)[:used]] > 5 * patches.median()).all()
        assert recording.attention[0].shape[2] == 1 + registers
        assert handle.is_active
        assert TestTimeRegisters.of(model) is handle
    assert artifacts(model, images).any()


def test_config_comes_back_through_json() -> None:
    model, images = planted()
    with test_time_registers(model, neurons={LAYER: NEURONS, 0: (3,)}, registers=2) as handle:
        config, expected = handle.config, model(images)
    with test_time_registers(model, **json.loads(json.dumps(config))) as again:
        assert again.by_layer == {LAYER: NEURONS, 0: (3,)}
        assert torch.equal(model(images), expected)


def test_each_image_has_its_own_activations() -> None:
    """The largest activation of each image moves, not that of the batch or of its first image."""
    model, images = planted()
    images[3:] *= torch.tensor([0.5, 0.9, 1.7]).view(3, 1, 1, 1)
    with test_time_registers(model, neurons={LAYER: NEURONS}):
        together = vitrail.record(model, images, "tokens", layers=-1).tokens[3]
        apart = [vitrail.record(model, images[i : i + 1], "tokens", layers=-1).tokens[3] for i in range(len(images))]
    assert distance(torch.cat(apart), together) < 1e-12


@pytest.mark.parametrize("registers", [1, 2])
@pytest.mark.parametrize("move", ["layer", "neuron"])
def test_activations_move_as_documented(move: str, registers: int) -> None:
    model, images = planted()
    seen: dict[str, Tensor] = {}
    last = model.blocks[LAYER].mlp.fc2
    hook = last.register_forward_pre_hook(lambda _, args: seen.update(before=args[0].detach().clone()))
    with test_time_registers(model, neurons={LAYER: NEURONS}, registers=registers, move=move):
        after = last.register_forward_pre_hook(lambda _, args: seen.update(after=args[0]))
        model(images)
        after.remove()
    hook.remove()
    expected = seen["before"].clone()
    for image in range(len(images)):
        of_layer = max(float(expected[image, :, neuron].max()) for neuron in NEURONS)
        for number, neuron in enumerate(NEURONS):
            largest = max(expected[image, :, neuron].tolist(), key=abs)
            first = 1 + registers if move == "layer" else 0  # the class token keeps its activations, or not
            expected[image, first:, neuron] = 0
            expected[image, 1 + number % registers, neuron] = of_layer if move == "layer" else largest
    assert torch.equal(seen["after"], expected)


def test_random_neurons_remove_no_artifacts() -> None:
    model, images = planted()
    before = artifacts(model, images)
    for seed in range(5):
        with test_time_registers(model, neurons={LAYER: NEURONS}, control=seed) as handle:
            assert len(handle.by_layer[LAYER]) == 2
            assert torch.equal(artifacts(model, images), before)


def test_random_neurons_exclude_the_given_ones() -> None:
    model, _ = planted()
    given = tuple(range(0, 128, 2))  # half of the layer: the control can only be the other half
    for seed in range(3):
        with test_time_registers(model, neurons={LAYER: given}, control=seed) as handle:
            assert sorted(handle.by_layer[LAYER]) == list(range(1, 128, 2))
    with pytest.raises(InvalidOption, match="layer 1 has 128, of which 65 are given"):
        test_time_registers(model, neurons={LAYER: (*given, 1)}, control=0)
    assert untouched(model)


def test_found_and_moved_in_one_call() -> None:
    model, images = planted()
    handle = test_time_registers(model, images, neurons=2, threshold=float(5 * norms(model, images)[-1].median()))
    assert handle.neurons is not None
    assert {layer: set(some) for layer, some in handle.by_layer.items()} == {LAYER: set(NEURONS)}
    assert not artifacts(model, images).any()
    handle.remove()
    again = test_time_registers(model, neurons=handle.neurons)
    assert not artifacts(model, images).any()
    again.remove()


@pytest.mark.parametrize("name", [name for name in FEW if name != "beit-own"])  # has a position bias
def test_every_model_takes_registers_and_is_restored(name: str) -> None:
    case = ALL[name]
    model, images = case.model(), case.images()
    before = run(model, images, case)
    keys = {key: value.clone() for key, value in model.state_dict().items()}
    with test_time_registers(model, neurons={0: (0, 3), 2: (1,)}, registers=2):
        changed = run(model, images, case)
        assert changed.shape == before.shape
        assert torch.isfinite(changed).all()
        assert not torch.equal(changed, before)
    assert torch.equal(run(model, images, case), before)
    assert all(torch.equal(value, keys[key]) for key, value in model.state_dict().items())
    assert untouched(model)


@pytest.mark.parametrize("name", ["eva-dinov3", "timm-registers", "hf-registers-head", "clip-projection"])
def test_patches_keep_their_rotation(name: str) -> None:
    """Without neurons to move, a zero token changes attention only by its own share."""
    case = ALL[name]
    model, images = case.model(), case.images()
    plain = vitrail.record(model, images, ("attention",), layers=0, queries=[0])
    with test_time_registers(model, neurons={}):
        found = vitrail.record(model, images, ("attention",), layers=0, queries=[0])
    place = plain.layout.num_special
    rows = torch.cat([found.attention[0][..., :place], found.attention[0][..., place + 1 :]], -1)
    assert distance(rows / rows.sum(-1, keepdim=True), plain.attention[0]) < 1e-9


def test_neurons_are_ranked_by_mean_absolute_activation_per_image() -> None:
    """A neuron that is as often negative as positive counts; an image with many artifacts counts as any other."""
    model, images = planted()
    threshold = float(norms(model, images)[-1].quantile(0.8))
    found = find_register_neurons(model, images, 128, threshold=threshold, layers=[0])
    seen = vitrail.record(model, images, ("mlp", "norms"))
    patches = seen.layout.patches
    sums = torch.zeros(128).double()
    concerned = 0
    for image in range(len(images)):
        outliers = (seen.norms[3][image, patches].double() > threshold).nonzero().flatten().tolist()
        if outliers:
            concerned += 1
            sums += sum(seen.mlp[0][image, patches][place].abs() for place in outliers) / len(outliers)
    scores = dict(zip(found.by_layer[0], found.scores[0], strict=True))
    assert [scores[neuron] for neuron in range(128)] == pytest.approx((sums / concerned).tolist(), rel=1e-5)
    assert list(found.scores[0]) == sorted(found.scores[0], reverse=True)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no data": ({}, InvalidOption, "pass data"),
    "registers": ({"neurons": {0: (1,)}, "registers": 0}, InvalidOption, "registers"),
    "layer": ({"neurons": {9: (1,)}}, InvalidOption, "0 to 3; got layer 9"),
    "neuron": ({"neurons": {0: (1, 5000)}}, InvalidOption, r"neurons 0 to 127.*got \[5000\]"),
    "twice": ({"neurons": {0: (1, 1)}}, InvalidOption, "each to be given once"),
    "none": ({"data": torch.zeros(2, 3, 64, 64), "threshold": 1e9}, UnsupportedInput, "no artifacts"),
    "layers": ({"data": torch.zeros(2, 3, 64, 64), "layers": [99]}, InvalidOption, "layers are integers from -4 to 3"),
    "threshold": ({"data": torch.zeros(2, 3, 64, 64), "threshold": "high"}, InvalidOption, "expected a number"),
    "half a register": ({"neurons": {0: (1,)}, "registers": 1.5}, InvalidOption, "registers"),
    "move": ({"neurons": {0: (1,)}, "move": "all"}, InvalidOption, "'layer' or 'neuron'"),
    "control": ({"neurons": {0: (1,)}, "control": "yes"}, InvalidOption, "control"),
    "half a neuron": ({"neurons": {0: (1.5,)}}, InvalidOption, "neurons"),
    "layer in words": ({"neurons": {"first": (1,)}}, InvalidOption, "neurons"),
    "layer twice": ({"neurons": {0: (1,), "0": (2,)}}, InvalidOption, "a layer twice"),
    "layer beyond, as text": ({"neurons": {"9": (1,)}}, InvalidOption, "0 to 3; got layer 9"),
    "empty layer": ({"neurons": {2: []}}, InvalidOption, "none for layer 2"),
    "one neuron": ({"neurons": {0: 5}}, InvalidOption, "neurons"),
    "words": ({"neurons": "many"}, InvalidOption, "neurons"),
    "count": ({"data": torch.zeros(2, 3, 64, 64), "neurons": 0}, InvalidOption, "1 or more"),
}


def test_clean_models_have_no_register_neurons() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=128, depth=3, embed_dim=32, num_heads=2).eval()
    images = torch.randn(24, 3, 128, 128, generator=torch.Generator().manual_seed(1))
    with pytest.raises(UnsupportedInput, match="one group"):
        find_register_neurons(model, images)
    assert find_register_neurons(model, images, 3, threshold=float(norms(model, images)[-1].quantile(0.99))).count == 3


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_options_change_nothing(wrong: str) -> None:
    model, images = planted()
    before = model(images)
    options, kind, words = WRONG[wrong]
    with pytest.raises(kind, match=words):
        test_time_registers(model, **options)
    assert torch.equal(model(images), before)
    assert untouched(model)


def test_merging_and_registers_refuse_each_other() -> None:
    model, _ = planted()
    with test_time_registers(model, neurons={0: (1,)}):
        with pytest.raises(AlreadyApplied, match="test-time registers"):
            vitrail.merge(model, r=1)
        with pytest.raises(AlreadyApplied, match="already"):
            test_time_registers(model, neurons={0: (1,)})
    with vitrail.merge(model, r=1), pytest.raises(AlreadyApplied, match="already merged"):
        test_time_registers(model, neurons={0: (1,)})
