"""Ablation replaces the requested tokens only, and is removed without a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

import vitrail
from tests.surgery.models import ALL, distance
from vitrail.data import open_dataset
from vitrail.errors import AlreadyApplied, InvalidOption, UnsupportedInput
from vitrail.surgery.ablation import How, ablate

NAMES = ["timm-registers", "eva-dinov3", "hf-registers-head"]


def tokens_after(model: torch.nn.Module, images: Tensor, layer: int) -> tuple[Tensor, list[int]]:
    """Return the input of the next block, and the positions of the registers."""
    seen: list[Tensor] = []
    blocks = vitrail.adapters.find(model).blocks
    hook = blocks[layer + 1].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else next(iter(kwargs.values()))), with_kwargs=True
    )
    with torch.no_grad():
        model(images)
    hook.remove()
    found = vitrail.adapters.find(model)
    return seen[0], list(found.adapter.layout(found.trunk).indices("register"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["zero", "mean", "noise", "shuffle"])
def test_registers_are_replaced_and_nothing_else(name: str, how: How) -> None:
    case = ALL[name]
    model, images = case.model(), case.images(batch=5)
    before, places = tokens_after(model, images, 0)
    with ablate(model, how, images, layers=0):
        after, _ = tokens_after(model, images, 0)
    others = [index for index in range(before.shape[1]) if index not in places]
    assert torch.equal(after[:, others], before[:, others])
    old, new = before[:, places], after[:, places]
    if how == "zero":
        assert not new.any()
    elif how == "mean":
        assert distance(new, old.mean(0, keepdim=True).expand_as(new)) < 1e-9
    elif how == "shuffle":
        assert torch.equal(new.sort(0).values, old.sort(0).values)
        assert all(not torch.equal(one, two) for one, two in zip(old, new, strict=True))
    else:
        assert not torch.equal(new, old)
    assert torch.equal(tokens_after(model, images, 0)[0], before)
    assert not any(part._forward_hooks for part in model.modules())


def test_noise_has_the_mean_and_standard_deviation_of_the_images() -> None:
    case = ALL["timm-registers"]
    model, images = case.model(), case.images(batch=6)
    before, places = tokens_after(model, images, 1)
    many = images.repeat(200, 1, 1, 1)
    with ablate(model, "noise", images, layers=1):
        after, _ = tokens_after(model, many, 1)
    old, new = before[:, places], after[:, places]
    assert torch.allclose(new.mean(0), old.mean(0), atol=6 * float(old.std(0).max()) / 1200**0.5)
    assert torch.allclose(new.std(0), old.std(0, correction=0), rtol=0.15, atol=1e-6)


def test_batches_give_the_same_mean() -> None:
    case = ALL["timm-registers"]
    model, images = case.model(), case.images(batch=5)
    with ablate(model, "mean", images) as whole:
        pass
    with ablate(model, "mean", images.split(2)) as parts:
        pass
    for layer, (mean, deviation) in whole.moments.items():
        assert torch.allclose(parts.moments[layer][0], mean)
        assert torch.allclose(parts.moments[layer][1], deviation, atol=1e-7)


def test_mean_over_a_directory(tmp_path: Path) -> None:
    case = ALL["timm-registers"]
    model = case.model()
    for number in range(3):
        Image.effect_noise((40, 30), 30 + 20 * number).convert("RGB").save(tmp_path / f"{number}.png")
    found = vitrail.adapters.find(model)
    batch = next(open_dataset(tmp_path).batches(found.adapter.input_spec(found.trunk), 3)).images
    with ablate(model, "mean", batch.double()) as whole:
        pass
    with ablate(model, "mean", tmp_path, batch_size=2) as parts:
        pass
    for layer, (mean, _) in whole.moments.items():
        assert torch.allclose(parts.moments[layer][0], mean)


def test_bad_options_are_refused() -> None:
    case = ALL["timm-registers"]
    model, images = case.model(), case.images()
    with pytest.raises(InvalidOption, match=r"zero.*mean.*noise.*shuffle"):
        ablate(model, "fire")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="needs images"):
        ablate(model, "mean")
    with pytest.raises(InvalidOption, match="special tokens"):
        ablate(model, "zero", tokens="patch")
    with pytest.raises(InvalidOption, match="no such token"):
        ablate(ALL["hf-deit-head"].model(), "zero")
    with pytest.raises(InvalidOption, match="tokens are roles"):
        ablate(model, "zero", tokens=2.5)
    with pytest.raises(InvalidOption, match="seed"):
        ablate(model, "noise", images, seed="a")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedInput, match="not finite"):
        ablate(model, "mean", images * torch.nan)
    with pytest.raises(UnsupportedInput, match="no images"):
        ablate(model, "mean", [])
    with vitrail.merge(model, r=1), pytest.raises(AlreadyApplied):
        ablate(model, "zero")
    with ablate(model, "shuffle"), pytest.raises(UnsupportedInput, match="two images"):
        model(images[:1])


def outlier_model() -> tuple[torch.nn.Module, Tensor, float]:
    """Return a model, images, and a norm that some patches exceed after block 1, not the same in each image."""
    case = ALL["timm-registers"]
    model, images = case.model(), case.images(batch=5)
    norms = vitrail.record(model, images, "norms", layers=1)
    patches = norms.norms[1][:, norms.layout.patches]
    return model, images, float(patches.flatten().quantile(0.8))


@pytest.mark.parametrize("how", ["zero", "mean", "noise"])
def test_outliers_of_each_image_are_replaced_and_nothing_else(how: How) -> None:
    model, images, threshold = outlier_model()
    before, _ = tokens_after(model, images, 1)
    special = vitrail.record(model, images[:1], "norms", layers=0).layout.num_special
    chosen = before.float().norm(dim=-1) > threshold
    chosen[:, :special] = False
    assert 0 < chosen.sum(1).min() < chosen.sum(1).max()
    with ablate(model, how, images, tokens="outlier", threshold=threshold, layers=1) as handle:
        after, _ = tokens_after(model, images, 1)
        config = handle.config
    assert torch.equal(after[~chosen], before[~chosen])
    if how == "zero":
        assert not after[chosen].any()
    elif how == "mean":
        assert distance(after[chosen], before[chosen].mean(0).expand_as(after[chosen])) < 1e-6
    else:
        assert not torch.equal(after[chosen], before[chosen])
    assert config["tokens"] == "outlier"
    with ablate(model, **config, data=images):
        assert torch.equal(tokens_after(model, images, 1)[0], after)
    assert torch.equal(tokens_after(model, images, 1)[0], before)


def test_outliers_get_back_what_they_held() -> None:
    model, images, threshold = outlier_model()
    before, _ = tokens_after(model, images, 0)
    depth = len(vitrail.adapters.find(model).blocks)
    options = {"tokens": "outlier", "threshold": threshold, "layers": 0}
    special = vitrail.record(model, images[:1], "norms", layers=0).layout.num_special
    chosen = before.float().norm(dim=-1) > threshold
    chosen[:, :special] = False
    with ablate(model, "zero", **options):  # type: ignore[arg-type]
        without, _ = tokens_after(model, images, 1)
    with ablate(model, "zero", **options, give_back=1):  # type: ignore[arg-type]
        returned, _ = tokens_after(model, images, 1)
    assert torch.equal(returned[chosen], before[chosen])
    assert torch.equal(returned[~chosen], without[~chosen])
    with pytest.raises(InvalidOption, match=f"1 to {depth - 1}; got 0"):
        ablate(model, "zero", **options, give_back=0)  # type: ignore[arg-type]


def test_outliers_need_a_threshold_that_some_patches_exceed() -> None:
    model, images, _ = outlier_model()
    for options, kind, words in (
        ({"how": "zero"}, InvalidOption, "needs threshold"),
        ({"how": "shuffle", "threshold": 1.0}, InvalidOption, "other places"),
        ({"how": "mean", "threshold": 1.0}, InvalidOption, "pass data"),
        ({"how": "mean", "threshold": 1e9, "data": images}, UnsupportedInput, "no patch has a norm above"),
    ):
        with pytest.raises(kind, match=words):
            ablate(model, tokens="outlier", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="for tokens='outlier'"):
        ablate(model, "zero", threshold=1.0)
    assert not any(part._forward_hooks for part in model.modules())
