"""``time_models``: interleaved timing of any models."""

import re
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.bench.models import tiny
from tests.surgery.models import ALL, FEW, main_output
from vitrail.bench import MODES, copy_model, time_models
from vitrail.bench._modes import prepare
from vitrail.bench.config import uses_graph
from vitrail.errors import InvalidOption, UnsupportedInput
from vitrail.models import create_model
from vitrail.surgery import Merging, merge

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"proportional": False},
    {"order": "original"},
    {"unmerge": False},
    {"method": "random"},
    {"method": "prune"},
    {"protect": torch.eye(4, dtype=torch.bool)},
]


class Plain(nn.Module):
    """Not a ViT; records the first value of each input in a list that copies share."""

    seen: ClassVar[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.flatten()[0]))
        return x


def merged(**options: Any) -> nn.Module:
    model = tiny()
    merge(model, r=2, **options)
    return model


@pytest.mark.usefixtures("no_inductor")
@pytest.mark.usefixtures("counting_clock")
def test_models_stay_unchanged() -> None:
    models = {"unmerged": tiny(), "merged": merged(), "at random": merged(method="random").train()}
    before = {name: [value.clone() for value in model.state_dict().values()] for name, model in models.items()}
    modes = {name: ("eager", "blocks") if name == "merged" else ("eager",) for name in models}
    found = time_models(models, IMAGES, modes=modes, seconds=1.0)
    assert list(found) == list(models)
    for name, times in found.items():
        assert tuple(times.modes) == modes[name]
        assert times.failed == {}
        for one in times.modes.values():
            assert (one.seconds, one.images_per_s, one.spread, one.samples) == (0.25, 8.0, 0.0, 5)
        assert times.best in times.modes.values()
    for name, model in models.items():
        after = model.state_dict().values()
        assert all(torch.equal(old, new) for old, new in zip(before[name], after, strict=True))
        assert all(part._compiled_call_impl is None for part in model.modules())
    assert not any(hasattr(part, "_vitrail_plan") for part in models["unmerged"].modules())
    assert Merging.of(models["merged"]).tokens_per_layer() == [15, 13, 11]
    assert [model.training for model in models.values()] == [False, False, True]


@pytest.mark.usefixtures("no_inductor")
@pytest.mark.parametrize(
    ("options", "mode"), [*((way, "eager") for way in OPTIONS), *((way, "blocks") for way in OPTIONS[:2])], ids=str
)
def test_step_runs_the_merged_model(options: dict[str, Any], mode: str) -> None:
    model = merged(**options)
    step = prepare(mode, copy_model(model, share=True), [IMAGES]).step
    torch.manual_seed(0)
    with torch.inference_mode():
        expected = model(IMAGES)
    torch.manual_seed(0)
    assert torch.allclose(step(0), expected, atol=1e-5)


@pytest.mark.parametrize("name", FEW)
def test_copies_of_merged_models(name: str) -> None:
    case = ALL[name]
    model, images = case.model().eval(), case.images()
    merging = merge(model, r=2)
    copied = copy_model(model, share=True)
    assert all(mine is theirs for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True))
    with torch.inference_mode():
        expected = main_output(model(images, **case.call))
        assert torch.equal(main_output(copied(images, **case.call)), expected)
        merging.remove()
        assert torch.equal(main_output(copied(images, **case.call)), expected)
        assert not torch.equal(main_output(model(images, **case.call)), expected)


@pytest.mark.usefixtures("no_inductor")
@pytest.mark.usefixtures("counting_clock")
def test_modes_by_model() -> None:
    models = {("unmerged", 0): tiny(), ("merged", 2): merged()}
    modes = {("merged", 2): "eager", ("unmerged", 0): ["blocks", "eager"]}
    found = time_models(models, IMAGES, modes=modes, seconds=1.0)
    assert {name: list(times.modes) for name, times in found.items()} == {
        ("unmerged", 0): ["blocks", "eager"],
        ("merged", 2): ["eager"],
    }


@pytest.mark.usefixtures("counting_clock")
def test_failed_modes() -> None:
    models = {"plain": Plain(), "vit": tiny()}
    images = torch.randn(2, 3, 32, 32)  # too small for the ViT
    found = time_models(models, images, modes=("eager", "blocks"), seconds=1.0)
    assert list(found["plain"].modes) == ["eager"]
    assert found["plain"].failed["blocks"].startswith("UnsupportedModel: Plain")
    assert list(found["vit"].failed) == ["eager", "blocks"]
    assert "32" in found["vit"].failed["eager"]
    assert (found["vit"].modes, found["vit"].best) == ({}, None)


@pytest.mark.usefixtures("counting_clock")
def test_batches_rotate() -> None:
    batches = [torch.full((2, 1, 1, 1), value) for value in (1.0, 2.0, 3.0)]
    Plain.seen.clear()
    time_models({"plain": Plain()}, batches, seconds=1.0)
    assert set(Plain.seen[-5:]) == {1.0, 2.0, 3.0}


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"image_size": (16, 32), "patch_size": 8, "in_chans": 1}, (2, 1, 16, 32)),
        ({"image_size": (4, 16, 16), "patch_size": (2, 8, 8)}, (2, 3, 4, 16, 16)),
    ],
    ids=["audio", "video"],
)
@pytest.mark.usefixtures("counting_clock")
def test_audio_and_video_in_bfloat16(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    model = create_model("vit_tiny_patch16", width=32, heads=2, depth=2, num_classes=4, **options).bfloat16()
    merge(model, r=1)
    found = time_models({"merged": model}, torch.randn(shape).bfloat16(), seconds=1.0)
    assert found["merged"].failed == {}
    assert found["merged"].modes["eager"].images_per_s == 8.0


def test_real_times_are_plausible() -> None:
    found = time_models({"unmerged": tiny(), "merged": merged()}, IMAGES, seconds=0.05)
    for times in found.values():
        one = times.modes["eager"]
        assert 0 < one.seconds < 60
        assert one.images_per_s == pytest.approx(2 / one.seconds)
        assert one.spread >= 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": {}}, "models must be at least one model by name"),
        ({"models": Plain()}, "models="),
        ({"models": {"a": "timm:vit"}}, "model 'a' is a str"),
        ({"images": []}, "got nothing"),
        ({"images": None}, "images="),
        ({"images": IMAGES[0]}, "got (3, 64, 64)"),
        ({"images": IMAGES[:0]}, "got (0, 3, 64, 64)"),
        ({"images": [IMAGES, IMAGES[:1]]}, "one shape, dtype and device"),
        ({"modes": ()}, "modes must be one of eager, graph"),
        ({"modes": ("quick",)}, "got 'quick'"),
        ({"modes": ("eager", "eager")}, "got 'eager', 'eager'"),
        ({"modes": {"b": ("eager",)}}, "modes has the keys 'b'"),
        ({"modes": {"a": ()}}, "got nothing"),
        *(({"modes": ("eager", mode)}, "CUDA graphs need a CUDA device") for mode in MODES if uses_graph(mode)),
        ({"seconds": 0}, "seconds"),
        ({"seconds": True}, "seconds=True"),
        ({"compile_mode": "fastest"}, "compile_mode"),
    ],
)
def test_invalid_arguments(given: dict[str, Any], message: str) -> None:
    Plain.seen.clear()
    with pytest.raises((InvalidOption, UnsupportedInput), match=re.escape(message)):
        time_models(**{"models": {"a": Plain()}, "images": IMAGES, **given})
    assert Plain.seen == []


@pytest.mark.usefixtures("counting_clock")
def test_old_argument_names() -> None:
    old: dict[str, Any] = {"pictures": IMAGES, "forms": "eager"}
    with pytest.warns(DeprecationWarning, match="modes=…"), pytest.warns(DeprecationWarning, match="images=…"):
        times = time_models({"a": Plain()}, **old)
    with pytest.warns(DeprecationWarning, match="modes"):
        assert times["a"].forms == times["a"].modes
